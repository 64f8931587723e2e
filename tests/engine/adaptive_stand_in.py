"""For tests: vLLM's adaptive verification on a CPU, with budgets and scores that are drawn.

vLLM's own manager measures CUDA graphs, and copies scores on a stream of its own. Here how many draft tokens
each step verifies is drawn, and so are the scores by which it divides them among the requests. All else is
vLLM's: the batch on the host, the lengths that only the device has, the tensors that each step overwrites.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode import adaptive_verification
from vllm.v1.worker.gpu.spec_decode.adaptive_verification import AdaptiveVerificationManager


class DrawnBudgets(AdaptiveVerificationManager):
    """vLLM's manager without costs.

    Args:
        runner: the model runner.
        seed: of what is drawn.

    Attributes:
        steps: by step that verified something, the draft tokens of each request.
        scheduled: draft tokens that all steps were scheduled with.

    """

    def __init__(self, runner: Any, seed: int) -> None:
        states = self.req_states = runner.req_states
        self.num_speculative_steps = states.num_speculative_steps
        self.num_bonus_tokens = 1
        self.query_start_loc = runner.input_buffers.query_start_loc
        self._batch_budget = None
        self._random = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        shape = states.max_num_reqs, self.num_speculative_steps
        self._confidence_probs = torch.ones(shape)
        self._batch_draft_capacity = torch.empty(states.max_num_reqs, dtype=torch.int32)
        self._num_non_draft_tokens = torch.empty_like(self.query_start_loc[:-1])
        self._cu_num_logits = torch.empty_like(self.query_start_loc)
        self.steps: list[list[int]] = []
        self.scheduled = 0

    def add_request(self, req_idx: int) -> None:
        """Give a request the scores that all begin with, whatever its row was used for before."""
        self._confidence_probs[req_idx] = 1.0

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """Draw the scores of the drafts that were just made."""
        # By the place in the batch: which rows requests have depends on those that ran before.
        drawn = torch.rand((input_batch.num_reqs, self.num_speculative_steps), generator=self._generator)
        self._confidence_probs[input_batch.idx_mapping] = drawn

    def get_num_tokens(self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]) -> int:
        """Draw the step's number of draft tokens and return its rows; none and all come up, too."""
        drafts = {request: len(draft_tokens.get(request, ())) for request in num_tokens_per_req}
        others = {request: rows - drafts[request] for request, rows in num_tokens_per_req.items()}
        most = sum(drafts.values())
        budget = self._random.choice([0, most, *(self._random.randint(0, most) for _ in range(6))])
        self._batch_budget = drafts, others, budget
        return sum(others.values()) + budget

    def compact_batch(
        self, num_draft_tokens_per_req: Any, num_scheduled_tokens: Any, cu_num_logits_np: Any
    ) -> tuple[Any, Any]:
        """Do as vLLM does, and remember what was scheduled."""
        self.scheduled += int(num_draft_tokens_per_req.sum())
        return super().compact_batch(num_draft_tokens_per_req, num_scheduled_tokens, cu_num_logits_np)

    def reallocate_drafts(self, req_ids: list[str], idx_mapping: torch.Tensor) -> Any:
        """Do as vLLM does, and remember what each request got."""
        made = super().reallocate_drafts(req_ids, idx_mapping)
        if made[2]:
            self.steps.append(self._batch_draft_capacity[: len(req_ids)].tolist())
        return made


@contextmanager
def trimmed(runner: Any, seed: int) -> Iterator[DrawnBudgets]:
    """Trim draft tokens within this block, as drawn.

    Args:
        runner: the model runner of an engine in this process that has no step under way.
        seed: of what is drawn.

    """
    with pytest.MonkeyPatch.context() as patch:
        drawn = DrawnBudgets(runner, seed)
        patch.setattr(
            adaptive_verification,
            "_assign_draft_token_budget_compiled",
            adaptive_verification._assign_draft_token_budget,
        )
        patch.setattr(runner, "adaptive_verification", drawn)
        patch.setattr(runner.rejection_sampler, "enable_adaptive_verification", True)
        yield drawn
