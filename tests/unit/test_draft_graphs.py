"""Claim: the drafter's first pass replays a mixed step's graph exactly where the target did.

Coverage: vLLM's manager of drafters, its capture and replay stood in for: the choice, which set a replay is
of, what draft layers see while a graph is captured, drafters of another kind. Graphs themselves need a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils import SpeculatorCudaGraphManager

from nwor.config import DraftBounds
from nwor.engine.cuda_graphs.draft import NworDraftGraphManager, NworDraftPassesManager
from nwor.engine.cuda_graphs.mixed import descriptors
from nwor.tree_shape import TreeShape

MIXED = descriptors(32, 4, [0, 1])
UNIFORM = BatchExecutionDescriptor(CUDAGraphMode.FULL, 20, 4, uniform_token_count=5)
PIECES = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 32, None)


@pytest.fixture
def layer() -> Any:
    return SimpleNamespace(impl=SimpleNamespace(vllm_flash_attn_version=3, nwor_draft=None))


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch, layer: Any) -> Any:
    made = object.__new__(SpeculatorCudaGraphManager)
    made.graphs, made._capture_descs = {}, {CUDAGraphMode.FULL: [UNIFORM]}
    speculator = SimpleNamespace(prefill_cudagraph_manager=made)
    mixed = SimpleNamespace(graphs=dict.fromkeys(MIXED), chosen=None)
    assert NworDraftGraphManager.adopt(speculator, mixed, [layer])  # type: ignore[arg-type]

    def capture(self: Any, forward_fn: Any, state: Any, buffers: Any, progress_bar_desc: str = "") -> None:
        for desc in self._capture_descs[CUDAGraphMode.FULL]:
            self.graphs[desc] = forward_fn(desc.num_reqs, desc.num_tokens, progress_bar_desc)

    monkeypatch.setattr(SpeculatorCudaGraphManager, "capture", capture)
    monkeypatch.setattr(CudaGraphManager, "run_fullgraph", lambda self, desc: self.graphs[desc])
    starts = torch.arange(6, dtype=torch.int32)

    def prefill(num_reqs: int, num_tokens: int, what: str) -> Any:
        split = layer.impl.nwor_draft
        seen = None if split is None else (split.num_tokens, split.rest_starts.tolist())
        return num_reqs, num_tokens, "mixed" in what, seen

    made.capture(prefill, None, SimpleNamespace(query_start_loc=starts), progress_bar_desc="own")
    assert layer.impl.nwor_draft is None
    return made


def choose(monkeypatch: pytest.MonkeyPatch, manager: Any, own: Any, target: Any, tokens: int) -> Any:
    monkeypatch.setattr(CudaGraphManager, "dispatch", lambda self, *_, **__: own)
    manager.mixed.chosen = target
    return manager.dispatch(3, tokens, None, num_active_loras=0)


def test_a_graph_for_each_of_the_targets_without_adapters(manager: Any) -> None:
    assert set(manager.graphs) == {UNIFORM}
    assert manager.graphs[UNIFORM] == (4, 20, False, None)
    assert set(manager.mixed_graphs) == {desc for desc in MIXED if not desc.num_active_loras}
    for desc, seen in manager.mixed_graphs.items():
        assert seen == (4, desc.num_tokens, True, (desc.num_tokens, [0, 1, 2, 3, 4]))
    assert manager._capture_descs == {CUDAGraphMode.FULL: [UNIFORM]}


def test_the_choice_follows_the_target(monkeypatch: pytest.MonkeyPatch, manager: Any) -> None:
    target = next(desc for desc in MIXED if desc.num_tokens == 32 and not desc.num_active_loras)
    adapters = next(desc for desc in MIXED if desc.num_active_loras)
    assert choose(monkeypatch, manager, PIECES, target, 32) is target
    assert manager.run_fullgraph(target)[2]
    assert choose(monkeypatch, manager, PIECES, None, 32) is PIECES
    assert choose(monkeypatch, manager, PIECES, target, 24) is PIECES
    assert choose(monkeypatch, manager, PIECES, adapters, adapters.num_tokens) is PIECES
    assert choose(monkeypatch, manager, UNIFORM, None, 32) is UNIFORM
    assert not manager.run_fullgraph(UNIFORM)[2]
    # Where the number of drafts is chosen, the target of a step of windows alone runs in such a graph too.
    assert choose(monkeypatch, manager, UNIFORM, target, 32) is target
    assert set(manager.graphs) == {UNIFORM}


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
    assert "set mixed_graph_rows to 0" in caplog.text


@pytest.mark.parametrize("version", [2, None])
def test_drafters_of_another_kind_are_left_alone(layer: Any, version: int | None) -> None:
    layer.impl.vllm_flash_attn_version = version
    stock = object.__new__(SpeculatorCudaGraphManager)
    adopt = NworDraftGraphManager.adopt
    assert not adopt(SimpleNamespace(prefill_cudagraph_manager=stock), None, [layer])  # type: ignore[arg-type]
    assert type(stock) is SpeculatorCudaGraphManager
    layer.impl.vllm_flash_attn_version = 3
    assert not adopt(SimpleNamespace(prefill_cudagraph_manager=stock), None, [])  # type: ignore[arg-type]
    assert not adopt(SimpleNamespace(prefill_cudagraph_manager=None), None, [layer])  # type: ignore[arg-type]
    assert not adopt(SimpleNamespace(), None, [layer])  # type: ignore[arg-type]


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
        # 16 requests have 61 rows each, 31 have 33, 60 have 17: the next larger graph holds them.
        trees = {16: [1, 8, 16, 24, 32, 64], 32: [1, 8, 16, 24, 32], 60: [1, 8, 16]}
        assert made == chains | (trees if tree is not None else {})
