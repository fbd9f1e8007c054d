"""Errors for shortages: what a cluster has, who holds the rest, and what to do."""

from __future__ import annotations

import logging
import os
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import ray
from ray.util import placement_group_table

from raypool.backends.ray.client import ask_inside
from raypool.backends.ray.demand import (
    ACCELERATOR,
    Demand,
    Need,
    Node,
    gpus_of,
    living_nodes,
    name_of,
    names_of,
)
from raypool.errors import ResourceError
from raypool.gpus.devices import GpuDevice
from raypool.gpus.sharing import CONTEXT_BYTES
from raypool.profiles import has_labels

if TYPE_CHECKING:
    from raypool.backends.ray.claims import Claim


OURS = ("PoolWorker", "NodeAgent", "ClusterProbe")
"""Actors of pools, which hold nothing besides their pools' placement groups."""

Crowd = Mapping[tuple[str, int], GpuDevice]
"""GPUs with too little free memory, by machine and index."""

GIB = 2**30

logger = logging.getLogger("raypool")


def holders() -> tuple[str, ...]:
    """Return who holds GPUs or cores in placement groups, and other live actors, from Ray."""
    found = []
    for group in placement_group_table().values():
        if group["state"] == "CREATED":
            amounts: Counter[str] = Counter()
            for bundle in group["bundles"].values():
                amounts.update({name: bundle.get(name, 0) for name in ("GPU", "CPU")})
            held = " and ".join(f"{amount:g} {name}" for name, amount in amounts.items() if amount)
            found.append(f"{group['name'].partition('#')[0] or 'a placement group'} ({held})")
    merged = [f"{count} x {name}" if count > 1 else name for name, count in Counter(found).items()]
    return (*merged, *ask_inside(_other_actors))


def our_name() -> str:
    """Return the name under which this process's claims appear to others."""
    return f"raypool in process {os.getpid()} on {platform.node()}"


def besides_us(names: Sequence[str]) -> tuple[str, ...]:
    """Return these holders without this process."""
    return tuple(name for name in names if our_name() not in name)


def _other_actors() -> list[str]:
    from raypool.ray_private import state

    return [
        f"perhaps actor {actor['Name'] or actor['ActorClassName']} (process {actor['Pid']})"
        for actor in state.actors().values()
        if actor["State"] == "ALIVE" and actor["ActorClassName"] not in OURS
    ]


def held_by(names: tuple[str, ...]) -> str:
    """Say who holds the missing resources."""
    names = names or holders()
    return f"Held by: {'; '.join(names)}." if names else "Ray does not know who holds them."


# --- shortages of any GPUs or cores ---------------------------------------------------------------


def check_sum(needs: Sequence[Need]) -> None:
    """Make sure that the cluster, if empty, has enough for all kinds together.

    Raises:
        ResourceError: It has not.
    """
    for name in ("GPU", "CPU"):
        amounts = [need.least * need.demand.bundle.get(name, 0) for need in needs]
        requested, capacity = sum(amounts), ray.cluster_resources().get(name, 0)
        if requested > capacity and len(needs) > 1:
            parts = " + ".join(f"{amount:g}" for amount in amounts if amount)
            raise ResourceError(
                f"{name}: requested {requested:g} ({parts}) for"
                f" {sum(need.least for need in needs)} workers, available {capacity:g}. List fewer"
                " workers in resources=[...], or less for each.",
                requested=requested,
                available=capacity,
            )


def too_few(need: Need, there: int, crowd: Crowd, min_free_bytes: int | None) -> ResourceError:
    """Return the error for a need that can be met only in part, `crowd` being left out."""
    demand, least = need.demand, need.least
    nodes = living_nodes()
    missing = lacking(demand, nodes)
    if missing is not None:
        return ResourceError(missing, requested=least, available=0)
    able = [node for node in nodes if demand.allows(node)]
    requested, available = least * demand.each, there * demand.each
    capacity = sum(node["Resources"].get(demand.kind, 0) for node in able)
    names = () if crowd and available + len(crowd) >= capacity else holders()
    held = need.num_held * demand.each
    if held:
        names = besides_us(names)
    why = [said_of(crowd, min_free_bytes)] if crowd else []
    largest = max((node["Resources"].get(demand.kind, 0) for node in able), default=0)
    why += [held_by(names)] if names and largest >= demand.each else []
    where = "the cluster has" if len(able) == len(nodes) else "the requested nodes have"
    return ResourceError(
        f"{demand.kind}: requested {requested:g}, available {available:g} ({where} {capacity:g}"
        f"{f', and this pool holds {held:g} of them' if held else ''})."
        f" {' '.join([*why, _next_step(need, there, largest, bool(names))])}",
        requested=requested,
        available=available,
        holders=names,
    )


