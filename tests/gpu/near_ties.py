"""How far the log-probabilities of greedy outputs differ, and where outputs part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

#: Log-probabilities by token of each step: the most likely few.
Steps = list[dict[int, float]]


def read(outputs: Sequence[Any]) -> tuple[list[tuple[int, ...]], list[Steps]]:
    """Return the tokens of vLLM's outputs, and their log-probabilities, which have to be asked for."""
    choices = [output.outputs[0] for output in outputs]
    steps = [
        [{token: entry.logprob for token, entry in step.items()} for step in choice.logprobs]
        for choice in choices
    ]
    return [tuple(choice.token_ids) for choice in choices], steps


def differences(seen: dict[str, Any], off: dict[str, Any]) -> tuple[float, float]:
    """Return the largest difference of a common token's log-probability, and the largest gap at a parting.

    Up to and including the step where two outputs part, both saw the same tokens. The gap is how much less
    likely than its own choice `off` found the other's token there: outputs may part at near-ties only.

    Args:
        seen: ``tokens`` and ``logprobs`` of a mode, as :func:`read` returns them.
        off: likewise.

    """
    difference = gap = 0.0
    for ours, theirs, x, y in zip(
        seen["logprobs"], off["logprobs"], seen["tokens"], off["tokens"], strict=True
    ):
        for mine, other, token, expected in zip(ours, theirs, x, y, strict=True):
            common = mine.keys() & other.keys()
            # Without any, the two have nothing to do with each other.
            difference = max(difference, max((abs(mine[t] - other[t]) for t in common), default=float("inf")))
            if token != expected:
                gap = max(gap, other[expected] - other.get(token, -float("inf")))
                break
    return difference, gap
