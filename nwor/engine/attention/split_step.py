"""A step split in two on the device: windows in front, all other rows behind them.

A CUDA graph of a mixed step is captured for any split. It reads from the device how many rows are windows.
From that it derives what each part attends to and writes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms import current_platform

from nwor import ops
from nwor.windows.layer_ops import Source

if TYPE_CHECKING:
    from nwor.windows.window import Window

#: Rows times splits. At 32 query heads and tiles of 128 query rows these are 256 tiles, two for each of an
#: H100's processors: more splits fill it no better, and joining them costs a launch that reads every part.
MOST_SPLIT_ROWS = 1024
#: vLLM's own bound for graphs (``flash_attn_max_num_splits_for_cuda_graph``).
MOST_SPLITS = 32


def splits_for(rows: int) -> int:
    """Return how often a graph may split its requests' contexts; less often where rows are many."""
    return max(1, min(MOST_SPLITS, MOST_SPLIT_ROWS // max(rows, 1)))


@dataclass
class SplitStep:
    """What the layers of one captured pass share.

    Attributes:
        num_tokens: rows of the graph.
        window_starts: int32 [requests + 1]: first rows of the windows; requests behind them are empty.
        rest_starts: int32 [requests + 1]: first rows of the others; the windows are empty.
        slots: by layer, int64 [num_tokens]: cache slots of the rows that the pass writes, -1 for others.
        aside: by layer, where the windows' keys and values are copied; None where the graph's own memory
            keeps them.
        sources: by layer, where a replay leaves keys and values; filled as layers run.
        stream: runs what belongs to windows, beside the rest.
        windows_only: whether all rows are windows, so that the pass writes nothing.

    """

    num_tokens: int
    window_starts: torch.Tensor
    rest_starts: torch.Tensor
    slots: Mapping[str, torch.Tensor]
    aside: Mapping[str, Source] | None
    stream: torch.cuda.Stream | None
    windows_only: bool = False
    sources: dict[str, Source] = field(default_factory=dict)
    _schedules: dict[Hashable, Any] = field(default_factory=dict)

    def fork(self) -> None:
        """Let the windows' stream see what the pass has made and written so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream())

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Launch what belongs to windows within this block."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        """Wait on the device for what was launched beside."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def keep(self, name: str, key: torch.Tensor, value: torch.Tensor) -> None:
        """Keep the windows' rows of one layer until the commit.

        Args:
            name: the layer.
            key: [num_tokens, num_kv_heads, head_size].
            value: likewise.

        """
        if self.aside is None:
            self.sources[name] = key, value
            return
        own_key, own_value = self.sources[name] = self.aside[name]
        self.fork()
        with self.beside():
            ops.stage_window([key], [value], [own_key], [own_value], self.window_starts[-1:], validate=False)

    def rest_of(self, impl: Any, metadata: Any, kv_cache: torch.Tensor) -> Any:
        """Return FlashAttention's metadata of the rows behind the windows, made once a pass for like layers.

        Args:
            impl: the layer's ``FlashAttentionImpl``.
            metadata: that of the whole step, as made for a capture.
            kv_cache: the layer's, [num_blocks, num_kv_heads, block_size, 2 * head_size].

        """
        key = (id(metadata), *attention_shape(impl, kv_cache))
        known = self._schedules.get(key)
        if known is None:
            splits = splits_for(self.num_tokens)
            rest = replace(metadata, query_start_loc=self.rest_starts, max_num_splits=splits)
            # `metadata` is kept as well: its address is part of the key.
            known = self._schedules[key] = scheduled(impl, rest, kv_cache), metadata
        return known[0]


@dataclass(frozen=True)
class SplitViews:
    """The two parts of a step whose layers are launched one by one.

    Attributes:
        block_table: int32 [windows, blocks].
        starts: int32 [windows + 1].
        seq_lens: int32 [windows].
        rest: the backend's metadata of the rows behind the windows; None where there are none.
        whole: that of the whole step.

    """

    block_table: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    rest: Any
    whole: Any


def split_views(window: Window, impl: Any, metadata: Any, kv_cache: torch.Tensor) -> SplitViews:
    """Return both parts of a step, made once for all layers of the same metadata and shape.

    Args:
        window: the rank's, a batch of mode ``stage`` open.
        impl: the layer's implementation, one of ``StagedAttention``.
        metadata: the backend's of the whole step.
        kv_cache: the layer's.

    """
    key = ("views", id(metadata), *attention_shape(impl, kv_cache))
    known: SplitViews | None = window.shared.get(key)
    if known is None:
        assert window.batch is not None
        requests, rest = window.batch.num_requests, None
        if window.batch.num_tokens < metadata.num_actual_tokens:
            rest = impl.nwor_rest(metadata, requests, window.batch.num_tokens, kv_cache)
        known = window.shared[key] = SplitViews(
            metadata.block_table[:requests],
            metadata.query_start_loc[: requests + 1],
            metadata.seq_lens[:requests],
            rest,
            metadata,
        )
    return known


def attention_shape(impl: Any, kv_cache: torch.Tensor) -> tuple[Hashable, ...]:
    """Return what a layer's attention is scheduled by, besides lengths."""
    capped = bool(impl.logits_soft_cap)
    return impl.num_heads, impl.num_kv_heads, impl.head_size, impl.sliding_window, kv_cache.dtype, capped


def scheduled(impl: Any, metadata: Any, kv_cache: torch.Tensor) -> Any:
    """Return metadata with FlashAttention 3's schedule for it; other versions take none."""
    if impl.vllm_flash_attn_version != 3:
        return replace(metadata, scheduler_metadata=None)
    # Not on machines without FlashAttention, where this module is imported all the same.
    from vllm.v1.attention.backends.fa_utils import get_scheduler_metadata

    quantized = impl.kv_cache_dtype.startswith("fp8")
    schedule = get_scheduler_metadata(
        batch_size=metadata.query_start_loc.shape[0] - 1,
        max_seqlen_q=metadata.max_query_len,
        max_seqlen_k=metadata.max_seq_len,
        num_heads_q=impl.num_heads,
        num_heads_kv=impl.num_kv_heads,
        headdim=impl.head_size,
        cache_seqlens=metadata.seq_lens,
        qkv_dtype=current_platform.fp8_dtype() if quantized else kv_cache.dtype,
        cu_seqlens_q=metadata.query_start_loc,
        page_size=kv_cache.shape[2],
        causal=True,
        window_size=impl.sliding_window,
        has_softcap=bool(impl.logits_soft_cap),
        num_splits=metadata.max_num_splits,
    )
    return replace(metadata, scheduler_metadata=schedule)
