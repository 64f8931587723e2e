"""A worker extension for tests: the slot probe, what windows keep alive, and the most memory in use."""

from __future__ import annotations

from typing import Any

import torch

from tests.copy_watch import CopyWatch
from tests.gpu.slot_probe import SlotProbe


class MixedProbe(CopyWatch, SlotProbe):
    """Mixed into the worker by ``worker_extension_cls``."""

    def peaks_start(self, rows: int) -> None:
        """Measure verify steps with more rows than this from now on, from their begin to their commit."""
        rank = self.model_runner.nwor
        self._peaks: list[float] = []
        plan_step, begin, finish = rank.plan_step, rank.begin, rank.finish

        def watched_plan(request_ids: Any, query_lens: Any, *args: Any) -> Any:
            self._step_rows = int(sum(query_lens))
            return plan_step(request_ids, query_lens, *args)

        def watched_begin(plan: Any, *args: Any) -> None:
            self._in_use: int | None = None
            if plan is not None and self._step_rows > rows:
                torch.cuda.reset_peak_memory_stats()
                self._in_use = torch.cuda.memory_allocated()
            begin(plan, *args)

        def watched_finish(rejected: torch.Tensor) -> Any:
            plan = finish(rejected)
            if self._in_use is not None:
                self._peaks.append((torch.cuda.max_memory_allocated() - self._in_use) / self._step_rows)
            return plan

        rank.plan_step, rank.begin, rank.finish = watched_plan, watched_begin, watched_finish

    def peaks_stop(self) -> list[float]:
        """Stop measuring and return, for each such step, the most bytes that it used, by its rows."""
        rank = self.model_runner.nwor
        del rank.plan_step, rank.begin, rank.finish
        return self._peaks
