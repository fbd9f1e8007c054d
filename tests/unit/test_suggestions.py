"""Names that users type from habit are answered with the name that raypool has."""

from collections.abc import Callable
from typing import Any

import pytest

from raypool import (
    DataQueue,
    Profile,
    RunOptions,
    TrainingOptions,
    WorkerResources,
    after_all,
    after_each,
    gcp,
    parpool,
)
from raypool.testing import sim_pool

TYPED: list[tuple[Callable[[], Any], str]] = [
    (lambda: parpool(workers=4), "no argument or field of a profile workers. Did you mean num_wo"),
    (lambda: parpool(n_jobs=4), "Did you mean num_workers"),
    (lambda: parpool(gpus_per_worker=1), "Did you mean resources"),
    (lambda: parpool(timeout=5), "Did you mean start_timeout_s"),
    (lambda: parpool("Threads"), "'Threads' is not a number .* Did you mean profile='threads'"),
    (lambda: parpool(2, profile="Threads"), "no profile 'Threads'. Did you mean threads"),
    (lambda: gcp("nocreate"), r"gcp\(create=False\)"),  # type: ignore[arg-type]
    (lambda: after_each(DataQueue(), print), r"queue.after_each\(fn\)"),  # type: ignore[arg-type]
    (lambda: after_each([], print, 1), "take no number of outputs"),  # type: ignore[arg-type]
    (lambda: after_all([], max, 1), "take no number of outputs"),  # type: ignore[arg-type]
    (lambda: sim_pool(1).options(timeout=1), "no option timeout. Did you mean timeout_s"),
    (lambda: sim_pool(1).options(colour=1), "no option colour. There are: retries, retry_on"),
    (lambda: TrainingOptions(lr=0.1), "TrainingOptions has no field lr. Did you mean learning_r"),
    (lambda: TrainingOptions(MaxEpochs=3), "Did you mean max_epochs"),
    (lambda: TrainingOptions(InitialLearnRate=0.1), "Did you mean learning_rate"),
    (lambda: TrainingOptions(epochs=3), "Did you mean max_epochs"),
    (lambda: RunOptions(runs_dir="x"), "RunOptions has no field runs_dir. Did you mean "),
    (lambda: WorkerResources(num_gpus=1), "Did you mean gpus"),
    (lambda: Profile(retrys=1), "Profile has no field retrys. Did you mean retries"),
    (lambda: sim_pool(1).parfor(abs, [1])["loss"], r"results.to_frame\(\)\['loss'\]"),
    (
        lambda: sim_pool(1).parfor(lambda x: {"accuracy": x}, [1]).best("acuracy"),
        "no column 'acuracy'. Did you mean accuracy",
    ),
]


@pytest.mark.parametrize(("typed", "words"), TYPED, ids=[words for _, words in TYPED])
def test_the_name_that_was_meant(typed: Callable[[], Any], words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        typed()
