"""What is wrong with manifests for Kubernetes: each mistake is found, where it stands, and what would be right is said."""

from __future__ import annotations

from importlib.metadata import version

import yaml

from raypool.cloud import kubernetes, kubernetes_checks
from raypool.cloud.documents import Findings, documents_of
from raypool.cloud.nodes import default_packages
from raypool.cloud.plan import ClusterPlan, NodeGroup

RAY = version("ray")
CODE = "https://example.org/code.zip"

WORKER = NodeGroup(name="t4", gpu="T4", gpus=4, most=9, spot=True)
PLAN = ClusterPlan(
    name="lab", provider="kubernetes", head=NodeGroup(name="head"), workers=(WORKER,), packages=default_packages(), python="3.11"
)
CLUSTER = yaml.safe_dump(kubernetes.write(PLAN), sort_keys=False, width=1000)
JOB = yaml.safe_dump(kubernetes.write_job(PLAN, "python train.py"), sort_keys=False, width=1000).replace(kubernetes.CODE, CODE)

# What is planted: in which manifest, what stands there, what comes instead; then the line that is named, and what is said of it.
PLANTED = {
    # names, and kinds of values
    "a misspelt setting": (
        CLUSTER,
        "maxReplicas: 9",
        "maxReplica: 9",
        "maxReplica: 9",
        "there is no setting 'maxReplica'. Did you mean maxReplicas",
    ),
    "a misspelt setting of a container": (
        CLUSTER,
        "resources:\n            requests",
        "resurces:\n            requests",
        "resurces:",
        "resources?",
    ),
    "a misspelt parameter of Ray": (
        CLUSTER,
        "num-cpus: '0'",
        "num-cpu: '0'",
        "num-cpu: '0'",
        "no setting 'num-cpu'. Did you mean num-cpus",
    ),
    "a number where text belongs": (CLUSTER, "num-cpus: '0'", "num-cpus: 0", "num-cpus: 0", '"0", in quotes'),
    "a number as a variable": (CLUSTER, "value: '10'", "value: 10", "value: 10", '"10", in quotes'),
    "a switch as a label": (
        CLUSTER,
        "gke-spot: 'true'",
        "gke-spot: true",
        "cloud.google.com/gke-spot: true",
        '"true", in quotes',
    ),
    "text where a number belongs": (
        CLUSTER,
        "maxReplicas: 9",
        "maxReplicas: nine",
        "maxReplicas: nine",
        "maxReplicas is 'nine'; it must be a whole number",
    ),
    "part of a machine": (
        CLUSTER,
        "maxReplicas: 9",
        "maxReplicas: 2.5",
        "maxReplicas: 2.5",
        "maxReplicas is 2.5; it must be a whole number",
    ),
    "nothing where something belongs": (
        CLUSTER,
        "rayStartParams:\n      num-cpus: '0'",
        "rayStartParams:",
        "rayStartParams:",
        "is empty; it must be a mapping",
    ),
    "an unknown mode": (CLUSTER, "mode: token", "mode: tokens", "mode: tokens", "Did you mean token?"),
    "an old version of the interface": (
        CLUSTER,
        "ray.io/v1",
        "ray.io/v1alpha1",
        "apiVersion: ray.io/v1alpha1",
        "Did you mean ray.io/v1?",
    ),
    "another kind": (CLUSTER, "kind: RayCluster", "kind: RayServe", "kind: RayServe", "RayCluster or RayJob would do"),
    "no containers": (
        CLUSTER,
        f"containers:\n        - name: ray\n          image: rayproject/ray:{RAY}-py311-gpu",
        "containers: []\n        x:\n        - name: ray",
        "containers: []",
        "containers has 0 entries; 1 would do",
    ),
    "no name": (CLUSTER, "metadata:\n  name: lab", "metadata:\n  labels: {}", "metadata:", "name is missing"),
    "no bound": (
        CLUSTER,
        "    maxReplicas: 9\n",
        "",
        "- groupName: t4",
        "maxReplicas is missing: KubeRay takes 2147483647",
    ),
    # names
    "a name that is too long": (CLUSTER, "name: lab", f"name: {'lab' * 18}", "name: lablab", "54 characters; 53 at most"),
    "a job's name that is too long": (JOB, "name: lab", f"name: {'lab' * 16}", "name: lablab", "48 characters; 47 at most"),
    "a name with capitals": (CLUSTER, "name: lab", "name: Lab_1", "name: Lab_1", "small letters, digits and - would do"),
    "the head's name": (
        CLUSTER,
        "groupName: t4",
        "groupName: headgroup",
        "- groupName: headgroup",
        "there is another group 'headgroup'",
    ),
    "a label": (CLUSTER, "raypool/role: t4", "raypool/role: 'a b'", "raypool/role: 'a b'", "is no label"),
    "labels in the wrong place": (CLUSTER, "num-cpus: '0'", "labels: a=b", "labels: a=b", "labels belong beside rayStartParams"),
    # numbers
    "min over max": (
        CLUSTER,
        "minReplicas: 0",
        "minReplicas: 10",
        "maxReplicas: 9",
        "minReplicas is 10 and maxReplicas 9; 10 or more would do",
    ),
    "more than the most": (
        CLUSTER,
        "replicas: 0",
        "replicas: 12",
        "replicas: 12",
        "replicas is 12, but minReplicas 0 and maxReplicas 9",
    ),
    "fewer than none": (CLUSTER, "minReplicas: 0", "minReplicas: -1", "minReplicas: -1", "minReplicas is -1; 0 is the least"),
    "part of a GPU": (
        CLUSTER,
        "limits:\n              cpu: '12'\n              memory: 48000M\n              nvidia.com/gpu: '4'",
        "limits:\n              cpu: '12'\n              memory: 48000M\n              nvidia.com/gpu: '0.5'",
        "nvidia.com/gpu: '0.5'",
        "a whole number would do. Workers share a GPU by workers_per_gpu",
    ),
    "GPUs that are only asked for": (
        CLUSTER,
        "memory: 48000M\n              nvidia.com/gpu: '4'\n        automount",
        "memory: 48000M\n        automount",
        "nvidia.com/gpu: '4'",
        "is 4 here and missing in limits",
    ),
    "a strange unit": (CLUSTER, "memory: 48000M", "memory: 48GB", "memory: 48GB", "no amount; 500m, 4 or 16Gi are some"),
    "bytes": (CLUSTER, "memory: 48000M", "memory: 48", "memory: 48", "48 bytes; 48Gi may be meant"),
    "more than the limit": (
        CLUSTER,
        "requests:\n              cpu: '12'",
        "requests:\n              cpu: '16'",
        "cpu: '16'",
        "cpu is 16 here and 12 in limits",
    ),
    "resources twice": (CLUSTER, "rayStartParams: {}", "rayStartParams: {num-gpus: '4'}", "resources:", "exclude each other"),
    "options without it": (
        CLUSTER,
        "  enableInTreeAutoscaling: true\n",
        "",
        "autoscalerOptions:",
        "mean nothing without enableInTreeAutoscaling",
    ),
    "a group's patience without v2": (
        CLUSTER.replace("version: v2", "version: v1"),
        "maxReplicas: 9",
        "maxReplicas: 9\n    idleTimeoutSeconds: 9",
        "idleTimeoutSeconds: 9",
        "needs autoscalerOptions: {version: v2}",
    ),
    "priority with an old Ray": (
        CLUSTER.replace(RAY, "2.54.0"),
        "maxReplicas: 9",
        "maxReplicas: 9\n    priority: 3",
        "priority: 3",
        "2.56.0 or later",
    ),
    "pods that start again": (
        CLUSTER,
        "automountServiceAccountToken: false",
        "restartPolicy: Always",
        "restartPolicy: Always",
        "Never would do",
    ),
    "v2 twice": (
        CLUSTER,
        "env:\n",
        "env:\n          - {name: RAY_enable_autoscaler_v2, value: '1'}\n",
        "- {name: RAY_enable_autoscaler_v2, value: '1'}",
        "say the same thing",
    ),
    "a group that is suspended": (
        CLUSTER,
        "maxReplicas: 9",
        "maxReplicas: 9\n    suspend: true",
        "suspend: true",
        "maxReplicas: 0 would do",
    ),
    # who may come in
    "no token": (CLUSTER, "    mode: token", "    mode: disabled", "mode: disabled", "nobody is asked for a token"),
    "a token that is not asked for": (
        CLUSTER,
        "authOptions:\n    mode: token",
        "authOptions: {}",
        "authOptions: {}",
        "nobody is asked for a token",
    ),
    "an open dashboard": (
        CLUSTER,
        "  authOptions:\n    mode: token\n",
        "",
        "spec:",
        "on 0.0.0.0; authOptions: {mode: token} would do",
    ),
    "a Ray without tokens": (CLUSTER, RAY, "2.51.0", "rayVersion: 2.51.0", "a token needs 2.52.0 or later"),
    "no version": (CLUSTER, f"  rayVersion: {RAY}\n", "", "spec:", "rayVersion is missing"),
    "tokens of Kubernetes and another": (
        CLUSTER,
        "mode: token",
        "mode: token\n    enableK8sTokenAuth: true\n    secretName: x",
        "secretName: x",
        "exclude each other",
    ),
    "a token taken back": (
        CLUSTER,
        "env:\n",
        "env:\n          - {name: RAY_AUTH_MODE, value: disabled}\n",
        "- {name: RAY_AUTH_MODE, value: disabled}",
        "takes back what authOptions say",
    ),
    "a token in the file": (
        CLUSTER,
        "env:\n",
        "env:\n          - {name: RAY_AUTH_TOKEN, value: abc}\n",
        "- {name: RAY_AUTH_TOKEN, value: abc}",
        "for everybody who reads the file",
    ),
    "open to the world": (
        CLUSTER,
        "  headGroupSpec:\n",
        "  headGroupSpec:\n    serviceType: LoadBalancer\n",
        "serviceType: LoadBalancer",
        "leave it out: `kubectl port-forward`",
    ),
    "open by a service of its own": (
        CLUSTER,
        "  headGroupSpec:\n",
        "  headGroupSpec:\n    headService: {spec: {type: NodePort}}\n",
        "headService: {spec: {type: NodePort}}",
        "type NodePort opens",
    ),
    "an ingress without TLS": (
        CLUSTER,
        "  headGroupSpec:\n",
        "  headGroupSpec:\n    enableIngress: true\n",
        "enableIngress: true",
        "enableIngress without ingressOptions.tls",
    ),
    "the machine's network": (
        CLUSTER,
        "automountServiceAccountToken: false",
        "hostNetwork: true",
        "hostNetwork: true",
        "hostNetwork opens",
    ),
    "a port of the machine": (
        CLUSTER,
        "containerPort: 10001",
        "containerPort: 10001\n            hostPort: 10001",
        "hostPort: 10001",
        "opens the port on the machine's own addresses",
    ),
    "a token taken back by a command": (CLUSTER, "|| exit 1", "|| exit 1; export RAY_AUTH_MODE=disabled", "- pip", "takes back"),
    "a token taken away by a command": (CLUSTER, "|| exit 1", "|| exit 1; unset RAY_AUTH_MODE", "- pip", "takes back"),
    "Ray that nobody starts": (
        CLUSTER,
        "template:\n      spec",
        "template:\n      metadata: {annotations: {ray.io/overwrite-container-cmd: 'true'}}\n      spec",
        "args:",
        "Ray is never started",
    ),
    "TLS by hand": (
        CLUSTER.replace("  authOptions", "  tlsOptions: {enabled: true}\n  authOptions"),
        "env:\n",
        "env:\n          - {name: RAY_USE_TLS, value: '1'}\n",
        "- {name: RAY_USE_TLS, value: '1'}",
        "is set by the operator",
    ),
    "a network policy for no group": (
        CLUSTER,
        "  authOptions",
        "  networkPolicy: {workerGroups: [{groupName: t44}]}\n  authOptions",
        "networkPolicy:",
        "there is no group 't44'. Did you mean t4?",
    ),
    "rules that mean nothing": (
        CLUSTER,
        "  authOptions",
        "  networkPolicy: {mode: DenyAllEgress, head: {ingressRules: [{}]}}\n  authOptions",
        "networkPolicy:",
        "DenyAll would do",
    ),
    # what contradicts itself
    "another Ray in the image": (
        CLUSTER,
        f"rayproject/ray:{RAY}-py311-gpu",
        "rayproject/ray:2.59.0-py311-gpu",
        "image: rayproject/ray:2.59.0-py311-gpu",
        f"Ray 2.59.0, and rayVersion is {RAY}",
    ),
    "killed while it drains": (
        CLUSTER,
        "value: '10'",
        "value: '15'",
        "value: '15'",
        "killed after 15 s (terminationGracePeriodSeconds)",
    ),
    "Redis by hand": (
        CLUSTER,
        "env:\n",
        "env:\n          - {name: RAY_REDIS_ADDRESS, value: 'redis:6379'}\n",
        "- {name: RAY_REDIS_ADDRESS, value: 'redis:6379'}",
        "gcsFaultToleranceOptions",
    ),
    # jobs
    "nothing to run": (JOB, "  entrypoint: python train.py\n", "", "spec:", "there is no command to run"),
    "no cluster": (JOB, "  rayClusterSpec:", "  metadata: {}\n  x:", "spec:", "there is no cluster"),
    "a cluster that goes on": (
        JOB,
        "shutdownAfterJobFinishes: true\n  ttlSecondsAfterFinished: 300",
        "shutdownAfterJobFinishes: false",
        "shutdownAfterJobFinishes: false",
        "the cluster would go on, and be paid for",
    ),
    "time after an end that is none": (
        JOB,
        "shutdownAfterJobFinishes: true",
        "shutdownAfterJobFinishes: false",
        "ttlSecondsAfterFinished: 300",
        "needs shutdownAfterJobFinishes: true",
    ),
    "tried again by hand": (
        JOB,
        "  entrypoint",
        "  submissionMode: InteractiveMode\n  backoffLimit: 2\n  entrypoint",
        "backoffLimit: 2",
        "backoffLimit: 0 would do",
    ),
    "tried again elsewhere": (
        JOB,
        "  entrypoint",
        "  clusterSelector: {ray.io/cluster: a}\n  backoffLimit: 2\n  entrypoint",
        "backoffLimit: 2",
        "needs a cluster of the job's own",
    ),
    "a cluster without a name": (
        JOB,
        "  entrypoint",
        "  clusterSelector: {cluster: a}\n  entrypoint",
        "clusterSelector: {cluster: a}",
        "has to name the cluster",
    ),
    "no time at all": (
        JOB,
        "  entrypoint",
        "  activeDeadlineSeconds: 0\n  entrypoint",
        "activeDeadlineSeconds: 0",
        "activeDeadlineSeconds is 0; 1 is the least",
    ),
    "a dashboard that nobody reaches": (
        JOB,
        "num-cpus: '0'",
        "dashboard-host: 127.0.0.1",
        "dashboard-host: 127.0.0.1",
        "the job is never handed in",
    ),
    "a token that jobs cannot have": (
        JOB,
        "mode: token",
        "mode: token\n      enableK8sTokenAuth: true",
        "enableK8sTokenAuth: true",
        "cannot use enableK8sTokenAuth",
    ),
    "a command that no pod can hold": (
        JOB,
        "  entrypoint",
        "  entrypointNumGpus: 8\n  entrypoint",
        "entrypointNumGpus: 8",
        "asks for 0 CPUs and 8 GPUs, which no pod has",
    ),
    "code that is still to be named": (
        JOB,
        CODE,
        "<address of a zip>",
        'runtimeEnvYAML: \'working_dir: "<address of a zip>"',
        "is still to be filled in",
    ),
    "code that is on the laptop": (JOB, CODE, "./src", 'runtimeEnvYAML: \'working_dir: "./src"', "which pods do not have"),
    "an environment that is no YAML": (
        JOB,
        f'"{CODE}"',
        f'"{CODE}',
        "runtimeEnvYAML: 'working_dir: \"https://example.org/code.zip",
        "is not YAML",
    ),
    "a variable that is no text": (
        JOB,
        f'working_dir: "{CODE}"',
        "env_vars: {EPOCHS: 10}",
        "runtimeEnvYAML: 'env_vars: {EPOCHS: 10}",
        '"10", in quotes',
    ),
}


