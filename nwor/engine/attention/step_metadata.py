"""A step's metadata where vLLM's own cannot be cut: its builder makes that of a part when a layer asks.

FlashInfer plans its kernels on the host for the very requests that they are to serve, and keeps the plan in
the builder. So the metadata of a part is built, not sliced. Where all rows are windows none is built.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from nwor.engine.attention.staged_attention import WindowsFirst
from nwor.modes import Mode

if TYPE_CHECKING:
    from vllm.v1.attention.backend import AttentionImpl, CommonAttentionMetadata

    from nwor.engine.attention.layer_context import LayerContext
else:
    AttentionImpl = object

#: What ``CommonAttentionMetadata`` has for each request.
_BY_REQUEST = (
    "seq_lens",
    "seq_lens_cpu_upper_bound",
    "block_table_tensor",
    "is_prefilling",
    "req_idx",
    "rswa_prefix_lens",
)
#: And for each row.
_BY_ROW = ("slot_mapping", "positions")


def without_first(common: CommonAttentionMetadata, requests: int, tokens: int) -> CommonAttentionMetadata:
    """Return what metadata is built from, without the first ``requests`` requests and their ``tokens`` rows.

    Args:
        common: that of the whole step; left as it is.
        requests: how many are left out.
        tokens: their rows.

    """
    # The host may not know the rows of each window, only those of all; it knows those of other requests.
    starts = common.query_start_loc_cpu[requests:] - common.query_start_loc_cpu[requests]
    changed: dict[str, Any] = {
        "query_start_loc": common.query_start_loc[requests:] - tokens,
        "query_start_loc_cpu": starts,
        "num_reqs": common.num_reqs - requests,
        "num_actual_tokens": common.num_actual_tokens - tokens,
        "max_query_len": int((starts[1:] - starts[:-1]).max()),
    }
    if isinstance(common.causal, torch.Tensor):
        changed["causal"] = common.causal[requests:]
    for names, first in ((_BY_REQUEST, requests), (_BY_ROW, tokens)):
        for name in names:
            if (value := getattr(common, name, None)) is not None:
                changed[name] = value[first:]
    # What was derived from the whole step does not hold for a part.
    changed |= {field.name: None for field in fields(common) if field.name.endswith("_cache")}
    return replace(common, **changed)


def last_rows(
    common: CommonAttentionMetadata, starts: torch.Tensor, seq_lens: torch.Tensor
) -> CommonAttentionMetadata:
    """Return what metadata of one row of each request is built from.

    Args:
        common: that of the whole step; left as it is.
        starts: int32 [requests + 1]: first rows.
        seq_lens: int32 [requests]: the row and all before it.

    """
    requests = seq_lens.shape[0]
    changed: dict[str, Any] = {
        "query_start_loc": starts,
        "query_start_loc_cpu": torch.arange(requests + 1, dtype=torch.int32),
        "seq_lens": seq_lens,
        "num_reqs": requests,
        "num_actual_tokens": requests,
        "max_query_len": 1,
    }
    for name in ("block_table_tensor", "seq_lens_cpu_upper_bound", "is_prefilling", "req_idx", *_BY_ROW):
        if (value := getattr(common, name, None)) is not None:
            changed[name] = value[:requests]
    changed |= {field.name: None for field in fields(common) if field.name.endswith("_cache")}
    return replace(common, **changed)


@dataclass
class StepMetadata:
    """What NWOR's layers read of a step, and vLLM's metadata of the part that was asked for last.

    A builder's buffers hold one plan. Whoever asks for another part has it made anew, and what was built
    before holds no more.

    Attributes:
        builder: the layers', one of :class:`BuildsOnDemand`.
        common: what it builds from.
        num_actual_tokens: rows of the step.
        block_table: int32 [requests, blocks].
        query_start_loc: int32 [requests + 1].
        seq_lens: int32 [requests], context and window together.

    """

    builder: BuildsOnDemand
    common: CommonAttentionMetadata
    num_actual_tokens: int
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    _built: tuple[int, Any] | None = None

    @classmethod
    def of(cls, builder: BuildsOnDemand, common: CommonAttentionMetadata) -> StepMetadata:
        """Return that of a step of which nothing has been built yet."""
        return cls(
            builder,
            common,
            common.num_actual_tokens,
            common.block_table_tensor,
            common.query_start_loc,
            common.seq_lens,
        )

    def part(self, requests: int = 0, tokens: int = 0) -> Any:
        """Return vLLM's metadata of the step without its first ``requests`` requests of ``tokens`` rows."""
        if self._built is None or self._built[0] != requests:
            common = without_first(self.common, requests, tokens) if requests else self.common
            self._built = requests, self.builder.build_stock(common)
        return self._built[1]


class BuildsOnDemand(WindowsFirst):
    """Stands before a stock builder: what it makes for the target's layers is built when it is asked for.

    A draft layer gets vLLM's own metadata, with the block table that passes over trees read. So does every
    layer before it is bound.
    """

    layer_names: list[str]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Any:
        """Return a step's metadata; what windows have no use for is left for a layer to ask for."""
        context = self._layer_context()
        if context is None:
            stock = self.build_stock(common_attn_metadata)
            stock.block_table = common_attn_metadata.block_table_tensor
            return stock
        metadata = StepMetadata.of(self, common_attn_metadata)
        if context.state.mode is not Mode.STAGE or self.nwor_replayed(common_attn_metadata):
            metadata.part()
        return metadata

    def nwor_replayed(self, common: CommonAttentionMetadata) -> bool:
        """Return whether one of vLLM's full graphs may replay a step's plan, which no layer asks for then."""
        return False

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> Any:
        """Return the metadata of a captured pass, in which nothing may be planned."""
        metadata = super().build_for_cudagraph_capture(common_attn_metadata)
        if type(metadata) is StepMetadata:
            metadata.part()
        return metadata

    def build_stock(self, common: CommonAttentionMetadata) -> Any:
        """Return vLLM's own metadata; a request is a decode where it is one to the stock builder."""
        threshold, self.reorder_batch_threshold = self.reorder_batch_threshold, self.nwor_stock_threshold
        try:
            return super().build(0, common)  # type: ignore[safe-super]
        finally:
            self.reorder_batch_threshold = threshold

    def _layer_context(self) -> LayerContext | None:
        """Return that of the first layer; None for draft layers, and where nothing is staged."""
        layer = self.vllm_config.compilation_config.static_forward_context.get(self.layer_names[0])
        context: LayerContext | None = getattr(getattr(layer, "impl", None), "nwor", None)
        return context


class AttendsOnDemand(AttentionImpl):
    """Stands between ``StagedAttention`` and vLLM's implementation, which gets the metadata that it knows."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend as vLLM does."""
        if type(attn_metadata) is StepMetadata:
            attn_metadata = attn_metadata.part()
        scales = (output_scale, output_block_scale)
        super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *scales)  # type: ignore[safe-super]
        return output

    def nwor_rest(self, metadata: StepMetadata, requests: int, tokens: int, kv_cache: torch.Tensor) -> Any:
        """Return vLLM's metadata of the rows behind the windows.

        Args:
            metadata: that of the whole step.
            requests: how many are left out.
            tokens: their rows.
            kv_cache: the layer's; of no matter here.

        """
        return metadata.part(requests, tokens)
