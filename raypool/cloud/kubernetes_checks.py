"""What is wrong with a RayCluster or a RayJob, said before Kubernetes is asked for anything.

The names and kinds of settings are those of `kubernetes_schema`. The rules are the operator's own, which it applies only when
Kubernetes has taken the manifest, and writes to its log; and some of ours: what Kubernetes takes but can never run, what costs
money without a bound, and what lets strangers in.

Source: KubeRay 1.7, `controllers/ray/utils/validation.go`, but for what needs a feature gate that is off by default (RocksDB,
history server).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

from raypool.cloud import schema_checks
from raypool.cloud.documents import OPEN, PLACEHOLDER, Findings, nearest
from raypool.cloud.kubernetes_pods import RAY, Part, capacity, check_group, release, variables
from raypool.cloud.kubernetes_schema import SCHEMAS

LONGEST_NAME = {"RayCluster": 53, "RayJob": 47}  # the operator puts more behind it, and 63 is what Kubernetes allows
FIRST_WITH_TOKEN = (2, 52)
FIRST_WITH_KUBERNETES_TOKEN = (2, 55)
FIRST_WITH_PRIORITY = (2, 56)
LOOPBACK = ("127.0.0.1", "localhost", "::1")
AUTOSCALER_V2 = "RAY_enable_autoscaler_v2"

NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
GROUP_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9]{0,61}[A-Za-z0-9])?")  # becomes a label of the pods


def is_manifest(content: object) -> bool:
    """Say whether it is for KubeRay's operator."""
    return isinstance(content, Mapping) and str(content.get("apiVersion")).startswith("ray.io/")


def check(findings: Findings) -> None:
    """Note all that is wrong with a manifest for KubeRay's operator."""
    top = Part(findings)
    kind = str(top["kind"])
    if kind not in SCHEMAS:
        top.wrong(f"kind is {kind}, of which raypool knows nothing; RayCluster or RayJob would do.", "kind")
        return
    schema_checks.check(findings, SCHEMAS[kind])
    _check_name(top.part("metadata"), LONGEST_NAME[kind])
    annotations = top.part("metadata", "annotations").mapping
    if kind == "RayJob":
        _check_job(top.part("spec"), annotations)
    else:
        _check_cluster(top.part("spec"), annotations)


def _check_name(metadata: Part, longest: int) -> None:
    name = metadata.text("name")
    if not name:
        return
    if len(name) > longest:
        metadata.wrong(f"name has {len(name)} characters; {longest} at most would do.", "name")
    if not NAME.fullmatch(name):
        metadata.wrong(f"name is {name!r}; small letters, digits and - would do, a letter first and no - last.", "name")


# --- clusters ---------------------------------------------------------------------------------------------------------


def _check_cluster(spec: Part, annotations: Mapping[str, Any]) -> None:
    head, groups = spec.part("headGroupSpec"), spec.parts("workerGroupSpecs")
    _check_token(spec)
    _check_doors(head)
    _check_autoscaler(spec, head, groups)
    _check_fault_tolerance(spec, head, annotations)
    _check_network(spec, groups)
    for group in (head, *groups):
        check_group(spec, group)
    names = ["headgroup"]  # what the autoscaler calls the head's
    for group in groups:
        if (name := group.text("groupName")) in names:
            group.wrong(f"there is another group {name!r}; each needs a name of its own.", "groupName")
        elif name and not GROUP_NAME.fullmatch(name):
            group.wrong(f"groupName is {name!r}; letters, digits and - would do, 63 of them at most.", "groupName")
        names.append(name)
        _check_counts(group)


def _check_token(spec: Part) -> None:
    options, version = spec.part("authOptions"), release(spec.text("rayVersion"))
    if options.text("mode") != "token":
        spec.wrong(
            "nobody is asked for a token, and KubeRay opens Ray's dashboard, which runs whatever it is sent, on 0.0.0.0; "
            "authOptions: {mode: token} would do.",
            "authOptions",
            "mode",
        )
    elif spec["rayVersion"] is not None and (version is None or version < FIRST_WITH_TOKEN):
        spec.wrong(f"rayVersion is {spec['rayVersion']!r}; a token needs 2.52.0 or later.", "rayVersion")
    if options["enableK8sTokenAuth"] is True:
        if version is not None and version < FIRST_WITH_KUBERNETES_TOKEN:
            options.wrong("enableK8sTokenAuth needs a rayVersion of 2.55.0 or later.", "enableK8sTokenAuth")
        if options.text("secretName"):
            options.wrong("secretName and enableK8sTokenAuth exclude each other; keep one.", "secretName")


