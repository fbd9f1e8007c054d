"""Refuses profiles that cannot work, before anything happens."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import TYPE_CHECKING, Any

from raypool.counts import checked_count, whole_number
from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.resources import WorkerResources, check_texts
from raypool.tls import Tls

if TYPE_CHECKING:
    from raypool.profiles import Profile

PINNING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Environment variables by which a worker is pinned to its GPU."""

BACKENDS = ("ray", "threads", "inline")


def check(profile: Profile) -> None:
    """Refuse fields that cannot work.

    Raises:
        InvalidTypeError: A field is of a wrong kind.
        InvalidValueError: A field has a value that cannot work.
    """
    if profile.backend not in BACKENDS:
        raise InvalidValueError(f"Backend {profile.backend!r} is none of {', '.join(BACKENDS)}.")
    check_kinds(profile)
    pinning = [name for name in profile.env if name in PINNING]
    if pinning:
        raise InvalidValueError(f"env sets {pinning[0]}, which the pool sets for each worker. Choose GPUs with gpus=[...].")
    if not profile.start_timeout_s > 0:
        raise InvalidValueError(f"start_timeout_s={profile.start_timeout_s!r} leaves no time to start. Give seconds above 0.")
    if profile.idle_timeout_s is not None and not profile.idle_timeout_s > 0:
        raise InvalidValueError(
            f"idle_timeout_s={profile.idle_timeout_s!r} would end workers that were just started. "
            "Give seconds above 0, or None to keep them."
        )
    if not profile.cancel_grace_s >= 0:
        raise InvalidValueError(
            f"cancel_grace_s={profile.cancel_grace_s!r} is negative. Give 0 to kill what is cancelled at once."
        )
    if profile.retries < 0:
        raise InvalidValueError(f"retries={profile.retries!r} is negative. Give 0 to run every item at most once.")
    _check_address(profile)
    _check_sharing(profile)


def _check_address(profile: Profile) -> None:
    """Refuse addresses of another form, and what cannot be had of a cluster that this machine is no node of."""
    if profile.address is not None and "://" in profile.address and not profile.is_remote:
        raise InvalidValueError(f"address={profile.address!r} is neither 'ray://HOST:10001' nor 'HOST:6379'.")
    if profile.jobs_address is not None and not profile.jobs_address.startswith(("http://", "https://")):
        raise InvalidValueError(f"jobs_address={profile.jobs_address!r} is not a URL, such as 'http://127.0.0.1:8265'.")
    if profile.is_remote and isinstance(profile.gpus, tuple):
        raise InvalidValueError(
            f"gpus={list(profile.gpus)} are GPUs of this machine, which is no node of {profile.address}. "
            "Say of which machine: gpus={'lab-3': [0, 2]}."
        )


def checked_packages(packages: Any) -> tuple[str, ...]:
    """Return what `pip` is to install, as it is kept."""
    if isinstance(packages, (str, bytes)) or not isinstance(packages, Sequence):
        raise InvalidTypeError(f"packages={packages!r} is not a list of what pip is to install, such as ['scikit-learn>=1.5'].")
    for package in packages:
        if not isinstance(package, str) or not package.strip():
            raise InvalidTypeError(f"packages has {package!r} in it, which names no package for pip.")
    return tuple(packages)


def check_kinds(profile: Profile) -> None:
    """Refuse fields of a kind that cannot work, before they are compared with numbers."""
    _check_connection_kinds(profile)
    for name in ("quiet", "fast_multinode", "mps"):
        if not isinstance(getattr(profile, name), bool):
            raise InvalidTypeError(f"{name}={getattr(profile, name)!r} is neither True nor False.")
    check_texts("env", profile.env, "environment variables")
    for name in ("start_timeout_s", "idle_timeout_s", "cancel_grace_s"):
        value = getattr(profile, name)
        is_left_out = value is None and name == "idle_timeout_s"
        if not is_left_out and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise InvalidTypeError(f"{name}={value!r} is not a number of seconds.")
    for name in ("setup", "teardown"):
        _check_plain_call(name, getattr(profile, name))
    retries = whole_number(profile.retries)
    if retries is None:
        raise InvalidTypeError(f"retries={profile.retries!r} is not a whole number.")
    object.__setattr__(profile, "retries", retries)


def _check_connection_kinds(profile: Profile) -> None:
    if profile.address is not None and not isinstance(profile.address, str):
        raise InvalidTypeError(f"address={profile.address!r} is not the address of a Ray cluster, such as '10.0.0.7:6379'.")
    if profile.jobs_address is not None and not isinstance(profile.jobs_address, str):
        raise InvalidTypeError(f"jobs_address={profile.jobs_address!r} is not a URL, such as 'http://127.0.0.1:8265'.")
    if profile.tls is not None and not isinstance(profile.tls, Tls):
        raise InvalidTypeError(f"tls={profile.tls!r} is not a Tls(certificate=, key=, authority=).")
    for name in ("token_file", "working_dir", "trace"):
        value = getattr(profile, name)
        if value is not None and not isinstance(value, (str, PathLike)):
            what = "folder" if name == "working_dir" else "file"
            raise InvalidTypeError(f"{name}={value!r} is not the path of a {what}.")


