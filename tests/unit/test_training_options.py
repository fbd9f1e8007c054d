"""The options of `pool.fit`: what they refuse, what they mean by default, and how the learning rate
goes on.
"""

from __future__ import annotations

import functools
import math
import pickle
from typing import Any

import numpy as np
import pytest

from raypool.errors import InvalidTypeError, InvalidValueError
from raypool.train.shares import LearningRates, default_warmup
from raypool.train.training_options import TrainingOptions


def make(weights: Any, lr: float, weight_decay: float = 0.5) -> None:
    """An optimizer of one's own."""


WRONG_VALUES: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": "rmsprop"}, "'sgdm', 'adam', 'adamw', or a function"),
    ({"schedule": "step"}, "'none', 'piecewise', 'cosine', 'linear', or a function"),
    ({"execution": "tpu"}, "'auto', 'cpu', 'gpu', 'multi-gpu'"),
    ({"precision": "float16"}, "'float32', 'bf16', 'fp16'"),
    ({"shuffle": "always"}, "'every-epoch', 'once', 'never'"),
    ({"strategy": "zero"}, "'ddp', 'fsdp'"),
    ({"output_model": "first"}, "'last', 'best'"),
    ({"output_model": "best"}, "Pass validation_data"),
    ({"scale_batch": "per_gpu"}, "'per_worker'"),
    ({"scale_learning_rate": "sqrt", "scale_batch": "per_worker"}, "'linear'"),
    ({"scale_learning_rate": "linear"}, "scale_batch='per_worker'"),
    ({"learning_rate": 0.0}, "learning_rate=0.0 is not above 0"),
    ({"learning_rate": -1}, "learning_rate=-1 is not above 0"),
    ({"learning_rate": math.nan}, "not finite"),
    ({"learning_rate": math.inf}, "not finite"),
    ({"momentum": 1.0}, "0 to below 1"),
    ({"momentum": -0.1}, "0 to below 1"),
    ({"weight_decay": -1e-4}, "below 0"),
    ({"drop_factor": 0}, "above 0 to 1"),
    ({"drop_every": 0}, "must be at least 1, not"),
    ({"warmup_steps": -1}, "must be at least 0, not -1"),
    ({"mini_batch_size": 0}, "mini_batch_size must be at least 1, not 0"),
    ({"max_epochs": 0}, "must be at least 1, not"),
    ({"accumulate_steps": 0}, "must be at least 1, not"),
    ({"validation_frequency": 0}, "must be at least 1, not"),
    ({"patience": 0, "validation_data": ([0], [0])}, "must be at least 1, not"),
    ({"patience": 3}, "validation_data="),
    ({"checkpoint_every": 0}, "must be at least 1, not"),
    ({"report_every": 0}, "must be at least 1, not"),
    ({"loader_processes": -1}, "must be at least 0, not -1"),
    ({"seed": -1}, "must be at least 0, not -1"),
    ({"seed": 2**63}, "not below 2\\*\\*63"),
    ({"clip_gradient_norm": 0}, "None does not clip"),
    ({"worker_load": [0, 0]}, "gives no worker anything"),
    ({"worker_load": []}, "gives no worker anything"),
    ({"worker_load": [1, -1]}, "below 0"),
    ({"worker_load": [1, math.nan]}, "not finite"),
    ({"schedule": lambda optimizer: None, "warmup_steps": 5}, "SequentialLR"),
    ({"optimizer": lambda weights: None, "learning_rate": 1}, "learning_rate=1 would be ignored"),
    ({"optimizer": functools.partial(make, lr=1), "learning_rate": 2}, "sets 'lr' itself"),
    ({"optimizer": make, "momentum": 0.5}, "let the function take an argument 'momentum'"),
]

