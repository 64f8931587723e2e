"""A worker extension for tests: after every verify step, compares the whole cache with what it must be.

What it must be is computed by vLLM's own writer on a copy that was taken before the step: rows of accepted
tokens and of prompts written, rows of rejected tokens left out. A step whose window an error ended has to
leave what stock vLLM leaves, all rows written. All bytes of all layers are compared, so a slot that was
touched by mistake anywhere in the cache is found.

Of a tree the slots get the rows on the way that plain Python walks by the target's tokens
(:mod:`nwor.reference.trees`), whatever kernels and commits say of it.
"""

from __future__ import annotations

from typing import Any

import torch

from nwor.engine.attention.target_layers import target_layers
from nwor.reference import trees
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
        self._paths: dict[int, list[int]] = {}
        # Windows whose accepted rows are not the leading ones, those cut short, and those that are chains.
        self._probe |= {"branched": 0, "cut": 0, "chains": 0}
        if getattr(runner, "_nwor_trees", None) is not None:
            self._watch_walks(runner._nwor_trees.tables)
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
                self._paths.clear()
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

    def _watch_walks(self, tables: Any) -> None:
        walk = tables.walk
        self._restore.append((tables, "walk"))

        def watched(targets: Any, tokens: Any, starts: Any, slots: Any, refusing: Any, *_: Any) -> Any:
            sampled, counts = walk(targets, tokens, starts, slots, refusing)
            attended = not refusing.any()
            for index, slot in enumerate(slots.tolist()):
                rows = slice(int(starts[index]), int(starts[index + 1]))
                wanted, drafts = targets[rows].tolist(), rows.stop - rows.start - 1
                chain = bool(tables._chains[slot])
                tree = trees.Tree(
                    tuple(tokens[rows].tolist()),
                    tuple(tables._parents[slot, : drafts + 1].tolist()),
                    tuple(tables._depths[slot, : drafts + 1].tolist()),
                    tuple(tables._masks[slot, : drafts + 1].tolist()),
                )
                # No more is taken in than a tree is deep, also of a longer chain.
                path = trees.walk(tree, wanted)[: tables.shape.depth + 1] if attended or chain else [0]
                self._paths[slot] = path
                if sampled[index, : int(counts[index])].tolist() != [wanted[row] for row in path]:
                    self._wrong(f"the walk through {wanted} does not go by {path}")
                self._probe["chains"] += chain and drafts > 0
                self._probe["cut"] += 0 < drafts < tables.shape.nodes
                self._probe["branched"] += path != list(range(len(path)))
            return sampled, counts

        tables.walk = watched

    def _wrong(self, text: str) -> None:
        if len(self._probe["wrong"]) < 20:
            self._probe["wrong"].append(f"step {self._probe['steps']}, {text}")

    def _draft_counts(self) -> list[int]:
        """Return the draft tokens of each request; of trimmed ones those that are left."""
        counts: list[int] = self._plan.outcome()[0].draft_counts
        return counts

    def _sources(self, rejected: torch.Tensor) -> torch.Tensor:
        """Return int64 [rows of all requests]: the row that each row's slot gets, -1 for none."""
        sources = torch.arange(int(self._starts[-1]))
        slots = self._slots_of_requests()
        for index, drafts in enumerate(self._draft_counts()):
            end, refused = int(self._starts[index + 1]), int(rejected[index])
            sources[end - refused : end] = -1
            if slots is None or not drafts:
                continue
            first, path = end - drafts - 1, self._paths.get(slots[index], [0])
            if len(path) != drafts + 1 - refused:
                self._wrong(f"{refused} of {drafts} drafts are rejected, the way is {path}")
            sources[first : first + len(path)] = torch.tensor(path) + first
        return sources

    def _slots_of_requests(self) -> list[int] | None:
        if not self._paths:
            return None
        states = self.model_runner.req_states
        return [states.req_id_to_index[request] for request in self._plan.request_ids]

    def _compare(self, rejected: torch.Tensor) -> None:
        probe, plan = self._probe, self._plan
        probe["steps"] += 1
        draft_counts = self._draft_counts()
        probe["mixed"] += any(drafts == 0 for drafts in draft_counts)
        sources = self._sources(rejected)
        moved = bool(((sources >= 0) & (sources != torch.arange(len(sources)))).any())
        for index, drafts in enumerate(draft_counts):
            refused = int(rejected[index])
            probe["rejected"] += refused
            probe["accepted"] += drafts - refused
        fault = self.model_runner.nwor.state.fault
        failed = plan.treatment.outside == "fault" or (fault is not None and fault is not self._fault)
        if failed:
            windows = sum(drafts > 0 for drafts in draft_counts)
            probe["failed"] += windows
            probe["direct"] += windows if "fault" in (plan.treatment.inside, plan.treatment.outside) else 0
        for name, layer in self._layers.items():
            key, value, slots = self._written[name]
            stock = super(type(layer.impl), layer.impl)
            allowed = []
            for rejected_too in self._outcomes(failed, moved):
                kept, rows = slots.clone(), torch.arange(len(slots))
                if not rejected_too:
                    kept[: len(sources)][sources < 0] = -1
                    rows[: len(sources)] = sources.clamp(min=0)
                expected = self._before[name].clone()
                stock.do_kv_cache_update(layer, key[rows], value[rows], expected, kept)
                allowed.append(expected.view(torch.uint8))
            real = layer.kv_cache.view(torch.uint8)
            # Eight bytes at a time; which bytes differ is looked up where some do.
            words = real.view(torch.int64)
            if any(torch.equal(expected.view(torch.int64), words) for expected in allowed):
                continue
            wrong = torch.stack([expected != real for expected in allowed]).all(dim=0)
            if wrong.any():
                self._wrong(f"{name}: {int(wrong.sum())} bytes differ")

    def _outcomes(self, failed: bool, moved: bool) -> tuple[bool, ...]:
        """Return whether the rows of rejected tokens are written; both where each slot may be either.

        Args:
            failed: whether an error ended the step's windows.
            moved: whether accepted rows of a tree belong into other slots than their own, which they must get
                whatever happens.

        """
        plan = self._plan
        if moved:
            return (False,)
        if plan.mode == "off" or not plan.num_requests:
            return (True,)
        if not failed:
            return (False,)
        # A window that was staged is written in full, but of trees that are sampled already the accepted rows
        # alone. One that was written as the layers ran has lost nothing, however many of its rejected tokens
        # were put back; nor has one whose commit is all done.
        return (True,) if plan.faulty and plan.mode == "stage" and not self._paths else (False, True)

    def probe_stop(self) -> dict[str, Any]:
        """Stop watching and return what was seen."""
        for owner, attribute in self._restore:
            delattr(owner, attribute)
        for layer in self._layers.values():
            del layer.impl.do_kv_cache_update
        return self._probe
