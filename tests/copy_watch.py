"""For probes in workers: what memory a step's windows keep alive, and what copying them aside writes."""

from __future__ import annotations

from typing import Any

import torch

from nwor.engine import step_planner


def set_few_rows(model_runner: Any, rows: int) -> int:
    """Have steps with more rows than this copy their windows, and return the number before."""
    before, step_planner.FEW_ROWS = step_planner.FEW_ROWS, rows
    model_runner.nwor._planner._known.clear()
    model_runner.nwor._planner._latest_key = None
    return before


class CopyWatch:
    """Mixed into a probe, which is mixed into the worker by ``worker_extension_cls``."""

    model_runner: Any

    def set_few_rows(self, rows: int) -> int:
        """Have steps with more rows than this copy their windows, and return the number before."""
        return set_few_rows(self.model_runner, rows)

    def copies_start(self, eager: bool = True) -> None:
        """Watch every step whose windows are staged from now on.

        Args:
            eager: whether no CUDA graph makes keys and values, so that the memory of all of them is known.

        """
        rank = self.model_runner.nwor
        self._kept_seen: dict[str, Any] = {"copied": 0, "kept": 0, "kept_mixed": 0, "bytes": 0, "wrong": []}
        self._eager = eager
        commit, plan_step, stage = rank.window.commit, rank.plan_step, rank.window.stage

        def watched_plan(request_ids: Any, query_lens: Any, *args: Any) -> Any:
            self._rows = int(sum(query_lens))
            self._plan_of_step = plan_step(request_ids, query_lens, *args)
            return self._plan_of_step

        def watched_stage(name: str, key: torch.Tensor, value: torch.Tensor) -> None:
            stage(name, key, value)
            tokens = rank.window.batch.num_tokens
            for kept, made in zip(rank.window.sources[name], (key, value), strict=True):
                if not torch.equal(kept[:tokens], made[:tokens]):
                    self._kept_seen["wrong"].append(f"{name}: what is kept is not what the layer made")

        def watched_commit(rejected: torch.Tensor) -> None:
            if rank.window.staging:
                self._look(rank)
            commit(rejected)

        rank.plan_step, rank.window.stage, rank.window.commit = watched_plan, watched_stage, watched_commit

    def _look(self, rank: Any) -> None:
        seen, plan, window, rows = self._kept_seen, self._plan_of_step, rank.window, self._rows
        storages, source_bytes = {}, 0
        for source in window.sources.values():
            for tensor in source:
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
                source_bytes += tensor.nbytes
        kept = sum(storages.values())
        limit = max(
            step_planner.FEW_TIMES * plan.num_tokens, step_planner.FEW_ROWS, rank._planner.largest_graph
        )
        if rows <= limit:
            seen["kept"] += 1
            seen["kept_mixed"] += rows > plan.num_tokens
            # Keys and values are the step's own tensors, with all of its rows.
            own = all(len(tensor) >= rows for source in window.sources.values() for tensor in source)
            small = self._eager and (kept < source_bytes or not own)
            if small or window.batch.copy:
                seen["wrong"].append(f"{plan.num_tokens} of {rows} rows keep {kept} bytes, but need no copy")
            return
        seen["copied"] += 1
        if not kept == source_bytes == plan.num_tokens * rank.state.source_token_bytes:
            seen["wrong"].append(f"{plan.num_tokens} of {rows} rows, copied, keep {kept} bytes")
        # Short prompts stand among the windows and are none: no figure counts them.
        windows = sum(1 + drafts for drafts in plan.draft_counts[: plan.num_requests] if drafts)
        seen["bytes"] += source_bytes // plan.num_tokens * windows

    def copies_stop(self) -> dict[str, Any]:
        """Stop watching and return what was seen."""
        rank = self.model_runner.nwor
        del rank.plan_step, rank.window.stage, rank.window.commit
        return self._kept_seen

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
