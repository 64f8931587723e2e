"""A worker extension for tests with pipeline stages: bytes that a stage changes, and stale slots it reads.

Nothing here depends on Python that a CUDA graph leaves out. Before each verify step its windows' slots are
poisoned with a pattern that no computed row has. A copy of the whole cache says at fixed points of each step
which slots have changed since the point before:

- when a step begins none, and after what was held back is settled, the accepted drafts of those steps alone,
  which are then what the forward pass made;
- after the forward pass, or the commit on the stage that samples: what must be written by then, nothing else.

Before each forward pass no slot of any request's context may hold the pattern: somebody would read what was
never written.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch

from nwor.windows.window import StagedLayer
from tests.gpu.rank_probe import RankProbe

#: A number that every float format holds exactly, throughout a row of all heads.
POISON = 12288.0
#: Integers as wide as a number of the cache, so that bytes are compared, whatever they stand for.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class StageProbe(RankProbe):
    """Mixed into the worker by ``worker_extension_cls``."""

    def stage_start(self) -> None:
        """Watch every step from now on, whatever the mode."""
        runner = self.model_runner
        rank = runner.nwor
        self._layers: list[StagedLayer] = [layer for group in rank.window.groups for layer in group.layers]
        self._caches = [cache for layer in self._layers for cache in (layer.key_cache, layer.value_cache)]
        self._copies = [cache.clone() for cache in self._caches]
        (self._group,) = {group.slot_key for group in rank.window.groups}
        self._seen: dict[str, Any] = {"steps": 0, "read": 0, "heard_early": 0, "cut_short": 0, "wrong": []}
        # Tokens of windows by mode; drafts of requests freed meanwhile are neither accepted nor rejected.
        for mode in ("stage", "cow"):
            self._seen[mode] = dict.fromkeys(("steps", "first", "drafts", "accepted", "rejected"), 0)
        self._pending: list[dict[str, Any]] = []
        self._step = 0
        self._plan: Any = None
        self._watched: list[tuple[Any, str]] = []
        self._watch(runner, "finish_requests", self._step_ends, self._step_begins)
        self._watch(runner, "prepare_attn", None, self._prepared)
        self._watch(rank, "begin", self._window_begins, None)
        if runner.is_last_pp_rank:
            self._watch(rank, "finish", None, self._sampled)
        else:
            self._watch(rank, "defer", self._about_to_hold, self._held)
            self._watch(rank, "expect", None, self._expected)

    def stage_stop(self) -> dict[str, Any]:
        """Stop watching and return what was seen."""
        for owner, attribute in self._watched:
            delattr(owner, attribute)
        return self._seen

    def _watch(self, owner: Any, name: str, before: Any, after: Any) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self._note(before, args, kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                self._note(after, (result, *args), kwargs)
            return result

        setattr(owner, name, watched)
        self._watched.append((owner, name))

    def _note(self, look: Callable[..., None], args: Any, kwargs: Any) -> None:
        # An error here would end one stage, and the other would wait for it for ever.
        try:
            look(*args, **kwargs)
        except Exception as error:
            self._wrong(f"the probe fails: {type(error).__name__}: {error}")

    def _wrong(self, what: str) -> None:
        if len(self._seen["wrong"]) < 20:
            self._seen["wrong"].append(f"step {self._step}: {what}")

    # Points of a step.

    def _step_ends(self, _: Any) -> None:
        self._plan = None
        self._compare("a step ended", [], [])

    def _step_begins(self, _: Any, scheduled: Any) -> None:
        self._step += 1
        self._seen["steps"] += 1
        oldest = self._step - scheduled.nwor_in_flight
        freed = {*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())}
        waiting, moved, restored = [], [], []
        for entry in self._pending:
            if entry["step"] >= oldest:
                entry["gone"] |= freed
            if entry["step"] >= oldest and entry["step"] + 2 > self._step:
                waiting.append(entry)
                continue
            self._seen["heard_early"] += entry["step"] + 2 > self._step
            kept, dropped = self._settle(entry)
            moved += kept if entry["plan"].mode == "stage" else dropped
            restored += dropped if entry["plan"].mode == "cow" else []
        self._pending = waiting
        self._compare("what was held back is settled", moved, moved)
        self._expect_as_before(restored)

    def _settle(self, entry: dict[str, Any]) -> tuple[list[int], list[int]]:
        """Return the slots of accepted and of rejected drafts, without those of requests freed meanwhile."""
        kept: list[int] = []
        dropped: list[int] = []
        refused = entry["rejected"]().tolist()
        for index, rows in entry["drafts"].items():
            if entry["plan"].request_ids[index] in entry["gone"]:
                self._seen["cut_short"] += 1
                continue
            kept += rows[: len(rows) - refused[index]]
            dropped += rows[len(rows) - refused[index] :]
        self._count(entry["plan"], accepted=len(kept), rejected=len(dropped))
        if entry["sources"]:
            places = self._places(entry["slots"][row] for row in kept)
            for cache, source in zip(self._caches, entry["sources"], strict=True):
                bits = BITS[cache.element_size()]
                if not torch.equal(cache[places].view(bits), source[kept].view(bits)):
                    self._wrong("accepted drafts are not what the forward pass made")
        return [entry["slots"][row] for row in kept], [entry["slots"][row] for row in dropped]

    def _window_begins(self, plan: Any, query_start_loc: torch.Tensor, slots: Any) -> None:
        self._plan = plan
        if plan is None:
            return
        self._starts = query_start_loc[: len(plan.request_ids) + 1].tolist()
        if plan.num_requests:
            rows = slots[self._group][: plan.num_tokens]
            for cache in (*self._caches, *self._copies):
                cache[self._places(rows[rows >= 0])] = POISON

    def _prepared(self, result: Any, batch: Any) -> None:
        tables, mappings = result
        self._slots: list[int] = mappings[self._group][: batch.num_tokens].tolist()
        states = self.model_runner.req_states
        lengths = states.num_computed_tokens.gpu[batch.idx_mapping].tolist()
        places = [torch.arange(length) for length in lengths]
        rows = tables[self._group][: len(lengths)].cpu().long()
        size = self._caches[0].shape[1]
        slots = torch.cat([row[at // size] * size + at % size for row, at in zip(rows, places, strict=True)])
        # What the step's own layers write before they attend to it, a prefix hit on another request's prompt.
        drafts = {row for of_one in self._draft_rows().values() for row in of_one}
        own = torch.tensor([slot for row, slot in enumerate(self._slots) if row not in drafts])
        slots = slots[~torch.isin(slots, own)]
        self._seen["read"] += len(slots)
        stale = max(self._poisoned(slots))
        if stale:
            self._wrong(f"{stale} of {len(slots)} slots of contexts were never written")

    def _about_to_hold(self) -> None:
        """Remember a window's keys and values, before anything may overwrite them."""
        sources = self.model_runner.nwor.window.sources
        names = [layer.name for layer in self._layers] if sources else []
        self._sources = [side[: self._plan.num_tokens].clone() for name in names for side in sources[name]]

    def _held(self, _: Any) -> None:
        """Take in a forward pass on a stage that does not sample."""
        drafts = self._draft_rows()
        if drafts:
            entry = {"step": self._step, "plan": self._plan, "drafts": drafts, "gone": set()}
            self._pending.append(entry | {"slots": self._slots, "sources": self._sources})
        hidden = set().union(*drafts.values()) if drafts and self._plan.mode == "stage" else set()
        self._written("held", hidden)

    def _expected(self, _: Any, rejected: Any) -> None:
        if self._pending and self._pending[-1]["step"] == self._step:
            self._pending[-1]["rejected"] = rejected

    def _sampled(self, _: Any, rejected: torch.Tensor) -> None:
        """Take in a commit on the stage that samples."""
        drafts = self._draft_rows()
        refused = rejected.tolist()
        dropped = {row for index, rows in drafts.items() for row in rows[len(rows) - refused[index] :]}
        if drafts:
            total = sum(map(len, drafts.values()))
            self._count(self._plan, accepted=total - len(dropped), rejected=len(dropped))
        self._written("sampled", dropped)
        self._expect_as_before([self._slots[row] for row in dropped])

    def _written(self, when: str, hidden: Iterable[int]) -> None:
        """Compare after a step's writes: all its rows but ``hidden``, those that were poisoned for sure."""
        hidden = set(hidden)
        plan = self._plan
        drafts = self._draft_rows()
        if drafts:
            rows = sum(self._starts[index + 1] - self._starts[index] for index in drafts)
            total = sum(map(len, drafts.values()))
            self._count(plan, steps=1, first=rows - total, drafts=total)
        poisoned = 0 if plan is None else plan.num_tokens
        may = [slot for row, slot in enumerate(self._slots) if row not in hidden]
        must = [slot for row, slot in enumerate(self._slots[:poisoned]) if row not in hidden]
        self._compare(when, may, must)

    def _count(self, plan: Any, **more: int) -> None:
        of_mode = self._seen[plan.mode.value]
        for name, count in more.items():
            of_mode[name] += count

    def _expect_as_before(self, slots: list[int]) -> None:
        """Slots of rejected drafts hold what they held before the step."""
        if min(self._poisoned(slots)) < len(slots):
            self._wrong("slots of rejected drafts have changed")

    def _draft_rows(self) -> dict[int, list[int]]:
        """Return the rows of drafts of each request of the plan."""
        if self._plan is None or self._plan.mode == "off":
            return {}
        return {
            index: list(range(self._starts[index + 1] - drafts, self._starts[index + 1]))
            for index, drafts in enumerate(self._plan.draft_counts)
            if drafts
        }

    # The cache.

    def _places(self, slots: torch.Tensor | Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the blocks of slots, and their places in these."""
        if not isinstance(slots, torch.Tensor):
            slots = torch.tensor([slot for slot in slots if slot >= 0], dtype=torch.int64)
        slots = slots.to(self._caches[0].device)
        size = self._caches[0].shape[1]
        return slots // size, slots % size

    def _compare(self, when: str, may: list[int], must: list[int]) -> None:
        """Say which slots have changed, though not in ``may``, or have not, though in ``must``."""
        for number, (old, new) in enumerate(zip(self._copies, self._caches, strict=True)):
            bits = BITS[new.element_size()]
            changed = (old.view(bits) != new.view(bits)).any(dim=-1).any(dim=-1)  # [blocks, block_size]
            allowed, wanted = torch.zeros_like(changed), torch.zeros_like(changed)
            allowed[self._places(may)] = True
            wanted[self._places(must)] = True
            stray, missing = int((changed & ~allowed).sum()), int((wanted & ~changed).sum())
            if stray or missing:
                side = f"{self._layers[number // 2].name} {'KV'[number % 2]}"
                self._wrong(f"{when}, {side}: {stray} slots changed, {missing} of {len(must)} did not")
            old.copy_(new)

    def _poisoned(self, slots: torch.Tensor | Iterable[int]) -> list[int]:
        """Return how many of the slots hold the pattern, in the keys and the values of each layer."""
        places = self._places(slots)
        return [int((cache[places] == POISON).flatten(1).all(dim=1).sum()) for cache in self._caches]

    # Synchronizations.

    def synchronizations_start(self) -> None:
        """Count calls that make the host wait from now on; the self-check, which may, is off meanwhile."""
        config = self.model_runner.nwor.state.config
        self._interval = config.self_check_interval
        object.__setattr__(config, "self_check_interval", 0)
        self._catch = warnings.catch_warnings(record=True)
        self._caught: Any = self._catch.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def synchronizations_stop(self) -> int:
        """Stop counting and return how many there were."""
        torch.cuda.set_sync_debug_mode("default")
        self._catch.__exit__(None, None, None)
        config = self.model_runner.nwor.state.config
        object.__setattr__(config, "self_check_interval", self._interval)
        return sum("synchronizing" in str(entry.message) for entry in self._caught)

    def probe_stage(self) -> dict[str, Any]:
        """Return what :meth:`probe_rank` does, and which pipeline stage this worker is."""
        from vllm.distributed.parallel_state import get_pp_group

        graphs = getattr(self.model_runner.cudagraph_manager, "stage_graphs", {})
        return {**self.probe_rank(), "stage": get_pp_group().rank_in_group, "stage_graphs": len(graphs)}
