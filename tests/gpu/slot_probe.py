"""A worker extension for tests: finds every cache slot that a verify step changed, in any kind of graph.

Slots of accepted tokens have to hold what `off` writes there, byte for byte: in `stage` what vLLM's own
writer makes of the window's keys and values, else what vLLM's own layers had left there before the commit.
"""

from __future__ import annotations

from typing import Any

import torch

from nwor.engine.attention.staged_attention import stock_attention
from nwor.engine.attention.target_layers import target_layers
from tests.copy_watch import CopyWatch


class SlotProbe(CopyWatch):
    """Mixed into the worker by ``worker_extension_cls``; vLLM takes one such class in a process."""

    def probe_start(self, direct: bool = False) -> None:
        """Watch every verify step in modes `stage` and `cow` from now on.

        Args:
            direct: whether steps may go direct after they have begun. They are counted then, and not looked
                at. Else what they write for rejected tokens is stray.

        """
        rank = self.model_runner.nwor
        self._layers = target_layers(self.model_runner)
        self._seen: dict[str, Any] = {"steps": 0, "rejected": 0, "accepted": 0}
        self._seen |= {"stray": 0, "unwritten": 0, "wrong": 0, "direct": 0}
        self._step: Any = None
        begin, finish = rank.begin, rank.finish

        def watched_begin(plan: Any, query_start_loc: torch.Tensor, slots: Any) -> None:
            self._step = None
            if plan is not None and plan.num_requests:
                # Poison first: a slot that is not written keeps a pattern that no computed value has.
                for layer in self._layers.values():
                    cache = layer.kv_cache
                    rows = slots[0][: plan.num_tokens]
                    # In fp8, which vLLM keeps as bytes, 448 throughout: no row is made of the largest alone.
                    poison = 12345.0 if cache.element_size() > 1 else 0x7E
                    rows = rows[rows >= 0]
                    block_size = cache.shape[2]
                    cache[rows // block_size, :, rows % block_size] = poison
                before = {name: layer.kv_cache.clone() for name, layer in self._layers.items()}
                self._step = (plan, query_start_loc.clone(), slots[0], before)
            begin(plan, query_start_loc, slots)

        def watched_finish(rejected: torch.Tensor) -> Any:
            if direct and self._step is not None and not self._step[0].num_requests:
                # Its layers wrote every row, as in `off`.
                self._seen["direct"] += self._step[0].known.windows
                self._step = None
            if self._step is not None:
                self._wanted = self._written_by_off(rank.window)
            plan = finish(rejected)
            if self._step is not None:
                self._compare(rejected)
            return plan

        rank.begin, rank.finish = watched_begin, watched_finish

    def _written_by_off(self, window: Any) -> dict[str, torch.Tensor]:
        """Return by layer what `off` writes for the rows of the open window batch, their layers run."""
        plan, _, slots, _ = self._step
        slots = slots[: plan.num_tokens]
        wanted = {}
        for name, layer in self._layers.items():
            cache = layer.kv_cache
            if window.staging:
                cache = torch.empty_like(cache)
                # A captured graph's rows are as many as its batch size.
                key, value = (side[: plan.num_tokens] for side in window.sources[name])
                if window.source_rows is not None:  # a tree's slots get the rows of its accepted path
                    own = window.source_rows[: plan.num_tokens].clamp(min=0).long()
                    key, value = key[own], value[own]
                stock_attention(layer.impl).do_kv_cache_update(layer, key, value, cache, slots)
            wanted[name] = self._lines(cache, slots)
        return wanted

    def _lines(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Return a copy of the bytes of some slots; of any where a slot is negative."""
        slots, block_size = slots.clamp(min=0), cache.shape[2]
        return cache[slots // block_size, :, slots % block_size].contiguous().view(torch.uint8)

    def _compare(self, rejected: torch.Tensor) -> None:
        plan, starts, rows, before = self._step
        seen = self._seen
        seen["steps"] += 1
        starts = starts.tolist()
        refused = rejected.tolist()
        dropped: list[int] = []
        # Read after the counts above, which the host has waited for: those of a trimmed step have come, too.
        draft_counts = plan.outcome()[0].draft_counts
        for index, drafts in enumerate(draft_counts):
            dropped.extend(range(starts[index + 1] - refused[index], starts[index + 1]))
            seen["rejected"] += refused[index]
            seen["accepted"] += drafts - refused[index]
        keep = torch.ones(rows.shape[0], dtype=torch.bool, device=rows.device)
        keep[dropped] = False
        keep[starts[len(draft_counts)] :] = False
        allowed = rows[keep & (rows >= 0)]
        for name, layer in self._layers.items():
            old, new = before[name].view(torch.uint8), layer.kv_cache.view(torch.uint8)
            changed = (old != new).any(dim=-1).any(dim=1).flatten()  # [blocks * block_size]
            expected = torch.zeros_like(changed)
            expected[allowed] = True
            seen["stray"] += int((changed & ~expected).sum())
            window, kept = rows[: plan.num_tokens], keep[: plan.num_tokens]
            kept = kept & (window >= 0)
            seen["unwritten"] += int((~changed[window[kept]]).sum())
            wrong = (self._lines(layer.kv_cache, window) != self._wanted[name]).flatten(1).any(dim=1)
            seen["wrong"] += int(wrong[kept].sum())

    def probe_drafter(self) -> dict[str, Any]:
        """Return what the drafter's windows of grown trees hold between steps.

        Returns:
            ``not numbers`` of the batch's first window, which is never padding, and ``semaphores`` of thread
            blocks that others have not waited for: both must be 0. ``windows``: all that hold what is no
            number, as ranges of key and value.

        """
        growth = self.model_runner._nwor_trees._drafts.growth
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        found: dict[str, Any] = {"not numbers": 0, "semaphores": 0, "windows": []}
        for window in growth._windows if growth is not None else []:
            rows = window._parameters.max_query_len
            for buffer in (window._key, window._value):
                strange = buffer.isnan().flatten(1).any(1).unflatten(0, (-1, rows))
                found["not numbers"] += int(strange[0].sum())
                own = strange.any(1).nonzero().flatten().tolist()
                found["windows"].append((own[0], own[-1], int(strange.sum())) if own else None)
            semaphores = window._workspace[: 4 * processors].view(torch.int32)
            found["semaphores"] += int(semaphores.count_nonzero())
        return found

    def probe_stop(self) -> dict[str, Any]:
        """Stop watching and return what was seen."""
        rank = self.model_runner.nwor
        del rank.begin, rank.finish
        return self._seen
