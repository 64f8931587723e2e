"""vLLM's CPU attention backend, extended: layers of an open ``stage`` window attend without writing first.

Everything else goes the stock way. A layer takes part only once :class:`LayerContext` was attached to its
implementation; draft layers never are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)

from nwor.engine.attention.cpu_layout import PACKED, UNPACKED, cache_views
from nwor.engine.attention.draft_pass import DraftPass
from nwor.engine.attention.draft_window import DraftWindow
from nwor.engine.attention.layer_context import LayerContext
from nwor.engine.attention.step_metadata import last_rows, without_first


@dataclass
class NworCPUAttentionMetadata(CPUAttentionMetadata):
    """The stock metadata and what is needed to build it again for a part of the batch."""

    builder: NworCPUAttentionMetadataBuilder | None = None
    common: CommonAttentionMetadata | None = None
    _rest: tuple[int, CPUAttentionMetadata] | None = None

    def rest(self, requests: int, tokens: int) -> CPUAttentionMetadata:
        """Return the stock metadata of the batch without its first ``requests`` requests of ``tokens`` rows.

        Built once a step, by the first layer that asks.
        """
        if self._rest is None or self._rest[0] != requests:
            assert self.builder is not None
            assert self.common is not None
            self._rest = (requests, self.builder.build_rest(self.common, requests, tokens))
        return self._rest[1]


class NworCPUAttentionMetadataBuilder(CPUAttentionMetadataBuilder):
    """Builds metadata that can be split; asks for windows to stand first and a cache of plain strides."""

    isa: str

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        speculative = self.vllm_config.speculative_config
        if speculative is None:
            return
        self.reorder_batch_threshold = 1 + speculative.num_speculative_tokens
        # Where K is packed for AMX no window can be staged. Attention alone changes, and with little to lose:
        # matrix products of the model's weights keep AMX. A KV connector packs what it moves as vLLM chose.
        if self.isa == PACKED and self.vllm_config.kv_transfer_config is None:
            self.isa = UNPACKED
            self._set_isa_to_layers(self.layer_names)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> NworCPUAttentionMetadata:
        """Build the stock metadata and keep what it was built from."""
        stock = super().build(common_prefix_len, common_attn_metadata, fast_build)
        # Its constructor takes longer, argument by argument, than the step's other metadata.
        extended: Any = object.__new__(NworCPUAttentionMetadata)
        vars(extended).update(vars(stock), builder=self, common=common_attn_metadata, _rest=None)
        built: NworCPUAttentionMetadata = extended
        return built

    def build_rest(self, common: CommonAttentionMetadata, requests: int, tokens: int) -> CPUAttentionMetadata:
        """Build stock metadata for the batch without its leading part."""
        return super().build(0, without_first(common, requests, tokens))

    def build_last_rows(
        self, common: CommonAttentionMetadata, starts: torch.Tensor, seq_lens: torch.Tensor
    ) -> CPUAttentionMetadata:
        """Build stock metadata for one row of each request."""
        return super().build(0, last_rows(common, starts, seq_lens))


class NworCPUAttentionImpl(CPUAttentionBackendImpl):
    """Stock attention of a layer, except for the rows of a window that is being staged."""

    nwor: LayerContext | None = None
    #: Of a draft layer whose passes are over trees.
    nwor_draft_window: DraftWindow | None = None
    #: Of a draft layer, in passes that are not vLLM's own.
    nwor_draft: DraftPass | None = None

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the rows outside the window; hand the window's rows over."""
        layer_context = self.nwor
        draft_window = self.nwor_draft_window
        if draft_window is not None and draft_window.step is not None:
            draft_window.keep(key, value)
            return
        if self.nwor_draft is not None and not self.nwor_draft.writes:
            return
        if layer_context is None or not layer_context.window.staging:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        tokens = layer_context.stage(key, value)
        if tokens < slot_mapping.shape[0]:
            super().do_kv_cache_update(layer, key[tokens:], value[tokens:], kv_cache, slot_mapping[tokens:])

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: the window's rows by ``nwor.verify_attention``, the others by the stock kernel."""
        layer_context = self.nwor
        draft_window = self.nwor_draft_window
        if draft_window is not None and draft_window.step is not None and attn_metadata is not None:
            draft_window.attend(query, attn_metadata.block_table, output)
            return output
        if self.nwor_draft is not None and attn_metadata is not None:
            attn_metadata = self.nwor_draft.metadata_of(self, attn_metadata, kv_cache)
        if layer_context is None or attn_metadata is None or not layer_context.window.staging:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        assert isinstance(attn_metadata, NworCPUAttentionMetadata)
        rest_of = NworCPUAttentionMetadata.rest
        window = layer_context.attend_window(query, key, value, attn_metadata, output, rest_of)
        if window is None:
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output)
        tokens, rest = window
        if rest is not None:
            if key is not None and value is not None:
                key, value = key[tokens:], value[tokens:]
            super().forward(layer, query[tokens:], key, value, kv_cache, rest, output[tokens:])
        return output

    def nwor_last_rows(
        self,
        metadata: NworCPUAttentionMetadata,
        starts: torch.Tensor,
        seq_lens: torch.Tensor,
        kv_cache: torch.Tensor,
    ) -> CPUAttentionMetadata:
        """Return the metadata of one row of each request, as :class:`LastRowsPass` describes it."""
        assert metadata.builder is not None
        assert metadata.common is not None
        return metadata.builder.build_last_rows(metadata.common, starts, seq_lens)


class NworCPUAttentionBackend(CPUAttentionBackend):
    """The stock backend with the classes above."""

    @staticmethod
    def get_impl_cls() -> type[CPUAttentionBackendImpl]:
        """Return the implementation of a layer."""
        return NworCPUAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[CPUAttentionMetadataBuilder]:
        """Return the builder of a step's metadata."""
        return NworCPUAttentionMetadataBuilder


def layer_cache_views(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cache views of one of vLLM's attention layers."""
    return cache_views(layer.kv_cache, layer.isa, layer.kv_cache_dtype)
