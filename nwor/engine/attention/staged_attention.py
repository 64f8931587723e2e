"""What NWOR's attention implementations on GPUs have in common, whichever of vLLM's backends they extend.

Layers of an open ``stage`` window attend without writing first. Everything else goes the stock way. A layer
takes part only once a layer context was attached to its implementation; draft layers never are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from nwor.engine.attention.split_step import split_views
from nwor.engine.eligibility import Unsupported

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder

    from nwor.engine.attention.draft_pass import DraftPass
    from nwor.engine.attention.draft_window import DraftWindow
    from nwor.engine.attention.layer_context import LayerContext
else:
    AttentionImpl = AttentionMetadataBuilder = object


def cache_views(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V of a cache as [num_blocks, block_size, num_kv_heads, head_size] views.

    Args:
        kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_size], any strides.
        head_size: elements per head.

    Raises:
        Unsupported: if the tensor has another shape.

    """
    if kv_cache.dim() != 4 or kv_cache.shape[-1] != 2 * head_size:
        raise Unsupported("cache_format", f"a cache of shape {tuple(kv_cache.shape)} is not known")
    key_cache, value_cache = kv_cache.transpose(1, 2).split(head_size, dim=-1)
    return key_cache, value_cache


def layer_cache_views(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the cache views of one of vLLM's attention layers."""
    return cache_views(layer.kv_cache, layer.head_size)


def stock_attention(impl: Any) -> Any:
    """Return an implementation's methods as vLLM's backend has them, past NWOR's own."""
    return super(StagedAttention if isinstance(impl, StagedAttention) else type(impl), impl)


class StagedAttention(AttentionImpl):
    """Stock attention of a layer, except for the rows of a window that is being staged.

    Stands before vLLM's implementation in the method order. The class that joins the two has
    ``nwor_rest(metadata, requests, tokens, kv_cache)``. It returns the backend's metadata of a step without
    so many leading requests and their rows. The stock ``forward`` gets it with the tensors of those rows.
    """

    #: Whether it gets the tensors of the whole step instead, as its kernels begin where the metadata says.
    nwor_rest_in_place = False
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
        if layer_context is None:
            draft_window = self.nwor_draft_window
            if draft_window is not None and draft_window.step is not None:
                draft_window.keep(key, value)
                return
            if self.nwor_draft is not None and not self.nwor_draft.writes:
                return
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        split = layer_context.window.split
        if split is not None:  # a mixed step's graph is being captured
            try:
                split.keep(layer_context.layer.name, key, value)
            except Exception as error:
                layer_context.give_up("stage", error)
            if split.windows_only:
                return
            super().do_kv_cache_update(layer, key, value, kv_cache, split.slots[layer_context.layer.name])
            return
        if layer_context.window.kept_alive is not None:
            # A piecewise graph is being captured: as long as these live, its pool gives each layer memory of
            # its own, which is what lets a later step leave the window where it is.
            layer_context.window.kept_alive.append((key, value))
        if not layer_context.window.staging:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        tokens = layer_context.stage(key, value)
        if tokens < slot_mapping.shape[0]:
            slots = layer_context.rest_slots(slot_mapping) if tokens else slot_mapping
            super().do_kv_cache_update(layer, key, value, kv_cache, slots)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend: the window's rows by ``nwor.verify_attention``, the others by the stock kernel.

        Where the cache is fp8, vLLM quantizes queries before they get here. Stock attention takes them as
        they are, in every mode.
        """
        layer_context = self.nwor
        draft_window = self.nwor_draft_window
        if draft_window is not None and draft_window.step is not None and attn_metadata is not None:
            draft_window.attend(query, attn_metadata.block_table, output)
            return output
        if self.nwor_draft is not None and attn_metadata is not None:
            attn_metadata = self.nwor_draft.metadata_of(self, attn_metadata, kv_cache)
        if layer_context is not None and layer_context.window.split is not None and attn_metadata is not None:
            return self._forward_split(
                layer_context, layer, query, key, value, kv_cache, attn_metadata, output
            )
        quantizes = output_scale is not None or output_block_scale is not None
        if quantizes and layer_context is not None and layer_context.window.staging:
            # Such engines are refused at the start. Windows that are staged all the same have to be in the
            # cache before the stock kernel reads it.
            layer_context.give_up("verify attention", NotImplementedError("the kernel quantizes its output"))
        if layer_context is None or attn_metadata is None or not layer_context.window.staging:
            scales = (output_scale, output_block_scale)
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)
        first = 0
        try:
            parts = split_views(layer_context.window, self, attn_metadata, kv_cache)
            rest = parts.rest
            if not self.nwor_rest_in_place:
                first = layer_context.batch.num_tokens
            layer_context.attend(
                query,
                key,
                value,
                parts.block_table,
                parts.starts,
                parts.seq_lens,
                output,
                mixed=rest is not None,
            )
        except Exception as error:
            layer_context.give_up("verify attention", error)
            rest, first = attn_metadata, 0
        if rest is None:
            return output
        behind = output
        if first:
            query, behind = query[first:], output[first:]
            if key is not None and value is not None:
                key, value = key[first:], value[first:]
        super().forward(layer, query, key, value, kv_cache, rest, behind)
        return output

    def _forward_split(
        self,
        layer_context: LayerContext,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        metadata: Any,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """Attend in a graph that serves any split of its rows: windows on one stream, the rest on another.

        After an error the layer attends as stock does; the graph is thrown away once all are captured.
        """
        split = layer_context.window.split
        rest, attends = metadata, True
        try:
            # A short request without drafts may stand among the windows, and read what others of the step
            # wrote.
            split.fork()
            with split.beside():
                layer_context.attend(
                    query,
                    key,
                    value,
                    metadata.block_table,
                    split.window_starts,
                    metadata.seq_lens,
                    output,
                )
            attends = not split.windows_only
            if attends:
                rest = split.rest_of(self, metadata, kv_cache)
        except Exception as error:
            layer_context.give_up("verify attention", error)
            rest, attends = metadata, True
        if attends:
            super().forward(layer, query, key, value, kv_cache, rest, output)
        split.join()
        return output


class WindowsFirst(AttentionMetadataBuilder):
    """Stands before a stock builder: on model runner V1 it asks for windows to stand first in the batch.

    V1 orders a batch as its backends ask, and few stock builders ask for that; V2 always sorts.

    Attributes:
        nwor_stock_threshold: rows of the longest request that the stock builder takes for a decode.

    """

    nwor_stock_threshold: int | None
    reorder_batch_threshold: int | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.nwor_stock_threshold = self.reorder_batch_threshold
        speculative = self.vllm_config.speculative_config
        if speculative is not None and not self.vllm_config.use_v2_model_runner:
            self.reorder_batch_threshold = 1 + speculative.num_speculative_tokens
