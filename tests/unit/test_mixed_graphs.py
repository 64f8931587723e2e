"""Claim: one graph of a mixed step writes, keeps and commits the right rows, wherever its windows end.

Coverage: layers with real caches on a CPU, the graph stood in for by the captured pass run again: splits of
every kind, rows written early, copies aside, faults, the choice among sizes, engines without such graphs.
Attention, capture and replay need a GPU: tests/gpu.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

from nwor.engine.attention.split_step import MOST_SPLIT_ROWS, SplitStep, splits_for
from nwor.engine.cuda_graphs import mixed as mixed_graphs
from nwor.engine.cuda_graphs import mixed_sizes
from nwor.engine.cuda_graphs.mixed import MixedGraphs
from nwor.engine.cuda_graphs.mixed_sizes import descriptors, graph_sizes, largest_size
from nwor.engine.cuda_graphs.v2 import NworCudaGraphManager
from nwor.modes import Mode
from nwor.windows.batch import WindowKind
from tests.unit.toy_layers import BLOCK, BLOCKS, ToyLayers

#: Two windows, of three rows and one, then a prompt of seven; the graph has sixteen rows and four requests.
STARTS = torch.tensor([0, 3, 4, 11, 11, 11, 11], dtype=torch.int32)
WINDOW_ROWS, ROWS, SIZE = 4, 11, 16
SLOTS = torch.tensor([[9, 10, 11, 20, 4, 5, 6, 7, 0, 1, 2, *[-1] * 21]])


class Engine:
    """A rank with the graphs of two sizes, captured on a CPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most_kept: int) -> None:
        monkeypatch.setattr(mixed_graphs, "MOST_KEPT_ROWS", most_kept)
        monkeypatch.setattr(mixed_graphs, "weak_sources", dict)
        monkeypatch.setattr(mixed_sizes, "STEPS", ((1 << 30, 16),))
        self.toy = ToyLayers()
        self.window_manager = self.toy.window_manager
        self.slots, self.starts = SLOTS.clone(), STARTS.clone()
        self.mixed = self.window_manager.mixed = MixedGraphs(self.window_manager)
        self.passes: dict[Any, Any] = {}
        self.descs = descriptors(32, 4, [0])
        self.mixed.capture(self.descs, self.slots, self.starts, self._run)

    def _run(self, wrap: Any) -> dict[Any, Any]:
        return self._captured(wrap, self.passes)

    def _captured(self, wrap: Any, passes: dict[Any, Any]) -> dict[Any, Any]:
        for desc in self.descs:
            for warmup in (True, False):
                passes[desc] = wrap(desc, lambda _: self.toy.forward_split(), warmup)
                passes[desc](CUDAGraphMode.NONE)
        return dict.fromkeys(self.descs)

    def capture_windows(self) -> dict[Any, Any]:
        """Capture graphs of windows alone too, and return their passes."""
        passes: dict[Any, Any] = {}
        self.mixed.capture_windows(self.slots, self.starts, lambda wrap: self._captured(wrap, passes))
        return passes

    def step(self, early: bool = False) -> Any:
        """Begin a step, choose its graph and replay it."""
        desc = self.mixed.choose(3, ROWS, 0)
        assert desc is not None
        plan = self.window_manager.plan_step(
            "abc", [3, 1, 7], [2, 0, 0], early=early, graph_copies=self.mixed.copies(desc)
        )
        self.window_manager.begin(plan, self.starts, self.slots)
        self.mixed.prepare(desc)
        self.replay(desc)
        return plan

    def replay(self, desc: Any) -> None:
        """Leave keys and values where the captured pass left them, as a graph does.

        Not where the pass itself copies them aside: what is kept is then what it copied.
        """
        left = self.mixed._sources[desc].sources
        if self.mixed.copies(desc):
            for key, value in left.values():
                key.zero_()
                value.zero_()
        self.passes[desc](CUDAGraphMode.NONE)
        if not self.mixed.copies(desc):
            for name, (key, value) in left.items():
                key.copy_(self.toy.made[name])
                value.copy_(-self.toy.made[name])