def _check_doors(head: Part) -> None:
    """Note what opens Ray's ports to those outside: a token is not encryption."""
    instead = "`kubectl port-forward` reaches it without, over Kubernetes' own encryption."
    for part, key in ((head, "serviceType"), (head.part("headService", "spec"), "type")):
        if part.text(key) in ("LoadBalancer", "NodePort"):
            part.wrong(f"{key} {part[key]} opens Ray's ports to whoever reaches the nodes; leave it out: {instead}", key)
    if head["enableIngress"] is True and not head.parts("ingressOptions", "tls"):
        head.wrong(
            f"enableIngress without ingressOptions.tls shows the dashboard's token to the network; leave it out: {instead}",
            "enableIngress",
        )


def _check_counts(group: Part) -> None:
    least, now, most = group.whole("minReplicas"), group.whole("replicas"), group.whole("maxReplicas")
    if group.mapping and group["maxReplicas"] is None:
        group.wrong("maxReplicas is missing: KubeRay takes 2147483647, so that there is no bound on what is paid for.")
    if group.mapping and group["minReplicas"] is None:
        group.wrong("minReplicas is missing; 0 would do.")
    if least is not None and most is not None and least > most:
        group.wrong(f"minReplicas is {least} and maxReplicas {most}; {least} or more would do for maxReplicas.", "maxReplicas")
    elif now is not None and ((least is not None and now < least) or (most is not None and now > most)):
        group.wrong(
            f"replicas is {now}, but minReplicas {least} and maxReplicas {most}; a number between them would do.", "replicas"
        )


def _check_autoscaler(spec: Part, head: Part, groups: list[Part]) -> None:
    is_on, options = spec["enableInTreeAutoscaling"] is True, spec.part("autoscalerOptions")
    variable = variables(head.part(*RAY)).get(AUTOSCALER_V2)
    is_v2 = options.text("version") == "v2" or (variable is not None and variable.text("value") in ("1", "true"))
    if options.mapping and not is_on:
        options.wrong("autoscalerOptions mean nothing without enableInTreeAutoscaling: true.")
    if variable is not None and not is_on and is_v2:
        variable.wrong(f"{AUTOSCALER_V2} needs enableInTreeAutoscaling: true.")
    if variable is not None and is_on and options.text("version"):
        variable.wrong(f"{AUTOSCALER_V2} and autoscalerOptions.version say the same thing; keep the latter.")
    if (command := variables(options).get("KUBERAY_GEN_AUTOSCALER_START_CMD")) is not None:
        command.wrong("KUBERAY_GEN_AUTOSCALER_START_CMD is set by the operator; leave it out.")
    for group in groups:
        _check_needs_v2(spec, group, is_v2)
        if is_on and group["suspend"] is True:
            group.wrong("a group cannot be suspended while the autoscaler runs; maxReplicas: 0 would do.", "suspend")
    for group in (head, *groups) if is_on else ():
        pod = group.part("template", "spec")
        if is_v2 and pod.text("restartPolicy") in ("Always", "OnFailure"):
            pod.wrong(
                f"restartPolicy is {pod['restartPolicy']}; Never would do, as the autoscaler makes pods anew.", "restartPolicy"
            )
        if group.mapping and capacity(group)[0] is None:
            group.wrong(
                'the autoscaler has to know how many CPUs a pod has; resources.limits of its container say so (cpu: "4").',
                "template",
                "spec",
                "containers",
                0,
            )


def _check_needs_v2(spec: Part, group: Part, is_v2: bool) -> None:
    if group["idleTimeoutSeconds"] is not None and not is_v2:
        group.wrong("a group's idleTimeoutSeconds needs autoscalerOptions: {version: v2}.", "idleTimeoutSeconds")
    if group.whole("priority"):
        version = release(spec.text("rayVersion"))
        if not is_v2 or version is None or version < FIRST_WITH_PRIORITY:
            group.wrong("priority needs autoscalerOptions: {version: v2} and a rayVersion of 2.56.0 or later.", "priority")


