"""Claim: the drafter's first pass replays a mixed step's graph exactly where the target did.

Coverage: vLLM's manager of drafters, its capture and replay stood in for: the choice, which set a replay is
of, what draft layers see while a graph is captured, drafters of another kind. Graphs themselves need a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import (
    SpeculatorBatchDescriptor,
    SpeculatorCudaGraphManager,
)
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

from nwor.config import DraftBounds
from nwor.engine.cuda_graphs import draft
from nwor.engine.cuda_graphs.draft import (
    NworDraftGraphManager,
    NworDraftPassesManager,
    graph_numbers,
    request_sizes,
)
from nwor.engine.cuda_graphs.mixed_sizes import descriptors
from nwor.tree_shape import TreeShape

MIXED = descriptors(32, 4, [0, 1])
UNIFORM = BatchExecutionDescriptor(CUDAGraphMode.FULL, 20, 4, uniform_token_count=5)
PIECES = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 32, None)


@pytest.fixture
def layer() -> Any:
    return SimpleNamespace(impl=SimpleNamespace(vllm_flash_attn_version=3, nwor_draft=None))


class Speculator(TargetDependentARSpeculator):
    """A drafter's first pass: a model that adds one to each row, and a head that counts what it is given."""

    def __init__(self, manager: Any, layer: Any) -> None:
        self.prefill_cudagraph_manager = manager
        self.layer = layer
        self.runs: list[Any] = []
        self.heads: list[Any] = []

    load_draft_model = None  # type: ignore[assignment]

    def _run_model(self, num_tokens: int, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        told = self.layer.impl.nwor_draft
        split = told and told.split
        seen = None if split is None else (split.num_tokens, split.rest_starts.tolist())
        self.runs.append((num_tokens, seen))
        return torch.full((num_tokens, 2), float(num_tokens)), torch.full((num_tokens, 2), -float(num_tokens))


def _prefill(self: Any, num_reqs: int, num_tokens: int, *others: Any) -> Any:
    last, fed_back = self._run_model(num_tokens, *others)
    self.heads.append((num_reqs, last[0, 0].item(), fed_back[0, 0].item()))
    return "head", num_reqs


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, layer: Any) -> Any:
    made = object.__new__(SpeculatorCudaGraphManager)
    made.graphs, made._capture_descs = {}, {CUDAGraphMode.FULL: [UNIFORM]}
    made.max_num_reqs = 4
    monkeypatch.setattr(TargetDependentARSpeculator, "_prefill", _prefill)
    speculator = Speculator(made, layer)
    mixed = SimpleNamespace(graphs=dict.fromkeys(MIXED), chosen=None, next_drafts=None)
    assert NworDraftGraphManager.adopt(speculator, mixed, [layer])  # type: ignore[arg-type]

    def capture(self: Any, forward_fn: Any, state: Any, buffers: Any, progress_bar_desc: str = "") -> None:
        for desc in self._capture_descs[CUDAGraphMode.FULL]:
            arguments = desc.num_reqs, desc.num_tokens, None, None, None, CUDAGraphMode.NONE
            forward_fn(*arguments)
            assert desc not in self.graphs
            self.graphs[desc] = object()

    monkeypatch.setattr(SpeculatorCudaGraphManager, "capture", capture)
    monkeypatch.setattr(CudaGraphManager, "run_fullgraph", lambda self, desc: (desc, self.graphs[desc])[0])
    starts = torch.arange(40, dtype=torch.int32)
    made.capture(speculator._prefill, None, SimpleNamespace(query_start_loc=starts), progress_bar_desc="own")
    assert layer.impl.nwor_draft is None
    assert "_run_model" not in vars(speculator)
    return made


