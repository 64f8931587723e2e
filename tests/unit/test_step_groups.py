"""Which steps' seconds say what a step costs: time that is moved between neighbours changes nothing."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import pytest

from nwor.draft_costs import StepCosts
from nwor.engine.draft_lengths.step_groups import MOST_STEPS, StepGroups
from nwor.engine.draft_lengths.step_times import StepTimes

#: A step of 64 requests with two drafts takes 10 ms, a row of a prompt beside it 25 us.
COSTS = StepCosts((1, 64), (0, 2), ((0.005, 0.006), (0.006, 0.010)), (64, 1024), (0.005, 0.005 + 960 * 25e-6))
PURE, ROW = 0.010, 25e-6


class Seen:
    """A :class:`StepTimes` that notes what it is told."""

    def __init__(self) -> None:
        self.pure: list[float] = []
        self.groups: list[tuple[int, float, float, float]] = []
        self.times = StepTimes(COSTS)
        self.times.observe = lambda _, __, seconds: self.pure.append(seconds)  # type: ignore[method-assign]
        self.times.observe_prompts = lambda *group: self.groups.append(group)  # type: ignore[method-assign]

    def run(self, steps: list[tuple[int, float]]) -> None:
        groups = StepGroups(self.times)
        for prompt, seconds in steps:
            groups.add(64, 2, prompt, seconds)


def test_steps_count_for_themselves_between_others_without_prompts() -> None:
    seen = Seen()
    seen.run([(0, 1.0), (0, 2.0), (0, 3.0), (400, 4.0), (0, 5.0), (0, 6.0), (0, 7.0), (0, 8.0)])
    assert seen.pure == [1.0, 2.0, 6.0, 7.0]  # the last waits for the next
    ((steps, seconds, without, adds),) = seen.groups
    assert (steps, seconds) == (3, 3.0 + 4.0 + 5.0)
    assert without == pytest.approx(3 * PURE)
    assert adds == pytest.approx(400 * ROW)


@pytest.mark.parametrize("forward", [True, False])
def test_moved_time_changes_nothing(forward: bool) -> None:
    random = Random(3)
    prompts = [random.choice([0, 0, 0, 0, 0, 0, 500, 900]) for _ in range(4000)]
    true = [PURE + 1.3 * ROW * prompt for prompt in prompts]
    shown = list(true)
    pairs = (
        pairwise(range(len(prompts))) if forward else (pair[::-1] for pair in pairwise(range(len(prompts))))
    )
    for index, neighbour in pairs:
        if prompts[index]:
            moved = 0.4 * true[index]
            shown[index] -= moved
            shown[neighbour] += moved
    seen = Seen()
    seen.run(list(zip(prompts, shown, strict=True)))
    assert len(seen.pure) > 500
    assert seen.pure == pytest.approx([PURE] * len(seen.pure))
    assert len(seen.groups) > 300
    for _, seconds, without, adds in seen.groups:
        assert (seconds - without) / adds == pytest.approx(1.3)


def test_a_step_whose_seconds_are_not_known_spoils_its_group_alone() -> None:
    seen = Seen()
    seen.run([(0, 1.0), (400, 0.0), (0, 2.0), (0, 3.0), (0, 4.0), (400, 5.0), (0, 6.0), (0, 7.0)])
    assert seen.pure == [3.0]
    assert [(steps, seconds) for steps, seconds, *_ in seen.groups] == [(3, 4.0 + 5.0 + 6.0)]


def test_prompts_in_every_step_are_added_up_in_parts() -> None:
    seen = Seen()
    seen.run([(400, 0.02)] * (2 * MOST_STEPS + 1))
    assert [group[0] for group in seen.groups] == [MOST_STEPS, MOST_STEPS]
    assert not seen.pure


@pytest.mark.parametrize("odd", [{"requests": 0}, {"drafts": 5}])
def test_steps_that_were_not_measured_say_nothing(odd: dict[str, Any]) -> None:
    seen = Seen()
    groups = StepGroups(seen.times)
    for prompt in (0, 0, 400, 0, 0, 0):
        groups.add(**({"requests": 64, "drafts": 2, "prompt": prompt, "seconds": 0.01} | odd))
    assert not seen.pure
    assert not seen.groups