def _check_fault_tolerance(spec: Part, head: Part, annotations: Mapping[str, Any]) -> None:
    """Note settings of the store that lets a head come back, where they contradict each other."""
    options, parameters, there = spec.part("gcsFaultToleranceOptions"), head.part("rayStartParams"), variables(head.part(*RAY))
    asked = str(annotations.get("ray.io/ft-enabled", "")).lower()
    if options.mapping:
        for name in ("RAY_REDIS_ADDRESS", "REDIS_PASSWORD"):
            if name in there:
                there[name].wrong(f"{name} belongs into gcsFaultToleranceOptions, as the rest of it.")
        if parameters.text("redis-password"):
            parameters.wrong("redis-password belongs into gcsFaultToleranceOptions (redisPassword).", "redis-password")
        if asked:
            options.wrong("gcsFaultToleranceOptions and the annotation ray.io/ft-enabled say the same thing; keep the former.")
    elif asked != "true" and "RAY_REDIS_ADDRESS" in there:
        there["RAY_REDIS_ADDRESS"].wrong(
            "RAY_REDIS_ADDRESS alone does not do; gcsFaultToleranceOptions: {redisAddress: ...} would."
        )
    if parameters.text("redis-username"):
        parameters.wrong("redis-username belongs into gcsFaultToleranceOptions (redisUsername).", "redis-username")
    if "REDIS_USERNAME" in there:
        there["REDIS_USERNAME"].wrong("REDIS_USERNAME belongs into gcsFaultToleranceOptions (redisUsername).")


def _check_network(spec: Part, groups: list[Part]) -> None:
    policy = spec.part("networkPolicy")
    idle = {"DenyAllEgress": "ingressRules", "DenyAllIngress": "egressRules"}.get(policy.text("mode"))
    names = [group.text("groupName") for group in groups]
    for part in (policy.part("head"), policy.part("worker"), *policy.parts("workerGroups")):
        if idle is not None and part[idle]:
            part.wrong(
                f"{idle} mean nothing where mode is {policy['mode']}, which leaves that direction open; DenyAll would do.", idle
            )
        if (name := part.text("groupName")) and name not in names:
            part.wrong(f"there is no group {name!r}{nearest(name, names)}", "groupName")
    if policy.mapping:
        for group in groups:
            if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", group.text("groupName")):
                group.wrong("groupName becomes part of the policy's name; small letters, digits and - would do.", "groupName")


# --- jobs -------------------------------------------------------------------------------------------------------------


def _check_job(spec: Part, annotations: Mapping[str, Any]) -> None:
    cluster, selector, mode = spec.part("rayClusterSpec"), spec.part("clusterSelector"), spec.text("submissionMode")
    if cluster.mapping:
        _check_cluster(cluster, annotations)
        _check_can_be_placed(spec, cluster)
    elif not selector.mapping:
        spec.wrong("there is no cluster; rayClusterSpec would make one, clusterSelector: {ray.io/cluster: NAME} choose one.")
    if cluster["authOptions"] is not None and cluster.part("authOptions")["enableK8sTokenAuth"] is True:
        cluster.wrong("a job's cluster cannot use enableK8sTokenAuth; leave it out.", "authOptions", "enableK8sTokenAuth")
    if not spec.text("entrypoint").strip() and mode != "InteractiveMode":
        spec.wrong("there is no command to run; entrypoint says which (python train.py).", "entrypoint")
    _check_end(spec)
    _check_mode(spec, cluster, mode)
    if selector.mapping:
        _check_chosen(spec, selector, mode)
    _check_environment(spec)


def _check_end(spec: Part) -> None:
    """Note what is said of the time after a job, where it contradicts itself."""
    ends, policy = spec["shutdownAfterJobFinishes"] is True, spec.part("deletionStrategy")
    if (spec.whole("ttlSecondsAfterFinished") or 0) > 0 and not ends:
        spec.wrong("ttlSecondsAfterFinished needs shutdownAfterJobFinishes: true.", "ttlSecondsAfterFinished")
    if spec["suspend"] is True and not ends:
        spec.wrong("a job can be suspended only with shutdownAfterJobFinishes: true.", "suspend")
    if not policy.mapping:
        if not ends and spec["clusterSelector"] is None:
            spec.wrong(
                "the cluster would go on, and be paid for, when the job has ended; true would do.", "shutdownAfterJobFinishes"
            )
        return
    old = [name for name in ("onSuccess", "onFailure") if policy[name] is not None]
    if policy.parts("deletionRules"):
        if ends or old:
            policy.wrong("deletionRules go with neither shutdownAfterJobFinishes nor onSuccess and onFailure; keep the rules.")
    elif len(old) < 2:
        policy.wrong("deletionStrategy needs deletionRules, or both onSuccess and onFailure.")


