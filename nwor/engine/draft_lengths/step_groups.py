"""Which steps' seconds say what a step costs, and what prompts add.

Seconds lie between results. What the host is late with, and what a step still does when its results have
come, moves time from one step to a neighbour. Steps with prompts are long, so much of theirs may be moved.
Therefore a step without prompts counts for itself between two others without. Those beside steps with prompts
are added up with them: moving changes no sum.

Where a number of draft tokens is hardly ever seen for itself, such sums have to do. What all of them take
beyond what is expected is due to prompts. What those of one number take beyond the others is due to that
number.
"""

from __future__ import annotations

from math import exp, isfinite, log
from typing import NamedTuple

from nwor.engine.draft_lengths.step_times import StepTimes

#: Most steps that are added up. At the ends of such a group time may still be moved.
MOST_STEPS = 32
#: Weight of a step in what all groups take, relative to what is expected.
WEIGHT = 0.03
#: Steps for which one that counted for itself stands for its number of requests and draft tokens.
FRESH = 256


class _Step(NamedTuple):
    """What :meth:`StepGroups.add` was told."""

    requests: int
    drafts: int
    prompt: int
    seconds: float
    rows: float


class StepGroups:
    """Takes in steps one after the other.

    Args:
        times: is told what they say.

    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._waiting = _Step(0, 0, 0, 0.0, 0.0)
        self._after_prompt = False
        self._group: list[_Step] = []
        self._now = 0
        # Sum of weights and of weighted logarithms: seconds of groups, relative to what is expected.
        self._weights = self._logarithms = 0.0
        # By place of the requests and drafts: when a step counted for itself last.
        self._fresh: dict[tuple[int, int], int] = {}

    def add(self, requests: int, drafts: int, prompt: int, seconds: float, rows: float | None = None) -> None:
        """Take in a step.

        Args:
            requests: of the step.
            drafts: that each verified, and that were made for each.
            prompt: rows of prompts.
            seconds: of the step; 0 where that is not known. Where not every draft was verified, what it would
                have taken with all.
            rows: of the windows; as many as drafts say where that is not given.

        """
        rows = requests * (drafts + 1.0) if rows is None else rows
        step, self._waiting = self._waiting, _Step(requests, drafts, prompt, seconds, rows)
        self._now += 1
        if not self._is_known(step):
            self._close()
            self._after_prompt = False
            return
        beside = prompt > 0 and seconds > 0
        if step.prompt or self._after_prompt or beside:
            self._group.append(step)
            if len(self._group) >= MOST_STEPS or not (step.prompt or beside):
                self._close()
        else:
            self._fresh[self._times.place(step.requests), step.drafts] = self._now
            self._times.observe(step.requests, step.drafts, step.seconds)
        self._after_prompt = step.prompt > 0

    def _is_known(self, step: _Step) -> bool:
        times = self._times
        if not (step.seconds > 0 and step.requests and times.knows(step.drafts)):
            return False
        return isfinite(times.step(step.requests, step.drafts))

    def _is_fresh(self, step: _Step) -> bool:
        seen = self._fresh.get((self._times.place(step.requests), step.drafts))
        return seen is not None and self._now - seen <= FRESH

    def _close(self) -> None:
        """Say what the steps of the group say together."""
        group, self._group = self._group, []
        if not group:
            return
        times = self._times
        seconds = sum(step.seconds for step in group)
        without = sum(times.step(step.requests, step.drafts) for step in group)
        adds = sum(times.costs.beside(round(step.rows), step.prompt) for step in group if step.prompt)
        relative = log(seconds / (without + times.prompts * adds))
        keep = (1.0 - WEIGHT) ** len(group)
        self._weights = keep * self._weights + 1.0 - keep
        self._logarithms = keep * self._logarithms + (1.0 - keep) * relative
        scale = exp(relative - self._logarithms / self._weights)
        # Once for each number: what its steps have in common is one finding, not as many as steps.
        for step in {(times.place(step.requests), step.drafts): step for step in group}.values():
            if not self._is_fresh(step):
                expected = times.step(step.requests, step.drafts)
                times.observe(step.requests, step.drafts, scale * expected, summed=True)
        if adds > 0:
            times.observe_prompts(len(group), seconds, without, adds)