def room_beside(need: Need, others: Mapping[str, Sequence[Claim]]) -> int:
    """Return how many more claims the cluster could hold beside these of other pools."""
    return sum(need.demand.fits(node) for node in without(others, living_nodes())) - need.num_held


def without(others: Mapping[str, Sequence[Claim]], nodes: Iterable[Node]) -> list[Node]:
    """Return the resources of nodes that these claims leave."""
    left: list[Node] = []
    for node in nodes:
        resources: Counter[str] = Counter(node["Resources"])
        for claims in others.values():
            for claim in claims:
                if claim.node_id == node["NodeID"]:
                    resources.subtract(claim.demand.bundle)
        left.append({**node, "Resources": resources})
    return left


def held_here(
    what: str, requested: float, available: float, kind: str, others: Mapping[str, Sequence[Claim]]
) -> ResourceError:
    """Return the error for resources of this process's other pools: nobody else could end them."""
    capacity = sum(node["Resources"].get(kind, 0) for node in living_nodes())
    names = tuple(f"the pool opened at {line}" for line in others)
    held = sum(claim.demand.bundle.get(kind, 0) for claims in others.values() for claim in claims)
    return ResourceError(
        f"{what}: requested {requested:g}, available {available:g} (the cluster has {capacity:g})."
        f" This process itself holds {held:g}: {'; '.join(names)}. Use that pool"
        " (raypool.gcp() returns it), make it smaller (resize), or close it (delete).",
        requested=requested,
        available=available,
        holders=names,
    )


def never(need: Need, there: int, most: int) -> ResourceError:
    """Return the error for more than a fully grown cluster could hold."""
    return _not_grown(
        need,
        there,
        "; with all nodes that its autoscaler may add, the cluster would have"
        f" {most * need.demand.each:g} for such workers. Ask for at most {most}, or raise"
        " max_workers in its file.",
    )


def not_yet(need: Need, there: int) -> ResourceError:
    """Return the error for nodes that have not come in time."""
    return _not_grown(
        need,
        there,
        ": the nodes requested from the cluster's autoscaler did not start within start_timeout_s."
        " A machine in a cloud takes minutes: raise start_timeout_s, and check `raypool cluster"
        " status`.",
    )


def _not_grown(need: Need, there: int, why: str) -> ResourceError:
    requested, available = need.least * need.demand.each, there * need.demand.each
    return ResourceError(
        f"{need.demand.kind}: requested {requested:g}, available {available:g}{why}",
        requested=requested,
        available=available,
    )


def say_growing(needs: Sequence[Need], there: Sequence[int]) -> None:
    """Report the resources that the pool waits for."""
    missing = ", ".join(
        f"{(need.least - number) * need.demand.each:g} {need.demand.kind}"
        for need, number in zip(needs, there, strict=True)
        if number < need.least
    )
    logger.warning(
        "The cluster has no nodes for %s yet; its autoscaler is adding them. Waiting at most"
        " start_timeout_s.",
        missing,
    )


def _next_step(need: Need, there: int, largest: float, has_others: bool) -> str:
    kind, each = need.demand.kind, need.demand.each
    if not largest:
        return (
            f"Connect to a cluster with a {kind}, or request none for each worker:"
            f" resources=WorkerResources({kind.lower()}s=0)."
        )
    if largest < each:
        return (
            f"Each worker needs {each:g} {kind} on one node, but the largest has {largest:g}."
            " Request less for each worker: resources=WorkerResources(...)."
        )
    if not there and (has_others or not need.num_held):
        return "Wait until the programs that hold them end, or end those programs."
    if need.is_listed:
        return f"List at most {there} such workers in resources=[...]."
    if need.num_held:
        most = (need.num_held + there) * need.demand.workers_per_claim
        return f"This pool can have at most {most} workers."
    return f"Ask for at most {there}, or for a range: parpool((1, {need.least}))."


