"""What draft layers do in passes that are not vLLM's own (:mod:`nwor.engine.fastpath.first_pass`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from nwor.engine.attention.split_step import SplitStep


class AllWritten(BaseException):
    """The layer of a drafter has its keys and values in the cache: the rest of its pass is not wanted.

    No error: whoever handles errors on the way of a model's call leaves this one alone.
    """


class DraftPass(Protocol):
    """What the implementation of a draft layer asks, where it is told of a pass."""

    #: Whether layers write their rows to the cache.
    writes: bool

    def metadata_of(self, impl: Any, metadata: Any, kv_cache: torch.Tensor) -> Any:
        """Return the backend's metadata to attend by, in place of the whole step's."""


class WrittenPass:
    """A pass over all rows of a step that ends when a layer has written its keys and values."""

    writes = True

    def metadata_of(self, impl: Any, metadata: Any, kv_cache: torch.Tensor) -> Any:
        """End the pass.

        Raises:
            AllWritten: always.

        """
        raise AllWritten


@dataclass
class RowsPass:
    """A pass over all rows of a step within a graph.

    Attributes:
        split: makes the step's schedule.

    """

    split: SplitStep
    writes: bool = True

    def metadata_of(self, impl: Any, metadata: Any, kv_cache: torch.Tensor) -> Any:
        """Return metadata of all rows."""
        return self.split.rest_of(impl, metadata, kv_cache)


@dataclass
class LastRowsPass:
    """A pass of one layer over one row of each request, whose keys and values are in the cache.

    Attributes:
        starts: int32 [requests + 1]: first rows; requests that pad the batch are empty.
        seq_lens: int32 [requests]: the row and all before it; 0 of requests that pad the batch.

    """

    starts: torch.Tensor
    seq_lens: torch.Tensor
    writes: bool = False

    def metadata_of(self, impl: Any, metadata: Any, kv_cache: torch.Tensor) -> Any:
        """Return metadata of those rows."""
        return impl.nwor_last_rows(metadata, self.starts, self.seq_lens, kv_cache)


@contextmanager
def attending(layers: Sequence[Any], draft_pass: DraftPass) -> Iterator[None]:
    """Tell a drafter's attention layers of a pass within this block."""
    for layer in layers:
        layer.impl.nwor_draft = draft_pass
    try:
        yield
    finally:
        for layer in layers:
            layer.impl.nwor_draft = None


def is_causal(attn_metadata: Any, layers: Sequence[Any]) -> bool:
    """Return whether a step's metadata, by layer, say that no row attends to one behind it."""
    if not isinstance(attn_metadata, dict):
        return False
    return all(_is_causal(attn_metadata.get(layer.layer_name)) for layer in layers)


def _is_causal(metadata: Any) -> bool:
    # FlashAttention calls a step causal in which images' rows attend to one another.
    ranges = getattr(metadata, "mm_prefix_query_range_tensor", None)
    return getattr(metadata, "causal", None) is True and ranges is None
