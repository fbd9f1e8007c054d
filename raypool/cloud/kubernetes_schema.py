"""What may stand in a RayCluster and a RayJob, as JSON schemas: every setting by its name, those that raypool writes in detail.

Parts that only other tools have to do with (volumes, probes, network policies' rules, ...) may be anything here.

Source: KubeRay 1.7's custom resource definitions; Kubernetes 1.37's API for what belongs to pods. Tests compare the names.
"""

from __future__ import annotations

from typing import Any

from jsonschema import Draft202012Validator

Schema = dict[str, Any]

ANYTHING: Schema = {}
TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
SWITCH: Schema = {"type": "boolean"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
POSITIVE: Schema = {"type": "integer", "minimum": 1}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
AMOUNTS: Schema = {"type": "object", "additionalProperties": {"type": ["string", "integer"]}}


def _one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def _items(each: Schema, at_least: int = 0) -> Schema:
    return {"type": "array", "items": each, "minItems": at_least}


def _mapping(required: str = "", /, **settings: Schema) -> Schema:
    return {"type": "object", "properties": settings, "required": required.split(), "additionalProperties": False}


def _anything(names: str) -> dict[str, Schema]:
    return dict.fromkeys(names.split(), ANYTHING)


VARIABLE = _mapping("name", name=NAME, value=TEXT, valueFrom=ANYTHING)

CONTAINER = _mapping(
    "name image",
    name=NAME,
    image=NAME,
    imagePullPolicy=_one_of("Always", "IfNotPresent", "Never"),
    command=_items(TEXT),
    args=_items(TEXT),
    env=_items(VARIABLE),
    ports=_items(_mapping("containerPort", containerPort=POSITIVE, name=TEXT, protocol=TEXT, hostIP=TEXT, hostPort=POSITIVE)),
    resources=_mapping(limits=AMOUNTS, requests=AMOUNTS, claims=ANYTHING),
    volumeMounts=_items(
        _mapping(
            "name mountPath",
            name=TEXT,
            mountPath=TEXT,
            **_anything("bindMountOptions mountPropagation readOnly recursiveReadOnly subPath subPathExpr"),
        )
    ),
    workingDir=TEXT,
    **_anything(
        "envFrom lifecycle livenessProbe readinessProbe resizePolicy restartPolicy restartPolicyRules securityContext "
        "startupProbe stdin stdinOnce terminationMessagePath terminationMessagePolicy tty volumeDevices"
    ),
)

TOLERATION = _mapping(
    key=TEXT,
    operator=_one_of("Exists", "Equal", "Lt", "Gt"),
    value=TEXT,
    effect=_one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
    tolerationSeconds=WHOLE,
)

POD = _mapping(
    "containers",
    containers=_items(CONTAINER, at_least=1),
    nodeSelector=TEXTS,
    tolerations=_items(TOLERATION),
    terminationGracePeriodSeconds=COUNT,
    automountServiceAccountToken=SWITCH,
    hostNetwork=SWITCH,
    restartPolicy=_one_of("Always", "OnFailure", "Never"),
    **_anything(
        "activeDeadlineSeconds affinity dnsConfig dnsPolicy enableServiceLinks ephemeralContainers evictionResponders "
        "hostAliases hostIPC hostPID hostUsers hostname hostnameOverride imagePullSecrets initContainers nodeName os "
        "overhead preemptionPolicy priority priorityClassName readinessGates resourceClaims resources runtimeClassName "
        "schedulerName schedulingGates schedulingGroup securityContext serviceAccount serviceAccountName "
        "setHostnameAsFQDN shareProcessNamespace subdomain topologySpreadConstraints volumes"
    ),
)

TEMPLATE = _mapping("spec", metadata={"type": "object"}, spec=POD)

# What `ray start` of Ray 2.60 can be told, in words or, for switches, by "true".
RAY_START = (
    "address autoscaling-config block cgroup-path dashboard-agent-grpc-port dashboard-agent-listen-port dashboard-host "
    "dashboard-port disable-usage-stats enable-object-reconstruction enable-resource-isolation head include-dashboard "
    "include-log-monitor labels labels-file log-color log-style max-worker-port memory metrics-export-port min-worker-port "
    "no-monitor no-redirect-output node-ip-address node-manager-port node-name num-cpus num-gpus object-manager-port "
    "object-spilling-directory object-store-memory plasma-directory port proxy-server-url ray-client-server-port "
    "ray-debugger-external redis-password redis-shard-ports redis-username resources runtime-env-agent-port system-config "
    "system-reserved-cpu system-reserved-memory temp-dir tracing-startup-hook verbose worker-port-list"
)

PARAMETERS = _mapping(**dict.fromkeys(RAY_START.split(), TEXT))

GROUP = {"rayStartParams": PARAMETERS, "resources": TEXTS, "labels": TEXTS, "template": TEMPLATE}

HEAD = _mapping(
    "template",
    **GROUP,
    serviceType=_one_of("ClusterIP", "NodePort", "LoadBalancer"),
    headService={"type": "object"},
    enableIngress=SWITCH,
    ingressOptions=_mapping(
        host=TEXT, path=TEXT, pathType=_one_of("Exact", "Prefix", "ImplementationSpecific"), tls=_items(ANYTHING)
    ),
)

WORKERS = _mapping(
    "groupName template",
    **GROUP,
    groupName=NAME,
    replicas=COUNT,
    minReplicas=COUNT,
    maxReplicas=COUNT,
    numOfHosts=POSITIVE,
    idleTimeoutSeconds=COUNT,
    priority=WHOLE,
    suspend=SWITCH,
    scaleStrategy=ANYTHING,
)

AUTOSCALER = _mapping(
    version=_one_of("v1", "v2"),
    idleTimeoutSeconds=COUNT,
    upscalingMode=_one_of("Default", "Aggressive", "Conservative"),
    image=TEXT,
    imagePullPolicy=_one_of("Always", "IfNotPresent", "Never"),
    env=_items(VARIABLE),
    command=_items(TEXT),
    args=_items(TEXT),
    **_anything("envFrom resources securityContext volumeMounts"),
)

RULES = {"ingressRules": ANYTHING, "egressRules": ANYTHING}

NETWORK_POLICY = _mapping(
    mode=_one_of("DenyAll", "DenyAllIngress", "DenyAllEgress"),
    head=_mapping(**RULES),
    worker=_mapping(**RULES),
    workerGroups=_items(_mapping("groupName", groupName=TEXT, **RULES)),
)

CLUSTER = _mapping(
    "headGroupSpec rayVersion",  # the operator wants the version where a token is asked for
    rayVersion=TEXT,
    authOptions=_mapping(mode=_one_of("token", "disabled"), secretName=TEXT, enableK8sTokenAuth=SWITCH),
    enableInTreeAutoscaling=SWITCH,
    autoscalerOptions=AUTOSCALER,
    headGroupSpec=HEAD,
    workerGroupSpecs=_items(WORKERS),
    networkPolicy=NETWORK_POLICY,
    tlsOptions=_mapping(enabled=SWITCH),
    suspend=SWITCH,
    **_anything("gcsFaultToleranceOptions headServiceAnnotations historyServerOptions managedBy upgradeStrategy"),
)

JOB = _mapping(
    entrypoint=TEXT,
    runtimeEnvYAML=TEXT,
    rayClusterSpec=CLUSTER,
    clusterSelector=TEXTS,
    submissionMode=_one_of("K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"),
    shutdownAfterJobFinishes=SWITCH,
    ttlSecondsAfterFinished=COUNT,
    activeDeadlineSeconds=POSITIVE,
    preRunningDeadlineSeconds=POSITIVE,
    backoffLimit=COUNT,
    entrypointNumCpus={"type": "number", "minimum": 0},
    entrypointNumGpus={"type": "number", "minimum": 0},
    entrypointResources=TEXT,
    jobId=TEXT,
    metadata=TEXTS,
    suspend=SWITCH,
    **_anything("deletionStrategy managedBy submitterConfig submitterPodTemplate"),
)

METADATA = {"type": "object", "required": ["name"], "properties": {"name": NAME, "labels": TEXTS, "annotations": TEXTS}}


def _resource(kind: str, spec: Schema) -> Schema:
    return _mapping(
        "apiVersion kind metadata spec",
        apiVersion=_one_of("ray.io/v1"),
        kind=_one_of(kind),
        metadata=METADATA,
        spec=spec,
        status=ANYTHING,
    )


SCHEMAS = {kind: Draft202012Validator(_resource(kind, spec)) for kind, spec in (("RayCluster", CLUSTER), ("RayJob", JOB))}
