"""Model runner V1's second set of full graphs: captured with open windows, chosen by the open batch's mode.

CUDA's graphs are stood in for by objects that remember how they were captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.compilation import cuda_graph
from vllm.compilation.cuda_graph import CUDAGraphOptions, CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from nwor.engine.attention.layer_context import LayerContext
from nwor.engine.cuda_graphs import stage_graphs
from nwor.engine.cuda_graphs import v1 as graphs_v1
from nwor.engine.cuda_graphs.v1 import NworCUDAGraphWrapper
from nwor.engine.model_runner.v1_gpu import NworGPUModelRunnerV1
from nwor.modes import Mode
from nwor.windows.window import WindowBatch
from tests.unit.toy_layers import ToyLayers

LONGEST = 4
#: Graphs of two windows and of one; one of any batch of eight rows; one that is never captured.
TWO, ONE = BatchDescriptor(8, 2, uniform=True), BatchDescriptor(4, 1, uniform=True)
MIXED, UNKNOWN = BatchDescriptor(8, 4), BatchDescriptor(12, 3, uniform=True)
SLOTS = torch.tensor([0, 1, 2, 3, 8, 9, 10, 11])


class Graph:
    """Remembers whether a window was open when it was captured, and each replay."""

    def __init__(self) -> None:
        self.staged = False

    def replay(self) -> None:
        Engine.replays.append("stage" if self.staged else "stock")


class Engine:
    """A V1 runner around toy layers, with the wrapper that vLLM would have put around its model."""

    replays: list[str]

    def __init__(self, context: Any) -> None:
        Engine.replays = []
        self.toy = ToyLayers(longest=LONGEST)
        self.context = context
        self.passes: list[str] = []
        wrapper: Any = object.__new__(CUDAGraphWrapper)
        wrapper.runnable = self._model
        wrapper.vllm_config = wrapper.graph_pool = None
        wrapper.runtime_mode = CUDAGraphMode.FULL
        wrapper.is_debugging_mode = False
        wrapper.cudagraph_options = CUDAGraphOptions()
        wrapper.concrete_cudagraph_entries = {}
        self.runner: Any = object.__new__(NworGPUModelRunnerV1)
        self.runner.nwor, self.runner.model = self.toy.window_manager, wrapper
        self.runner.uniform_decode_query_len = LONGEST
        self.runner.engine = self
        self.graphs = NworCUDAGraphWrapper.adopt(wrapper, self.toy.window_manager)
        self.runner._nwor_graphs = self.graphs

    def _model(self) -> torch.Tensor:
        window = self.toy.window
        self.passes.append(
            "stage" if window.staging else "holding" if window.kept_alive is not None else "stock"
        )
        return self.toy.forward(torch.full((self.context.batch_descriptor.num_tokens,), -1))

    def capture(self) -> None:
        for mode, descs in ((CUDAGraphMode.PIECEWISE, [MIXED]), (CUDAGraphMode.FULL, [TWO, ONE, MIXED])):
            self.runner._capture_cudagraphs(descs, mode)

    def step(self, mode: Mode, desc: BatchDescriptor, runtime: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
        """Run a step of one full window and, where there is room for it, one of two rows."""
        self.toy.window_manager.state.switch(mode)
        self.step_on(desc, runtime)

    def step_on(self, desc: BatchDescriptor, runtime: CUDAGraphMode = CUDAGraphMode.FULL) -> None:
        """Run such a step in the mode that is in force."""
        lengths, drafts = ([4, 2], [3, 1]) if desc.num_tokens > 4 else ([4], [3])
        window_manager = self.toy.window_manager
        plan = window_manager.plan_step(["a", "b"][: len(lengths)], lengths, drafts)
        starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist(), 99], dtype=torch.int32)
        window_manager.begin(plan, starts, {0: SLOTS})
        self.context.batch_descriptor, self.context.cudagraph_runtime_mode = desc, runtime
        self.runner.model()


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    context = SimpleNamespace(batch_descriptor=None, cudagraph_runtime_mode=CUDAGraphMode.NONE)
    made = Engine(context)

    @contextmanager
    def capturing(graph: Graph, **kwargs: Any) -> Iterator[None]:
        graph.staged = made.toy.window.staging
        yield

    for module in (cuda_graph, graphs_v1):
        monkeypatch.setattr(module, "get_forward_context", lambda: context)
        monkeypatch.setattr(module, "is_forward_context_available", lambda: True)
    for module in (cuda_graph, stage_graphs):
        monkeypatch.setattr(module, "weak_ref_tensors", lambda tensors: tensors)
    monkeypatch.setattr(cuda_graph, "capture_pool", lambda *args: nullcontext())
    monkeypatch.setattr(cuda_graph, "current_stream", lambda: None)
    monkeypatch.setattr(cuda_graph, "validate_cudagraph_capturing_enabled", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capturing)
    free = iter(range(1000, 0, -100))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(free), 1000))
    monkeypatch.setattr(GPUModelRunner, "_dummy_run", _dummy_run)
    monkeypatch.setattr(GPUModelRunner, "_capture_cudagraphs", _capture_cudagraphs)
    return made


def _dummy_run(
    self: Any, num_tokens: int, cudagraph_runtime_mode: CUDAGraphMode, is_graph_capturing: bool = False
) -> None:
    self.engine.context.cudagraph_runtime_mode = cudagraph_runtime_mode
    self.model()


def _capture_cudagraphs(self: Any, descs: Any, mode: CUDAGraphMode, profiler: Any = None) -> None:
    for desc in descs:
        self.engine.context.batch_descriptor = desc
        self._dummy_run(desc.num_tokens, cudagraph_runtime_mode=CUDAGraphMode.NONE)
        self._dummy_run(desc.num_tokens, cudagraph_runtime_mode=mode, is_graph_capturing=True)


def test_both_sets_are_captured_each_pass_with_a_window_of_its_own(engine):
    engine.capture()
    # A warm-up and a capture of: piecewise MIXED; stock TWO, ONE, MIXED; stage TWO, ONE.
    assert engine.passes == ["stock", "holding"] + ["stock", "stock"] * 3 + ["stage", "stage"] * 2
    assert engine.toy.window.batch is None
    assert set(engine.graphs.concrete_cudagraph_entries) == {TWO, ONE, MIXED}
    assert set(engine.graphs.stage_entries) == {TWO, ONE}
    state = engine.toy.window_manager.state
    assert state.capture_seconds > 0
    assert state.capture_bytes == 100


def test_no_second_set_where_stage_is_not_enabled(engine):
    engine.toy.window_manager.state.config = SimpleNamespace(modes=(Mode.OFF, Mode.COW))
    engine.capture()
    assert "stage" not in engine.passes
    assert engine.graphs.stage_entries == {}


@pytest.mark.parametrize(
    ("mode", "expected"), [(Mode.OFF, "stock"), (Mode.COW, "stock"), (Mode.STAGE, "stage")]
)
def test_the_open_window_picks_the_graph(engine, mode, expected):
    engine.capture()
    passes = len(engine.passes)
    engine.step(mode, TWO)
    assert engine.replays == [expected]
    assert len(engine.passes) == passes  # replayed, not run


def test_a_replayed_window_is_committed_from_where_its_graph_left_it(engine):
    engine.capture()
    kept = dict(engine.toy.made)  # of ONE, the last to be captured
    engine.step(Mode.STAGE, ONE)
    engine.toy.window_manager.finish(torch.tensor([2], dtype=torch.int32))
    assert engine.toy.window_manager.state.fault is None
    for name, cache in engine.toy.caches.items():
        lines = cache.flatten(0, 1)
        assert torch.equal(lines[:2, 0], kept[name][:2])
        assert not lines[2:].any()


def failing(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("planted")


@pytest.mark.parametrize(("shared", "expected"), [(True, "stage"), (False, "stock")])
def test_after_a_fault_a_rank_replays_what_the_ranks_beside_it_do(engine, monkeypatch, shared, expected):
    engine.capture()
    kept = dict(engine.toy.made)
    window_manager = engine.toy.window_manager
    window_manager.state.shared_graphs = shared
    with monkeypatch.context() as patch:
        patch.setattr(engine.toy.window, "commit", failing)
        engine.step(Mode.STAGE, ONE)
        assert window_manager.finish(torch.tensor([2], dtype=torch.int32)).faulty
    assert engine.toy.written(SLOTS[:4]) == [0, 1, 2, 3]
    for cache in engine.toy.caches.values():
        cache.zero_()
    engine.replays.clear()
    rejected = torch.tensor([2], dtype=torch.int32)
    engine.step_on(ONE)
    plan = window_manager.finish(rejected)
    assert engine.replays == [expected]
    assert window_manager.state.report()["mode"] == "off"
    assert window_manager.state.fault == "commit: RuntimeError: planted"
    assert engine.toy.window.batch is None
    if shared:  # as much as stock's graph would have written, by the host's hand
        assert kept == engine.toy.made
        assert engine.toy.written(SLOTS[:4]) == [0, 1, 2, 3]
        window_manager.account(plan, [1])
        assert window_manager.state.counts.direct_windows == {"fault": 1}
    engine.step(Mode.STAGE, ONE)
    assert not window_manager.finish(rejected).faulty
    assert window_manager.state.fault is None
    assert engine.replays[-1] == "stage"
    engine.step(Mode.OFF, ONE)
    assert engine.replays[-1] == "stock"


@pytest.mark.parametrize(("shared", "expected"), [(True, "stage"), (False, "stock")])
def test_a_step_that_begins_with_a_fault_replays_what_the_ranks_beside_it_do(
    engine, monkeypatch, shared, expected
):
    engine.capture()
    window_manager = engine.toy.window_manager
    window_manager.state.shared_graphs = shared
    window_manager.state.config = replace(window_manager.state.config, self_check_interval=1)
    monkeypatch.setattr("nwor.engine.window_manager.SelfCheck", failing)
    engine.step(Mode.STAGE, ONE)
    assert engine.replays == [expected]
    assert window_manager.finish(torch.tensor([2], dtype=torch.int32)).faulty
    assert window_manager.state.fault == "begin: RuntimeError: planted"
    if shared:
        assert engine.toy.written(SLOTS[:4]) == [0, 1, 2, 3]


def test_a_window_that_cannot_be_opened_at_all_ends_no_step(engine, monkeypatch):
    engine.capture()
    engine.toy.window_manager.state.shared_graphs = True
    monkeypatch.setattr(engine.toy.window, "begin", failing)
    engine.step(Mode.STAGE, ONE)
    assert engine.replays == ["stock"]
    assert engine.toy.window_manager.finish(torch.tensor([2], dtype=torch.int32)).faulty


def test_no_second_set_where_every_window_is_copied_as_layers_run(engine):
    engine.toy.window_manager._planner.copy_always = True
    engine.capture()
    assert "stage" not in engine.passes
    engine.step(Mode.STAGE, TWO)
    assert engine.replays == ["stock"]
    assert engine.toy.window_manager.finish(torch.zeros(2, dtype=torch.int32)).direct_reason == "graph"


@pytest.mark.parametrize("desc", [UNKNOWN, MIXED])
def test_a_size_that_was_not_captured_for_stage_is_written_directly(engine, desc):
    engine.capture()
    engine.step(Mode.STAGE, desc)
    assert engine.toy.window.finished_direct
    plan = engine.toy.window_manager.finish(torch.zeros(2, dtype=torch.int32))
    assert plan.direct_reason == "graph"
    # The wrapper captured what it had none for, as vLLM's does, for direct writes.
    assert engine.replays == (["stock"] if desc == MIXED else [])
    assert desc not in engine.graphs.stage_entries


def test_a_step_whose_rows_others_of_it_read_is_written_directly(engine, monkeypatch):
    engine.capture()
    begin: Callable[[WindowBatch], None] = engine.toy.window.begin
    monkeypatch.setattr(engine.toy.window, "begin", lambda batch: begin(replace(batch, early=batch.slots)))
    engine.step(Mode.STAGE, TWO)
    assert engine.replays == ["stock"]
    assert engine.toy.window_manager.finish(torch.zeros(2, dtype=torch.int32)).direct_reason == "graph"


def test_an_error_on_the_way_to_a_graph_of_stage_takes_the_stock_graph(engine, monkeypatch):
    def broken(*args: Any) -> None:
        raise RuntimeError("not adopted")

    engine.capture()
    monkeypatch.setattr(engine.toy.window, "adopt", broken)
    engine.step(Mode.STAGE, TWO)
    assert engine.replays == ["stock"]
    assert not engine.toy.window.staging
    state = engine.toy.window_manager.state
    assert (state.mode, state.fault) == (Mode.OFF, "graph: RuntimeError: not adopted")
    plan = engine.toy.window_manager.finish(torch.zeros(2, dtype=torch.int32))
    assert plan.direct_reason == "fault"
    assert engine.toy.window.batch is None
    record = engine.toy.window_manager.account(plan, [0, 0])
    assert record.windows == {"a": ("stage", "fault", 3, 0), "b": ("stage", "fault", 1, 0)}


@pytest.mark.parametrize("runtime", [CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE])
def test_steps_without_a_full_graph_hand_their_windows_over_as_layers_run(engine, runtime):
    engine.capture()
    engine.step(Mode.STAGE, MIXED, runtime)
    assert engine.replays == []
    assert engine.passes[-1] == "stage"
    assert set(engine.toy.window.sources) == set(engine.toy.names)


def _layer_fails(engine: Engine) -> None:
    window, manager = engine.toy.window, engine.toy.window_manager
    if window.staging:
        layer = window.groups[0].layers[1]
        context: Any = LayerContext(window, manager.state, layer, parameters=None, workspace=None)
        context.give_up("verify attention", RuntimeError("no shared memory"))


def _layer_is_left_out(engine: Engine) -> None:
    engine.toy.window._sources.pop("layer.1", None)


@pytest.mark.parametrize(
    ("wrong", "why", "staged"),
    [
        # The passes behind the first are stock passes, captured in the same order as on other ranks.
        (_layer_fails, "verify attention, layer layer.1: RuntimeError: no shared memory", 1),
        (_layer_is_left_out, "1 layers were not staged, the first is layer.1", 4),
    ],
)
def test_a_layer_that_fails_while_captured_ends_staging_and_not_the_start(
    engine, monkeypatch, wrong, why, staged
):
    forward = engine.toy.forward

    def failing(slots: torch.Tensor) -> torch.Tensor:
        output = forward(slots)
        wrong(engine)
        return output

    monkeypatch.setattr(engine.toy, "forward", failing)
    engine.capture()
    manager, state = engine.toy.window_manager, engine.toy.window_manager.state
    assert state.unsupported == ("capture", why)
    assert engine.passes.count("stage") == staged
    assert state.fault is None
    assert state.token_bytes == 0
    assert manager.window is None
    assert engine.toy.window.batch is None
    assert engine.toy.window.capture_errors is None
    assert not any(cache.any() for cache in engine.toy.caches.values())
    assert not engine.graphs.capturing_stage
    assert engine.graphs.stage_entries == {}
    # vLLM's own graphs are whole, and serve every step.
    plan = manager.plan_step(["a", "b"], [4, 2], [3, 1])
    manager.begin(plan, torch.tensor([0, 4, 6], dtype=torch.int32), {0: SLOTS})
    engine.context.batch_descriptor, engine.context.cudagraph_runtime_mode = TWO, CUDAGraphMode.FULL
    engine.runner.model()
    assert engine.replays == ["stock"]
    manager.account(manager.finish(torch.tensor([0, 0], dtype=torch.int32)), [3, 1])
    assert state.counts.direct_windows == {"capture": 2}


def test_clearing_takes_both_sets(engine):
    engine.capture()
    engine.graphs.clear_graphs()
    assert engine.graphs.concrete_cudagraph_entries == {}
    assert engine.graphs.stage_entries == {}
    engine.step(Mode.STAGE, TWO)
    assert engine.toy.window.finished_direct


def test_only_the_wrapper_around_the_model_is_taken_over(engine):
    again = NworCUDAGraphWrapper.adopt(engine.graphs, engine.toy.window_manager)
    assert again is engine.graphs

    class Foreign(CUDAGraphWrapper):
        pass

    with pytest.raises(TypeError, match="Foreign"):
        NworCUDAGraphWrapper.adopt(object.__new__(Foreign), engine.toy.window_manager)