@pytest.fixture(params=[512, 0], ids=["kept", "copied"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Engine:
    return Engine(monkeypatch, request.param)


def test_windows_stay_out_of_the_cache_and_the_rest_is_written(engine: Engine) -> None:
    plan = engine.step()
    rows = SLOTS[0, :ROWS]
    assert engine.toy.written(rows) == list(range(WINDOW_ROWS, ROWS))
    engine.window_manager.finish(torch.tensor([1, 0, 0], dtype=torch.int32))
    assert engine.toy.written(rows) == [0, 1, 3, *range(WINDOW_ROWS, ROWS)]
    engine.window_manager.account_sampled(plan, [2, 1, 1])
    counts, state = engine.window_manager.state.counts, engine.window_manager.state
    assert counts.accepted_windows == [0, 1, 0]
    assert counts.direct_windows == {}
    copied = WINDOW_ROWS * state.engine_source_bytes if engine.mixed.copies(engine.descs[0]) else 0
    assert counts.stage_bytes == copied
    assert state.report()["mixed_graphs"] == {"rows": 32, "steps": 1, "why_not": "not captured"}


def test_slots_that_no_step_names_are_left_alone(engine: Engine) -> None:
    engine.step()
    engine.window_manager.finish(torch.tensor([0, 0, 0], dtype=torch.int32))
    named = set(SLOTS[0, :ROWS].tolist())
    others = torch.tensor([slot for slot in range(BLOCKS * BLOCK) if slot not in named])
    assert all(not cache.flatten(0, 1)[others].any() for cache in engine.toy.caches.values())


def test_rows_that_others_of_the_step_read_are_written_as_layers_run(engine: Engine) -> None:
    rows = SLOTS[0, :ROWS]
    engine.step(early=True)
    assert engine.toy.written(rows) == [0, 3, *range(WINDOW_ROWS, ROWS)]
    engine.window_manager.finish(torch.tensor([2, 0, 0], dtype=torch.int32))
    assert engine.toy.written(rows) == [0, 3, *range(WINDOW_ROWS, ROWS)]
    # The step after it has nothing to write early.
    for cache in engine.toy.caches.values():
        cache.zero_()
    engine.step()
    assert engine.toy.written(rows) == list(range(WINDOW_ROWS, ROWS))


@pytest.mark.parametrize("rows", [0, 4, 11])
def test_a_graph_serves_every_split(engine: Engine, rows: int) -> None:
    window = engine.window_manager.window
    assert window is not None
    engine.mixed._rows.fill_(rows)
    with engine.mixed._open(engine.descs[-1], engine.slots, engine.starts) as split:
        assert split.window_starts.tolist() == [min(start, rows) for start in STARTS[:5].tolist()]
        assert split.rest_starts.tolist() == [max(start, rows) for start in STARTS[:5].tolist()]
        expected = [-1] * rows + SLOTS[0, rows:SIZE].tolist()
        assert [slots.tolist() for slots in split.slots.values()] == [expected] * 3
        assert window.split is split
    assert window.split is None


def test_a_fault_before_the_replay_writes_every_row(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("injected")

    window = engine.window_manager.window
    assert window is not None
    engine.step()  # leaves a split behind that the next step must not find
    engine.window_manager.drop()
    with monkeypatch.context() as patch:
        patch.setattr(window, "adopt", fail)
        plan = engine.step()
    assert engine.toy.written(SLOTS[0, :ROWS]) == list(range(ROWS))
    assert engine.window_manager.state.mode is Mode.OFF
    engine.window_manager.finish(torch.tensor([2, 0, 0], dtype=torch.int32))
    engine.window_manager.account_sampled(plan, [1, 1, 1])
    assert engine.window_manager.state.counts.direct_windows == {"fault": 1}
    assert engine.toy.written(SLOTS[0, :ROWS]) == list(range(ROWS))


def test_a_step_without_windows_is_written_as_a_whole(engine: Engine) -> None:
    engine.step()
    engine.window_manager.drop()
    desc = engine.mixed.choose(3, ROWS, 0)
    assert desc is not None
    engine.window_manager.begin(None, engine.starts, engine.slots)
    engine.mixed.prepare(desc)
    engine.replay(desc)
    assert engine.toy.written(SLOTS[0, :ROWS]) == list(range(ROWS))


def test_only_steps_that_are_staged_take_these_graphs(engine: Engine) -> None:
    choose = engine.mixed.choose
    assert choose(1, 3, 0) is engine.descs[-1]
    assert choose(3, 17, 0) is engine.descs[0]
    assert choose(3, 33, 0) is None
    assert choose(5, 17, 0) is None
    assert choose(3, 17, 1) is None
    engine.window_manager.state.switch(Mode.OFF)
    assert choose(1, 3, 0) is None
    assert engine.mixed.chosen is None
    engine.window_manager.state.switch(Mode.STAGE)
    engine.mixed.clear()
    assert choose(1, 3, 0) is None


def test_pieces_of_larger_steps_are_not_served(engine: Engine) -> None:
    """vLLM's piecewise graphs beyond the largest of these have to keep their keys and values."""
    assert [rows for rows in (1, 16, 32, 33, 512) if engine.mixed.serves(rows)] == [1, 16, 32]
    engine.mixed.clear()
    assert not engine.mixed.serves(1)


WINDOWS = torch.tensor([0, 3, 4, 8, 8, 8, 8], dtype=torch.int32)


@pytest.mark.parametrize("early", [False, True])
def test_a_step_of_windows_alone_runs_in_a_graph_that_writes_nothing(engine: Engine, early: bool) -> None:
    passes = engine.capture_windows()
    engine.starts.copy_(WINDOWS)
    desc = engine.mixed.choose(3, 8, 0)
    assert desc is not None
    copies = engine.mixed.copies(desc)
    plan = engine.window_manager.plan_step("abc", [3, 1, 4], [2, 0, 3], early=early, graph_copies=copies)
    engine.window_manager.begin(plan, engine.starts, engine.slots)
    graphs = engine.mixed.prepare(desc)
    # Rows that others of the step read have to be written by the pass.
    assert (graphs is engine.mixed.window_graphs) == (not early)
    if early:
        return
    assert engine.mixed._window_sources[desc] is not engine.mixed._sources[desc]
    left = engine.mixed._window_sources[desc].sources
    passes[desc](CUDAGraphMode.NONE)
    if not copies:
        for name, (key, value) in left.items():
            key.copy_(engine.toy.made[name])
            value.copy_(-engine.toy.made[name])
    rows = SLOTS[0, :8]
    assert engine.toy.written(rows) == []
    engine.window_manager.finish(torch.tensor([1, 0, 2], dtype=torch.int32))
    assert engine.toy.written(rows) == [0, 1, 3, 4, 5]
    assert engine.window_manager.state.report()["mixed_graphs"]["steps"] == 0


def test_a_step_with_other_rows_does_not_take_a_graph_of_windows_alone(engine: Engine) -> None:
    engine.capture_windows()
    desc = engine.mixed.choose(3, ROWS, 0)
    plan = engine.window_manager.plan_step(
        "abc", [3, 1, 7], [2, 0, 0], graph_copies=engine.mixed.copies(desc)
    )
    engine.window_manager.begin(plan, engine.starts, engine.slots)
    assert engine.mixed.prepare(desc) is engine.mixed.graphs


def test_sizes_grow_with_the_rows_and_end_at_the_limit() -> None:
    sizes = graph_sizes(2048)
    assert sizes[:5] == [8, 16, 24, 32, 40]
    assert sizes[-3:] == [1920, 1984, 2048]
    # Steps of up to 512 rows are padded no further than in vLLM's own graphs.
    assert all(b - a <= (8 if b <= 256 else 16) for a, b in itertools.pairwise(sizes) if b <= 512)
    assert max(b - a for a, b in itertools.pairwise(sizes)) == 64
    assert sizes == sorted(set(sizes))
    assert graph_sizes(600) == [*(size for size in sizes if size < 600), 600]  # no step has more rows
    assert graph_sizes(2368)[-2:] == [2304, 2368]
    assert graph_sizes(7) == []
    assert graph_sizes(4096)[len(sizes) :] == list(range(2048 + 128, 4096 + 1, 128))


@pytest.mark.parametrize(
    ("parameters", "layers", "rows"),
    [
        (1_236_000_000, 16, 3840),
        (8_030_000_000, 32, 2048),
        (4_015_000_000, 32, 2304),
        (500_000, 2, 8192),
        (0, 0, 2048),
    ],
)
def test_small_models_have_larger_graphs(parameters: int, layers: int, rows: int) -> None:
    assert largest_size(parameters, layers) == rows
    assert rows in graph_sizes(mixed_sizes.MOST_LARGEST)


def test_graphs_take_as_many_requests_as_are_likely_in_so_many_rows() -> None:
    assert [desc.num_reqs for desc in descriptors(32, 20, [0, 1])] == [20, 20, 16, 16, 16, 16, 8, 8]
    by_rows: dict[int, list[int | None]] = {}
    for desc in descriptors(2048, 1024, [0]):
        by_rows.setdefault(desc.num_tokens, []).append(desc.num_reqs)
    assert [by_rows[rows] for rows in (8, 16, 24, 32, 40, 80, 1984)] == [
        [8],
        [16],
        [16],
        [16],
        [20],
        [40],
        [992],
    ]
    # Some take as many requests as there are rows, for steps in which few requests speculate.
    assert [by_rows[rows] for rows in (64, 128, 384, 512, 1536)] == [
        [64, 32],
        [128, 64],
        [384, 192],
        [512, 256],
        [1024, 768],
    ]
    # Any step that is small enough fits at least into the largest.
    assert by_rows[2048] == [1024]
    assert {desc.num_reqs for desc in descriptors(2048, 4, [0])} == {4}
    assert len({(desc.num_tokens, desc.num_reqs) for desc in descriptors(2048, 4, [0])}) == 80
    assert next(desc.num_reqs for desc in descriptors(64, 4096, [0])) == 64


def _padded(descs: list[Any], rows: int, requests: int) -> int:
    return min(desc.num_tokens for desc in descs if desc.num_tokens >= rows and desc.num_reqs >= requests)


def test_steps_with_trees_have_graphs_of_fewer_sizes_for_fewer_requests() -> None:
    every, trees = (descriptors(2000, 1024, [0], tree_rows=rows) for rows in (None, 17))
    # The drafter's pass runs in the graphs of the others, by their rows.
    most = {desc.num_tokens: desc.num_reqs or 0 for desc in reversed(every)}
    assert {desc.num_tokens for desc in trees} < set(most)
    assert all((desc.num_reqs or 0) <= most[desc.num_tokens] for desc in trees)
    assert trees[0] == every[0]
    assert trees[0].num_reqs == 1024
    for requests, rows in ((1, 61), (2, 122), (3, 183), (4, 244), (8, 33 * 8), (16, 16 * 17), (16, 16 * 61)):
        assert _padded(trees, rows, requests) - rows < max(64, rows // 4)
    likely = {desc.num_tokens: desc.num_reqs for desc in trees}  # the last of a size takes the fewest
    assert [likely[size] for size in (16, 64, 128, 256, 320)] == [2, 8, 16, 16, 18]
    assert descriptors(7, 4, [0], tree_rows=17) == []


@pytest.mark.parametrize(
    ("trees", "others", "rows"), [(10, 40, 1), (1, 60, 8), (4, 30, 5), (1, 12, 9), (2, 100, 1)]
)
def test_few_trees_beside_many_short_requests_are_not_padded_much(trees: int, others: int, rows: int) -> None:
    step = trees * 17 + others * rows
    size = _padded(descriptors(2048, 256, [0], tree_rows=17), step, trees + others)
    assert size <= max(256, 1.35 * step)


@pytest.mark.parametrize(("requests", "rows"), [(237, 276), (132, 148), (1000, 1100), (60, 70)])
def test_many_requests_without_drafts_are_not_padded_much(requests: int, rows: int) -> None:
    # Up to about 150 rows padding costs nothing.
    assert _padded(descriptors(2048, 1024, [0]), rows, requests) <= max(152, 1.42 * rows)


@pytest.fixture
def with_trees(monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine with graphs of chains of up to 3 rows, and of trees."""
    engine = Engine(monkeypatch, 512)
    engine.mixed.kind = WindowKind(3, trees=False)
    engine.mixed.of_trees = MixedGraphs(engine.window_manager, WindowKind(17, trees=True))
    descs = descriptors(32, 4, [0], tree_rows=8)

    def run(wrap: Any) -> dict[Any, Any]:
        for desc in descs:
            wrap(desc, lambda _: engine.toy.forward_split(), False)(CUDAGraphMode.NONE)
        return dict.fromkeys(descs)

    engine.mixed.of_trees.capture(descs, engine.slots, engine.starts, run)
    return engine


def test_steps_with_trees_take_their_own_graphs(with_trees: Engine) -> None:
    mixed, trees = with_trees.mixed, with_trees.mixed.of_trees
    assert trees is not None
    chains = mixed.choose(3, ROWS, 0)
    assert chains in mixed.graphs
    assert chains is not None
    assert mixed.prepare(chains) is mixed.graphs
    mixed.verifies_trees = True
    grown = mixed.choose(3, ROWS, 0)
    assert grown is mixed.chosen is trees.chosen
    assert grown is not None
    assert any(desc is grown for desc in trees.graphs)
    assert mixed.prepare(grown) is trees.graphs
    # The smaller graph is for two trees at most.
    assert grown.num_tokens == 32
    assert mixed.longest == 17
    mixed.chosen = None  # as where a step runs without graphs
    assert mixed.longest is None
    mixed.verifies_trees = False
    assert mixed.choose(3, ROWS, 0) is chains
    assert mixed.longest == 3
    assert trees.chosen is None
    assert mixed.prepare(chains) is mixed.graphs
    assert mixed.serves(32)
    trees.clear()
    assert not mixed.serves(32)
    mixed.verifies_trees = True
    assert mixed.choose(3, ROWS, 0) is None
    mixed.clear()
    assert not mixed.graphs


def test_both_sets_copy_aside_to_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(monkeypatch, 0)
    trees = engine.mixed.of_trees = MixedGraphs(engine.window_manager, WindowKind(17, trees=True))
    for graphs in (engine.mixed, trees):
        graphs.capture(engine.descs, engine.slots, engine.starts, engine._run)
    assert trees._aside is engine.mixed._aside
    assert trees._aside
    own = engine.mixed._sources[engine.descs[0]].sources
    theirs = trees._sources[engine.descs[0]].sources
    assert all(own[name][0].data_ptr() == theirs[name][0].data_ptr() for name in own)


def test_layers_know_which_windows_a_graph_is_captured_for(with_trees: Engine) -> None:
    window = with_trees.window_manager.window
    assert window is not None
    assert with_trees.mixed.of_trees is not None
    for graphs in (with_trees.mixed, with_trees.mixed.of_trees):
        with graphs._open(with_trees.descs[-1], with_trees.slots, with_trees.starts):
            assert window.kind is graphs.kind
        with graphs._open(with_trees.descs[-1], with_trees.slots, with_trees.starts, windows_only=True):
            assert window.kind is graphs.kind
        assert window.kind is None


def test_partial_results_take_no_more_memory_where_rows_are_many() -> None:
    assert [splits_for(rows) for rows in (1, 32, 128, 512, 1024, 4096)] == [32, 32, 8, 2, 1, 1]
    assert all(rows * splits_for(rows) <= max(rows, MOST_SPLIT_ROWS) for rows in graph_sizes(8192))


def _config(**other: Any) -> Any:
    parts: dict[str, Any] = {
        "compilation_config": SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
        "parallel_config": SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=1),
        "cache_config": SimpleNamespace(kv_sharing_fast_prefill=False),
    }
    return SimpleNamespace(**(parts | other))


def _layer(version: int, builder: type) -> Any:
    backend = SimpleNamespace(get_builder_cls=lambda: builder)
    return SimpleNamespace(
        impl=SimpleNamespace(vllm_flash_attn_version=version), get_attn_backend=lambda: backend
    )


def test_engines_without_such_graphs_say_why() -> None:
    builder = mixed_graphs.FlashAttentionMetadataBuilder
    layers = {"a": _layer(3, builder)}
    why_not = mixed_graphs.why_not
    assert why_not(_config(), layers, False) is None
    pieces = SimpleNamespace(cudagraph_mode=CUDAGraphMode.PIECEWISE)
    assert "full CUDA graphs" in str(why_not(_config(compilation_config=pieces), layers, False))
    ranks = SimpleNamespace(data_parallel_size=2, pipeline_parallel_size=1)
    assert "data-parallel" in str(why_not(_config(parallel_config=ranks), layers, False))
    stages = SimpleNamespace(data_parallel_size=1, pipeline_parallel_size=2)
    assert "pipeline" in str(why_not(_config(parallel_config=stages), layers, False))
    prefill = SimpleNamespace(kv_sharing_fast_prefill=True)
    assert "kv_sharing" in str(why_not(_config(cache_config=prefill), layers, False))
    assert "embeddings" in str(why_not(_config(), layers, True))
    assert "layer b" in str(why_not(_config(), layers | {"b": _layer(2, builder)}, False))
    assert "builder" in str(why_not(_config(), {"a": _layer(3, object)}, False))


def test_a_stream_beside_is_not_needed() -> None:
    rows = torch.zeros(1, dtype=torch.int32)
    split = SplitStep(1, rows, rows, {}, None, None)
    split.fork()
    with split.beside():
        split.keep("layer", rows, rows)
    split.join()
    assert list(split.sources) == ["layer"]


@pytest.mark.parametrize(("rows", "held"), [(16, False), (32, False), (40, True), (512, True)])
def test_vllms_pieces_keep_what_a_larger_step_leaves(engine: Engine, rows: int, held: bool) -> None:
    window = engine.window_manager.window
    manager = SimpleNamespace(mixed=engine.mixed, nwor=engine.window_manager)
    seen: list[bool] = []

    def create(desc: Any, warmup: bool) -> Any:
        return lambda cg_mode: seen.append(window is not None and window.kept_alive is not None)

    desc = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, rows, None)
    holding = NworCudaGraphManager._holding(manager, create)  # type: ignore[arg-type]
    for mode in (CUDAGraphMode.NONE, CUDAGraphMode.PIECEWISE):
        holding(desc, False)(mode)
    assert seen == [False, held]
