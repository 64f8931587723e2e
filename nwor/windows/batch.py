"""What a window consists of: its place in the step's tensors, its keys and values, its way to a commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from nwor.modes import Mode
from nwor.windows.layer_ops import Source


@dataclass(frozen=True)
class WindowKind:
    """Which windows a CUDA graph is captured for: kernels are chosen by that.

    Attributes:
        longest: rows of the longest.
        trees: whether any of them may be a tree.

    """

    longest: int
    trees: bool


@dataclass(frozen=True)
class WindowBatch:
    """The windows of one step.

    Attributes:
        mode: ``stage`` or ``cow``.
        num_requests: requests in the batch.
        num_tokens: rows of the step's tensors that belong to them; the first ones.
        query_start_loc: int32 [num_requests + 1] on the device; the first row of each window.
        slots: by slot key, int64 [num_tokens]: the cache slot of each row, negative to skip.
        early: likewise, for rows that are written as the layers run, before they attend; none where None.
        copy: whether each layer's rows are copied aside as they are staged (``stage``). A slice keeps all of
            the step's tensor alive, which may have many more rows than the windows.

    """

    mode: Mode
    num_requests: int
    num_tokens: int
    query_start_loc: torch.Tensor
    slots: Mapping[int, torch.Tensor]
    early: Mapping[int, torch.Tensor] | None = None
    copy: bool = False


@dataclass(frozen=True)
class CapturedSources:
    """Where a captured graph leaves the keys and values of a window at each replay.

    Attributes:
        sources: by layer name; tensors that do not own their memory, the graph's pool does.
        tables: one layer table a group, in the order of the groups.

    """

    sources: Mapping[str, Source]
    tables: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class HeldBatch:
    """A batch on its way to a commit, with all that the commit needs; kept alive by who holds it.

    Attributes:
        batch: the windows.
        sources: keys and values by layer name; none in mode ``cow``.
        tables: one layer table of the sources a group, in the order of the groups; none in mode ``cow``.
        logs: one log of old bytes a group, in the order of the groups; none in mode ``stage``.

    """

    batch: WindowBatch
    sources: Mapping[str, Source]
    tables: tuple[torch.Tensor, ...]
    logs: tuple[torch.Tensor, ...]

    def with_slots(self, slots: Mapping[int, torch.Tensor]) -> HeldBatch:
        """Return the same batch with other slots."""
        return replace(self, batch=replace(self.batch, slots=slots))
