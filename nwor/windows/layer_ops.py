"""Commit, log and restore of one group of layers: the ops with their tables made once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from nwor import ops

if TYPE_CHECKING:
    from nwor.windows.kv_layers import StagedLayer

#: Keys and values of a layer as the forward pass left them, each [tokens, num_kv_heads, head_size].
Source = tuple[torch.Tensor, torch.Tensor]


class LayerGroupOps:
    """The launches that serve all layers of a group at once.

    Args:
        layers: layers of equal shape, format and block size.

    """

    def __init__(self, layers: Sequence[StagedLayer]) -> None:
        first = layers[0]
        self.layers = tuple(layers)
        self.caches = [layer.kv_cache for layer in layers]
        self.key_caches = [layer.key_cache for layer in layers]
        self.value_caches = [layer.value_cache for layer in layers]
        num_blocks, block_size, self.num_kv_heads, self.head_size = first.key_cache.shape
        self._geometry: dict[str, Any] = {
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "block_size": block_size,
            "num_blocks": num_blocks,
        }
        self.kv_cache_dtype = first.kv_cache_dtype
        self.source_dtype = first.source_dtype
        self.k_scales = _stack([layer.k_scale for layer in layers])
        self.v_scales = _stack([layer.v_scale for layer in layers])
        self._tables = ops.LayerTables(self.key_caches, self.value_caches)
        # On the host one table serves all steps, and one commit.
        self._step_table: torch.Tensor | None = None
        self._step_commit: ops.PreparedCommit | None = None
        # Reads no source: serves the ops that only move bytes between cache and log.
        self.cache_table = ops.make_cache_table(self.key_caches, self.value_caches)

    def take_scales(self) -> None:
        """Take the layers' scales anew, in place: commits that are prepared read them where they lie."""
        for own, scales in (
            (self.k_scales, _stack([layer.k_scale for layer in self.layers])),
            (self.v_scales, _stack([layer.v_scale for layer in self.layers])),
        ):
            if own is not None and scales is not None:
                own.copy_(scales)

    def source_table(self, sources: Sequence[Source]) -> torch.Tensor:
        """Return the layer table of ``sources``; it stays valid as long as their memory does."""
        return self._tables.of(sources)

    def step_table(self, sources: Sequence[Source]) -> torch.Tensor:
        """Return the layer table of ``sources``; on the host it is valid until this is called again."""
        if self._step_table is not None:
            self._tables.refill(self._step_table, sources)
            return self._step_table
        table = self.source_table(sources)
        if table.is_cpu:
            self._step_table = table
        return table

    def prepared(
        self,
        table: torch.Tensor,
        slots: torch.Tensor,
        query_start_loc: torch.Tensor,
        source_index: torch.Tensor | None = None,
    ) -> ops.PreparedCommit:
        """Return the commit of these windows: called with the rejected counts, one launch for all layers.

        That of :meth:`step_table` on the host is one object, which the next such call changes.

        Args:
            table: what :meth:`source_table` or :meth:`step_table` returned.
            slots: int64 [tokens].
            query_start_loc: int32 [requests + 1].
            source_index: int32 [tokens]: the row that each slot gets; None where each gets its own.

        """
        if table is self._step_table and self._step_commit is not None:
            self._step_commit.retarget(slots, query_start_loc, source_index)
            return self._step_commit
        commit = ops.PreparedCommit(
            table,
            slots,
            query_start_loc,
            **self._geometry,
            source_dtype=self.source_dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            k_scales=self.k_scales,
            v_scales=self.v_scales,
            source_index=source_index,
        )
        if table is self._step_table:
            self._step_commit = commit
        return commit

    def log(self, slots: torch.Tensor, query_start_loc: torch.Tensor) -> torch.Tensor:
        """Copy the old bytes of the draft slots of all layers aside and return them."""
        element_size = self.key_caches[0].element_size()
        log = torch.empty(
            (len(self.layers), 2, slots.shape[0], self.num_kv_heads * self.head_size * element_size),
            dtype=torch.uint8,
            device=slots.device,
        )
        ops.log_slots(self.cache_table, self.caches, log, slots, query_start_loc, **self._geometry)
        return log

    def restore(
        self,
        log: torch.Tensor,
        slots: torch.Tensor,
        query_start_loc: torch.Tensor,
        rejected: torch.Tensor,
    ) -> None:
        """Put the logged bytes of rejected tokens' slots back, all layers in one launch."""
        ops.restore_slots(
            self.cache_table,
            self.caches,
            log,
            slots,
            query_start_loc,
            rejected_counts=rejected,
            **self._geometry,
        )


def _stack(scales: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    present = [scale.reshape(-1).to(torch.float32) for scale in scales if scale is not None]
    return torch.stack(present) if present else None
