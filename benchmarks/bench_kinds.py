"""Cards of several kinds: how long loops take if long items go to the fast ones, of what they take otherwise. In simulation.

Two or three kinds of cards, 2 to 12 workers, 2 to 120 items; nothing is known of the speeds at the start of a loop.
With costs that are off, single loops may take longer: an item's time is drawn in the order of starts, so two courses are
not of the same items.
"""

from __future__ import annotations

from statistics import mean

from benchmarks.measuring import Line
from tests.property.test_kinds_property import ratio

LOOPS = 1000
MOST = 1.05


def run():
    true = [ratio(seed) for seed in range(LOOPS)]
    rough = [ratio(seed, spread=0.3) for seed in range(LOOPS)]
    area = f"several kinds of cards, {LOOPS:,} simulated loops"
    above = sum(value > MOST for value in rough) / LOOPS
    return [
        Line(area, "makespan, true costs (median)", "costs unknown", "x", true, target=MOST, note=f"mean {mean(true):.3f}"),
        Line(area, "makespan, true costs: the worst loop", "costs unknown", "x", [max(true)], target=MOST),
        Line(area, "makespan, costs off by up to 30 % (median)", "costs unknown", "x", rough, note=f"mean {mean(rough):.3f}"),
        Line(area, f"makespan, costs off by up to 30 %: the worst ({above:.1%} above 1.05)", "costs unknown", "x", [max(rough)]),
    ]
