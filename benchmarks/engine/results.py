"""Results of compare.py as cells with their ratios and noise."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Result:
    """A cell's runs.

    Attributes:
        shape: the model's shape.
        k: draft tokens of a step.
        context: tokens of each prompt.
        batch: requests.
        acceptance: chance of each draft token.
        rates: by mode, tokens per second of each run; "stock" is one of the modes.
        gains: by mode, tokens that a request gained in a step, on average.
        direct: windows written directly against the mode.
        without_graph: whether the step is larger than the largest CUDA graph.

    """

    shape: str
    k: int
    context: int
    batch: int
    acceptance: float
    rates: dict[str, list[float]] = field(default_factory=dict)
    gains: dict[str, float] = field(default_factory=dict)
    direct: int = 0
    without_graph: bool = False

    def has(self, mode: str, base: str = "stock") -> bool:
        """Whether there is a ratio of two modes."""
        return mode in self.rates and base in self.rates

    def ratio(self, mode: str, base: str = "stock") -> float:
        """Return the ratio of the medians."""
        return statistics.median(self.rates[mode]) / statistics.median(self.rates[base])

    def noise(self, mode: str, base: str = "stock") -> float:
        """Return the relative noise of the ratio: half the spread of the runs, both sides' together."""
        sides = (self.rates[mode], self.rates[base])
        return sum((max(runs) - min(runs)) / 2 / statistics.median(runs) for runs in sides)

    def slower(self, mode: str, base: str = "stock") -> bool:
        """Whether the ratio is below 1 by more than its noise."""
        return self.ratio(mode, base) < 1 - self.noise(mode, base)

    @property
    def name(self) -> str:
        """The cell in words."""
        return f"{self.shape}, k={self.k}, {self.batch} x {self.context}, {self.acceptance}"


def results_of(files: Iterable[dict[str, Any]]) -> list[Result]:
    """Return the cells of all files.

    A ratio is never taken between processes of different files. Of a cell in several files the last one
    counts that has most modes.
    """
    found: dict[tuple[str, int, int, int, float], Result] = {}
    for data in files:
        new: dict[tuple[str, int, int, int, float], Result] = {}
        for process in data["processes"]:
            for entry in process.get("cells", ()):
                key = (
                    process["shape"],
                    process["k"],
                    entry["context"],
                    entry["batch"],
                    entry["acceptance"],
                )
                result = new.setdefault(key, Result(*key))
                for mode, seconds in entry["seconds"].items():
                    tokens = entry["tokens"][mode]
                    result.rates[mode] = [t / s for t, s in zip(tokens, seconds, strict=True)]
                    result.gains[mode] = statistics.mean(tokens) / entry["steps"] / entry["batch"]
                result.direct += sum(entry["direct"].values())
                largest = process.get("graph_tokens")
                result.without_graph |= largest is not None and entry["batch"] * (process["k"] + 1) > largest
        for key, result in new.items():
            if key not in found or len(result.rates) >= len(found[key].rates):
                found[key] = result
    return list(found.values())


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean; NaN of nothing."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else math.nan