WRONG_TYPES: list[dict[str, Any]] = [
    {"optimizer": 3},
    {"optimizer": None},
    {"schedule": 0.1},
    {"execution": None},
    {"precision": 16},
    {"shuffle": 1},
    {"schedule": True},
    {"strategy": None},
    {"scale_batch": 2},
    {"learning_rate": "0.1"},
    {"learning_rate": True},
    {"momentum": None},
    {"mini_batch_size": 32.0},
    {"max_epochs": None},
    {"max_epochs": True},
    {"accumulate_steps": None},
    {"seed": None},
    {"warmup_steps": 1.5},
    {"clip_gradient_norm": "1"},
    {"worker_load": 3},
    {"worker_load": "11"},
    {"worker_load": ["1", 2]},
    {"output_fn": "print"},
    {"compile": 1},
]


def test_values_that_cannot_work_are_refused() -> None:
    for fields, message in WRONG_VALUES:
        with pytest.raises(InvalidValueError, match=message):
            TrainingOptions(**fields)


def test_kinds_that_cannot_work_are_refused() -> None:
    for fields in WRONG_TYPES:
        with pytest.raises(InvalidTypeError, match=next(iter(fields))):
            TrainingOptions(**fields)


def test_they_are_named_frozen_and_travel() -> None:
    with pytest.raises(TypeError):
        TrainingOptions("adam")  # type: ignore[misc]
    options = TrainingOptions(worker_load=np.array([2, 1]))
    assert options.worker_load == (2, 1)
    with pytest.raises(AttributeError):
        options.max_epochs = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(options)) == options


def test_numbers_become_pythons_own() -> None:
    """No checkpoint could be loaded with NumPy's."""
    options = TrainingOptions(
        learning_rate=np.float32(0.5), weight_decay=np.float64(0.25), clip_gradient_norm=np.int64(2)
    )
    values = options.learning_rate, options.weight_decay, options.clip_gradient_norm
    assert values == (0.5, 0.25, 2)
    assert [type(value) for value in values] == [float] * 3


def test_defaults_change_nothing_silently() -> None:
    options = TrainingOptions()
    assert options.scale_batch is options.scale_learning_rate is options.clip_gradient_norm is None
    assert (options.precision, options.schedule, options.strategy) == ("float32", "none", "ddp")


def test_pythons_own_words_mean_what_matlabs_mean() -> None:
    yes = TrainingOptions(shuffle=True, scale_batch=True, scale_learning_rate=True, schedule=None)
    assert yes == TrainingOptions(
        shuffle="every-epoch", scale_batch="per_worker", scale_learning_rate="linear"
    )
    no = TrainingOptions(shuffle=False, scale_batch=False, scale_learning_rate=False)
    assert no == TrainingOptions(shuffle="never")


# --- the learning rate ----------------------------------------------------------------------------


def factors(kind: str, **fields: Any) -> list[float]:
    course = LearningRates(kind, steps_per_epoch=2, num_steps=8, **fields)
    return [round(course.factor(step), 6) for step in range(8)]


def test_the_courses_of_the_learning_rate() -> None:
    assert factors("none") == [1] * 8
    assert factors("piecewise", drop_every=2, drop_factor=0.5) == [1, 1, 1, 1, 0.5, 0.5, 0.5, 0.5]
    assert factors("linear") == [1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert factors("cosine") == [
        round((1 + math.cos(math.pi * step / 8)) / 2, 6) for step in range(8)
    ]


def test_a_warm_up_rises_evenly_to_the_whole_rate() -> None:
    for kind in ["none", "piecewise", "cosine", "linear"]:
        assert factors(kind, warmup_steps=4)[:5] == [0.25, 0.5, 0.75, 1, 1]
        assert factors(kind, warmup_steps=3, warmup_from=0.25)[:4] == [0.5, 0.75, 1, 1]


def test_a_warm_up_may_be_longer_than_the_training() -> None:
    assert factors("cosine", warmup_steps=16) == [round((step + 1) / 16, 6) for step in range(8)]


def test_the_warm_up_of_a_scaled_rate() -> None:
    assert default_warmup(steps_per_epoch=10, num_steps=900) == 50
    assert default_warmup(steps_per_epoch=10, num_steps=90) == 9
    assert default_warmup(steps_per_epoch=1, num_steps=5) == 0