def problems(text: str) -> list[tuple[str, str]]:
    """Return what is found to be wrong: the line that is named, and what is said of it."""
    [document] = documents_of(text, "lab.yaml")
    findings = Findings(document)
    kubernetes_checks.check(findings)
    lines = text.splitlines()
    return [(lines[document.line_of(problem.keys) - 1].strip(), problem.text) for problem in findings]


def test_nothing_is_wrong_with_what_mistakes_are_planted_in() -> None:
    assert problems(CLUSTER) == problems(JOB) == []


def test_mistakes_are_found_where_they_stand() -> None:
    wrong = {}
    for name, (text, right, spoilt, line, said) in PLANTED.items():
        assert right in text
        found = problems(text.replace(right, spoilt))
        if not any(said in what and place.startswith(line) for place, what in found):
            wrong[name] = found
    assert not wrong


def test_all_mistakes_are_told_at_once() -> None:
    text = (
        CLUSTER.replace("mode: token", "mode: none").replace("minReplicas: 0", "minReplicas: 11").replace("cpu: '12'", "cpu: x")
    )
    said = " ".join(what for _, what in problems(text))
    assert "mode is 'none'" in said
    assert "minReplicas is 11" in said
    assert "cpu is 'x'" in said


def test_nonsense_is_refused_and_nothing_else_happens() -> None:
    for part in ("spec", "headGroupSpec", "workerGroupSpecs", "template", "authOptions", "metadata"):
        for nonsense in (None, 7, [1, 2], {"a": 1}, "text"):
            manifest = yaml.safe_load(CLUSTER)
            _put(manifest, part, nonsense)
            assert problems(yaml.safe_dump(manifest, sort_keys=False)), (part, nonsense)


def _put(content: object, name: str, value: object) -> None:
    """Put a value wherever something has that name."""
    if isinstance(content, dict):
        for key in content:
            if key == name:
                content[key] = value
            else:
                _put(content[key], name, value)
    elif isinstance(content, list):
        for entry in content:
            _put(entry, name, value)


def test_strange_amounts_for_a_command_are_refused() -> None:
    for value in (".nan", ".inf", "-1", "many", "true"):
        assert problems(JOB.replace("  entrypoint", f"  entrypointNumGpus: {value}\n  entrypoint")), value


def test_an_environment_may_be_anything() -> None:
    for text in ("a: 2026-99-99", "[1, 2]", "&a [*a]", "{", "7"):
        assert problems(JOB.replace(f'working_dir: "{CODE}"', text))


def test_what_is_for_the_operator_is_known() -> None:
    assert kubernetes_checks.is_manifest({"apiVersion": "ray.io/v1"})
    assert not kubernetes_checks.is_manifest({"apiVersion": "v1", "kind": "Secret"})
    assert not kubernetes_checks.is_manifest(["ray.io/v1"])
