"""An NVML library without GPUs: it has the functions and errors of pynvml, and answers from what a
test says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pynvml

GIB = 2**30


@dataclass
class FakeCard:
    """A GPU as NVML tells of it; an answer that is an error is raised."""

    uuid: Any = "GPU-11111111-0000-0000-0000-000000000000"
    name: Any = "NVIDIA H200"
    memory: Any = field(
        default_factory=lambda: SimpleNamespace(total=140 * GIB, used=2 * GIB, free=138 * GIB)
    )
    rates: Any = field(default_factory=lambda: SimpleNamespace(gpu=25, memory=10))
    temperature: Any = 41
    mode: Any = 0
    capability: Any = (9, 0)
    mig_mode: Any = field(default_factory=lambda: [0, 0])
    instances: dict[int, str] = field(default_factory=dict)
    instance_memory: Any = None
    computing: Any = ()
    drawing: Any = ()
    mps: Any = ()


class FakeNvml:
    """Stands for the module pynvml.

    Args:
        cards: What there is.
    """

    NVMLError = pynvml.NVMLError

    def __init__(self, *cards: FakeCard) -> None:
        self.cards = list(cards)
        self.broken: Exception | None = None  # what every call raises
        self.asked: list[str] = []

    def __call__(self) -> FakeNvml:
        """Be the function that loads it."""
        return self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            self.asked.append(name)
            if self.broken is not None:
                raise self.broken
            answer = self._answers(name, *args)
            if isinstance(answer, Exception):
                raise answer
            return answer

        return call

    def _answers(self, name: str, *args: Any) -> Any:
        if name == "nvmlInit":
            return None
        if name == "nvmlDeviceGetCount":
            return len(self.cards)
        if name == "nvmlDeviceGetHandleByIndex":
            return self.cards[args[0]] if args[0] < len(self.cards) else error("INVALID_ARGUMENT")
        if name == "nvmlDeviceGetMigDeviceHandleByIndex":
            return (
                SimpleNamespace(uuid=args[0].instances[args[1]])
                if args[1] in args[0].instances
                else error("NOT_FOUND")
            )
        if name == "nvmlDeviceGetHandleByUUID":
            whole = [card for card in self.cards if args[0] in card.instances.values()]
            return SimpleNamespace(memory=whole[0].instance_memory) if whole else error("NOT_FOUND")
        return getattr(args[0], ANSWERS[name]) if ANSWERS[name] != "most" else 7


ANSWERS = {
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetMemoryInfo": "memory",
    "nvmlDeviceGetUtilizationRates": "rates",
    "nvmlDeviceGetTemperature": "temperature",
    "nvmlDeviceGetComputeMode": "mode",
    "nvmlDeviceGetCudaComputeCapability": "capability",
    "nvmlDeviceGetMigMode": "mig_mode",
    "nvmlDeviceGetMaxMigDeviceCount": "most",
    "nvmlDeviceGetComputeRunningProcesses": "computing",
    "nvmlDeviceGetGraphicsRunningProcesses": "drawing",
    "nvmlDeviceGetMPSComputeRunningProcesses": "mps",
}


def error(name: str) -> Exception:
    """Return an error of NVML by its name, such as "GPU_IS_LOST"."""
    made: Exception = pynvml.NVMLError(getattr(pynvml, f"NVML_ERROR_{name}"))
    return made
