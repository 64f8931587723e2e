"""Windows of steps with many more rows than theirs: copied aside, so that the step's tensors are let go."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor.engine import step_planner
from nwor.engine.attention.layer_context import LayerContext
from nwor.engine.cuda_graphs.stage_graphs import StageGraphs
from nwor.engine.step_plan import StepPlan
from nwor.errors import WindowStateError
from nwor.modes import Mode
from tests.unit.toy_layers import BLOCK, BLOCKS, HEADS, SIZE, ToyLayers

#: Two windows of 4 and 3 rows, then a prompt's rows.
WINDOWS, TOKENS, ROWS = [4, 3], 7, 24
STARTS = torch.tensor([0, 4, 7, ROWS], dtype=torch.int32)
SLOTS = torch.arange(3, 3 + ROWS)
LAYER_BYTES = 2 * HEADS * SIZE * 4


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ToyLayers:
    monkeypatch.setattr(step_planner, "FEW_ROWS", ROWS - 1)
    toy = ToyLayers()
    toy.window_manager.state.source_token_bytes = len(toy.names) * LAYER_BYTES
    assert ROWS + 3 <= BLOCK * BLOCKS
    return toy


def plan_of(toy: ToyLayers, rows: int = ROWS) -> StepPlan:
    plan = toy.window_manager.plan_step(["a", "b", "p"], [*WINDOWS, rows - TOKENS], [3, 2, 0])
    assert plan is not None
    return plan


def begin(toy: ToyLayers) -> StepPlan:
    plan = plan_of(toy)
    toy.window_manager.begin(plan, STARTS, {0: SLOTS})
    return plan


def kept_bytes(toy: ToyLayers) -> int:
    """Return the bytes of all memory that the window keeps alive."""
    storages = {}
    for source in toy.window.sources.values():
        for tensor in source:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("tokens", "rows", "graph", "copied"),
    [
        (7, step_planner.FEW_ROWS + 1, 0, True),
        (7, step_planner.FEW_ROWS, 0, False),  # few rows
        (7, 1024, 1024, False),  # a graph may serve it, whose memory nobody can let go of
        (7, 1025, 1024, True),
        (400, 801, 0, True),
        (400, 800, 0, False),  # windows are half of it
        (900, 900, 0, False),  # windows alone
    ],
)
def test_which_steps_copy(tokens: int, rows: int, graph: int, copied: bool) -> None:
    window_manager = ToyLayers(longest=1000).window_manager
    (
        window_manager.state.source_token_bytes,
        window_manager.state.other_source_bytes,
        window_manager.state.ranks,
    ) = 100, 60, 2
    window_manager._planner.largest_graph = graph
    lengths, drafts = [tokens, rows - tokens][: 2 if rows > tokens else 1], [tokens - 1, 0]
    window_manager.longest_window = tokens
    window_manager._planner._longest = tokens
    plan = window_manager.plan_step("ab"[: len(lengths)], lengths, drafts[: len(lengths)])
    assert plan is not None
    assert plan.treatment.copied_bytes == (320 if copied else 0)
    window_manager.begin(plan, torch.tensor([0, tokens], dtype=torch.int32), {0: torch.arange(tokens)})
    assert window_manager.window is not None
    assert window_manager.window.batch is not None
    assert window_manager.window.batch.copy is copied
    window_manager.drop()
    window_manager.state.switch(Mode.COW)
    again = window_manager.plan_step("ab"[: len(lengths)], lengths, drafts[: len(lengths)])
    assert again is not None
    assert again.treatment.copied_bytes == 0


def test_the_steps_tensors_are_let_go_and_the_copies_committed(toy: ToyLayers) -> None:
    plan = begin(toy)
    toy.forward(SLOTS)
    assert kept_bytes(toy) == TOKENS * toy.window_manager.state.source_token_bytes
    assert plan.treatment.held_bytes == kept_bytes(toy)
    assert toy.written(SLOTS) == list(range(TOKENS, ROWS))
    # What the originals become later does not matter.
    made = {name: key.clone() for name, key in toy.made.items()}
    for key in toy.made.values():
        key.fill_(9.0)
    toy.made = made
    finished = toy.window_manager.finish(torch.tensor([1, 2], dtype=torch.int32))
    assert finished is plan
    assert toy.written(SLOTS) == [0, 1, 2, 4, *range(TOKENS, ROWS)]
    assert toy.window._aside == {}
    record = toy.window_manager.account_sampled(plan, [3, 1, 1])
    counts = toy.window_manager.state.counts
    assert counts.stage_bytes == TOKENS * toy.window_manager.state.source_token_bytes
    assert counts.written_bytes == 4 * toy.window_manager.state.token_bytes + counts.stage_bytes
    assert record.treatment.copied_bytes == toy.window_manager.state.engine_source_bytes


def test_a_step_with_few_rows_stays_where_it_is(toy: ToyLayers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_planner, "FEW_ROWS", ROWS)
    plan = begin(toy)
    toy.forward(SLOTS)
    assert kept_bytes(toy) >= ROWS * LAYER_BYTES * len(toy.names) // 2
    toy.window_manager.finish(torch.tensor([1, 2], dtype=torch.int32))
    toy.window_manager.account_sampled(plan, [3, 1, 1])
    assert toy.window_manager.state.counts.stage_bytes == 0


def test_a_stage_that_copies_for_others_does_not_copy_again(
    toy: ToyLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(toy)
    toy.forward(SLOTS)
    sources = dict(toy.window.sources)
    monkeypatch.setattr(toy.window, "_copies", None)
    held = toy.window.release(copy=True)
    assert all(held.sources[name] is source for name, source in sources.items())
    toy.window.finish(held, torch.tensor([0, 0], dtype=torch.int32))
    assert toy.written(SLOTS) == list(range(ROWS))


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_an_error_while_copying_writes_the_step_directly(
    toy: ToyLayers, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    plan = begin(toy)
    stage = toy.window.stage

    def broken_stage(name: str, key: torch.Tensor, value: torch.Tensor) -> None:
        if name == toy.names[broken]:
            raise torch.OutOfMemoryError("no memory for the copies")
        stage(name, key, value)

    monkeypatch.setattr(toy.window, "stage", broken_stage)
    for layer in toy.window.groups[0].layers:
        key = toy.made[layer.name] = torch.randn(ROWS, HEADS, SIZE)
        unused: Any = SimpleNamespace()
        layer_context = LayerContext(toy.window, toy.window_manager.state, layer, unused, torch.empty(0))
        tokens = layer_context.stage(key, -key) if toy.window.staging else 0
        layer.direct_write(key[tokens:], -key[tokens:], SLOTS[tokens:])
    assert toy.written(SLOTS) == list(range(ROWS))
    assert toy.window_manager.state.mode is Mode.OFF
    assert "no memory" in str(toy.window_manager.state.fault)
    toy.window_manager.finish(torch.tensor([3, 2], dtype=torch.int32))
    toy.window_manager.account_sampled(plan, [1, 1, 1])
    counts = toy.window_manager.state.counts
    assert (counts.stage_bytes, counts.direct_windows) == (0, {"fault": 2})
    assert toy.written(SLOTS) == list(range(ROWS))


def test_no_memory_for_the_copies_is_a_fault_of_the_step(
    toy: ToyLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(rows: int) -> None:
        raise torch.OutOfMemoryError("no memory for the copies")

    monkeypatch.setattr(toy.window, "room", no_room)
    plan = begin(toy)
    assert plan.faulty
    assert not toy.window.staging
    toy.forward(SLOTS)
    assert toy.written(SLOTS) == list(range(ROWS))


def test_a_full_graph_does_not_stand_in_for_a_step_that_copies(toy: ToyLayers) -> None:
    """None is large enough; if one were, its window would be written directly, and counted so."""
    graphs: StageGraphs[str] = StageGraphs(toy.window_manager)
    sources = {name: (torch.zeros(ROWS, HEADS, SIZE),) * 2 for name in toy.names}
    graphs._sources = {"graph": toy.window.captured(sources)}
    plan = begin(toy)
    assert not graphs.take("graph")
    toy.forward(SLOTS)
    assert toy.written(SLOTS) == list(range(ROWS))
    toy.window_manager.finish(torch.tensor([1, 2], dtype=torch.int32))
    toy.window_manager.account_sampled(plan, [3, 1, 1])
    counts = toy.window_manager.state.counts
    assert (counts.stage_bytes, counts.direct_windows) == (0, {"graph": 2})


def test_a_layer_is_copied_once(toy: ToyLayers) -> None:
    begin(toy)
    key = torch.randn(TOKENS, HEADS, SIZE)
    toy.window.stage(toy.names[0], key, key)
    with pytest.raises(WindowStateError, match="already"):
        toy.window.stage(toy.names[0], key, key)
