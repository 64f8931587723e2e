"""Which steps' seconds say what a step costs.

Seconds lie between results. What the host is late with, and what a step still does when its results have
come, moves time from one step to a neighbour. Steps with prompts are long, so much of theirs may be moved. A
step without prompts counts for itself between two others without. Those beside steps with prompts are added
up with them: moving changes no sum.
"""

from __future__ import annotations

from math import isfinite
from typing import NamedTuple

from nwor.engine.draft_lengths.step_times import StepTimes

#: Most steps that are added up. At the ends of such a group time may still be moved.
MOST_STEPS = 32


class _Step(NamedTuple):
    """What :meth:`StepGroups.add` was told."""

    requests: int
    drafts: int
    prompt: int
    seconds: float


class StepGroups:
    """Takes in steps one after the other.

    Args:
        times: is told what they say.

    """

    def __init__(self, times: StepTimes) -> None:
        self._times = times
        self._waiting: _Step | None = None
        self._open = False
        self._clear()

    def _clear(self) -> None:
        self._steps = 0
        self._seconds = self._without = self._adds = 0.0
        self._spoiled = False

    def add(self, requests: int, drafts: int, prompt: int, seconds: float) -> None:
        """Take in a step.

        Args:
            requests: of the step.
            drafts: that each verified, and that were made for each.
            prompt: rows of prompts.
            seconds: of the step; 0 where that is not known.

        """
        step, self._waiting = self._waiting, _Step(requests, drafts, prompt, seconds)
        if step is None:
            return
        if step.prompt:
            self._open = True
            self._add(step)
            if self._steps >= MOST_STEPS:
                self._close()
        elif self._open:
            self._add(step)
            if not prompt:
                self._close()
        elif prompt:
            self._open = True
            self._add(step)
        elif step.seconds > 0 and step.requests and self._times.knows(step.drafts):
            self._times.observe(step.requests, step.drafts, step.seconds)

    def _add(self, step: _Step) -> None:
        """Add a step to the group."""
        times = self._times
        if not step.seconds or not step.requests or not times.knows(step.drafts):
            self._spoiled = True
            return
        self._steps += 1
        self._seconds += step.seconds
        self._without += times.step(step.requests, step.drafts)
        self._adds += (
            times.costs.beside(step.requests * (step.drafts + 1), step.prompt) if step.prompt else 0.0
        )

    def _close(self) -> None:
        """Say what the group's prompts added."""
        if not self._spoiled and self._adds > 0 and isfinite(self._without):
            self._times.observe_prompts(self._steps, self._seconds, self._without, self._adds)
        self._open = False
        self._clear()