def lacking(demand: Demand, nodes: Sequence[Node]) -> str | None:
    """Say which part of a claim none of these nodes has, whoever may hold it."""
    marked = [node for node in nodes if has_labels(node["Labels"], demand.labels)]
    if not marked:
        return (
            f"{_unlabelled(demand.labels, nodes)} Change labels= in resources, or connect to a"
            " cluster that has such nodes."
        )
    for name in demand.bundle:
        if name.startswith(ACCELERATOR) and not any(name in node["Resources"] for node in marked):
            names = {other for node in marked for other in node["Resources"]}
            there = sorted(
                other.removeprefix(ACCELERATOR) for other in names if other.startswith(ACCELERATOR)
            )
            kinds = ", ".join(there) or "none of any type"
            return (
                f"No node has an accelerator of type {name.removeprefix(ACCELERATOR)}; there are:"
                f" {kinds}. Change accelerator_type= in resources (use Ray's name), or connect to a"
                " cluster that has it."
            )
    able = [node for node in marked if demand.allows(node)]
    words = []
    for name, amount in demand.bundle.items():
        largest = max((node["Resources"].get(name, 0) for node in able), default=0)
        if largest < amount and name != demand.kind:
            words.append(f"{name}: requested {amount:g}, the largest has {largest:g}")
    if not words:
        return None
    return (
        f"No node of the cluster is large enough for a worker: {'; '.join(words)}. Request less for"
        " each worker (resources=WorkerResources(...)), or connect to a cluster that has such"
        " nodes."
    )


def _unlabelled(labels: Mapping[str, str], nodes: Sequence[Node]) -> str:
    for name, value in labels.items():
        if not any(has_labels(node["Labels"], {name: value}) for node in nodes):
            there = sorted({str(node["Labels"][name]) for node in nodes if name in node["Labels"]})
            kinds = (
                f"there are {', '.join(f'{name}={other}' for other in there)}"
                if there
                else f"none has a label {name}"
            )
            return f"No node has the label {name}={value}; {kinds}."
    return (
        "No node has all of the labels"
        f" {', '.join(f'{name}={value}' for name, value in labels.items())}."
    )


# --- GPUs filled by others ------------------------------------------------------------------------


def said_of(crowd: Crowd, min_free_bytes: int | None) -> str:
    """Say which GPUs are left out, and why; "" for none."""
    if not crowd:
        return ""
    cards = ", ".join(
        f"GPU {index} of {machine} ({(card.free_bytes or 0) / GIB:.1f} of"
        f" {(card.total_bytes or 0) / GIB:.1f} GiB free)"
        for (machine, index), card in sorted(crowd.items())
    )
    return (
        f"Left out, because min_free_memory_bytes requires {(min_free_bytes or 0) / GIB:.1f} GiB:"
        f" {cards}."
    )


def all_crowded(requested: int, available: int, crowd: str) -> ResourceError:
    """Return the error for chosen GPUs of which too few have enough memory."""
    return ResourceError(
        f"GPU: requested {requested}, available {available}. {crowd} Choose other GPUs, require"
        " less memory, or end the processes that use it (see nvidia-smi).",
        requested=requested,
        available=available,
    )


