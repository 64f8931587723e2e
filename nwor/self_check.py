"""The cache invariants, checked on a running engine: what no commit may ever get wrong.

After a step, the slot of every rejected token holds the bytes that it held before the step, and the slot of
every accepted draft token holds what the forward pass computed. Reading the verdict waits for the device, so
the check runs on every N-th verify step only, if at all.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from nwor.windows.layer_ops import LayerGroupOps, Source
from nwor.windows.window import Window, WindowBatch
from nwor.worker_state import WorkerState


class SelfCheck:
    """One checked step: made before the forward pass, asked after the commit.

    Args:
        window: the rank's window, its batch just begun.

    """

    def __init__(self, window: Window) -> None:
        assert window.batch is not None
        self._batch: WindowBatch = window.batch
        self._source_rows = window.source_rows
        self._groups: list[tuple[int, LayerGroupOps]] = [
            (group.slot_key, group_ops) for group, group_ops in window.group_ops
        ]
        self._before = [self._read(slot_key, group_ops) for slot_key, group_ops in self._groups]

    def _read(self, slot_key: int, group_ops: LayerGroupOps) -> torch.Tensor:
        return group_ops.log(self._batch.slots[slot_key], self._batch.query_start_loc)

    def follow(self, batch: WindowBatch) -> None:
        """Go on with another record of the same batch; rows without a slot there are not checked."""
        self._batch = batch

    def report(self, state: WorkerState, sources: Mapping[str, Source], rejected: torch.Tensor) -> None:
        """Count the check, and turn NWOR off if an invariant is broken or the check itself fails.

        Args:
            state: the rank's state.
            sources: as for :meth:`violations`.
            rejected: likewise.

        """
        state.self_checks += 1
        try:
            broken = self.violations(sources, rejected)
            if broken:
                raise RuntimeError(f"{broken} slots are not what they must be")
        except Exception as error:
            state.fail("self-check", error)

    def violations(self, sources: Mapping[str, Source], rejected: torch.Tensor) -> int:
        """Return how many (layer, token) pairs break an invariant; 0 is right. Waits for the device.

        Args:
            sources: what was staged, by layer; empty in mode ``cow``, where accepted tokens are written in
                the forward pass and only the rejected ones are checked.
            rejected: int32 [at least num_requests], as the batch was committed.

        """
        starts = self._batch.query_start_loc.long()
        rows = torch.arange(self._batch.num_tokens, device=starts.device)
        request = torch.searchsorted(starts[1:].contiguous(), rows, right=True).clamp_(max=len(starts) - 2)
        index = rows - starts[request]
        draft = (index >= 1) & (rows < starts[-1])
        lengths = starts[1:] - starts[:-1]
        kept = index < (lengths - rejected[: len(lengths)])[request]
        source_rows = rows
        if self._source_rows is not None and sources:
            own = self._source_rows[: len(rows)]
            # Where a slot of a tree gets its bytes from is asked as well as whether it gets any.
            kept, source_rows = kept & (own >= 0), own.clamp(min=0).long()
        broken = torch.zeros((), dtype=torch.int64, device=starts.device)
        for (slot_key, group_ops), before in zip(self._groups, self._before, strict=True):
            after = self._read(slot_key, group_ops)
            present = draft & (self._batch.slots[slot_key] >= 0)
            changed = (before != after).any(dim=-1).any(dim=1)
            broken += (changed & (present & ~kept)).sum()
            if group_ops.kv_cache_dtype != "auto":
                continue
            for number, layer in enumerate(group_ops.layers):
                if layer.name in sources:
                    wrong = torch.zeros_like(present)
                    for side, tensor in enumerate(sources[layer.name]):
                        # A captured graph's rows are as many as its batch size, the step's may be fewer.
                        rows_of = tensor[: self._batch.num_tokens][source_rows]
                        staged = rows_of.reshape(rows_of.shape[0], -1).contiguous().view(torch.uint8)
                        wrong |= (staged != after[number, side]).any(dim=-1)
                    broken += (wrong & present & kept).sum()
        return int(broken)
