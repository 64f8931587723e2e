"""Windows that fit each request: which drafts of which requests are worth the rows that they take.

A step that makes k drafts for each request need not verify them all. What counts is how long requests take:
with t_i tokens a window, request i takes T / t_i seconds for each of its tokens. Relative to what it takes
now, all together gain most by the step with the least T / (t_1 t_2 ... t_b)^(1/b). So the tokens of a step
are counted by their geometric mean. By their sum, requests that are easy to draft for would get rows that
others need more. These would stay longer, and a server with a given number of clients would serve less.

A draft's gain is what it makes its request's window longer by, as a logarithm. Drafts are taken in the order
of their gains until the next one costs more time than it is worth. Gains become less along a chain, so each
request's drafts are the first ones of its chain. vLLM's adaptive verification takes drafts in the order of
their chances, by what the draft model says of single tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from nwor.engine.draft_lengths.request_acceptance import Floats

#: What fitted windows have to save, relative, to be taken up, and to be kept.
BEGIN, KEEP = 0.02, 0.005
#: Relative distance of a draft's gain from the least one within which a request's length stays as it is.
MARGIN = 0.1


class Plan(NamedTuple):
    """A step as it may be.

    Attributes:
        rows: of all windows together.
        tokens: expected of them; where requests differ, their number times the geometric mean.
        least: gain that a draft needs for a row; 0 where no windows are fitted.

    """

    rows: float
    tokens: float
    least: float = 0.0


def whole(requests: int, drafts: int, tokens: float) -> Plan:
    """Return the step in which every request verifies all its drafts.

    Args:
        requests: of the step.
        drafts: of each.
        tokens: expected of a window.

    """
    return Plan(requests * (drafts + 1.0), requests * tokens)


def gains(survival: Floats) -> Floats:
    """Return what each draft makes its request's window longer by, as a logarithm.

    Args:
        survival: float64 [requests, longest], the chance that all drafts up to each are accepted.

    Returns:
        float64 [requests, longest], descending along each chain.

    """
    found: Floats = np.log1p(survival / (1.0 + np.cumsum(survival, axis=1) - survival))
    return found


def fitted(
    gained: Floats, drafts: int, cost: Callable[[Floats, Floats], Floats], least_drafts: int = 0
) -> Plan:
    """Return the step with the cheapest tokens.

    Args:
        gained: float64 [requests, longest], the gains.
        drafts: that are made for each.
        cost: the cost of a token, by rows and by tokens of a step.
        least_drafts: drafts that every request verifies.

    """
    requests, kept = len(gained), min(least_drafts, drafts)
    falling: Floats = np.sort(gained[:, kept:drafts], axis=None)[::-1]
    rows = np.arange(len(falling) + 1, dtype=np.float64) + requests * (1.0 + kept)
    before = float(gained[:, :kept].sum())
    tokens: Floats = requests * np.exp(np.concatenate(([before], before + np.cumsum(falling))) / requests)
    best = int(np.argmin(cost(rows, tokens)))
    return Plan(float(rows[best]), float(tokens[best]), float(falling[best - 1]) if best else 1.0)


def lengths(gained: Floats, least: float, before: Floats) -> Floats:
    """Return how many drafts of each request gain enough.

    Args:
        gained: float64 [requests, longest], the gains.
        least: gain that a draft needs.
        before: float64 [requests], what was returned for each last; negative where nothing was.

    Returns:
        float64 [requests], whole numbers.

    """
    now = (gained >= least).sum(axis=1)
    more = (gained >= least * (1.0 + MARGIN)).sum(axis=1)
    fewer = (gained >= least * (1.0 - MARGIN)).sum(axis=1)
    return np.where(before < 0, now, np.clip(before, more, fewer)).astype(np.float64)
