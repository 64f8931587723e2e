"""What a step costs now: the measurement of the start, corrected by the steps of late.

The measurement has short contexts, and whatever else the device did meanwhile is in it. So each cell of its
table has an excess: the mean of what its steps took beyond it. The median of a row's is what its cells have
in common, such as contexts; the rest is the cell's own. Few steps say little of a cell: its own part is drawn
towards none by :data:`PRIOR` steps, less so where the measurement is far off. This is a random-effects model
with heavy tails (Lange, Little and Taylor, "Robust statistical modeling using the t distribution", 1989).
What prompts add has one factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, log
from typing import Any

import numpy as np

from nwor.draft_costs import StepCosts
from nwor.engine.draft_lengths.request_acceptance import Floats

#: Steps of a cell that count as much as its measurement.
PRIOR = 1.0
#: Error of a measurement, relative, from which on it counts less. Once others have become so much shorter,
#: what was seen of a cell before is forgotten.
FAR = 0.15
#: Most steps that a cell's mean is over.
MOST_STEPS = 32.0
#: Steps of the row after which a step of the cell counts half in its mean.
HALF_LIFE = 512.0
#: Steps of the row after which a cell is taken to have moved as those that were seen since.
STALE = 64.0
#: Bounds of a step's seconds relative to what is expected: what lies beyond was no step alone. Results that
#: the host is late with make one step too long, and the next too short.
LEAST_NEW, MOST_NEW = 0.3, 1.5
#: The same once a cell has so many steps.
LEAST_KNOWN, MOST_KNOWN, KNOWN = 0.75, 1.25, 4
#: Findings in a row that are all longer, or all shorter, than expected show that a cell has changed: steps
#: beyond their bounds, and sums of steps, which chance moves less, by so much.
CHANGED, BEYOND = 3, 0.1
#: Least seconds of a step, relative to its measurement.
LEAST = 0.1
#: Weight of a step in the factor of what prompts add, and bounds of the factor.
PROMPT_WEIGHT, LEAST_FACTOR, MOST_FACTOR = 0.03, 0.1, 10.0
#: Most seconds of steps with prompts, relative to what was measured.
MOST = 4.0


class _Row:
    """What was seen with about so many requests, by column of the measurement.

    Args:
        measured: seconds of each column.

    """

    def __init__(self, measured: Sequence[float]) -> None:
        columns = len(measured)
        self._far = [FAR * seconds for seconds in measured]
        self.excess = [0.0] * columns
        self.steps = [0.0] * columns
        self.seen = [0] * columns
        self.common = 0.0
        self._now = 0
        #: By cell, whether sums of late took another time than expected, and too few to say why.
        self.doubtful = [False] * columns
        # What known cells have moved by; and by cell, the row's step that saw it last, and that sum then.
        self._drift = 0.0
        self._then = [0] * columns
        self._drifted = [0.0] * columns
        # By cell, how many steps in a row were far longer than expected, or shorter if negative.
        self.beyond = [0] * columns

    def own(self, column: int) -> float:
        """Return the seconds of a cell beyond its measurement and what the row has in common."""
        if not self.seen[column]:
            return 0.0
        steps, prior = self._trust(column), self._prior(column)
        return steps / (steps + prior) * (self.excess[column] - self.common)

    def _prior(self, column: int) -> float:
        """Return the steps that a cell's measurement counts as."""
        return PRIOR / (1.0 + ((self.excess[column] - self.common) / self._far[column]) ** 2)

    def _trust(self, column: int) -> float:
        """Return the steps that speak for a cell. Old ones give way to new ones, and count until then."""
        return max(self.steps[column], min(self.seen[column], KNOWN))

    def add(self, column: int, excess: float, beyond: int) -> None:
        """Take in the excess of one step.

        Args:
            column: of its cell.
            excess: seconds, within bounds.
            beyond: 1 if it was far longer than expected, -1 if it was far shorter.

        """
        self._now += 1
        self.beyond[column] = beyond if self.beyond[column] * beyond <= 0 else self.beyond[column] + beyond
        if abs(self.beyond[column]) >= CHANGED:
            # No accident: all that was seen before counts as one step.
            self.steps[column] = min(self.steps[column], 1.0)
        kept = 0.5 ** ((self._now - self._then[column]) / HALF_LIFE)
        before = self.steps[column] * kept
        steps = self.steps[column] = min(before + 1.0, MOST_STEPS)
        moved = (excess - self.excess[column]) / steps
        self.excess[column] += moved
        self.seen[column] += 1
        self._then[column] = self._now
        # A cell that is known well moves with what all have in common: so the others move as well.
        drift = moved * min((self.seen[column] - 1) / MOST_STEPS, 1.0)
        self._drift += drift
        self._drifted[column] = self._drift
        seen = [other for other, count in enumerate(self.seen) if count]
        for other in seen:
            since = self._now - self._then[other]
            self.excess[other] += drift * min(since / STALE, 1.0)
            if self._drifted[other] - self._drift > self._far[other]:
                # All steps took longer then, for contexts were or another program had the device.
                self.excess[other] = self.steps[other] = 0.0
                self.seen[other] = 0
        # The median: a cell whose measurement is far off says nothing of the others.
        # Of many that were seen long ago each may have been seen while the device was busy.
        weights = {
            other: self._trust(other) * 0.5 ** ((self._now - self._then[other]) / HALF_LIFE)
            for other in seen
            if self.seen[other]
        }
        half = 0.5 * sum(weights.values())
        for other in sorted(weights, key=self.excess.__getitem__):
            half -= weights[other]
            if half <= 0.0:
                self.common = self.excess[other]
                break


