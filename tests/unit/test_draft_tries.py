"""Claim: trying other numbers of draft tokens costs a share of the time, as long as costs are as measured."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from nwor.config import DraftBounds
from nwor.draft_costs import StepCosts
from nwor.engine.draft_lengths.policy import DraftLengthPolicy
from nwor.engine.draft_lengths.step_times import FAR

BOUNDS = DraftBounds(0, 8)
REQUESTS = 128
#: Seconds of a step without drafts, and what each draft of all requests adds: far more than it is worth.
FLOOR, DRAFT = 0.01, 0.004


def _costs() -> StepCosts:
    row = tuple(FLOOR + DRAFT * drafts for drafts in BOUNDS.candidates)
    return StepCosts((1, REQUESTS), BOUNDS.candidates, (row, row), (1, 512), (0.0, 0.0))


class Engine:
    """An engine whose drafts are never accepted.

    Args:
        factor: how much longer than measured its steps take.

    """

    def __init__(self, factor: float = 1.0) -> None:
        self.policy, self.factor, self.seconds = DraftLengthPolicy(BOUNDS), factor, 0.0
        self.policy.take_costs(_costs())
        self.made: Counter[int] = Counter()

    def run(self, seconds: float) -> float:
        """Return the share of the time that was spent on drafts."""
        began, spent = self.seconds, 0.0
        while self.seconds < began + seconds:
            drafts = self.policy.choose(REQUESTS)
            took = self.factor * _costs().step(REQUESTS, drafts)
            self.made[drafts] += 1
            self.seconds += took
            spent += took - self.factor * FLOOR
            self.policy.observe_step(REQUESTS, drafts, 0, float(REQUESTS), took)
            if drafts:
                self.policy.estimates.observe(drafts, np.zeros(REQUESTS, np.int32))
        return spent / seconds


def test_a_new_load_is_not_served_worse_for_what_is_not_known_of_it() -> None:
    engine = Engine()
    share = engine.run(20.0)
    assert engine.policy.chosen == 0
    # A hundredth of the time, what was saved up before, and what is lost until the text is known.
    assert share < 0.02
    assert len(engine.made) > 2  # others are tried all the same


@pytest.mark.parametrize("factor", [1.0 + 2 * FAR, 1.0 - 2 * FAR])
def test_where_steps_take_another_time_more_is_tried(factor: float) -> None:
    measured, other = Engine(), Engine(factor)
    measured.run(10.0)
    other.run(10.0)
    tried = [sum(count for drafts, count in one.made.items() if drafts) for one in (measured, other)]
    assert tried[1] > 1.3 * tried[0]
