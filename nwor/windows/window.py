"""The life of a window: begin, stage, then commit or abort. One owner per rank; torch only.

A *window batch* is the leading part of a step's batch: the requests whose tokens are held back. Its rows come
first in the step's tensors, so one ``query_start_loc`` serves attention, commit and log alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from nwor import ops
from nwor.errors import WindowStateError
from nwor.modes import Mode
from nwor.ops import PreparedCommit
from nwor.windows.batch import CapturedSources, HeldBatch, WindowBatch, WindowKind
from nwor.windows.kv_layers import LayerGroup, StagedLayer, group_layers
from nwor.windows.layer_ops import LayerGroupOps, Source

__all__ = [
    "CapturedSources",
    "HeldBatch",
    "LayerGroup",
    "StagedLayer",
    "Window",
    "WindowBatch",
    "WindowKind",
    "group_layers",
]

#: Batches of captured graphs whose commits are kept prepared.
_MOST_PREPARED = 512

#: A batch, the tables of the graph that it ran in, and the commits of the two.
_Commits = tuple[WindowBatch, tuple[torch.Tensor, ...], list[PreparedCommit]]


class _State(Enum):
    IDLE = "idle"
    OPEN = "open"
    DIRECT = "direct"


# A member found through its class costs ten times as much as a name, and a step needs several.
_IDLE, _OPEN, _DIRECT = _State.IDLE, _State.OPEN, _State.DIRECT
_STAGE = Mode.STAGE


@dataclass
class Window:
    """Owner of this rank's windows.

    Attributes:
        groups: the staged layers by group.
        batch: the open window batch, None while idle.
        kept_alive: collects keys and values that a capture keeps alive; None outside captures.
        staging: whether layers have to hand their keys and values over instead of writing them. Read only.
        finished_direct: whether the open batch fell back to direct writes. Read only.
        shared: what was made once for all layers of the open batch, and holds until the next is begun.
        split: what the layers of a mixed step's graph share while it is captured; None at all other times.
        kind: the windows that a graph is being captured for, where they are not any of the engine's.
        capture_errors: collects what goes wrong in layers while a graph is captured; None at all other times.
        source_rows: int32 [most tokens] on the device, where windows are trees: once a step is sampled, the
            row that each slot of the batch gets, negative for none. None where each slot gets its own row.

    """

    groups: tuple[LayerGroup, ...]
    batch: WindowBatch | None = None
    kept_alive: list[Source] | None = None
    staging: bool = False
    finished_direct: bool = False
    shared: dict[object, Any] = field(default_factory=dict)
    split: Any = None
    kind: WindowKind | None = None
    capture_errors: list[str] | None = None
    source_rows: torch.Tensor | None = None
    _state: _State = _IDLE
    _sources: Mapping[str, Source] = field(default_factory=dict)
    _tables: tuple[torch.Tensor, ...] = ()
    _logs: list[torch.Tensor] = field(default_factory=list)
    _aside: Mapping[str, Source] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Index the layers by name and make the tables of each group."""
        self._layers = {layer.name: (group, layer) for group in self.groups for layer in group.layers}
        self._ops = [LayerGroupOps(group.layers) for group in self.groups]
        # By a batch's identity, which holds as long as the batch stands here itself.
        self._prepared: dict[int, _Commits] = {}
        self._latest: _Commits | None = None

    @property
    def slot_keys(self) -> dict[str, int]:
        """Which slot mapping each staged layer uses."""
        return {name: group.slot_key for name, (group, _) in self._layers.items()}

    @property
    def layer_names(self) -> frozenset[str]:
        """Names of the staged layers."""
        return frozenset(self._layers)

    def begin(self, batch: WindowBatch) -> None:
        """Open the window batch of a step, once, before the first layer runs.

        In mode ``cow`` the old bytes of the draft slots of all layers are logged here.

        Raises:
            WindowStateError: if the batch before it was neither committed nor aborted.

        """
        if self._state is not _IDLE:
            raise WindowStateError("begin: the window batch before was neither committed nor aborted")
        self.batch = batch
        if self.shared:
            self.shared.clear()
        self._state = _OPEN
        self.staging = batch.mode is _STAGE
        if batch.copy and self.staging:
            self._aside = self.room(batch.num_tokens)
        if not self.staging:
            self._logs = [
                group_ops.log(batch.slots[group.slot_key], batch.query_start_loc)
                for group, group_ops in zip(self.groups, self._ops, strict=True)
            ]

    def stage(self, name: str, key: torch.Tensor, value: torch.Tensor) -> None:
        """Take over the window's rows of one layer; only rows with an early slot are written.

        Args:
            name: the layer.
            key: [at least num_tokens, num_kv_heads, head_size], the window's rows first; kept alive until
                commit or abort, unless the batch says that it is to be copied.
            value: likewise.

        Raises:
            WindowStateError: outside an open ``stage`` batch, or for a layer staged twice.

        """
        if not self.staging:
            raise WindowStateError(f"stage {name}: no window batch is being staged")
        if name in self._sources:
            raise WindowStateError(f"stage {name}: the layer was staged already in this step")
        assert isinstance(self._sources, dict)
        assert self.batch is not None
        kept = key, value
        if self.batch.copy:
            kept = self._aside[name]
            end = self.batch.query_start_loc[-1:]
            ops.stage_window([key], [value], [kept[0]], [kept[1]], end, validate=False)
        self._sources[name] = kept
        if self.batch.early is not None:
            group, layer = self._layers[name]
            rows = self.batch.num_tokens
            layer.direct_write(key[:rows], value[:rows], self.batch.early[group.slot_key])

    @property
    def group_ops(self) -> list[tuple[LayerGroup, LayerGroupOps]]:
        """The groups with their launches."""
        return list(zip(self.groups, self._ops, strict=True))

    @property
    def sources(self) -> Mapping[str, Source]:
        """Keys and values that were staged so far in the open batch, by layer."""
        return self._sources

    @contextmanager
    def keeping_alive(self) -> Iterator[None]:
        """Keep every layer's keys and values of a pass alive until the block ends.

        While a piecewise graph is captured this makes its pool give each layer memory of its own.
        """
        self.kept_alive = []
        try:
            yield
        finally:
            self.kept_alive = None

    def captured(self, sources: Mapping[str, Source]) -> CapturedSources:
        """Make the layer tables of a captured graph.

        Args:
            sources: by layer name, where its replays leave keys and values.

        Raises:
            WindowStateError: if a layer is missing.

        """
        return CapturedSources(dict(sources), self._tables_of(sources))

    def adopt(self, captured: CapturedSources) -> None:
        """Take the keys and values of the open batch from a graph that is about to be replayed."""
        if not self.staging or self._sources:
            raise WindowStateError("adopt: the open batch is not staged, or was staged in part")
        self._sources = captured.sources
        self._tables = captured.tables

    def commit(self, rejected: torch.Tensor) -> None:
        """Finish the batch: write the accepted tokens (``stage``) or put rejected slots back (``cow``).

        Args:
            rejected: int32 [at least num_requests] on the device: tokens at the end of each window that are
                not kept.

        Raises:
            WindowStateError: if no batch is open, or a layer was never staged.

        """
        batch = self.batch
        if batch is None:
            raise self._not_open("commit")
        if self.staging:
            latest = self._latest  # a decode runs the same graph step after step
            if latest is None or latest[0] is not batch or latest[1] is not self._tables:
                commits = self._commits_of(batch)
            else:
                commits = latest[2]
            for prepared in commits:
                prepared(rejected)
        elif self._state is _OPEN:
            self.finish(self._held(batch), rejected)
        self._close()

    def _commits_of(self, batch: WindowBatch) -> list[PreparedCommit]:
        """Return the commits of the open batch; those of a captured graph's are prepared once."""
        tables = self._tables
        if not tables:
            return self._prepare(batch, self._step_tables())
        known = self._prepared.get(id(batch))
        if known is None or known[0] is not batch or known[1] is not tables:
            if len(self._prepared) >= _MOST_PREPARED:
                self._prepared.clear()
            known = self._prepared[id(batch)] = (batch, tables, self._prepare(batch, tables))
        self._latest = known
        return known[2]

    def _prepare(self, batch: WindowBatch, tables: Sequence[torch.Tensor]) -> list[PreparedCommit]:
        sources = None if self.source_rows is None else self.source_rows[: batch.num_tokens]
        return [
            group_ops.prepared(table, batch.slots[group.slot_key], batch.query_start_loc, sources)
            for group, group_ops, table in zip(self.groups, self._ops, tables, strict=True)
        ]

    def release(self, *, copy: bool) -> HeldBatch:
        """Take the open batch out, to be finished in a later step; the window is idle again.

        What the next step's inputs overwrite (slots and rows of the windows) is copied.

        Args:
            copy: copy the staged keys and values aside too, where the next step overwrites them as it does
                those that a CUDA graph makes. What was copied as it was staged is not copied again.

        Raises:
            WindowStateError: if no batch is open, it fell back to direct writes, or a layer was never staged.

        """
        batch = self._require_open("release")
        if self._state is _DIRECT:
            raise WindowStateError("release: the batch was finished by direct writes")
        if copy and batch.mode is _STAGE and not batch.copy:
            # The graph's own tables name the memory that the copies are to replace.
            self._sources, self._tables = self._copies(batch), ()
        held = self._held(batch)
        own = replace(
            batch,
            query_start_loc=batch.query_start_loc.clone(),
            slots={key: slots.clone() for key, slots in batch.slots.items()},
        )
        self._close()
        return replace(held, batch=own)

    def finish(self, held: HeldBatch, rejected: torch.Tensor) -> None:
        """Write the accepted tokens of a batch (``stage``) or put rejected slots back (``cow``).

        Args:
            held: the batch; rows with a negative slot are left alone.
            rejected: as for :meth:`commit`.

        """
        batch = held.batch
        if batch.mode is _STAGE:
            for prepared in self._prepare(batch, held.tables):
                prepared(rejected)
        else:
            for group, group_ops, log in zip(self.groups, self._ops, held.logs, strict=True):
                group_ops.restore(log, batch.slots[group.slot_key], batch.query_start_loc, rejected)

    def write_all(self, held: HeldBatch) -> None:
        """Write every row of a batch that has a slot, accepted or not, as stock code would have."""
        self._write(held.sources, held.batch)

    def _held(self, batch: WindowBatch) -> HeldBatch:
        tables: tuple[torch.Tensor, ...] = ()
        if batch.mode is _STAGE:
            tables = self._tables or self._tables_of(self._sources)
        return HeldBatch(batch, dict(self._sources), tables, tuple(self._logs))

    def _copies(self, batch: WindowBatch) -> dict[str, Source]:
        self._require_all(self._sources)
        rows = batch.query_start_loc[-1:].contiguous()
        copies = self.room(batch.num_tokens)
        for group in self.groups:
            names = [layer.name for layer in group.layers]
            keys, values = zip(*(self._sources[name] for name in names), strict=True)
            own_keys, own_values = zip(*(copies[name] for name in names), strict=True)
            ops.stage_window(keys, values, own_keys, own_values, rows, validate=False)
        return copies

    def room(self, rows: int) -> dict[str, Source]:
        """Return new memory for windows' rows of every layer; docs/vllm/integration.md says why new."""
        room: dict[str, Source] = {}
        for group in self.groups:
            count, first = len(group.layers), group.layers[0]
            # One tensor for all layers: the host makes it in each step.
            shape = (2 * count, rows, first.shape.num_kv_heads, first.shape.head_size)
            sides = torch.empty(shape, dtype=first.source_dtype, device=first.kv_cache.device).unbind()
            names = [layer.name for layer in group.layers]
            room |= zip(names, zip(sides[:count], sides[count:], strict=True), strict=True)
        return room

    def _tables_of(self, sources: Mapping[str, Source]) -> tuple[torch.Tensor, ...]:
        self._require_all(sources)
        return tuple(
            group_ops.source_table([sources[layer.name] for layer in group.layers])
            for group, group_ops in zip(self.groups, self._ops, strict=True)
        )

    def _step_tables(self) -> list[torch.Tensor]:
        """Return the tables of the open batch's sources, which no later step uses."""
        self._require_all(self._sources)
        return [
            group_ops.step_table([self._sources[layer.name] for layer in group.layers])
            for group, group_ops in zip(self.groups, self._ops, strict=True)
        ]

    def finish_direct(self, *, sampled: bool = False) -> None:
        """Fall back for the open batch: write in full what was staged, and let later layers write directly.

        The cache is then what stock writes would have left. The batch stays open until commit or abort, which
        do nothing more. While a graph is captured nothing is written.

        Args:
            sampled: whether the step is sampled already: of trees the accepted rows alone are written, where
                they belong.

        Raises:
            WindowStateError: if no batch is open.

        """
        batch = self._require_open("finish_direct")
        if self._state is _DIRECT:
            return
        self._state = _DIRECT
        self.staging, self.finished_direct = False, True
        sources, self._sources = self._sources, {}
        if self.capture_errors is None:
            self._write(sources, batch, sampled)
        self._aside = {}

    def _write(self, sources: Mapping[str, Source], batch: WindowBatch, sampled: bool = False) -> None:
        if sampled and self.source_rows is not None:
            self._write_accepted(sources, batch, self.source_rows[: batch.num_tokens])
            return
        for name, (key, value) in sources.items():
            group, layer = self._layers[name]
            rows = batch.num_tokens  # a captured graph's rows are as many as its batch size
            layer.direct_write(key[:rows], value[:rows], batch.slots[group.slot_key])

    def _write_accepted(
        self, sources: Mapping[str, Source], batch: WindowBatch, source_rows: torch.Tensor
    ) -> None:
        own = source_rows.clamp(min=0).long()
        slots = {key: torch.where(source_rows >= 0, value, -1) for key, value in batch.slots.items()}
        for name, (key, value) in sources.items():
            group, layer = self._layers[name]
            layer.direct_write(key[own], value[own], slots[group.slot_key])

    def abort(self) -> None:
        """Drop the batch, if one is open, without any write."""
        self._close()

    def _require_all(self, sources: Mapping[str, Source]) -> None:
        missing = sorted(self.layer_names - sources.keys())
        if missing:
            raise WindowStateError(f"{len(missing)} layers were not staged, the first is {missing[0]}")

    def _require_open(self, what: str) -> WindowBatch:
        if self.batch is None:
            raise self._not_open(what)
        return self.batch

    def _not_open(self, what: str) -> WindowStateError:
        return WindowStateError(f"{what}: no window batch is open")

    def _close(self) -> None:
        self.batch = None
        self._state = _IDLE
        self.staging = self.finished_direct = False
        self._sources = {}
        self._tables = ()
        self._logs = []
        self._aside = {}
