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
        refusing: returns float32 [at least 1], 0 where the next windows can be attended as trees.

    Attributes:
        growth: the passes of grown trees; None for combs, whose passes are vLLM's own.

    """

    def __init__(self, speculator: Any, tables: TreeTables, refusing: Callable[[], torch.Tensor]) -> None:
        self._speculator = speculator
        self._tables = tables
        self._refusing = refusing
        self._propose = speculator.propose
        self._likeliest_alone = False
        speculator.propose = self.propose
        speculator.sample_draft = self.sample_draft
        self.growth: TreeGrowth | None = None
        if tables.candidates is not None:
            self.growth = TreeGrowth(speculator, tables)
        for name in ("_generate_fused_drafts", "_generate_draft", "_multi_step_decode"):
            setattr(speculator, name, self._passes(name, getattr(speculator, name)))

    def _passes(self, name: str, stock: Callable[..., None]) -> Callable[..., None]:
        """Return what runs the passes behind the drafter's first, of a tree or of a shorter chain.

        vLLM counts passes by draft tokens: more than a tree is deep stand for a tree.
        """
        shape, growth, speculator = self._tables.shape, self.growth, self._speculator

        def passes(*args: Any, num_speculative_steps: int | None = None, **kwargs: Any) -> None:
            if num_speculative_steps is None:
                *args, num_speculative_steps = args  # type: ignore[assignment]
            assert num_speculative_steps is not None
            if not shape.is_tree(num_speculative_steps):
                # Nobody asks for the runners-up of a chain. A comb's passes come here by their depth.
                before, self._likeliest_alone = self._likeliest_alone, growth is not None
                try:
                    stock(*args, num_speculative_steps=num_speculative_steps, **kwargs)
                finally:
                    self._likeliest_alone = before
            elif growth is None or _requests(*args, **kwargs) > self._tables.most_requests:
                stock(*args, num_speculative_steps=shape.depth, **kwargs)
            elif name == "_multi_step_decode":
                # Of metadata, which vLLM builds anew for each pass here, ours read where the context is.
                speculator._fused_multi_step_decode(
                    *args, num_speculative_steps=num_speculative_steps, **kwargs
                )
            else:
                growth.passes(*args, depth=shape.depth_of(num_speculative_steps), **kwargs)

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
        """Return the likeliest token of each row, and note the runners-up of a tree's pass."""
        tables = self._tables
        logits: torch.Tensor = self._speculator.compute_draft_logits(hidden_states, spec_step_idx)
        if self._likeliest_alone:
            return logits.argmax(dim=-1)
        # A graph's rows are those of the largest batch, and requests come first. No trees are in larger ones.
        leading, rest = logits[: tables.most_requests], logits[tables.most_requests :]
        if self.growth is not None:
            likeliest = self.growth.note_first(leading)
        else:
            likeliest = top_tokens(leading, draft_step, tables.tokens, tables.logprobs, tables.assumed)
        return torch.cat((likeliest, rest.argmax(dim=-1))) if len(rest) else likeliest

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
        """Return int64 [requests, nodes], the draft tokens of each request's next window.

        Where fewer tokens are asked for than a tree has nodes, they are its likeliest ones, and a chain where
        they are no more than it is deep, or where vLLM tries a batch that is too large for trees.
        """
        tables, speculator, shape = self._tables, self._speculator, self._tables.shape
        if input_batch.num_draft_tokens and tables.verifies_trees and not dummy_run:
            # The accepted path becomes what stock code expects: leading rows, one after the other.
            tables.flatten(input_batch, list(aux_hidden_states or [last_hidden_states]))
        drafts = shape.nodes if num_speculative_tokens is None else num_speculative_tokens
        self._propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            *args,
            num_speculative_tokens=drafts,
            dummy_run=dummy_run,
            **kwargs,
        )
        tokens: torch.Tensor = speculator.draft_tokens[: input_batch.num_reqs]
        if shape.is_tree(drafts) and input_batch.num_reqs <= tables.most_requests:
            if not dummy_run:
                tables.growing.update(input_batch.req_ids)
            tables.build(input_batch.idx_mapping, tokens, self._refusing(), drafts)
        elif drafts:
            tables.build_chains(input_batch.idx_mapping)
            tables.growing.difference_update(input_batch.req_ids if tables.growing else ())
        return tokens


def _requests(num_reqs: int, *_: Any, **__: Any) -> int:
    """Return the requests of a call of vLLM's loops of passes."""
    return num_reqs
