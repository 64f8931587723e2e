"""Figures of one load on one arm, from the times of its requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Timeline:
    """What a client saw of one request; times in seconds on one clock.

    Attributes:
        sent: when it was sent.
        chunks: when each chunk of its answer came.
        tokens: tokens of the answer; None while it has not ended.

    """

    sent: float
    chunks: list[float] = field(default_factory=list)
    tokens: int | None = None

    @property
    def ended(self) -> float | None:
        """When its last chunk came; None while it has not ended."""
        return self.chunks[-1] if self.tokens is not None else None


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile by linear interpolation between the values; NaN of none."""
    if not values:
        return math.nan
    ranked = sorted(values)
    place = share * (len(ranked) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def tokens_per_chunk(timelines: Sequence[Timeline]) -> float:
    """Return how many tokens a chunk behind the first brings, over all answers that ended."""
    ended = [one for one in timelines if one.tokens is not None and len(one.chunks) > 1]
    chunks = sum(len(one.chunks) - 1 for one in ended)
    return sum((one.tokens or 0) - 1 for one in ended) / chunks if chunks else 1.0


def tokens_between(timelines: Sequence[Timeline], start: float, end: float) -> float:
    """Return how many tokens came in a window.

    A first chunk brings one token. The others of an answer bring equal parts of the rest: a chunk does not
    say how many it holds. Answers that were cut off are taken to have had the mean of all others.
    """
    usual = tokens_per_chunk(timelines)
    total = 0.0
    for one in timelines:
        whole = one.tokens is not None and len(one.chunks) > 1
        each = ((one.tokens or 0) - 1) / (len(one.chunks) - 1) if whole else usual
        for index, when in enumerate(one.chunks):
            if start < when <= end:
                total += each if index else 1.0
    return total


def _gap(one: Timeline) -> float:
    return max(
        (after - before for before, after in zip(one.chunks, one.chunks[1:], strict=False)), default=0.0
    )


def summarize(timelines: Sequence[Timeline], start: float, end: float, by: str = "ended") -> dict[str, Any]:
    """Return the figures of a window.

    Args:
        timelines: all requests, also those before, behind and across the window.
        start: of the window.
        end: of the window.
        by: which requests count: ``ended`` in the window (closed loop), or ``sent`` in it (arrivals).

    Returns:
        ``tokens_s``, ``requests`` and ``seconds``; per request ``ttft_ms`` (first token), ``tpot_ms``
        (time per output token behind the first), ``stall_ms`` (longest gap between two chunks).

    """
    if by == "ended":
        counted = [one for one in timelines if one.ended is not None and start < one.ended <= end]
        first = [one for one in timelines if one.chunks and start < one.chunks[0] <= end]
    else:
        counted = [one for one in timelines if one.ended is not None and start < one.sent <= end]
        first = counted
    long = [one for one in counted if (one.tokens or 0) > 1]
    return {
        "tokens_s": tokens_between(timelines, start, end) / (end - start),
        "requests": len(counted),
        "seconds": end - start,
        "tokens_per_chunk": tokens_per_chunk(timelines),
        "ttft_ms": [round(1e3 * (one.chunks[0] - one.sent), 2) for one in first],
        "tpot_ms": [
            round(1e3 * (one.chunks[-1] - one.chunks[0]) / ((one.tokens or 0) - 1), 4) for one in long
        ],
        "stall_ms": [round(1e3 * _gap(one), 2) for one in long],
    }
