"""How far the log-probabilities of greedy outputs differ, and where outputs part."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

#: Log-probabilities by token of each step: the most likely few.
Steps = list[dict[int, float]]
#: How far the demo model's may differ in bfloat16, and how near a tie has to be for outputs to part at it: a
#: logit of 16 to 32 is rounded to an eighth, by each kernel otherwise.
MOST_DIFFERENCE, MOST_GAP = 0.75, 0.25


def read(outputs: Sequence[Any]) -> tuple[list[tuple[int, ...]], list[Steps]]:
    """Return the tokens of vLLM's outputs, and their log-probabilities, which have to be asked for.

    A token that must not come (by a grammar, say) has none.
    """
    choices = [output.outputs[0] for output in outputs]
    steps = [
        [
            {token: entry.logprob for token, entry in step.items() if entry.logprob != -math.inf}
            for step in choice.logprobs
        ]
        for choice in choices
    ]
    return [tuple(choice.token_ids) for choice in choices], steps


def by_step(seen: dict[str, Any], off: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Return each step's largest difference of a common token's log-probability, and the gap of each parting.

    Up to and including the step where two outputs part, both saw the same tokens. The gap is how much less
    likely than its own choice `off` found the other's token there: outputs may part at near-ties only.

    Args:
        seen: ``tokens`` and ``logprobs`` of a mode, as :func:`read` returns them.
        off: likewise.

    """
    steps, gaps = [], []
    for ours, theirs, x, y in zip(
        seen["logprobs"], off["logprobs"], seen["tokens"], off["tokens"], strict=True
    ):
        for mine, other, token, expected in zip(ours, theirs, x, y, strict=True):
            common = mine.keys() & other.keys()
            # Without any, the two have nothing to do with each other.
            steps.append(max((abs(mine[t] - other[t]) for t in common), default=float("inf")))
            if token != expected:
                gaps.append(other[expected] - other.get(token, -float("inf")))
                break
    return steps, gaps


def differences(seen: dict[str, Any], off: dict[str, Any]) -> tuple[float, float]:
    """Return the largest of all steps' differences and of all partings' gaps; see :func:`by_step`."""
    steps, gaps = by_step(seen, off)
    return max(steps, default=0.0), max(gaps, default=0.0)


def check(
    what: str, outputs: Sequence[Any], expected: Sequence[Any], *, scale: float = 1.0, greedy: bool = True
) -> None:
    """Assert that outputs part from others at near-ties only.

    Args:
        what: what the outputs are of, for messages.
        outputs: vLLM's outputs of a mode, with log-probabilities after all processing of logits.
        expected: those of `off`, in the same order.
        scale: how much farther the two may differ than where attention alone rounds otherwise.
        greedy: whether each token is the likeliest; others say nothing by where they part.

    """
    seen, off = (dict(zip(("tokens", "logprobs"), read(part), strict=True)) for part in (outputs, expected))
    for index, (ours, theirs) in enumerate(zip(seen["tokens"], off["tokens"], strict=True)):
        shorter = min(len(ours), len(theirs))
        assert ours[:shorter] != theirs[:shorter] or len(ours) == len(theirs), (
            f"{what}: output {index} has {len(ours)} tokens, in `off` the same has {len(theirs)}"
        )
    values = [value for steps in seen["logprobs"] for step in steps for value in step.values()]
    assert all(map(math.isfinite, values)), f"{what}: log-probabilities are not finite"
    difference, gap = differences(seen, off)
    same = sum(ours == theirs for ours, theirs in zip(seen["tokens"], off["tokens"], strict=True))
    parted = f"outputs part at gaps up to {gap:.3f}" if greedy else "random outputs"
    print(f"{what}: {same} of {len(outputs)} the same; log-probabilities ", end="")
    print(f"differ by {difference:.3f}; {parted}")
    assert difference <= MOST_DIFFERENCE * scale, f"{what}: log-probabilities differ by {difference}"
    assert not greedy or gap <= MOST_GAP * scale, f"{what}: outputs part at a gap of {gap}, no near-tie"
