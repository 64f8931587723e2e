"""Ratios of arms, cell by cell, with their noise; and what has to hold for them to count."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.serving.results import Record
from benchmarks.serving.summary import quantile

#: Arms accept the same drafts: beyond this share, and beyond chance, a run says that they did not.
ACCEPTANCE_SHARE = 0.01
_ERRORS = 4.0
#: From so many accepted tokens a draft may differ by chance, times the root of the number of drafts.
_DEVIATION = 1.4


@dataclass(frozen=True)
class Ratio:
    """A ratio over rounds.

    Attributes:
        mean: geometric mean.
        error: standard error of the mean; NaN of one round.
        rounds: how many.

    """

    mean: float
    error: float
    rounds: int

    def __str__(self) -> str:
        """Return it with its standard error, or as it is where there is one round only."""
        if not self.rounds:
            return "-"
        return f"{self.mean:.3f}" + (f" ± {self.error:.3f}" if self.rounds > 1 else "")


def ratio_of(values: Sequence[float]) -> Ratio:
    """Return the ratio over rounds from those of the rounds."""
    if not values:
        return Ratio(math.nan, math.nan, 0)
    mean = statistics.geometric_mean(values)
    logs = [math.log(value) for value in values]
    error = mean * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.nan
    return Ratio(mean, error, len(values))


#: Figures of a record by name, each with whether more is better.
FIGURES: dict[str, tuple[Callable[[Record], float], bool]] = {
    "tokens_s": (lambda one: one["tokens_s"], True),
    "tpot": (lambda one: quantile(one["tpot_ms"], 0.5), False),
    # Of a closed loop: until the last request was sent. All arms of a round have the same requests.
    "turn_s": (lambda one: one["wall_s"], False),
}


def arms(records: Sequence[Record]) -> list[str]:
    """Return the arms of some records: stock first, then NWOR's modes."""
    known = ["stock", "off", "stage", "cow", "tree", "auto", "fitted", "auto-tree"]
    known += ["stock-adaptive", "adaptive"]
    found = {record["arm"] for record in records}
    return sorted(found, key=lambda arm: (known.index(arm.split("@")[0]), arm))


def compare(records: Sequence[Record], arm: str, base: str, figure: str) -> Ratio:
    """Return how much better an arm is than another in a cell: above 1 it is the better.

    Only records of the same run and round are compared: they had the same requests at about the same time.
    """
    value, more = FIGURES[figure]
    by_key = {(one["run"], one["round"], one["arm"]): value(one) for one in records}
    ratios = []
    for (run, number, name), own in by_key.items():
        other = by_key.get((run, number, base))
        if name != arm or other is None or not (own > 0 and other > 0):
            continue
        ratios.append(own / other if more else other / own)
    return ratio_of(ratios)


def pooled(records: Sequence[Record], arm: str, figure: str, share: float) -> float:
    """Return a quantile over the requests of all rounds of an arm."""
    return quantile([value for one in records if one["arm"] == arm for value in one[figure]], share)


def accepted(records: Sequence[Record], arm: str) -> tuple[float, float]:
    """Return the accepted drafts a step of an arm, and how many drafts that rests on."""
    own = [one["counters"] for one in records if one["arm"] == arm]
    drafts = sum(one["drafts"] for one in own)
    return (sum(one["accepted"] for one in own) / drafts if drafts else math.nan), drafts


def acceptance_warnings(records: Sequence[Record]) -> list[str]:
    """Return where arms with as many drafts accepted different numbers of them, beyond chance."""
    warnings = []
    by_k: dict[str, list[str]] = {}
    for arm in arms(records):
        if arm.startswith(("auto", "fitted", "tree")) or "adaptive" in arm:  # of no one number
            continue
        by_k.setdefault(arm.partition("@")[2], []).append(arm)
    for group in by_k.values():
        base, many = accepted(records, group[0])
        for arm in group[1:]:
            own, drafts = accepted(records, arm)
            if not (drafts and many):
                continue
            chance = _ERRORS * _DEVIATION * math.sqrt(1 / drafts + 1 / many)
            if abs(own - base) > max(chance, ACCEPTANCE_SHARE * (1 + base)):
                warnings.append(f"{arm} accepted {own:.3f} drafts a step, {group[0]} {base:.3f}")
    return warnings


def windows(records: Sequence[Record], arm: str) -> tuple[float, dict[str, float]]:
    """Return the share of an arm's windows that were staged, and those written directly by reason."""
    staged = direct = 0.0
    reasons: dict[str, float] = {}
    for one in records:
        if one["arm"] != arm:
            continue
        outcomes = one["counters"].get("windows", {})
        staged += outcomes.get("committed", 0.0)
        direct += outcomes.get("direct", 0.0)
        for reason, count in one["counters"].get("direct_reasons", {}).items():
            reasons[reason] = reasons.get(reason, 0.0) + count
    return (staged / (staged + direct) if staged + direct else math.nan), reasons


def best_stock(records: Sequence[Record], figure: str = "tokens_s") -> str:
    """Return the stock arm that is best by the median of a figure, whichever its k."""
    value, more = FIGURES[figure]
    medians = {
        arm: statistics.median(value(one) for one in records if one["arm"] == arm)
        for arm in arms(records)
        if arm.startswith("stock")
    }
    return (max if more else min)(medians, key=lambda arm: medians[arm]) if medians else ""
