"""The plan of a step's attention is written once a step for all layers that attend alike, and in every step.

That is, in every pass of which a graph is captured; the graph repeats what the pass did. A plan of other
lengths gives wrong attention without any error, so who may use which plan is settled here, without a GPU: the
op that writes a plan is replaced by one that notes the lengths.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch

from nwor import ops
from nwor.engine.attention.layer_context import AttentionParameters, AttentionPlan, LayerContext
from nwor.engine.step_plan import StepPlan
from tests.unit.toy_layers import SIZE, ToyLayers

PARAMETERS = AttentionParameters(
    scale=1.0, sliding_window=-1, softcap=0.0, sinks=None, max_query_len=5, query_scales=None
)
STARTS = torch.tensor([0, 4, 8], dtype=torch.int32)
#: As vLLM has them: the slot mappings of all groups in one tensor, in the same memory in each step.
SLOTS = torch.arange(8)[None]
CPU = torch.device("cpu")
DTYPE, QUANTIZED = torch.float32, torch.float8_e4m3fn


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], dict[str, Any]]]:
    """The lengths that plans were written for, and for which layers."""
    notes: list[tuple[list[int], dict[str, Any]]] = []

    def write(starts: torch.Tensor, lengths: torch.Tensor, plan: torch.Tensor, **layers: Any) -> None:
        notes.append((lengths.tolist(), layers))

    monkeypatch.setattr(ops, "make_verify_plan", lambda device: torch.zeros(8, dtype=torch.uint8))
    monkeypatch.setattr(ops, "plan_verify_attention", write)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    return notes


def bind(toy: ToyLayers, *windows: int) -> list[AttentionPlan]:
    """Return the plans of the toy's layers, whose sliding windows may differ."""
    known: dict[Hashable, AttentionPlan] = {}
    plans = []
    for layer, window in zip(toy.window.groups[0].layers, windows, strict=True):
        plan = AttentionPlan.share(known, CPU, 2, layer, replace(PARAMETERS, sliding_window=window))
        assert plan is not None
        plans.append(plan)
    return plans


def begin(toy: ToyLayers) -> StepPlan:
    plan = toy.window_manager.plan_step(["a", "b"], [4, 4], [3, 3])
    assert plan is not None
    toy.window_manager.begin(plan, STARTS, SLOTS)
    assert toy.window.staging
    return plan


def test_each_step_has_a_plan_of_its_own(written: list[Any]) -> None:
    """Also where steps share one window batch, as those of one shape do."""
    toy = ToyLayers()
    plans = bind(toy, *[-1] * len(toy.names))
    assert len(set(plans)) == 1
    batches = []
    for step in range(3):
        begin(toy)
        batches.append(toy.window.batch)
        lengths = torch.tensor([20 + step, 30 + step], dtype=torch.int32)
        assert len({id(plan.of(toy.window, DTYPE, STARTS, lengths)) for plan in plans}) == 1
        assert [seen for seen, _ in written] == [[20 + i, 30 + i] for i in range(step + 1)]
        toy.window.abort()
    assert batches[0] is batches[1]  # or this test shows nothing
    assert batches[1] is batches[2]


def test_layers_that_attend_otherwise_have_another_plan(written: list[Any]) -> None:
    toy = ToyLayers()
    count = len(toy.names)
    plans = bind(toy, *[64 if i % 2 else -1 for i in range(count)])
    assert len(set(plans)) == 2
    begin(toy)
    lengths = torch.tensor([20, 30], dtype=torch.int32)
    for plan in plans:
        plan.of(toy.window, DTYPE, STARTS, lengths)
    assert [layers["sliding_window"] for _, layers in written] == [-1, 64]
    assert written[0][1]["head_size"] == SIZE
    toy.window.abort()


def test_the_plan_is_for_the_queries_that_came(written: list[Any]) -> None:
    """Kernels differ with them: a plan of the others' launches would be none. Layers of a kind share one."""
    toy = ToyLayers()
    (plan, *_) = bind(toy, *[-1] * len(toy.names))
    lengths = torch.tensor([20, 30], dtype=torch.int32)
    for dtypes, wanted in (
        ([DTYPE, DTYPE, DTYPE], [False]),
        ([QUANTIZED, QUANTIZED, QUANTIZED], [True]),
        ([QUANTIZED, QUANTIZED, DTYPE, QUANTIZED], [True, False, True]),
        ([DTYPE, DTYPE], [False]),
    ):
        begin(toy)
        for dtype in dtypes:
            assert plan.of(toy.window, dtype, STARTS, lengths) is not None
        assert [layers["quantized_query"] for _, layers in written] == wanted
        written.clear()
        toy.window.abort()


def test_a_layer_attends_with_the_plan(written: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    toy = ToyLayers()
    (plan, *_) = bind(toy, *[-1] * len(toy.names))
    layer = toy.window.groups[0].layers[0]
    layer_context = LayerContext(
        toy.window, toy.window_manager.state, layer, PARAMETERS, torch.empty(0), plan
    )
    seen: dict[str, Any] = {}
    monkeypatch.setattr(ops, "verify_attention", lambda *_args, **named: seen.update(named))
    begin(toy)
    rows = torch.zeros(8, 2, SIZE)
    lengths = torch.tensor([20, 30], dtype=torch.int32)
    layer_context.attend(rows, rows, rows, torch.zeros(2, 2, dtype=torch.int32), STARTS, lengths, rows)
    assert seen["plan"] is plan.of(toy.window, DTYPE, STARTS, lengths)
    assert [seen for seen, _ in written] == [[20, 30]]
    toy.window.abort()


@pytest.mark.parametrize("scales", [None, torch.tensor([0.5, 2.0])], ids=["one", "heads"])
def test_queries_go_to_attention_as_they_came(
    written: list[Any], monkeypatch: pytest.MonkeyPatch, scales: torch.Tensor | None
) -> None:
    """Quantized ones with their scales, others without: vLLM decides layer by layer."""
    toy = ToyLayers()
    (plan, *_) = bind(toy, *[-1] * len(toy.names))
    layer = toy.window.groups[0].layers[0]
    parameters = replace(PARAMETERS, query_scales=scales)
    layer_context = LayerContext(
        toy.window, toy.window_manager.state, layer, parameters, torch.empty(0), plan
    )
    seen: list[tuple[torch.Tensor, torch.Tensor | None]] = []
    monkeypatch.setattr(
        ops, "verify_attention", lambda *rows, **named: seen.append((rows[0], named["q_scale"]))
    )
    begin(toy)
    rows = torch.zeros(8, 2, SIZE)
    table, lengths = torch.zeros(2, 2, dtype=torch.int32), torch.tensor([20, 30], dtype=torch.int32)
    for query, wanted in ((rows.to(QUANTIZED), scales), (rows, None)):
        layer_context.attend(query, rows, rows, table, STARTS, lengths, rows)
        assert seen[-1][0] is query
        assert seen[-1][1] is wanted
    assert [layers["quantized_query"] for _, layers in written] == [True, False]
    toy.window.abort()


def test_outside_of_a_capture_nothing_is_planned(written: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    toy = ToyLayers()
    (plan, *_) = bind(toy, *[-1] * len(toy.names))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    begin(toy)
    assert plan.of(toy.window, DTYPE, STARTS, torch.tensor([20, 30], dtype=torch.int32)) is None
    assert not written
    toy.window.abort()


def test_a_cpu_has_no_plan() -> None:
    toy = ToyLayers()
    layer = toy.window.groups[0].layers[0]
    assert AttentionPlan.share({}, CPU, 2, layer, PARAMETERS) is None