def _check_sharing(profile: Profile) -> None:
    """Refuse numbers of bytes and of workers that cannot work."""
    for name, least in (("min_free_memory_bytes", 1), ("max_leftover_bytes", 0)):
        value = getattr(profile, name)
        if value is None:
            continue
        if whole_number(value) is None:
            raise InvalidTypeError(f"{name}={value!r} is not a whole number of bytes, such as 8 * 2**30.")
        object.__setattr__(profile, name, checked_count(name, value, least))
    per_gpu = profile.workers_per_gpu
    if per_gpu is not None and per_gpu != "auto":
        number = whole_number(per_gpu)
        if number is None:
            raise InvalidTypeError(f"workers_per_gpu={per_gpu!r} is neither a whole number nor 'auto'.")
        if number < 1:
            raise InvalidValueError(f"workers_per_gpu={number} leaves no worker. Give 1 or more, or 'auto'.")
        object.__setattr__(profile, "workers_per_gpu", number)
    sized = [kind.gpus for kind in profile.kinds if kind.gpus]
    if per_gpu is not None and sized:
        raise InvalidValueError(
            f"workers_per_gpu={per_gpu!r} says how many workers share a GPU, and so does gpus={sized[0]:g} in resources. "
            "Give one of the two."
        )


def _check_plain_call(name: str, fn: Any) -> None:
    """Refuse what cannot be called without arguments, as far as that can be known without calling it."""
    if fn is None:
        return
    if not callable(fn):
        raise InvalidTypeError(f"{name}={fn!r} is not callable. Give a function without arguments.")
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # some builtins do not say what they take
        return
    try:
        signature.bind()
    except TypeError as error:
        raise InvalidTypeError(
            f"{name}={getattr(fn, '__name__', fn)} cannot be called without arguments: {error}. Bind them with functools.partial."
        ) from None


def checked_list(resources: Any) -> tuple[WorkerResources, ...]:
    """Return a list of what each worker gets, as it is kept."""
    if not isinstance(resources, Sequence) or isinstance(resources, (str, bytes)):
        raise InvalidTypeError(f"resources={resources!r} is not a WorkerResources, nor a list of them, one for each worker.")
    for entry in resources:
        if not isinstance(entry, WorkerResources):
            raise InvalidTypeError(f"resources has {entry!r} in it, which is not a WorkerResources.")
    if not resources:
        raise InvalidValueError("resources=[] names no worker. Give one WorkerResources for all workers, or one for each.")
    return tuple(resources)


def check_chosen(kinds: Sequence[WorkerResources]) -> None:
    """Refuse kinds of worker that cannot have single GPUs that were chosen."""
    if len(kinds) > 1:
        kinds = [kind for kind in kinds if kind.gpus != 0]
        if len(kinds) != 1:
            raise InvalidValueError(
                f"gpus= chooses single GPUs, but resources=[...] names {len(kinds)} kinds of worker with a GPU. "
                "Name one such kind, beside workers with gpus=0."
            )
    wanted = kinds[0].gpus
    if wanted is not None and not 0 < wanted <= 1:
        raise InvalidValueError(
            f"gpus= chooses single GPUs, but each worker is to have {wanted:g} (resources.gpus). Set one of the two."
        )


def checked_gpus(gpus: Any) -> tuple[int, ...] | dict[str, tuple[int, ...]]:
    """Return GPUs that were chosen, as they are kept."""
    if not isinstance(gpus, Mapping):
        return _checked_indices(gpus)
    for machine in gpus:
        if not isinstance(machine, str):
            raise InvalidTypeError(f"gpus has {machine!r} in it, which is not the name of a machine.")
    if not gpus:
        raise InvalidValueError("gpus={} names no GPU. For workers without one, use resources=WorkerResources(gpus=0).")
    return {machine: _checked_indices(indices) for machine, indices in gpus.items()}


def _checked_indices(gpus: Any) -> tuple[int, ...]:
    try:
        given = tuple(gpus)
    except TypeError:
        raise InvalidTypeError(f"gpus={gpus!r} is not a list of GPU indices, such as [0, 2].") from None
    indices: list[int] = []
    for entry in given:
        index = whole_number(entry)
        if index is None:
            raise InvalidTypeError(f"GPU index {entry!r} is not an integer. GPUs are numbered from 0.")
        if index < 0:
            raise InvalidValueError(f"GPU index {index} is negative. GPUs are numbered from 0.")
        if index in indices:
            raise InvalidValueError(f"GPU {index} is named twice in gpus={list(given)}. Name each GPU once.")
        indices.append(index)
    if not indices:
        raise InvalidValueError("gpus=[] names no GPU. For workers without one, use resources=WorkerResources(gpus=0).")
    return tuple(indices)
