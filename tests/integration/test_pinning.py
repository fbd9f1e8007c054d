"""What a worker does to see its own GPU and no other. Imports Ray, starts none."""

from __future__ import annotations

import pytest

from raypool.backends.ray.worker import pin

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("given", "before", "after", "problem"),
    [
        (["1"], "1", "1", None),
        (["0", "3"], "0,3", "0,3", None),
        (["GPU-abc"], "GPU-abc", "GPU-abc", None),
        ([], None, "", None),
        ([], "0,1", "", None),
        (["2"], None, "2", None),
        (["2"], "", "2", None),
        (["1"], "0", "0", "given GPU 1, but something has set CUDA_VISIBLE_DEVICES=0"),
        (["1"], "1,0", "1,0", "given GPU 1, but something has set CUDA_VISIBLE_DEVICES=1,0"),
    ],
)
def test_a_worker_sees_what_it_was_given(
    given: list[str], before: str | None, after: str, problem: str | None
) -> None:
    environ = {} if before is None else {"CUDA_VISIBLE_DEVICES": before}
    said = pin(given, environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == after
    assert said is None if problem is None else problem in str(said)
