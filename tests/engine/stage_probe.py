"""A worker extension for tests with pipeline stages: what each stage writes, leaves alone and reads.

Three things are followed in every step, from outside of what they check:

- the whole cache, against a copy that vLLM's own writer keeps: a draft token is written to the copy once its
  stage may know that it was accepted, never where it was rejected or its request freed before that;
- what the first stage's first layer reads: its keys depend on token and position alone, so each context slot
  of each request in the batch is compared with the key that was once computed for that token there;
- the bytes that commits, logs and restores move.
"""

from __future__ import annotations

from typing import Any

import torch

from nwor.engine.attention.cpu import layer_cache_views
from nwor.engine.attention.target_layers import target_layers
from server import cpu_sampling  # its import mends sampling in the worker's process, as the server does
from tests.copy_watch import set_few_rows

assert cpu_sampling.KERNEL


class StageProbe:
    """Mixed into the worker by ``worker_extension_cls``."""

    model_runner: Any

    def probe_start(self) -> None:
        """Watch every step from now on, whatever the mode."""
        runner = self.model_runner
        self._last = runner.is_last_pp_rank
        self._layers = target_layers(runner)
        self._shadow = {name: layer.kv_cache.clone() for name, layer in self._layers.items()}
        self._seen: dict[str, Any] = {"steps": 0, "verified": 0, "rejected": 0, "accepted": 0}
        self._seen |= {"read": 0, "heard_early": 0, "cut_short": 0, "wrong": []}
        self._seen["bytes"] = {"commit": 0, "stage": 0, "log": 0, "restore": 0}
        self._written: dict[str, Any] = {}
        self._pending: list[dict[str, Any]] = []
        self._keys: dict[tuple[int, int], torch.Tensor] = {}
        self._step = 0
        self._plan: Any = None
        self._undo: list[tuple[Any, str]] = []
        rank = runner.nwor
        self._before_and_after(runner, "finish_requests", self._step_ends, self._step_begins)
        self._before_and_after(rank, "begin", self._window_begins, None)
        if self._last:
            self._before_and_after(rank, "finish", None, self._sampled)
        else:
            self._before_and_after(rank, "defer", None, self._held)
            self._before_and_after(rank, "expect", None, self._expected)
        for name, layer in self._layers.items():
            self._before_and_after(layer.impl, "do_kv_cache_update", self._note_write(name), None)
        if runner.is_first_pp_rank:
            self._before_and_after(runner, "prepare_attn", None, self._note_tables)
            self._first = min(self._layers, key=lambda name: int(name.split("layers.")[1].split(".")[0]))
            self._before_and_after(self._layers[self._first].impl, "forward", self._check_reads, None)
        self._before_and_after(rank.window, "stage", None, self._note_staged)
        self._before_and_after(rank.window, "_copies", None, self._note_copies_afterwards)
        self._before_and_after(rank.window, "begin", None, self._note_logs)
        for group_ops in rank.window._ops:
            self._watch_commits(group_ops)
            self._before_and_after(group_ops, "restore", self._note_bytes(group_ops, "restore"), None)

    def probe_stop(self) -> dict[str, Any]:
        """Stop watching and return what was seen."""
        for owner, attribute in self._undo:
            delattr(owner, attribute)
        return self._seen

    def _before_and_after(self, owner: Any, name: str, before: Any, after: Any) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if before is not None:
                self._note(before, args, kwargs)
            result = original(*args, **kwargs)
            if after is not None:
                self._note(after, (result, *args), kwargs)
            return result

        setattr(owner, name, watched)
        self._undo.append((owner, name))

    def _watch_commits(self, group_ops: Any) -> None:
        original = group_ops.prepared

        def prepared(*windows: torch.Tensor) -> Any:
            commit = original(*windows)

            def watched(rejected: torch.Tensor) -> None:
                self._note(self._note_bytes(group_ops, "commit"), (*windows, rejected), {})
                commit(rejected)

            return watched

        group_ops.prepared = prepared
        self._undo.append((group_ops, "prepared"))

    def _note(self, watch: Any, args: Any, kwargs: Any) -> None:
        # An error here would end one stage, and the other would wait for it for ever.
        try:
            watch(*args, **kwargs)
        except Exception as error:
            self._wrong(f"the probe fails: {type(error).__name__}: {error}")

    def _wrong(self, what: str) -> None:
        if len(self._seen["wrong"]) < 20:
            self._seen["wrong"].append(f"step {self._step}: {what}")

    # The cache: who writes what, and when.

    def _step_ends(self, _: Any) -> None:
        self._plan = None

    def _step_begins(self, _: Any, scheduled: Any) -> None:
        self._step += 1
        self._seen["steps"] += 1
        self._written.clear()
        oldest = self._step - scheduled.nwor_in_flight
        freed = {*scheduled.finished_req_ids, *(scheduled.preempted_req_ids or ())}
        waiting = []
        for entry in self._pending:
            if entry["step"] >= oldest:
                entry["gone"] |= freed
            if entry["step"] < oldest or entry["step"] + 2 <= self._step:
                self._seen["heard_early"] += entry["step"] + 2 > self._step
                self._settle(entry)
            else:
                waiting.append(entry)
        self._pending = waiting
        self._compare("a step began")

    def _window_begins(self, plan: Any, query_start_loc: torch.Tensor, slots: Any) -> None:
        self._plan = plan
        if plan is not None:
            self._held_drafts = plan.draft_counts[: plan.num_requests]
            self._starts = query_start_loc[: len(plan.request_ids) + 1].tolist()

    def _note_write(self, name: str) -> Any:
        def note(module: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
            self._written[name] = (key.clone(), value.clone(), slots.clone())
            if name == getattr(self, "_first", None):
                batch = self._batch
                positions, tokens = batch.positions.tolist(), batch.input_ids.tolist()
                for row in range(batch.num_tokens):
                    self._keys[tokens[row], positions[row]] = key[row].clone()

        return note

    def _write(self, written: Any, rows: list[int]) -> None:
        for name, (key, value, slots) in written.items():
            layer = self._layers[name]
            kept = torch.full_like(slots, -1)
            kept[rows] = slots[rows]
            stock = super(type(layer.impl), layer.impl)
            stock.do_kv_cache_update(layer, key, value, self._shadow[name], kept)

    def _draft_rows(self) -> dict[int, list[int]]:
        """Return the rows of drafts of each request of the plan."""
        if self._plan is None or self._plan.mode == "off":
            return {}
        return {
            index: list(range(self._starts[index + 1] - drafts, self._starts[index + 1]))
            for index, drafts in enumerate(self._plan.draft_counts)
            if drafts
        }

    def _all_rows(self) -> list[int]:
        return list(range(next(iter(self._written.values()))[2].shape[0])) if self._written else []

    def _sampled(self, plan: Any, rejected: torch.Tensor) -> None:
        drafts = self._draft_rows()
        dropped = {
            row
            for index, rows in drafts.items()
            for row in rows[len(rows) - int(rejected[index]) :]
            if rejected[index]
        }
        self._seen["verified"] += bool(drafts)
        self._seen["rejected"] += len(dropped)
        self._seen["accepted"] += sum(map(len, drafts.values())) - len(dropped)
        self._write(self._written, [row for row in self._all_rows() if row not in dropped])
        self._compare("sampled")

    def _held(self, _: Any) -> None:
        drafts = self._draft_rows()
        hidden = {row for rows in drafts.values() for row in rows}
        before = {}
        if drafts and self._plan.mode == "cow":
            before, hidden = {name: cache.clone() for name, cache in self._shadow.items()}, set()
        self._write(self._written, [row for row in self._all_rows() if row not in hidden])
        self._compare("held")
        if drafts:
            self._seen["verified"] += 1
            entry = {"step": self._step, "plan": self._plan, "drafts": drafts, "gone": set()}
            self._pending.append(entry | {"written": dict(self._written), "before": before})

    def _expected(self, _: Any, rejected: Any) -> None:
        if self._pending and self._pending[-1]["step"] == self._step:
            self._pending[-1]["rejected"] = rejected().tolist()

    def _settle(self, entry: dict[str, Any]) -> None:
        kept: list[int] = []
        dropped: list[int] = []
        for index, rows in entry["drafts"].items():
            refused = entry["rejected"][index]
            if entry["plan"].request_ids[index] in entry["gone"]:
                self._seen["cut_short"] += 1
                continue
            kept += rows[: len(rows) - refused]
            dropped += rows[len(rows) - refused :]
        self._seen["rejected"] += len(dropped)
        self._seen["accepted"] += len(kept)
        if entry["plan"].mode == "stage":
            self._write(entry["written"], kept)
            return
        for name, (_, _, slots) in entry["written"].items():
            for row in dropped:
                slot, block_size = int(slots[row]), self._block_size(name)
                place = (slot // block_size, slice(None), slot % block_size)
                views = [self._views(name, cache) for cache in (self._shadow[name], entry["before"][name])]
                for mine, old in zip(*views, strict=True):
                    mine[place[0], place[2]] = old[place[0], place[2]]

    def _views(self, name: str, cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from nwor.engine.attention.cpu_layout import cache_views

        layer = self._layers[name]
        return cache_views(cache, layer.isa, layer.kv_cache_dtype)

    def _block_size(self, name: str) -> int:
        return int(self._layers[name].kv_cache.shape[2])

    def _compare(self, when: str) -> None:
        for name, layer in self._layers.items():
            mine, real = self._shadow[name].view(torch.uint8), layer.kv_cache.view(torch.uint8)
            if not torch.equal(mine, real):
                self._wrong(f"{when}, {name}: {int((mine != real).sum())} bytes differ")

    # What is read.

    def _note_tables(self, result: Any, batch: Any) -> None:
        self._batch, self._tables = batch, result[0]

    def _check_reads(self, layer: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> None:
        runner, batch = self.model_runner, self._batch
        keys, _ = layer_cache_views(self._layers[self._first])
        block_size = keys.shape[1]
        states = runner.req_states
        for row, index in enumerate(batch.idx_mapping_np.tolist()):
            length = int(states.num_computed_tokens.gpu[index])
            tokens = states.all_token_ids.gpu[index, :length].tolist()
            places = torch.arange(length)
            blocks = self._tables[0][row][places // block_size].long()
            found = keys[blocks, places % block_size]
            missing = [at for at in range(length) if (tokens[at], at) not in self._keys]
            if missing:
                self._wrong(f"{batch.req_ids[row]} reads position {missing[0]}, which nobody computed")
                continue
            self._seen["read"] += length
            if length:
                wanted = torch.stack([self._keys[tokens[at], at] for at in range(length)])
                stale = (found - wanted).abs().amax(dim=(1, 2)) > 1e-4
                if stale.any():
                    where = stale.nonzero().flatten().tolist()
                    self._wrong(f"{batch.req_ids[row]} reads stale keys at {where[:5]} of {length}")

    # What is moved.

    def set_copies(self, rows: int, always: bool) -> tuple[int, bool]:
        """Have windows copied aside, and return what was in force before.

        Args:
            rows: steps with more rows than this copy as the layers run.
            always: whether stages before the last copy after the forward pass, as they do with CUDA graphs.

        """
        state = self.model_runner.nwor.state
        before, state.stages_copy = state.stages_copy, always
        state.forget_facts()
        return set_few_rows(self.model_runner, rows), before

    def _note_copies_afterwards(self, copies: Any, batch: Any) -> None:
        if batch.copy:
            self._wrong("windows were copied twice")
        windows = sum(1 + drafts for drafts in self._held_drafts if drafts)
        for source in copies.values():
            self._seen["bytes"]["stage"] += windows * sum(side[0].nbytes for side in source)

    def _note_staged(self, _: Any, name: str, key: Any, value: Any) -> None:
        self._note_copies(name, key, value)
        self._note_early(name, key, value)

    def _note_copies(self, name: str, key: Any, value: Any) -> None:
        rank = self.model_runner.nwor
        if not rank.window.batch.copy:
            return
        windows = sum(1 + drafts for drafts in self._held_drafts if drafts)
        rows = rank.window.batch.num_tokens
        for kept, made in zip(rank.window.sources[name], (key, value), strict=True):
            self._seen["bytes"]["stage"] += windows * kept[0].nbytes
            if not torch.equal(kept, made[:rows]):
                self._wrong(f"{name}: the copy is not what the forward pass made")
            if kept.untyped_storage().nbytes() != len(kept) * rank.state.source_token_bytes:
                self._wrong(f"{name}: the copy keeps {kept.untyped_storage().nbytes()} bytes alive")

    def _note_early(self, name: str, key: Any, value: Any) -> None:
        window = self.model_runner.nwor.window
        if window.batch.early is None:
            return
        group, layer = window._layers[name]
        slots, drafts = window.batch.early[group.slot_key], self._plan.draft_counts
        rows = [
            row
            for index in range(len(window.batch.query_start_loc) - 1)
            if drafts[index]
            for row in range(self._starts[index], self._starts[index + 1])
        ]
        self._seen["bytes"]["commit"] += int((slots[rows] >= 0).sum()) * layer.shape.bytes_per_token

    def _note_logs(self, _: Any, batch: Any) -> None:
        # Not at the op itself, which the self-check uses as well.
        if batch.mode == "cow":
            for group, group_ops in self.model_runner.nwor.window.group_ops:
                self._note_bytes(group_ops, "log")(batch.slots[group.slot_key], batch.query_start_loc)

    def _note_bytes(self, group_ops: Any, path: str) -> Any:
        token = 2 * group_ops.num_kv_heads * group_ops.head_size * group_ops.key_caches[0].element_size()

        def note(*args: Any) -> None:
            slots, starts = args[-3:-1] if path == "restore" else (args[0], args[1])
            rejected = args[-1]  # not there where old bytes are logged
            if path == "commit":
                slots, starts = args[1], args[2]
            moved = 0
            # Short prompts stand among the windows and are none: no figure counts them. What was held back
            # (no plan is open then) has slots for drafts alone.
            drafts = [1] * len(starts) if self._plan is None else self._plan.draft_counts
            for index in range(len(starts) - 1):
                if not drafts[index]:
                    continue
                rows = slots[int(starts[index]) : int(starts[index + 1])]
                if path == "commit":
                    rows = rows[: len(rows) - int(rejected[index])]
                elif path == "restore":
                    rows = rows[max(len(rows) - int(rejected[index]), 1) :]
                else:
                    rows = rows[1:]
                moved += int((rows >= 0).sum())
            self._seen["bytes"][path] += moved * token * len(group_ops.layers)

        return note
