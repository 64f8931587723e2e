"""A worker extension for tests with several ranks: the slot probe, and each rank's own count of windows."""

from __future__ import annotations

from typing import Any

import torch

from tests.gpu.slot_probe import SlotProbe


class RankProbe(SlotProbe):
    """Mixed into the worker by ``worker_extension_cls``."""

    def probe_rank(self) -> dict[str, Any]:
        """Return who this worker is, and whether the plugin was loaded in its process."""
        from vllm.distributed import get_tensor_model_parallel_rank
        from vllm.platforms import current_platform

        return {
            "tensor_parallel_rank": get_tensor_model_parallel_rank(),
            "device": str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid),
            "runner": type(self.model_runner).__name__,
            "plugin": getattr(type(current_platform).check_and_update_config, "_nwor_patched", False),
        }

    def count_start(self) -> None:
        """Count windows from now on, from what the rank is told after sampling.

        Only the rank whose output vLLM reads accounts for windows; this counts on every rank.
        """
        rank = self.model_runner.nwor
        finish = rank.finish
        self._counts = {"windows": 0, "draft_tokens": 0}
        self._rejected: Any = 0

        def counted(rejected: torch.Tensor) -> Any:
            plan = rank.plan
            if plan is not None:
                windows = sum(drafts > 0 for drafts in plan.draft_counts)
                assert all(plan.draft_counts[:windows])  # windows stand first in the batch
                self._counts["windows"] += windows
                self._counts["draft_tokens"] += sum(plan.draft_counts)
                self._rejected = self._rejected + rejected[:windows].sum()
            return finish(rejected)

        rank.finish = counted

    def count_stop(self) -> dict[str, int]:
        """Stop counting and return windows, their draft tokens and the accepted ones."""
        del self.model_runner.nwor.finish
        drafts = self._counts["draft_tokens"]
        return {**self._counts, "accepted_tokens": drafts - int(self._rejected)}
