"""The checkpoints of `pool.fit`: written between two epochs, and read to go on from there. For workers only."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from raypool.errors import InvalidValueError
from raypool.train.learner import Learner
from raypool.train.spread import whole_state

FILE = "training.pt"
"""The name of the one file of a checkpoint."""

VERSION = 1

ASKED = ("momentum", "weight_decay")
"""What is said of an optimizer by the options holds, also where a checkpoint was made with others."""


class Progress(NamedTuple):
    """How far a training has come: the epochs and steps that are done, and what patience has seen."""

    epoch: int = 0
    step: int = 0
    best_loss: float = float("inf")
    worse_in_a_row: int = 0


def take(learner: Learner, progress: Progress, best: dict[str, Any] | None) -> dict[str, Any]:
    """Return what a checkpoint has in it, on rank 0; all ranks have to ask for it. Each epoch is seeded anew: no generators."""
    scheduler, scaler = learner.scheduler, learner.scaler
    return {
        "raypool": VERSION,
        "progress": tuple(progress),
        "strategy": learner.strategy,
        "model": whole_state(learner.module, learner.ranks),
        "best": best,
        "optimizer": _optimizer_state(learner),
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
    }


def write(state: dict[str, Any], folder: str) -> None:
    """Write a checkpoint into a folder."""
    torch.save(state, Path(folder) / FILE)


def read(folder: str) -> dict[str, Any]:
    """Return what a checkpoint has in it; no code of its is run.

    Raises:
        InvalidValueError: It is none of `pool.fit`.
    """
    path = Path(folder) / FILE
    advice = "Give one that a training by pool.fit has made."
    if not path.is_file():
        found = ", ".join(sorted(each.name for each in Path(folder).iterdir())[:5]) or "nothing"
        raise InvalidValueError(f"{folder} is no checkpoint of pool.fit: it has no {FILE} in it, but {found}. {advice}")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # of a file that was cut short torch's reader may raise anything, an IndexError for one
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise InvalidValueError(f"{path} is no checkpoint of pool.fit: it cannot be read ({reason}). {advice}") from error
    if not isinstance(state, dict) or state.get("raypool") != VERSION:
        raise InvalidValueError(f"{path} is no checkpoint of pool.fit, but something else that torch has saved. {advice}")
    return state


def restore(learner: Learner, state: dict[str, Any], folder: str) -> Progress:
    """Let a model go on from a checkpoint; return how far it has come.

    Raises:
        InvalidValueError: The checkpoint is of another model, optimizer, or strategy.
    """
    check_same_model(state["model"], learner.module, folder)
    if state["strategy"] != learner.strategy:
        raise InvalidValueError(
            f"{folder} was made with strategy={state['strategy']!r}, and this training goes on with {learner.strategy!r}, which "
            "keeps the optimizer's state in another way. Use the same."
        )
    if learner.is_sharded:
        from torch.distributed.checkpoint.state_dict import set_model_state_dict

        set_model_state_dict(learner.module, state["model"], options=_whole_options())
    else:
        learner.module.load_state_dict(state["model"])
    _restore_rest(learner, state, folder)
    return Progress(*state["progress"])


def _restore_rest(learner: Learner, state: dict[str, Any], folder: str) -> None:
    asked = [{name: group[name] for name in ASKED if name in group} for group in learner.optimizer.param_groups]
    try:
        if learner.strategy == "fsdp":
            from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict

            set_optimizer_state_dict(learner.module, learner.optimizer, state["optimizer"], options=_whole_options())
        else:
            learner.optimizer.load_state_dict(state["optimizer"])
        for group, own in zip(learner.optimizer.param_groups, asked, strict=True):
            group.update(own)
        for name, part in (("scheduler", learner.scheduler), ("scaler", learner.scaler)):
            if (part is None) != (state[name] is None):
                raise ValueError(f"it has {'no' if state[name] is None else 'a'} {name}")
            if part is not None:
                part.load_state_dict(state[name])
    except (ValueError, KeyError) as error:
        raise InvalidValueError(
            f"{folder} was made with other options: {error}. Go on with the optimizer, schedule and precision that it was made "
            "with, or begin anew."
        ) from error


def check_same_model(state: dict[str, Any], module: nn.Module, folder: str) -> None:
    """Raise the error for the first key in which a checkpoint is not of this model.

    Raises:
        InvalidValueError: It names the key.
    """
    own = module.state_dict()
    text = f"{folder} is a checkpoint of another model: "
    for name, tensor in own.items():
        if name not in state:
            raise InvalidValueError(f"{text}it has no {name!r}. Give one of this model, or begin anew.")
        shapes = [tuple(getattr(each, "shape", ())) for each in (state[name], tensor)]
        if shapes[0] != shapes[1]:
            raise InvalidValueError(
                f"{text}{name!r} has the shape {shapes[0]} in it, and {shapes[1]} here. Give one of this model, or begin anew."
            )
    for name in state:
        if name not in own:
            raise InvalidValueError(f"{text}it has {name!r}, which is not here. Give one of this model, or begin anew.")


def _optimizer_state(learner: Learner) -> dict[str, Any]:
    if learner.strategy != "fsdp":
        return learner.optimizer.state_dict()
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    state: dict[str, Any] = get_optimizer_state_dict(learner.module, learner.optimizer, options=_whole_options())
    return state


def _whole_options() -> Any:
    """Return the options for states as one process would have them."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(full_state_dict=True, cpu_offload=True)
