"""Claim: layers that attend to their cache once more are staged; errors while graphs are captured are noted.

Coverage: a layer's context with the op stood in for; FlashAttention's layers in a mixed step's graph; ranks.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl

from nwor.engine.attention import layer_context
from nwor.engine.attention.flash import NworFlashAttentionImpl
from nwor.engine.attention.layer_context import AttentionParameters, LayerContext
from nwor.engine.attention.split_step import SplitStep
from nwor.engine.cuda_graphs.mixed import MixedGraphs
from nwor.engine.pipeline_parallel import stages
from nwor.modes import Mode
from nwor.windows.window import WindowBatch
from tests.unit.toy_layers import HEADS, SIZE, ToyLayers

ROWS = 6
STARTS = torch.tensor([0, 2, 3], dtype=torch.int32)
#: Of the layer that the tests look at.
NAME = "layer.1"


@pytest.fixture
def toy() -> ToyLayers:
    return ToyLayers()


@pytest.fixture
def context(toy: ToyLayers) -> LayerContext:
    layer = next(layer for layer in toy.window.groups[0].layers if layer.name == NAME)
    parameters = AttentionParameters(1.0, -1, 0.0, None, 4)
    return LayerContext(toy.window, toy.window_manager.state, layer, parameters, torch.zeros(1))


@pytest.fixture
def attended(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, ...]]:
    """Query, keys, values and output of each call of the op."""
    calls: list[tuple[torch.Tensor, ...]] = []

    def verify_attention(query: Any, key: Any, value: Any, *others: Any, **settings: Any) -> None:
        calls.append((query, key, value, others[5]))

    monkeypatch.setattr(layer_context.ops, "verify_attention", verify_attention)
    return calls


def attend(context: LayerContext, key: torch.Tensor | None, value: torch.Tensor | None) -> None:
    rows = torch.zeros(ROWS, HEADS, SIZE)
    context.attend(rows, key, value, STARTS, STARTS, STARTS, rows.clone())


@pytest.mark.parametrize("copy", [False, True])
def test_a_layer_attends_once_more_to_what_it_staged(
    toy: ToyLayers, context: LayerContext, attended: list[tuple[torch.Tensor, ...]], copy: bool
) -> None:
    toy.window.begin(WindowBatch(Mode.STAGE, 2, 3, STARTS, {0: torch.arange(3)}, copy=copy))
    key, value = torch.randn(2, ROWS, HEADS, SIZE)
    assert context.stage(key, value) == 3
    attend(context, None, None)
    query, own_key, own_value, output = attended.pop()
    assert torch.equal(own_key[:3], key[:3])
    assert torch.equal(own_value[:3], value[:3])
    assert len(query) == len(output) == len(own_key) == (3 if copy else ROWS)
    attend(context, key, value)
    assert attended.pop()[1] is key
    # A backend may cut the queries to the windows' rows, beside prompts.
    rows = torch.zeros(3, HEADS, SIZE)
    context.attend(rows, None, None, STARTS, STARTS, STARTS, rows.clone())
    assert {len(tensor) for tensor in attended.pop()} == {3}


def test_in_a_mixed_steps_graph_as_well(
    toy: ToyLayers, context: LayerContext, attended: list[tuple[torch.Tensor, ...]]
) -> None:
    toy.window.split = SplitStep(ROWS, STARTS, STARTS, {}, None, None)
    key, value = torch.randn(2, ROWS, HEADS, SIZE)
    toy.window.split.keep(NAME, key, value)
    attend(context, None, None)
    _, own_key, own_value, _ = attended.pop()
    assert torch.equal(own_key, key)
    assert torch.equal(own_value, value)


def test_a_layer_that_has_staged_nothing_has_nothing_to_attend_to(
    toy: ToyLayers, context: LayerContext, attended: list[tuple[torch.Tensor, ...]]
) -> None:
    toy.window.begin(WindowBatch(Mode.STAGE, 2, 3, STARTS, {0: torch.arange(3)}))
    with pytest.raises(RuntimeError, match="none were staged"):
        attend(context, None, None)
    assert attended == []


class StockAttention:
    """What stock attention and the stock writer were called with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.metadata: list[Any] = []
        self.slots: list[Any] = []

        def forward(
            impl: Any, layer: Any, query: Any, key: Any, value: Any, cache: Any, metadata: Any, *rest: Any
        ):
            self.metadata.append(metadata)

        def update(impl: Any, layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
            self.slots.append(slots)

        monkeypatch.setattr(FlashAttentionImpl, "forward", forward)
        monkeypatch.setattr(FlashAttentionImpl, "do_kv_cache_update", update)


@pytest.mark.parametrize(
    ("where", "windows_only"),
    [("stage", False), ("attend", False), ("rest", False), ("stage", True), ("attend", True)],
)
def test_an_error_in_a_mixed_steps_graph_is_noted_and_the_pass_goes_on(
    toy: ToyLayers, context: LayerContext, monkeypatch: pytest.MonkeyPatch, where: str, windows_only: bool
) -> None:
    stock = StockAttention(monkeypatch)
    split = SplitStep(ROWS, STARTS, STARTS, {NAME: STARTS}, None, None, windows_only)
    rest = object()
    monkeypatch.setattr(split, "rest_of", lambda *_: rest)
    monkeypatch.setattr(context, "attend", lambda *_: None)

    def fail(*_: Any) -> None:
        raise RuntimeError("injected")

    owner, name = {"stage": (split, "keep"), "attend": (context, "attend"), "rest": (split, "rest_of")}[where]
    monkeypatch.setattr(owner, name, fail)
    impl: Any = object.__new__(NworFlashAttentionImpl)
    impl.nwor, toy.window.split = context, split
    metadata: Any = SimpleNamespace(block_table=STARTS, seq_lens=STARTS)
    key, value, query, output = torch.randn(4, ROWS, HEADS, SIZE)
    with toy.window_manager.capture_errors.noting():
        impl.do_kv_cache_update(None, key, value, None, STARTS)
        impl.forward(None, query, key, value, None, metadata, output)
        errors = list(toy.window.capture_errors or [])
    assert [error.split(",")[0] for error in errors] == ["stage" if where == "stage" else "verify attention"]
    assert "injected" in errors[0]
    assert stock.slots == ([] if windows_only else [STARTS])
    if where == "stage":
        assert stock.metadata == ([] if windows_only else [rest])
    else:
        assert stock.metadata == [metadata]
    state = toy.window_manager.state
    assert state.mode is Mode.STAGE
    assert toy.window_manager.capture_errors.settle()
    assert state.unsupported == ("capture", errors[0])


def test_mixed_steps_graphs_behind_an_error_are_stock(toy: ToyLayers) -> None:
    graphs = MixedGraphs(toy.window_manager)
    split = SplitStep(ROWS, STARTS, STARTS, {}, None, None)
    with graphs._showing(split):
        assert toy.window.split is split
        assert toy.window.capture_errors == []
        toy.window.capture_errors.append("injected")
    with graphs._showing(split):
        assert toy.window.split is None
    assert toy.window.capture_errors is None


def test_a_pass_outside_a_capture_is_a_fault_as_before(toy: ToyLayers, context: LayerContext) -> None:
    toy.window.begin(WindowBatch(Mode.STAGE, 2, 3, STARTS, {0: torch.arange(3)}))
    context.stage(*torch.randn(2, ROWS, HEADS, SIZE))
    context.give_up("verify attention", RuntimeError("injected"))
    assert toy.window_manager.state.fault == f"verify attention, layer {NAME}: RuntimeError: injected"
    assert not toy.window_manager.capture_errors.settle()
    assert toy.window.finished_direct
    assert toy.caches[NAME].any()


def test_all_ranks_hear_of_an_error_on_one(toy: ToyLayers, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed import parallel_state

    parallel = SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=2)
    toy.window_manager.vllm_config.parallel_config = parallel
    tensor = SimpleNamespace(world_size=2, cpu_group="tensor")
    pipeline = SimpleNamespace(world_size=2, cpu_group="pipeline", is_last_rank=True)
    monkeypatch.setattr(parallel_state, "get_tp_group", lambda: tensor)
    monkeypatch.setattr(parallel_state, "get_pp_group", lambda: pipeline)

    def all_gather_object(said: list[Any], mine: Any, group: str) -> None:
        said[:] = [mine, None] if group == "tensor" else [[None, "elsewhere"], mine]

    monkeypatch.setattr(stages.torch.distributed, "all_gather_object", all_gather_object)
    assert toy.window_manager.capture_errors.settle()
    assert toy.window_manager.state.unsupported == ("capture", "elsewhere")
