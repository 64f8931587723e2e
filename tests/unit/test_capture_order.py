"""Claim: of all graphs the largest is captured first, and vLLM's estimate of them covers mixed steps'.

Coverage: vLLM's managers with its capture stood in for: mixed graphs larger and smaller than vLLM's own, in
the real capture and in the one for sizes; engines in which nothing is staged; a capture that fails.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import (
    BatchExecutionDescriptor,
    CudaGraphManager,
    ModelCudaGraphManager,
)

from nwor.engine.cuda_graphs.mixed_sizes import descriptors
from nwor.engine.cuda_graphs.v2 import (
    NworCudaGraphManager,
    ProfiledCudaGraphManager,
    _CaptureBothModes,
    _CaptureForSize,
)
from tests.unit.toy_layers import ToyLayers

UNIFORM = BatchExecutionDescriptor(CUDAGraphMode.FULL, 12, 3, uniform_token_count=4)


class Captures:
    """What vLLM's capture was asked for, in order: the largest batch of each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.fails_at = 0
        self.after: Callable[[int], None] = lambda size: None

        def capture(manager: Any, create: Any, what: str = "") -> None:
            descs = [desc for of_mode in manager._capture_descs.values() for desc in of_mode]
            self.sizes.append(max(desc.num_tokens for desc in descs))
            if self.sizes[-1] == self.fails_at:
                raise RuntimeError("no memory")
            for desc in descs:
                if desc.cg_mode is CUDAGraphMode.FULL:
                    assert desc not in manager.graphs
                    manager.graphs[desc] = object()
            self.after(self.sizes[-1])

        monkeypatch.setattr(CudaGraphManager, "capture", capture)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device=None: (0, 0))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Captures:
    return Captures(monkeypatch)


def stock(pieces: int) -> Any:
    manager = object.__new__(ModelCudaGraphManager)
    manager.graphs = {}
    manager._capture_descs = {
        CUDAGraphMode.FULL: [UNIFORM],
        CUDAGraphMode.PIECEWISE: [BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, pieces, None)],
    }
    manager._max_full_descs_to_capture = None
    return manager


@pytest.mark.parametrize(("pieces", "order"), [(32, [64, 32]), (64, [64, 64]), (512, [512, 64])])
def test_vllms_estimate_covers_mixed_graphs(captures: Captures, pieces: int, order: list[int]) -> None:
    manager, mixed = stock(pieces), descriptors(64, 4, [0])
    before = dict(manager._capture_descs)
    ProfiledCudaGraphManager.adopt(manager, mixed)
    _CaptureForSize.capture(manager, lambda *_: None)
    assert captures.sizes == order
    assert manager._capture_descs == before | {CUDAGraphMode.FULL: [*mixed, UNIFORM]}
    assert set(manager.graphs) == {UNIFORM}
    assert set(manager._kept) == set(mixed)  # alive until vLLM has measured all


def adopted(pieces: int) -> Any:
    toy = ToyLayers()
    toy.window_manager.vllm_config.compilation_config = SimpleNamespace()
    manager = NworCudaGraphManager.adopt(stock(pieces), toy.window_manager, descriptors(64, 4, [0]))
    manager._step_inputs = torch.zeros(1, 64, dtype=torch.int64), torch.zeros(6, dtype=torch.int32)
    return manager


@pytest.mark.parametrize(("pieces", "order"), [(32, [64, 32, 12]), (512, [512, 64, 12])])
def test_the_largest_comes_first(
    captures: Captures, monkeypatch: pytest.MonkeyPatch, pieces: int, order: list[int]
) -> None:
    manager = adopted(pieces)
    window = manager.nwor.window
    monkeypatch.setattr(window, "captured", lambda sources: sources)
    monkeypatch.setattr(type(manager.stage), "wanted", property(lambda self: True))
    _CaptureBothModes.capture(manager, lambda *_: None)
    assert captures.sizes == order
    assert set(manager.graphs) == {UNIFORM}
    assert set(manager.mixed.graphs) == set(manager.mixed_descs)
    assert manager.nwor.state.mixed_graphs_why_not is None
    assert manager.nwor.state.mixed_graph_rows == 64


def test_no_mixed_graphs_where_nothing_is_staged(captures: Captures, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = adopted(32)
    monkeypatch.setattr(type(manager.stage), "wanted", property(lambda self: False))
    _CaptureBothModes.capture(manager, lambda *_: None)
    assert captures.sizes == [32]
    assert manager.nwor.state.report()["mixed_graphs"]["why_not"] == "nothing is staged"


@pytest.mark.parametrize(("fails_at", "order"), [(64, [64, 32]), (12, [64, 32, 12])])
def test_a_layer_that_fails_ends_staging_and_not_the_start(
    captures: Captures, monkeypatch: pytest.MonkeyPatch, fails_at: int, order: list[int]
) -> None:
    manager = adopted(32)
    window = manager.nwor.window
    monkeypatch.setattr(window, "captured", lambda sources: sources)
    wanted = property(lambda self: self._window_manager.window is not None)
    monkeypatch.setattr(type(manager.stage), "wanted", wanted)

    def fail(size: int) -> None:
        if size == fails_at:
            with manager.nwor.capture_errors.noting():
                window.capture_errors.append("verify attention, layer 1: out of registers")

    captures.after = fail
    _CaptureBothModes.capture(manager, lambda *_: None)
    assert captures.sizes == order
    assert set(manager.graphs) == {UNIFORM}
    assert manager.stage_graphs == {}
    assert manager.mixed.graphs == {}
    state = manager.nwor.state
    assert state.unsupported == ("capture", "verify attention, layer 1: out of registers")
    assert state.report()["mixed_graphs"] == {"rows": 0, "steps": 0, "why_not": "nothing is staged"}


def test_a_failed_capture_ends_the_start_and_says_what_to_do(
    captures: Captures, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = adopted(32)
    monkeypatch.setattr(type(manager.stage), "wanted", property(lambda self: True))
    captures.fails_at = 64
    with pytest.raises(RuntimeError, match="no memory"):
        _CaptureBothModes.capture(manager, lambda *_: None)
    assert "set mixed_graph_rows to 0" in caplog.text
