"""How the requests of one step are treated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nwor.modes import Mode


@dataclass(frozen=True)
class StepPlan:
    """How the requests of one step are treated.

    Attributes:
        mode: the mode in force.
        request_ids: the step's requests in batch order.
        draft_counts: draft tokens of each request.
        num_requests: leading requests that form the window batch; 0 where all is direct.
        num_tokens: rows of those requests.
        direct_reason: why windows outside the batch are written directly.
        faulty: whether the batch was written directly after an error.
        query_lens: rows of each request of the window batch.
        step: number of the step among all of this rank's, verify steps or not.

    """

    mode: Mode
    request_ids: Sequence[str]
    draft_counts: Sequence[int]
    num_requests: int
    num_tokens: int
    direct_reason: str | None
    faulty: bool = False
    query_lens: Sequence[int] = ()
    step: int = 0


def leading_windows(query_lens: Sequence[int], longest: int) -> tuple[int, int]:
    """Return how many leading requests are at most ``longest`` rows long, and their rows in all."""
    requests = tokens = 0
    for rows in query_lens:
        if rows > longest:
            break
        requests += 1
        tokens += rows
    return requests, tokens
