"""Cells of the mixed-step benchmark, the most telling first, and what their blocks of steps say."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from nwor.config import DraftBounds

#: Tokens of the prompt that comes in chunks.
LONG = 16384
#: Requests that decode, and tokens of the prompts beside them; 0 is none. What serving does most comes first.
CELLS = (
    (16, 128), (64, 128), (16, 512), (64, 512), (16, 0), (64, 0), (4, 128), (16, 2048), (64, 2048), (4, 512),
    (16, LONG), (64, LONG), (16, 64), (64, 64), (4, 0), (4, 2048), (4, 64), (4, LONG),
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """So many requests decode; a prompt of so many tokens joins in every ``every``-th step.

    A prompt longer than a step takes comes in chunks, one in each step, and the next one follows it. Of the
    requests ``bounded`` have windows of ``drafts`` draft tokens at most.
    """

    requests: int
    prompt: int
    every: int = 2
    bounded: int = 0
    drafts: int = 0

    @property
    def name(self) -> str:
        """Return it in short, as ``16x512``, or ``16x512:8/1`` where 8 requests have windows of one draft."""
        bound = f":{self.bounded}/{self.drafts}" if self.bounded else ""
        return f"{self.requests}x{self.prompt}{bound}"

    @property
    def clients(self) -> str:
        """Return its requests in words."""
        return f"{self.requests}{f', {self.bounded} of at most {self.drafts} drafts' if self.bounded else ''}"

    def bound(self, index: int) -> int | None:
        """Return the most draft tokens of a request's windows; None where it has no bound."""
        # Spread out: those with a bound stand among the others.
        return self.drafts if index * self.bounded % self.requests < self.bounded else None


def of(record: Mapping[str, Any]) -> Cell:
    """Return the cell of a record."""
    return Cell(*(record.get(field.name, field.default) for field in fields(Cell)))


def parse(text: str, every: int) -> list[Cell]:
    """Return the cells of ``16x512,64x0:32/1``; all of them for an empty text.

    Raises:
        ValueError: if it is of another form.

    """
    if not text.strip():
        return [Cell(*pair, every) for pair in CELLS]
    cells = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)x(\d+)(?::(\d+)/(\d+))?", part.strip())
        found = [int(number or 0) for number in match.groups()] if match else [0]
        if not found[0] or found[2] > found[0]:
            raise ValueError(
                f"{part!r} is no cell: give requests and prompt tokens, as 16x512, and how many of the "
                "requests have windows of how many draft tokens at most, as 16x512:8/1"
            )
        requests, prompt, bounded, drafts = found
        cells.append(Cell(requests, prompt, every, bounded, drafts))
    return cells


def parse_mode(text: str, k: int) -> tuple[str, int | None]:
    """Return the mode of ``stage@1`` and its draft tokens; None for them where none are given.

    Args:
        text: a mode, with a number where the engine is to choose among several and is kept to that one.
        k: the most draft tokens of the engine.

    Raises:
        ValueError: if the engine has no graphs of that number, or chooses none in that mode.

    """
    mode, at, number = text.strip().partition("@")
    if not at:
        return mode, None
    numbers = DraftBounds(0, k).candidates
    if mode != "stage" or not number.isdecimal() or int(number) not in numbers:
        known = ", ".join(f"stage@{one}" for one in numbers)
        raise ValueError(
            f"{text!r} is no mode: numbers of draft tokens are chosen in stage alone, as {known}"
        )
    return mode, int(number)


@dataclass(frozen=True)
class Step:
    """One step's wall time and what ran in it.

    Attributes:
        seconds: between its results and those before.
        waited: of these, how long the host waited for the device.
        windows: requests that decoded.
        rows: rows of prompts.

    """

    seconds: float
    waited: float
    windows: int
    rows: int


def describe(steps: Sequence[Step]) -> dict[str, Any]:
    """Return a block of steps in milliseconds: all of them, and pure and mixed ones apart."""
    result: dict[str, Any] = {
        "steps": len(steps),
        "mean": 1e3 * statistics.fmean(step.seconds for step in steps),
        "host": 1e3 * statistics.fmean(step.seconds - step.waited for step in steps),
    }
    for kind in ("pure", "mixed"):
        chosen = [step for step in steps if bool(step.rows) == (kind == "mixed")]
        if chosen:
            times = [1e3 * step.seconds for step in chosen]
            result[kind] = {
                "steps": len(chosen),
                "mean": statistics.fmean(times),
                "median": statistics.median(times),
                "rows": statistics.fmean(step.rows for step in chosen),
            }
    # What a step costs without the outliers of a shared machine: medians, weighted by how many there are.
    result["typical"] = sum(
        result[kind]["median"] * result[kind]["steps"] for kind in ("pure", "mixed") if kind in result
    ) / len(steps)
    return result


def ratios(
    blocks: Mapping[str, Sequence[Mapping[str, Any]]], base: str, other: str, figure: str
) -> list[float]:
    """Return base / other, block by block: above 1, ``other`` takes less time.

    Args:
        blocks: by mode.
        base: a mode.
        other: another.
        figure: of a block, as ``typical``; ``mixed.median`` for one inside.

    """
    pairs = zip(blocks[base], blocks[other], strict=False)
    found = [(_figure(first, figure), _figure(second, figure)) for first, second in pairs]
    return [first / second for first, second in found if first and second]


def _figure(block: Mapping[str, Any], figure: str) -> float | None:
    value: Any = block
    for part in figure.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return None if value is None else float(value)


def geometric_mean(values: Sequence[float]) -> float:
    """Return the geometric mean; NaN of none."""
    return statistics.geometric_mean(values) if values else math.nan