def _check_mode(spec: Part, cluster: Part, mode: str) -> None:
    """Note what does not go with the way in which a job is submitted."""
    if mode == "InteractiveMode" and spec.whole("backoffLimit"):
        spec.wrong(
            "a job that is submitted by hand cannot be tried again by the operator; backoffLimit: 0 would do.", "backoffLimit"
        )
    head = cluster.part("headGroupSpec", "rayStartParams")
    if mode in ("", "K8sJobMode", "HTTPMode") and head.text("dashboard-host") in LOOPBACK:
        text = f"the job is never handed in: nobody reaches a dashboard at {head['dashboard-host']}; leave it out."
        head.wrong(text, "dashboard-host")
    if mode == "SidecarMode":
        for name in ("submitterPodTemplate", "submitterConfig", "clusterSelector"):
            if spec[name] is not None:
                spec.wrong(f"{name} does not go with submissionMode SidecarMode; K8sJobMode would do.", name)
        pod = cluster.part("headGroupSpec", "template", "spec")
        if pod.text("restartPolicy") in ("Always", "OnFailure"):
            pod.wrong("restartPolicy has to be Never where submissionMode is SidecarMode.", "restartPolicy")


def _check_chosen(spec: Part, selector: Part, mode: str) -> None:
    """Note what does not go with a cluster that is there already."""
    if not selector.text("ray.io/cluster"):
        selector.wrong("clusterSelector has to name the cluster: {ray.io/cluster: NAME}.")
    for name in ("suspend", "backoffLimit"):
        if spec[name]:
            spec.wrong(f"{name} needs a cluster of the job's own (rayClusterSpec).", name)


def _check_can_be_placed(spec: Part, cluster: Part) -> None:
    """Note a command that asks for more than any pod has: Ray would let it wait for ever."""
    cpus, gpus = (spec[name] if isinstance(spec[name], int | float) else 0 for name in ("entrypointNumCpus", "entrypointNumGpus"))
    groups = [cluster.part("headGroupSpec"), *(group for group in cluster.parts("workerGroupSpecs") if group["maxReplicas"] != 0)]
    pods = [(float(has[0] or 0), float(has[1])) for has in map(capacity, groups)]
    if not any(cpus <= pod[0] and gpus <= pod[1] for pod in pods):
        there = ", ".join(f"{pod[0]:g} CPUs and {pod[1]:g} GPUs" for pod in pods)
        key = "entrypointNumGpus" if gpus else "entrypointNumCpus"
        spec.wrong(
            f"the command asks for {cpus:g} CPUs and {gpus:g} GPUs, which no pod has (they have {there}); 0 would do.", key
        )


def _check_environment(spec: Part) -> None:
    """Note what Ray would refuse of a job's runtime environment, or not find."""
    try:
        content = yaml.safe_load(spec.text("runtimeEnvYAML")) or {}
    except (yaml.YAMLError, ValueError) as error:  # a date that there is not is a ValueError
        spec.wrong(f"runtimeEnvYAML is not YAML: {str(error).splitlines()[0]}.", "runtimeEnvYAML")
        return
    if not isinstance(content, Mapping):
        spec.wrong("runtimeEnvYAML has to be a mapping, such as env_vars: {NAME: value}.", "runtimeEnvYAML")
        return
    folder = content.get("working_dir")
    if isinstance(folder, str) and folder.startswith(PLACEHOLDER):
        spec.wrong(f"{folder} {OPEN}", "runtimeEnvYAML")
    elif isinstance(folder, str) and not re.match(r"\w+://|/", folder):
        text = f"working_dir is {folder!r}, which pods do not have; the address of a zip, or a folder of the image, would do."
        spec.wrong(text, "runtimeEnvYAML")
    settings = content.get("env_vars")
    for name, value in settings.items() if isinstance(settings, Mapping) else ():
        if not isinstance(value, str):
            spec.wrong(
                f'env_vars: {name} is {value!r}, which YAML reads as no text; "{value}", in quotes, would do.', "runtimeEnvYAML"
            )
