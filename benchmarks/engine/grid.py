"""The cells that are measured: their order, how many steps each takes, and whether its cache fits."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

#: Fewest steps of a measured run.
LEAST_STEPS = 32
#: Steps of the run that fills the prefix cache and tells how long a step takes.
WARM_STEPS = 16


@dataclass(frozen=True)
class Cell:
    """One cell of the grid.

    Attributes:
        context: tokens of each prompt.
        batch: requests that decode at once.
        acceptance: chance of each draft token to be accepted, given that those before it were.

    """

    context: int
    batch: int
    acceptance: float


def groups(
    contexts: Sequence[int], batches: Sequence[int], acceptances: Sequence[float]
) -> Iterator[list[Cell]]:
    """Yield the cells of each context and batch together, in the order in which they are measured.

    Contexts go first, short ones ahead: a time budget then costs the long ones, and a context's prompts are
    not pushed out of the prefix cache by those of another. The largest batch of a context goes first: its
    prompts are those of the smaller ones and more.
    """
    for context in contexts:
        for batch in sorted(batches, reverse=True):
            yield [Cell(context, batch, acceptance) for acceptance in acceptances]


def expected_tokens(drafts: int, acceptance: float) -> float:
    """Return the mean number of tokens that a request gains in a step of ``drafts`` draft tokens."""
    return math.fsum(acceptance**accepted for accepted in range(drafts + 1))


def steps_of_run(
    step_seconds: float, run_seconds: float, drafts: int, acceptance: float, most_tokens: int
) -> int:
    """Return how many steps a run takes.

    Args:
        step_seconds: how long a step takes.
        run_seconds: how long the run should take.
        drafts: draft tokens of a step.
        acceptance: as in :class:`Cell`.
        most_tokens: tokens that a request may gain in the run, on average: a short context that grows by
            much more than itself is none.

    """
    wanted = math.ceil(run_seconds / step_seconds)
    return max(LEAST_STEPS, min(wanted, int(most_tokens / expected_tokens(drafts, acceptance))))


def tokens_needed(context: int, batch: int, growth: int, block_size: int) -> int:
    """Return the cache that a batch takes, in tokens.

    Args:
        context: tokens of each prompt.
        batch: requests.
        growth: tokens by which a request grows.
        block_size: tokens in a block of the cache.

    """
    blocks = math.ceil((context + growth) / block_size) + 1
    return batch * blocks * block_size


@functools.lru_cache(maxsize=1024)
def prompt(context: int, index: int) -> list[int]:
    """Return a request's prompt: always the same one, so that an engine computes its cache once.

    Args:
        context: its length in tokens.
        index: number of the request in its batch.

    """
    import numpy

    tokens: list[int] = numpy.random.default_rng([context, index]).integers(10, 100000, context).tolist()
    return tokens


def numbers(text: str) -> list[int]:
    """Return the whole numbers of a comma-separated list."""
    return [int(part) for part in text.split(",")]


def fractions(text: str) -> list[float]:
    """Return the numbers of a comma-separated list."""
    return [float(part) for part in text.split(",")]
