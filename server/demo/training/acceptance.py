"""Greedy acceptance of a head, computed from the text that the target generates.

While every draft token equals the target's greedy token, the head's chain reads just the tokens that were
generated. So one unrolled pass over the generated text tells, for each anchor, how many draft tokens would be
accepted there, and walking from anchor to anchor gives what an engine would count.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from server.demo.training.heads import EagleHead
from server.demo.training.model import Target


@dataclass(frozen=True)
class Acceptance:
    """Counts of verify steps. ``per_position[j]`` is the share of steps that accepted draft token ``j``."""

    drafts: int
    accepted: int
    per_position: list[float]

    @property
    def mean_length(self) -> float:
        """Mean acceptance length, the bonus token included."""
        return 1 + self.accepted / max(self.drafts, 1)


@torch.no_grad()
def greedy_acceptance(
    target: Target, head: EagleHead, ids: Tensor, lengths: Tensor, new: int, steps: int
) -> Acceptance:
    """Acceptance over the ``new`` greedy tokens after each prompt, with ``steps`` draft tokens a step.

    Args:
        ids, lengths: from ``greedy_after`` with at least ``new + steps + 1`` new tokens.
    """
    final, stream = target.hidden_states(ids)
    states = head.unroll(target, ids, head.features(final, stream), steps)
    output = target.model.embed_tokens.weight
    rows = states[0].shape[1]
    hits = torch.stack(
        [F.linear(s, output).argmax(-1) == ids[:, 2 + j : 2 + j + rows] for j, s in enumerate(states)], dim=-1
    )
    leading = hits.int().cumprod(dim=-1).sum(dim=-1).tolist()
    drafts = accepted = 0
    at_position = [0] * steps
    for row, given in enumerate(lengths.tolist()):
        # The prefill yields the first new token; its anchor is the last token of the prompt.
        anchor, end = given - 1, given + new - 2
        while anchor < end:
            count = leading[row][anchor]
            drafts += 1
            accepted += count
            for j in range(count):
                at_position[j] += 1
            anchor += count + 1
    return Acceptance(drafts, accepted, [n / max(drafts, 1) for n in at_position])
