"""A worker extension for tests: what memory windows keep alive, and what copying them aside writes."""

from __future__ import annotations

from typing import Any

from nwor.engine import planner
from tests.engine.cache_probe import CacheProbe


def set_few_rows(model_runner: Any, rows: int) -> int:
    """Have steps with more rows than this copy their windows, and return the number before."""
    before, planner.FEW_ROWS = planner.FEW_ROWS, rows
    model_runner.nwor._planner._known.clear()
    model_runner.nwor._planner._latest_key = None
    return before


class CopyProbe(CacheProbe):
    """Mixed into the worker by ``worker_extension_cls``."""

    def set_few_rows(self, rows: int) -> int:
        """Have steps with more rows than this copy their windows, and return the number before."""
        return set_few_rows(self.model_runner, rows)

    def copies_start(self) -> None:
        """Watch every step whose windows are staged from now on."""
        rank = self.model_runner.nwor
        self._copies: dict[str, Any] = {"copied": 0, "kept": 0, "kept_mixed": 0, "bytes": 0, "wrong": []}
        commit, plan_step = rank.window.commit, rank.plan_step

        def watched_plan(request_ids: Any, query_lens: Any, *args: Any) -> Any:
            self._rows = int(sum(query_lens))
            self._plan_of_step = plan_step(request_ids, query_lens, *args)
            return self._plan_of_step

        def watched(rejected: Any) -> None:
            if rank.window.staging:
                self._look(rank)
            commit(rejected)

        rank.window.commit, rank.plan_step = watched, watched_plan

    def _look(self, rank: Any) -> None:
        seen, plan, window = self._copies, self._plan_of_step, rank.window
        storages, source_bytes, rows = {}, 0, self._rows
        for source in window.sources.values():
            for tensor in source:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
                source_bytes += tensor.nbytes
        kept = sum(storages.values())
        if source_bytes != plan.num_tokens * rank.state.source_token_bytes:
            seen["wrong"].append(f"{plan.num_tokens} rows have {source_bytes} bytes")
        if rows <= max(planner.FEW_TIMES * plan.num_tokens, planner.FEW_ROWS):
            seen["kept"] += 1
            seen["kept_mixed"] += rows > plan.num_tokens
            # Fused with the queries of all rows.
            if kept < source_bytes * rows // plan.num_tokens or window.batch.copy:
                seen["wrong"].append(
                    f"{plan.num_tokens} of {rows} rows keep {kept} bytes, but were not copied"
                )
            return
        seen["copied"] += 1
        if kept != source_bytes:
            seen["wrong"].append(f"{plan.num_tokens} of {rows} rows, copied, keep {kept} bytes")
        # Short prompts stand among the windows and are none: no figure counts them.
        windows = sum(1 + drafts for drafts in plan.draft_counts[: plan.num_requests] if drafts)
        seen["bytes"] += source_bytes // plan.num_tokens * windows

    def copies_stop(self) -> dict[str, Any]:
        """Stop watching and return what was seen."""
        del self.model_runner.nwor.window.commit, self.model_runner.nwor.plan_step
        return self._copies