def too_narrow(share: int, machine: str, index: int, total_bytes: int) -> ResourceError:
    """Return the error for more workers on a GPU than it can hold, whatever they do.

    Source:
        PyTorch forum, "High GPU memory overhead" and "What is the reason for PyTorch's GPU memory
        floor?": 0.7 to 0.8 GB for a process that has allocated nothing.
    """
    most = max(1, total_bytes // CONTEXT_BYTES)
    return ResourceError(
        f"{share} workers cannot share GPU {index} of {machine}: {total_bytes / GIB:.1f} GiB /"
        f" {share} = {total_bytes / share / GIB:.2f} GiB for each, but CUDA alone needs about"
        f" {CONTEXT_BYTES / GIB:.1f} GiB per process. Ask for fewer (workers_per_gpu, or a larger"
        f" part in resources): at most {most}, if they need nothing else.",
        requested=share,
        available=most,
    )


# --- shortages of chosen GPUs ---------------------------------------------------------------------


def in_use(
    missing: Sequence[str], free: Sequence[str], requested: int, available: int, crowd: str
) -> ResourceError:
    """Return the error for chosen GPUs that somebody holds."""
    names = holders()
    return ResourceError(
        f"In use: GPU {', '.join(missing)}; requested {requested}, available {available} (free:"
        f" {', '.join(free) or 'none'}). {crowd}{' ' if crowd else ''}{held_by(names)}",
        requested=requested,
        available=available,
        holders=names,
    )


def too_little_beside(
    free: Sequence[str], demand: Demand, requested: int, available: int
) -> ResourceError:
    """Return the error for chosen GPUs that are free, while other needs of a worker are not met."""
    needs = ", ".join(f"{amount:g} {name}" for name, amount in demand.bundle.items())
    names = holders()
    return ResourceError(
        f"GPU {', '.join(free)}: free, but the rest of what a worker needs ({needs}) is not;"
        f" requested {requested}, available {available}. {held_by(names)} Request less for each"
        " worker: resources=WorkerResources(...).",
        requested=requested,
        available=available,
        holders=names,
    )


def no_such_gpus(
    missing: Sequence[int], known: Sequence[int], total: int, machine: str | None
) -> ResourceError:
    """Return the error for chosen GPUs that do not exist; `machine`: None for this one."""
    where = "this machine" if machine is None else machine
    numbered = ""
    if known and list(known) != list(range(total)):
        numbered = f", numbered {', '.join(map(str, known))}"
    advice = "GPUs are numbered from 0, as nvidia-smi shows them."
    if machine is None and total == 0:
        names = [name_of(node) for node in living_nodes() if gpus_of(node)]
        if names:
            name = min(names)
            advice = f"Other machines have GPUs: list them, as in gpus={{{name!r}: [0]}}."
    return ResourceError(
        f"There is no GPU {' or '.join(map(str, missing))} on {where}, which has {total or 'none'}"
        f"{numbered}. {advice}",
        requested=len(missing),
        available=total,
    )


def nameless(missing: Sequence[str]) -> ResourceError:
    """Return the error for chosen GPUs where nobody knows which index is which GPU."""
    return ResourceError(
        f"GPU {', '.join(missing)} could not be identified: Ray was started with"
        " CUDA_VISIBLE_DEVICES as UUIDs, and the driver (NVML), which knows their indices, does"
        " not answer. Check nvidia-smi, or start Ray with indices.",
        requested=len(missing),
        available=0,
    )


def no_more_chosen(
    gpus: Sequence[int] | Mapping[str, Sequence[int]], requested: int, available: int
) -> ResourceError:
    """Return the error for more workers than the chosen GPUs have room for."""
    if isinstance(gpus, Mapping):
        chosen = "; ".join(f"{', '.join(map(str, on))} of {name}" for name, on in gpus.items())
    else:
        chosen = ", ".join(map(str, gpus))
    return ResourceError(
        f"GPU: requested {requested}, available {available}: the pool may use GPU {chosen}"
        " only. List more GPUs in gpus=[...], or ask for fewer workers.",
        requested=requested,
        available=available,
    )


def no_such_machine(machine: str, indices: Sequence[int], nodes: Sequence[Node]) -> ResourceError:
    """Return the error for a machine's name that no node has, or more than one."""
    same = [str(node["NodeID"]) for node in nodes if machine in names_of(node)]
    if same:
        fact, step = f"{len(same)} nodes of the cluster are", f"Use their ids: {', '.join(same)}."
    else:
        there = ", ".join(f"{name_of(node)} ({node['NodeManagerAddress']})" for node in nodes)
        fact, step = "No node of the cluster is", f"There are: {there}."
    return ResourceError(
        f"{fact} called {machine!r}, as in gpus= (GPU {', '.join(map(str, indices))}). {step}",
        requested=len(indices),
        available=0,
    )


def same_machine(first: str, second: str, requested: int) -> ResourceError:
    """Return the error for two names of one machine."""
    return ResourceError(
        f"{first!r} and {second!r} in gpus= are the same machine. List each machine once, with all"
        " its chosen GPUs.",
        requested=requested,
        available=0,
    )
