"""A speculator of vLLM's without its model: logits are what the hidden states are, less a padded end."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

PADDING = 10


class Speculator(DraftModelSpeculator):
    """Counts what sampling a draft calls."""

    def __init__(self, device: torch.device | str = "cpu", max_num_reqs: int = 6) -> None:
        self.device = torch.device(device)
        self.max_num_reqs = max_num_reqs
        self.num_speculative_steps = 4
        self.use_local_argmax_reduction = False
        self.computed = self.predicted = 0
        self.model: Any = SimpleNamespace(compute_logits=lambda hidden: hidden[:, :-PADDING])

    def compute_draft_logits(self, hidden_states: torch.Tensor, spec_step_idx: int) -> torch.Tensor:
        self.computed += 1
        return super().compute_draft_logits(hidden_states, spec_step_idx)

    def _maybe_predict_acceptance(self, *args: Any) -> None:
        self.predicted += 1

    def _none(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    load_draft_model = init_cudagraph_manager = capture = propose = _none


def draft(
    speculator: DraftModelSpeculator,
    hidden: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    spec_step_idx: int = 0,
) -> torch.Tensor:
    """Sample drafts as vLLM's speculators do."""
    rows = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    return speculator.sample_draft(
        hidden, rows, rows, rows.float(), rows, rows, draft_logits, spec_step_idx=spec_step_idx
    )