class FirstPass:
    """Stands in for the pass in two parts: what is asked of it."""

    def __init__(self, speculator: Any) -> None:
        self.stock = speculator._prefill
        self.written: list[Any] = []
        self.last: list[int] = []
        self.replay_last_rows: Any = None

    def rows(self, num_tokens: int, *_: Any) -> None:
        self.written.append(num_tokens)

    def last_rows(self, num_reqs: int, *_: Any) -> None:
        self.last.append(num_reqs)


@pytest.fixture
def parted(manager: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A manager whose passes of 24 rows and more are in two parts."""
    monkeypatch.setattr(draft, "LEAST_ROWS", 24)
    manager._first_pass = FirstPass(manager._speculator)
    del manager._speculator.runs[:], manager._speculator.heads[:]
    manager.graphs = {}
    manager.capture(manager._speculator._prefill, None, SimpleNamespace(query_start_loc=torch.arange(40)))
    return manager


def choose(
    monkeypatch: pytest.MonkeyPatch, manager: Any, own: Any, target: Any, tokens: int, requests: int = 3
) -> Any:
    monkeypatch.setattr(CudaGraphManager, "dispatch", lambda self, *_, **__: own)
    manager.mixed.chosen = target
    return manager.dispatch(requests, tokens, None, num_active_loras=0)


def test_a_graph_for_each_of_the_targets_and_for_each_number_of_requests(manager: Any) -> None:
    alone = [desc for desc in MIXED if not desc.num_active_loras]
    assert set(manager.graphs) == {UNIFORM}
    assert set(manager.mixed_graphs) == set(alone)
    runs: list[Any] = [(20, None)]  # vLLM's own; those by rows have attention scheduled in the graph
    runs += [(desc.num_tokens, (desc.num_tokens, list(range(desc.num_reqs + 1)))) for desc in alone]
    assert manager._speculator.runs == runs
    # None of those runs the head for the requests of the largest batch: that is in the graphs by requests.
    assert [desc.num_reqs for desc in manager.request_graphs] == [4, 2, 1]
    assert manager._speculator.heads == [(4, 20.0, -20.0), *((count, 8.0, -8.0) for count in (4, 2, 1))]
    assert manager._capture_descs == {CUDAGraphMode.FULL: [UNIFORM]}


def test_the_choice_follows_the_target(monkeypatch: pytest.MonkeyPatch, manager: Any) -> None:
    target = next(desc for desc in MIXED if desc.num_tokens == 32 and not desc.num_active_loras)
    adapters = next(desc for desc in MIXED if desc.num_active_loras)
    own = choose(monkeypatch, manager, PIECES, target, 32)
    assert own in manager.mixed_graphs
    assert own.num_tokens == 32
    assert choose(monkeypatch, manager, PIECES, None, 32) is PIECES
    assert choose(monkeypatch, manager, PIECES, target, 24) is PIECES
    assert choose(monkeypatch, manager, PIECES, adapters, adapters.num_tokens) is PIECES
    assert choose(monkeypatch, manager, UNIFORM, None, 32) is UNIFORM
    assert manager.run_fullgraph(UNIFORM) is UNIFORM
    # Where the number of drafts is chosen, the target of a step of windows alone runs in such a graph too.
    assert choose(monkeypatch, manager, UNIFORM, target, 32) is own
    # Steps with trees have graphs of their own, of the same rows.
    trees = replace(target, num_reqs=1)
    assert choose(monkeypatch, manager, PIECES, trees, 32) is own
    assert set(manager.graphs) == {UNIFORM}


@pytest.mark.parametrize(("requests", "replayed"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, None)])
def test_what_a_pass_does_for_each_request_is_done_for_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch, manager: Any, requests: int, replayed: int | None
) -> None:
    target = next(desc for desc in MIXED if desc.num_tokens == 24 and not desc.num_active_loras)
    order: list[Any] = []
    monkeypatch.setattr(
        CudaGraphManager, "run_fullgraph", lambda self, desc: order.append((desc, self.graphs[desc]))
    )
    desc = choose(monkeypatch, manager, PIECES, target, 24, requests)
    del manager._speculator.heads[:], manager._speculator.runs[:]
    manager.run_fullgraph(desc)
    (first, first_graph), *rest = order
    assert first is desc
    assert first_graph is manager.mixed_graphs[desc]
    assert [other.num_reqs for other, _ in rest] == ([replayed] if replayed else [])
    if replayed is None:
        assert manager._speculator.heads == [(5, 8.0, -8.0)]
        assert manager._speculator.runs == []
        assert "_run_model" not in vars(manager._speculator)


def test_of_graphs_of_the_same_rows_the_drafter_follows_the_one_for_most_requests(
    monkeypatch: pytest.MonkeyPatch, manager: Any
) -> None:
    wide = [desc for desc in MIXED if not desc.num_active_loras]
    narrow = [replace(desc, num_reqs=2) for desc in wide if desc.num_tokens in (16, 24)]
    targets = sorted([*wide, *narrow], key=lambda desc: (-desc.num_tokens, -desc.num_reqs))
    for order in (targets, sorted(targets, key=lambda desc: (-desc.num_tokens, desc.num_reqs))):
        manager.mixed.graphs = dict.fromkeys(order)
        manager.graphs = {}
        manager.capture(manager._speculator._prefill, None, SimpleNamespace(query_start_loc=torch.arange(40)))
        assert set(manager.mixed_graphs) == set(wide)
    assert choose(monkeypatch, manager, PIECES, narrow[0], narrow[0].num_tokens) in wide


def test_a_step_that_makes_no_drafts_runs_no_head(monkeypatch: pytest.MonkeyPatch, manager: Any) -> None:
    target = next(desc for desc in MIXED if desc.num_tokens == 24 and not desc.num_active_loras)
    order: list[Any] = []
    monkeypatch.setattr(CudaGraphManager, "run_fullgraph", lambda self, desc: order.append(desc))
    desc = choose(monkeypatch, manager, PIECES, target, 24, 5)
    del manager._speculator.heads[:]
    manager.mixed.next_drafts = 0
    manager.run_fullgraph(desc)
    assert order == [desc]
    assert manager._speculator.heads == []


ALONE = [desc for desc in MIXED if not desc.num_active_loras]


def test_graphs_of_many_rows_end_with_keys_and_values(parted: Any) -> None:
    few = [desc for desc in ALONE if desc.num_tokens < 24]
    assert few
    assert set(parted.mixed_graphs) == set(few)
    assert set(parted.written_graphs) == set(ALONE)
    assert parted._first_pass.written == [desc.num_tokens for desc in ALONE]
    assert [desc.num_reqs for desc in parted.request_graphs] == [4, 2, 1]
    assert [desc.num_reqs for desc in parted.last_row_graphs] == parted._first_pass.last == [4, 2, 1]
    # Only the largest of those that keep hidden states has room for them.
    assert len(parted._states[0]) == max(desc.num_tokens for desc in few)


@pytest.mark.parametrize("drafts", [None, 2, 0])
@pytest.mark.parametrize("rows", [16, 24, 32])
def test_what_is_replayed_by_rows_and_drafts(
    monkeypatch: pytest.MonkeyPatch, parted: Any, rows: int, drafts: int | None
) -> None:
    replayed: list[Any] = []
    monkeypatch.setattr(
        CudaGraphManager, "run_fullgraph", lambda self, desc: replayed.append(self.graphs[desc])
    )
    target = next(desc for desc in ALONE if desc.num_tokens == rows)
    parted.mixed.next_drafts = drafts
    desc = choose(monkeypatch, parted, PIECES, target, rows, 3)
    parted.run_fullgraph(desc)
    (four,) = (one for one in parted.last_row_graphs if one.num_reqs == 4)
    whole, heads = parted.mixed_graphs, parted.request_graphs
    if drafts == 0:
        assert replayed == [parted.written_graphs[desc]]
    elif rows < 24:
        assert replayed == [whole[desc], heads[four]]
    else:
        assert replayed == [parted.written_graphs[desc], parted.last_row_graphs[four]]


@pytest.mark.parametrize(("rows", "graph"), [(1, 8), (8, 8), (9, 16), (20, 24), (32, 32), (33, None)])
def test_steps_without_drafts_have_a_graph_by_rows_whatever_the_target_ran_in(
    monkeypatch: pytest.MonkeyPatch, parted: Any, rows: int, graph: int | None
) -> None:
    parted.mixed.next_drafts = 0
    desc = choose(monkeypatch, parted, UNIFORM, None, rows, rows)
    if graph is None:
        assert desc is UNIFORM
        return
    assert desc.num_tokens == graph
    replayed: list[Any] = []
    monkeypatch.setattr(
        CudaGraphManager, "run_fullgraph", lambda self, desc: replayed.append(self.graphs[desc])
    )
    assert parted.run_fullgraph(desc) is None
    assert replayed == [parted.written_graphs[desc]]
    # Of any other step the target's graph says it.
    parted.mixed.next_drafts = 1
    assert choose(monkeypatch, parted, UNIFORM, None, rows, rows) is UNIFORM


def test_passes_piece_by_piece_find_the_graphs_of_last_rows(
    monkeypatch: pytest.MonkeyPatch, parted: Any, layer: Any
) -> None:
    replayed: list[Any] = []
    monkeypatch.setattr(
        CudaGraphManager, "run_fullgraph", lambda self, desc: replayed.append(self.graphs[desc])
    )
    first_pass = FirstPass(parted._speculator)
    parted.__class__ = SpeculatorCudaGraphManager  # freshly made once more
    assert NworDraftGraphManager.adopt(parted._speculator, parted.mixed, [layer], first_pass)  # type: ignore[arg-type]
    assert not first_pass.replay_last_rows(1)  # nothing is captured yet
    parted.graphs = {}
    parted.capture(parted._speculator._prefill, None, SimpleNamespace(query_start_loc=torch.arange(40)))
    (four,) = (one for one in parted.last_row_graphs if one.num_reqs == 4)
    assert first_pass.replay_last_rows(3)
    assert replayed == [parted.last_row_graphs[four]]
    assert parted.graphs.keys() == {UNIFORM}
    assert not first_pass.replay_last_rows(5)


def test_more_requests_than_any_graph_takes_are_drafted_for_piece_by_piece(
    monkeypatch: pytest.MonkeyPatch, parted: Any
) -> None:
    target = next(desc for desc in ALONE if desc.num_tokens == 32)
    assert choose(monkeypatch, parted, PIECES, target, 32, 5) is PIECES
    parted.mixed.next_drafts = 0
    assert choose(monkeypatch, parted, PIECES, target, 32, 5) in parted.written_graphs


@pytest.mark.parametrize("most", [1, 3, 20, 100, 1024])
def test_every_batch_has_a_graph_by_requests_up_to_the_largest(most: int) -> None:
    sizes = request_sizes(most)
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[0] == min(most, 256)
    for count in range(1, sizes[0] + 1):
        assert min(size for size in sizes if size >= count) < 2 * count + 8


def test_a_drafter_that_feeds_back_what_its_head_reads_keeps_one_copy(manager: Any) -> None:
    manager._forget()
    state = torch.arange(6.0).view(3, 2)
    manager._keep(state, state)
    assert manager._states[0] is manager._states[1]
    manager._keep(state[:2] + 1, state[:2] + 1)
    assert manager._states[0].tolist() == [[1, 2], [3, 4], [4, 5]]


def test_a_failed_capture_ends_the_start(
    monkeypatch: pytest.MonkeyPatch, manager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def capture(self: Any, *_: Any, **__: Any) -> None:
        calls.append(len(self.graphs))
        if len(calls) == 2:
            raise RuntimeError("no memory")

    monkeypatch.setattr(SpeculatorCudaGraphManager, "capture", capture)
    with pytest.raises(RuntimeError, match="no memory"):
        manager.capture(None, None, SimpleNamespace(query_start_loc=torch.zeros(6)), progress_bar_desc="own")
    assert set(manager.graphs) == {UNIFORM}
    assert "set fast_drafting to false, or mixed_graph_rows to 0" in caplog.text


@pytest.mark.parametrize("version", [2, None])
def test_drafters_of_another_kind_are_left_alone(layer: Any, version: int | None) -> None:
    layer.impl.vllm_flash_attn_version = version
    stock = object.__new__(SpeculatorCudaGraphManager)
    adopt = NworDraftGraphManager.adopt
    assert not adopt(Speculator(stock, layer), None, [layer])  # type: ignore[arg-type]
    assert type(stock) is SpeculatorCudaGraphManager
    layer.impl.vllm_flash_attn_version = 3
    assert not adopt(Speculator(stock, layer), None, [])  # type: ignore[arg-type]
    assert not adopt(SimpleNamespace(prefill_cudagraph_manager=stock), None, [layer])  # type: ignore[arg-type]

    class Other(Speculator):
        def _prefill(self, *_: Any) -> None:  # type: ignore[override]
            pass

    assert not adopt(Other(stock, layer), None, [layer])  # type: ignore[arg-type]
    assert not adopt(SimpleNamespace(prefill_cudagraph_manager=None), None, [layer])  # type: ignore[arg-type]
    assert not adopt(SimpleNamespace(), None, [layer])  # type: ignore[arg-type]


def test_more_requests_than_may_have_trees_have_a_graph_of_chains() -> None:
    tree = TreeShape.of(60, 8)
    assert graph_numbers(DraftBounds(9, 60, given=True).with_tree(tree)) == [8, 13, 14, 15]
    assert graph_numbers(DraftBounds(0, 3)) == [2, 3]


def test_graphs_of_trees_are_for_few_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    captured: list[Any] = []
    stock = SpeculatorCudaGraphManager
    monkeypatch.setattr(stock, "capture", lambda self: captured.append(self._capture_descs))
    sizes = (1, 8, 16, 24, 32, 64, 128, 512)
    for tree in (TreeShape.of(60, 8), None):
        manager = object.__new__(stock)
        manager._capture_descs = {
            CUDAGraphMode.FULL: [
                BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=size, num_reqs=size)
                for size in sizes
            ]
        }
        bounds = DraftBounds() if tree is None else DraftBounds().with_tree(tree)
        assert NworDraftPassesManager.adopt(SimpleNamespace(decode_cudagraph_manager=manager), bounds)
        manager.capture(specialize_spec_tokens=True)
        made: dict[int, list[int]] = {}
        for desc in captured.pop()[CUDAGraphMode.FULL]:
            made.setdefault(desc.num_speculative_tokens, []).append(desc.num_reqs)
        chains = {drafts: list(sizes) for drafts in (2, 3, 4, 6, 8)}
        # Trees of 13, 29 and 58 nodes have the same passes, and the most requests have 13.
        trees = {drafts: [1, 8, 16, 24, 32] for drafts in (13, 14, 15)}
        assert made == chains | (trees if tree is not None else {})
        for drafts, graph in ((4, 4), (8, 8), *(((29, 13), (59, 14), (60, 15)) if tree is not None else ())):
            desc = BatchExecutionDescriptor(cg_mode=CUDAGraphMode.FULL, num_tokens=8, num_reqs=8)
            manager.graphs = {SpeculatorBatchDescriptor(**vars(desc), num_speculative_tokens=graph): None}
            found = manager.specialize_spec_tokens(desc, drafts)
            assert (found.cg_mode, found.num_speculative_tokens) == (CUDAGraphMode.FULL, graph)