class StepTimes:
    """Seconds of steps, as serving shows them.

    Args:
        costs: as measured at the start.

    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        self._rows = [_Row(measured) for measured in costs.seconds]
        self._prompts = 1.0
        self._columns = {drafts: column for column, drafts in enumerate(costs.drafts)}
        self._places: dict[int, int] = {}
        self._measured: dict[tuple[int, int], float] = {}
        # By requests: rows of windows, and seconds as measured without further passes of the drafter.
        self._lines: dict[int, tuple[Floats, Floats]] = {}

    def place(self, requests: int) -> int:
        """Return which of the measured numbers of requests is nearest, by ratio."""
        place = self._places.get(requests)
        if place is None:
            apart = [abs(log(count / max(requests, 1))) for count in self.costs.requests]
            place = self._places[requests] = apart.index(min(apart))
        return place

    def knows(self, drafts: int) -> bool:
        """Return whether steps with so many draft tokens were measured."""
        return drafts in self._columns

    def common(self, requests: int) -> float:
        """Return the seconds that all steps of about so many requests take beyond the measurement."""
        return self._rows[self.place(requests)].common

    def step(self, requests: int, drafts: int) -> float:
        """Return the seconds of a step without prompts; infinity where no step has room for that.

        Args:
            requests: of the step.
            drafts: of each; one of those measured.

        """
        measured, row = self._of(requests, drafts), self._rows[self.place(requests)]
        return max(measured + row.common + row.own(self._columns[drafts]), LEAST * measured)

    def without_own(self, requests: int, drafts: int) -> float:
        """Return what :meth:`step` would, had nothing been seen of this number of draft tokens."""
        measured = self._of(requests, drafts)
        return max(measured + self._rows[self.place(requests)].common, LEAST * measured)

    def saved(self, requests: int, drafts: int, chains: Sequence[int], rows: Floats) -> Floats:
        """Return what steps save in which not every draft that is made is verified.

        Args:
            requests: of the step.
            drafts: that are made for each.
            chains: the numbers of draft tokens that were measured as chains, ascending.
            rows: float64 [steps], the rows of all windows of a step together.

        Returns:
            float64 [steps], seconds, 0 or more: as measured, and less where whole steps turned out shorter.

        """
        line = self._lines.get(requests)
        if not isfinite(self._of(requests, drafts)):
            return np.zeros_like(rows)
        if line is None:
            known = [k for k in chains if isfinite(self._of(requests, k))]
            passes = self.costs.passes
            seconds = [self._of(requests, k) - passes(requests, k) for k in known]
            places = np.array([requests * (k + 1.0) for k in known])
            # More rows never take less time, whatever the passes of the drafter were measured to take.
            line = self._lines[requests] = places, np.maximum.accumulate(seconds)
        shorter = min(self.step(requests, drafts) / self._of(requests, drafts), 1.0)
        whole = np.interp(requests * (drafts + 1.0), *line)
        found: Floats = shorter * np.maximum(whole - np.interp(rows, *line), 0.0)
        return found

    def is_in_doubt(self, requests: int, drafts: int) -> bool:
        """Return whether sums of late took far longer or shorter than expected, and too few to say why."""
        return self._rows[self.place(requests)].doubtful[self._columns[drafts]]

    def _of(self, requests: int, drafts: int) -> float:
        """Return what was measured."""
        seconds = self._measured.get((requests, drafts))
        if seconds is None:
            seconds = self._measured[requests, drafts] = self.costs.step(requests, drafts)
        return seconds

    def observe(self, requests: int, drafts: int, seconds: float, summed: bool = False) -> None:
        """Take in how long a step without prompts took.

        Args:
            requests: of the step.
            drafts: that each verified, and that were made for each; one of those measured.
            seconds: of the step.
            summed: whether that follows from a sum of steps.

        """
        measured, expected = self._of(requests, drafts), self.step(requests, drafts)
        if not isfinite(measured):
            return
        row, column = self._rows[self.place(requests)], self._columns[drafts]
        known = row.steps[column] >= KNOWN
        least, most = (LEAST_KNOWN, MOST_KNOWN) if known else (LEAST_NEW, MOST_NEW)
        taken = min(max(seconds, least * expected), most * expected)
        off = seconds / expected - 1.0
        longer, shorter = (off > BEYOND, off < -BEYOND) if summed else (seconds > taken, seconds < taken)
        row.add(column, taken - measured, longer - shorter)
        row.doubtful[column] = summed and 0 < abs(row.beyond[column]) < CHANGED

    def beside(self, rows: int, prompt: int) -> float:
        """Return the seconds that a prompt of ``prompt`` rows adds to a step of ``rows`` others."""
        return self.costs.beside(rows, prompt) * self._prompts

    def observe_prompts(self, steps: int, seconds: float, without: float, adds: float) -> None:
        """Take in how long steps took of which some had rows of prompts beside their windows.

        Args:
            steps: how many.
            seconds: of all.
            without: seconds that they would have taken without prompts.
            adds: seconds that prompts add, as measured; above 0.

        """
        seen = max(min(seconds, MOST * (without + adds)) - without, 0.0) / adds
        weight = 1.0 - (1.0 - PROMPT_WEIGHT) ** steps
        self._prompts += weight * (min(seen, MOST_FACTOR) - self._prompts)
        self._prompts = max(self._prompts, LEAST_FACTOR)

    @property
    def prompts(self) -> float:
        """How much prompts add, relative to the measurement."""
        return self._prompts

    def plain(self, requests: int) -> dict[str, Any]:
        """Return what was seen at about so many requests, as plain JSON values by draft tokens."""
        row = self._rows[self.place(requests)]
        return {
            str(drafts): {"milliseconds": round(1e3 * row.own(column), 3), "steps": row.seen[column]}
            for drafts, column in self._columns.items()
            if row.seen[column]
        }
