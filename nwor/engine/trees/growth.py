"""Trees that grow level by level (EAGLE-2): each pass of the drafter expands the likeliest nodes of the last.

Nodes of a tree have no slots: several would have the same one. Their keys and values stand in a window of the
drafter's own (:mod:`nwor.engine.attention.draft_window`), and nothing is written to its cache.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context

from nwor.engine.attention import draft_window
from nwor.engine.attention.attachment import CacheViews
from nwor.engine.attention.draft_window import DraftWindow, DraftWindowStep
from nwor.engine.trees.tables import TreeTables
from nwor.engine.trees.top_tokens import top_tokens
from nwor.errors import ConfigError


class TreeGrowth:
    """Runs the passes behind the drafter's first; takes the place of the speculator's own loop.

    Args:
        speculator: vLLM's, its model loaded.
        tables: the rank's trees, grown ones.

    """

    def __init__(self, speculator: Any, tables: TreeTables) -> None:
        assert tables.candidates is not None
        self._speculator = speculator
        self._tables = tables
        self._candidates = candidates = tables.candidates
        self._windows: list[DraftWindow] = []
        requests, device = tables.most_requests, speculator.device
        self._starts = torch.arange(requests + 1, dtype=torch.int32, device=device) * candidates.window
        self._pass = torch.zeros((), dtype=torch.int64, device=device)

    def attach(self, layers: list[Any], cache_views: CacheViews) -> None:
        """Give the drafter's layers their windows: its cache is allocated, no graph is captured yet.

        Raises:
            ConfigError: their attention is one that knows no windows.

        """
        speculator, candidates = self._speculator, self._candidates
        if not all(hasattr(layer.impl, "nwor_draft_window") for layer in layers):
            raise ConfigError(
                "trees of draft tokens are not possible here: NWOR does not extend the drafter's attention "
                "backend; choose another (--attention-backend), or draft chains (--num-speculative-tokens "
                "auto:0-8, and no --tree-nodes)"
            )
        self._windows = []
        if candidates.window:
            dtype = speculator.vllm_config.model_config.dtype
            self._windows = draft_window.attach(
                layers, cache_views, dtype, speculator.device, candidates.window, self._tables.most_requests
            )

    def expected_bytes(self, layers: list[Any], graphs_measured: bool) -> int:
        """Return the memory of the drafter's windows and passes that vLLM does not measure.

        Args:
            layers: the drafter's.
            graphs_measured: whether graphs of these passes are among those that vLLM measures.

        """
        speculator, requests = self._speculator, self._tables.most_requests
        itemsize = speculator.vllm_config.model_config.dtype.itemsize
        rows = requests * self._candidates.window
        # Keys and values of a window, what is attended, and queries.
        elements = sum(
            2 * (layer.impl.num_kv_heads + layer.impl.num_heads) * layer.impl.head_size for layer in layers
        )
        # A pass has logits of each node that it expands.
        logits = 0 if graphs_measured else requests * self._candidates.shape.width * speculator.vocab_size
        return int((rows * elements + logits) * itemsize)

    def note_first(self, logits: torch.Tensor) -> torch.Tensor:
        """Take in what the drafter's first pass says.

        Args:
            logits: [requests, V].

        Returns:
            int64 [requests], the likeliest tokens.

        """
        return self._note(logits)

    def _note(self, logits: torch.Tensor) -> torch.Tensor:
        found, rows = self._candidates, logits.shape[0]
        tokens, logprobs = found.tokens[:rows].unsqueeze(1), found.logprobs[:rows].unsqueeze(1)
        return top_tokens(logits, self._pass, tokens, logprobs, self._tables.assumed)

    def passes(
        self,
        num_reqs: int,
        num_tokens_padded: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode,
        *,
        depth: int,
    ) -> None:
        """Expand trees of a depth, called as vLLM's own loop of passes; may be captured in a graph."""
        speculator, found = self._speculator, self._candidates
        longest, shape = speculator.max_model_len, found.shape
        buffers = speculator.input_buffers
        first_positions = buffers.positions[:num_reqs].clone()
        rows = num_reqs * shape.width
        step = DraftWindowStep(
            requests=num_reqs,
            width=shape.width,
            window=found.window,
            row_masks=found.row_masks[:num_reqs].reshape(-1),
            starts=self._starts[: num_reqs + 1],
            # vLLM counts the first node as written already. Requests that pad a batch have no rows.
            seq_lens=(buffers.seq_lens[:num_reqs] - 1).clamp_(min=0) + found.window,
        )
        found.expand(num_reqs, 0, first_positions, longest)
        hidden = speculator.hidden_states[:num_reqs]
        try:
            for window in self._windows:
                window.step = step
            for level in range(depth - 1):
                step.level = level
                last, hidden = self._run(
                    hidden.index_select(0, found.sources[:rows]),
                    rows,
                    attn_metadata,
                    slot_mappings,
                    cudagraph_runtime_mode,
                )
                self._note(speculator.compute_draft_logits(last[:rows], 0))
                found.expand(num_reqs, level + 1, first_positions, longest)
        finally:
            for window in self._windows:
                window.step = None

    def _run(
        self,
        hidden: torch.Tensor,
        rows: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        mode: CUDAGraphMode,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the drafter's model over the rows of a pass, and return its last and its fed-back states."""
        speculator, found = self._speculator, self._candidates
        model = speculator.model
        ids = found.ids[:rows]
        embeds = None
        if speculator.supports_mm_inputs:
            embeds = model.embed_input_ids(ids, multimodal_embeddings=None, is_multimodal=None)
        with set_forward_context(
            attn_metadata,
            speculator.vllm_config,
            num_tokens=rows,
            cudagraph_runtime_mode=mode,
            slot_mapping=slot_mappings,
            batch_descriptor=BatchDescriptor(num_tokens=rows),
        ):
            states = model(
                input_ids=ids, positions=found.positions[:rows], hidden_states=hidden, inputs_embeds=embeds
            )
        return states if isinstance(states, tuple) else (states, states)
