"""A worker extension for tests: after every verify step, compares the whole cache with what it must be.

What it must be is computed by vLLM's own writer on a copy that was taken before the step: rows of accepted
tokens and of prompts written, rows of rejected tokens left out. A step whose window an error ended has to
leave what stock vLLM leaves, all rows written. All bytes of all layers are compared, so a slot that was
touched by mistake anywhere in the cache is found.
"""

from __future__ import annotations

from typing import Any

import torch

from nwor.engine.attention.target_layers import target_layers
from server import cpu_sampling  # its import mends sampling in the worker's process, as the server does
from tests.copy_watch import CopyWatch
from tests.engine.breaking import Breaking

assert cpu_sampling.KERNEL


class CacheProbe(CopyWatch, Breaking):
    """Mixed into the worker by ``worker_extension_cls``; vLLM takes one such class in a process."""

    def runner_module(self) -> str:
        """Return where the class of the model runner is defined."""
        return type(self.model_runner).__module__

    def probe_start(self) -> None:
        """Watch every verify step from now on, whatever the mode."""
        runner = self.model_runner
        rank = runner.nwor
        self._probe: dict[str, Any] = {"steps": 0, "rejected": 0, "accepted": 0, "mixed": 0, "wrong": []}
        # Windows of steps in which something failed, and how many of them count as written directly.
        self._probe |= {"failed": 0, "direct": 0}
        self._written: dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = {}
        self._layers = target_layers(runner)
        self._restore = [(rank, "begin"), (rank, "finish")]
        for name, layer in self._layers.items():
            self._watch_writes(name, layer)
        begin, finish = rank.begin, rank.finish

        def watched_begin(plan: Any, query_start_loc: torch.Tensor, slots: Any) -> None:
            self._before = None
            self._written.clear()
            if plan is not None:
                self._before = {name: layer.kv_cache.clone() for name, layer in self._layers.items()}
                self._starts = query_start_loc[: len(plan.request_ids) + 1].clone()
                self._plan = plan
                # A fault of this step is another object than one of a step before.
                self._fault = rank.state.fault
            begin(plan, query_start_loc, slots)

        def watched_finish(rejected: torch.Tensor) -> Any:
            plan = finish(rejected)
            if self._before is not None:
                self._compare(rejected)
            return plan

        rank.begin, rank.finish = watched_begin, watched_finish

    def _watch_writes(self, name: str, layer: Any) -> None:
        update = layer.impl.do_kv_cache_update

        def watched(module: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
            self._written[name] = (key.clone(), value.clone(), slots.clone())
            update(module, key, value, cache, slots)

        layer.impl.do_kv_cache_update = watched

    def _compare(self, rejected: torch.Tensor) -> None:
        probe, plan = self._probe, self._plan
        probe["steps"] += 1
        probe["mixed"] += any(drafts == 0 for drafts in plan.draft_counts)
        dropped = []
        for index, drafts in enumerate(plan.draft_counts):
            end, refused = int(self._starts[index + 1]), int(rejected[index])
            dropped.extend(range(end - refused, end))
            probe["rejected"] += refused
            probe["accepted"] += drafts - refused
        fault = self.model_runner.nwor.state.fault
        failed = plan.treatment.outside == "fault" or (fault is not None and fault is not self._fault)
        if failed:
            windows = sum(drafts > 0 for drafts in plan.draft_counts)
            probe["failed"] += windows
            probe["direct"] += windows if "fault" in (plan.treatment.inside, plan.treatment.outside) else 0
        for name, layer in self._layers.items():
            key, value, slots = self._written[name]
            stock = super(type(layer.impl), layer.impl)
            allowed = []
            for rejected_too in self._outcomes(failed):
                kept = slots.clone()
                if dropped and not rejected_too:
                    kept[torch.tensor(dropped)] = -1
                expected = self._before[name].clone()
                stock.do_kv_cache_update(layer, key, value, expected, kept)
                allowed.append(expected.view(torch.uint8))
            real = layer.kv_cache.view(torch.uint8)
            # Eight bytes at a time; which bytes differ is looked up where some do.
            words = real.view(torch.int64)
            if any(torch.equal(expected.view(torch.int64), words) for expected in allowed):
                continue
            wrong = torch.stack([expected != real for expected in allowed]).all(dim=0)
            if wrong.any() and len(probe["wrong"]) < 20:
                probe["wrong"].append(f"step {probe['steps']}, {name}: {int(wrong.sum())} bytes differ")

    def _outcomes(self, failed: bool) -> tuple[bool, ...]:
        """Return whether the rows of rejected tokens are written; both where each slot may be either."""
        plan = self._plan
        if plan.mode == "off" or not plan.num_requests:
            return (True,)
        if not failed:
            return (False,)
        # A window that was staged is written in full. One that was written as the layers ran has lost
        # nothing, however many of its rejected tokens were put back; nor has one whose commit is all done.
        return (True,) if plan.faulty and plan.mode == "stage" else (False, True)

    def probe_stop(self) -> dict[str, Any]:
        """Stop watching and return what was seen."""
        for owner, attribute in self._restore:
            delattr(owner, attribute)
        for layer in self._layers.values():
            del layer.impl.do_kv_cache_update
        return self._probe
