"""A drafter of EAGLE's kinds that proposes trees: its passes stay, and their runners-up are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nwor.engine.trees.growth import TreeGrowth
from nwor.engine.trees.tables import TreeTables
from nwor.engine.trees.top_tokens import top_tokens


class TreeDrafts:
    """Takes the place of one speculator's ``propose`` and ``sample_draft``, before graphs are captured.

    Args:
        speculator: vLLM's, its model loaded.
        tables: the rank's trees.
        chains_only: returns whether the next windows cannot be attended as trees.

    Attributes:
        growth: the passes of grown trees; None for combs, whose passes are vLLM's own.

    """

    def __init__(self, speculator: Any, tables: TreeTables, chains_only: Callable[[], bool]) -> None:
        self._speculator = speculator
        self._tables = tables
        self._chains_only = chains_only
        self._propose = speculator.propose
        self._passes = {
            name: getattr(speculator, name) for name in ("_generate_fused_drafts", "_generate_draft")
        }
        speculator.propose = self.propose
        speculator.sample_draft = self.sample_draft
        self.growth: TreeGrowth | None = None
        if tables.candidates is not None:
            self.growth = TreeGrowth(speculator, tables.candidates)
            speculator._generate_fused_drafts = self.growth.passes
        else:
            speculator._generate_fused_drafts = self._limited("_generate_fused_drafts")
            speculator._generate_draft = self._limited("_generate_draft")

    def _limited(self, name: str) -> Callable[..., None]:
        """Return a pass of the drafter that knows its last by the depth: vLLM counts passes by nodes."""
        stock, depth = self._passes[name], self._tables.shape.depth

        def passes(*args: Any, num_speculative_steps: int | None = None, **kwargs: Any) -> None:
            if num_speculative_steps is None:
                *args, num_speculative_steps = args  # type: ignore[assignment]
            stock(*args, num_speculative_steps=min(num_speculative_steps or depth, depth), **kwargs)

        return passes

    def sample_draft(
        self,
        hidden_states: torch.Tensor,
        sample_src_positions: torch.Tensor,
        idx_mapping: torch.Tensor,
        temperature: torch.Tensor,
        seeds: torch.Tensor,
        draft_step: torch.Tensor,
        draft_logits: torch.Tensor | None,
        spec_step_idx: int = 0,
        **others: Any,
    ) -> torch.Tensor:
        """Return the likeliest token of each row, and note the runners-up of the pass."""
        tables = self._tables
        logits = self._speculator.compute_draft_logits(hidden_states, spec_step_idx)
        if self.growth is not None:
            return self.growth.note_first(logits)
        return top_tokens(logits, draft_step, tables.tokens, tables.logprobs)

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        *args: Any,
        num_speculative_tokens: int | None = None,
        dummy_run: bool = False,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Return int64 [requests, nodes], the draft tokens of each request's next window."""
        tables, speculator = self._tables, self._speculator
        if input_batch.num_draft_tokens and not dummy_run:
            # The accepted path becomes what stock code expects: leading rows, one after the other.
            tables.flatten(input_batch, list(aux_hidden_states or [last_hidden_states]))
        passes = tables.shape.depth
        if num_speculative_tokens is not None:
            passes = min(passes, num_speculative_tokens)
        self._propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            *args,
            num_speculative_tokens=passes,
            dummy_run=dummy_run,
            **kwargs,
        )
        drafts: torch.Tensor = speculator.draft_tokens[: input_batch.num_reqs]
        if passes == tables.shape.depth:
            tables.build(input_batch.idx_mapping, drafts, self._chains_only())
        return drafts
