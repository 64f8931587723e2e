"""What a step costs now: the measurement of the start, corrected by the steps of late.

The measurement has short contexts, and whatever else the device did meanwhile is in it. So each cell of its
table has a factor, and each number of requests in it has an addend for what all of its cells have in common,
such as contexts. What prompts add has one factor. All follow the steps that serving takes.
"""

from __future__ import annotations

from math import isfinite, log
from typing import Any

from nwor.draft_costs import StepCosts

#: Least weight of a step in the addend.
ADDEND_WEIGHT = 0.05
#: Weights of a step in its cell's factor: least, most, and what each step of other cells before it adds.
FACTOR_LEAST, FACTOR_MOST, FACTOR_RISE = 0.003, 0.35, 0.01
#: Weight of a step in the factor of what prompts add.
PROMPT_WEIGHT = 0.03
#: Bounds of a step's seconds relative to what was expected: what lies beyond was no step alone. Results that
#: the host is late with make one step too long, and the next too short.
LEAST, MOST = 0.2, 4.0
#: The same once so many steps have shown what the cell takes.
KNOWN_LEAST, KNOWN_MOST, KNOWN = 0.7, 1.4, 4
#: Bounds of a factor.
LEAST_FACTOR, MOST_FACTOR = 0.1, 10.0


class StepTimes:
    """Seconds of steps, as serving shows them.

    Args:
        costs: as measured at the start.

    """

    def __init__(self, costs: StepCosts) -> None:
        self.costs = costs
        rows, columns = len(costs.requests), len(costs.drafts)
        self._factors = [[1.0] * columns for _ in range(rows)]
        self._seen = [[0] * columns for _ in range(rows)]
        # The weight that a cell's factor had at the row's step of that number.
        self._weights = [[(FACTOR_MOST, 0)] * columns for _ in range(rows)]
        self._addends = [0.0] * rows
        self._steps = [0] * rows
        self._prompts = 1.0
        self._columns = {drafts: column for column, drafts in enumerate(costs.drafts)}
        self._places: dict[int, int] = {}
        self._measured: dict[tuple[int, int], float] = {}

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

    def addend(self, requests: int) -> float:
        """Return the seconds that steps of about so many requests take beyond their cells."""
        return self._addends[self.place(requests)]

    def step(self, requests: int, drafts: int) -> float:
        """Return the seconds of a step without prompts; infinity where no step has room for that.

        Args:
            requests: of the step.
            drafts: of each; one of those measured.

        """
        place = self.place(requests)
        cell = self._of(requests, drafts) * self._factors[place][self._columns[drafts]]
        return max(cell + self._addends[place], 0.2 * cell)

    def _of(self, requests: int, drafts: int) -> float:
        """Return what was measured."""
        seconds = self._measured.get((requests, drafts))
        if seconds is None:
            seconds = self._measured[requests, drafts] = self.costs.step(requests, drafts)
        return seconds

    def observe(self, requests: int, drafts: int, seconds: float) -> None:
        """Take in how long a step without prompts took.

        Args:
            requests: of the step.
            drafts: that each verified, and that were made for each; one of those measured.
            seconds: of the step.

        """
        row, column = self.place(requests), self._columns[drafts]
        measured = self._of(requests, drafts)
        if not isfinite(measured):
            return
        cell = measured * self._factors[row][column]
        expected = max(cell + self._addends[row], 0.2 * cell)
        seen, steps = self._seen[row][column], self._steps[row]
        known = seen >= KNOWN
        least, most = (KNOWN_LEAST, KNOWN_MOST) if known else (LEAST, MOST)
        beyond = min(max(seconds, least * expected), most * expected) - cell - self._addends[row]
        # What cells have in common is learned at once; what is left of it is the cell's own. A cell that is
        # seen all the time says what is common: what it says of itself, compared with others, others show.
        weight = max(ADDEND_WEIGHT, 1.0 / (steps + 1.0))
        self._addends[row] += weight * beyond
        before, then = self._weights[row][column]
        own = min(max(before + FACTOR_RISE * (steps - then), FACTOR_LEAST), 2 * FACTOR_MOST)
        self._weights[row][column] = 0.6 * own, steps + 1
        # The measurement counts for a quarter of a step.
        own = min(own, FACTOR_MOST) if known else 1.0 / (seen + 1.25)
        factor = self._factors[row][column] + (1.0 - weight) * own * beyond / measured
        self._factors[row][column] = min(max(factor, LEAST_FACTOR), MOST_FACTOR)
        self._seen[row][column] = seen + 1
        self._steps[row] = steps + 1

    def beside(self, rows: int, prompt: int) -> float:
        """Return the seconds that a prompt of ``prompt`` rows adds to a step of ``rows`` others."""
        return self.costs.beside(rows, prompt) * self._prompts

    def observe_prompt(self, requests: int, drafts: int, prompt: int, seconds: float) -> None:
        """Take in how long a step took that had rows of prompts beside its windows.

        Args:
            requests: that verified.
            drafts: that each verified, and that were made for each; one of those measured.
            prompt: rows of prompts.
            seconds: of the step.

        """
        adds, without = self.costs.beside(requests * (drafts + 1), prompt), self.step(requests, drafts)
        if not isfinite(without) or not adds:
            return
        seen = max(min(seconds, MOST * (without + adds)) - without, 0.0) / adds
        self._prompts += PROMPT_WEIGHT * (min(seen, MOST_FACTOR) - self._prompts)
        self._prompts = max(self._prompts, LEAST_FACTOR)

    @property
    def prompts(self) -> float:
        """How much prompts add, relative to the measurement."""
        return self._prompts

    def plain(self, requests: int) -> dict[str, Any]:
        """Return what was seen at about so many requests, as plain JSON values by draft tokens."""
        row = self.place(requests)
        found = zip(self.costs.drafts, self._factors[row], self._seen[row], strict=True)
        return {
            str(drafts): {"factor": round(factor, 3), "steps": seen} for drafts, factor, seen in found if seen
        }
