"""Claim: what graphs of `stage` will take is added to vLLM's estimate of its own, and only where they come.

Coverage: V2's runner on CUDA with vLLM's own methods, graphs and layers stood in for; which graphs count,
other modes, engines in which nothing is staged, layers without keys and values. Whether the estimate is near
what graphs then take, a GPU has to say.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from nwor.engine.cuda_graphs.stage_graphs import LEAST_GRAPH_BYTES, expected_bytes
from nwor.engine.eligibility import Unsupported
from nwor.engine.model_runner import v2_gpu as runner_v2_gpu
from nwor.engine.model_runner.v2_gpu import NworGPUModelRunnerV2
from nwor.modes import Mode

MIB = 1 << 20
#: vLLM's own estimate, which the stand-in returns.
OWN = 1000 * MIB


def _desc(
    tokens: int, requests: int | None, each: int | None, ubatches: int = 1, longest: int | None = None
) -> Any:
    return SimpleNamespace(
        num_tokens=tokens,
        num_reqs=requests,
        uniform_token_count=each,
        max_query_len=longest,
        num_ubatches=ubatches,
    )


#: Three of windows of five rows; one of any batch, one of single tokens, one in parts, one of longer windows.
FULL = [
    _desc(40, 8, 5), _desc(20, 4, 5), _desc(5, 1, 5),
    _desc(64, None, None), _desc(8, 8, 1), _desc(40, 8, 5, ubatches=2), _desc(48, 8, 6),
]  # fmt: skip
#: Two layers with four query heads and two KV heads of 64 elements: 2 * (4 + 2 * 2) * 64 numbers a row.
IMPL = SimpleNamespace(num_heads=4, num_kv_heads=2, head_size=64)
ROW_BYTES = 2 * 8 * 64 * 2


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    made: Any = object.__new__(NworGPUModelRunnerV2)
    made.vllm_config = SimpleNamespace(compilation_config="settings")
    made.model_config = SimpleNamespace(dtype=torch.bfloat16)
    config = SimpleNamespace(
        modes=(Mode.OFF, Mode.STAGE), mixed_graph_rows=0, draft_tokens=None, fast_drafting=False
    )
    made.nwor = SimpleNamespace(state=SimpleNamespace(config=config), longest_window=5, most_window_rows=640)
    made.cudagraph_manager = SimpleNamespace(
        _capture_descs={CUDAGraphMode.FULL: FULL, CUDAGraphMode.PIECEWISE: [_desc(40, 8, 5)]},
        _capture_mem_samples=[90 * MIB, 3 * MIB],
    )
    layers = {"a": SimpleNamespace(impl=IMPL), "b": SimpleNamespace(impl=IMPL), "c": SimpleNamespace()}
    monkeypatch.setattr(runner_v2_gpu, "target_layers", lambda of: layers if of is made else {})
    for name in ("check_engine", "check_graphs"):
        monkeypatch.setattr(runner_v2_gpu, name, lambda *_: None)
    monkeypatch.setattr(runner_v2_gpu, "memory_is_reused", lambda _: False)
    # vLLM captures some graphs for their size and throws them away.
    monkeypatch.setattr(
        GPUModelRunner, "profile_cudagraph_memory", lambda self: self.capture_model(profile_only=True) + OWN
    )
    monkeypatch.setattr(GPUModelRunner, "capture_model", lambda self, *, profile_only=False: 0)
    return made


def test_graphs_take_what_vllms_do_and_one_set_of_keys_and_values() -> None:
    assert expected_bytes([40, 20, 5], [90 * MIB, 3 * MIB], 7) == 3 * 3 * MIB + 40 * 7
    # One graph says nothing of what a further one takes; vLLM takes no graph for less than this either.
    assert expected_bytes([40, 20], [90 * MIB], 7) == 2 * LEAST_GRAPH_BYTES + 40 * 7
    assert expected_bytes([40, 20], [90 * MIB, 10], 7) == 2 * LEAST_GRAPH_BYTES + 40 * 7
    assert expected_bytes([], [90 * MIB, 3 * MIB], 7) == 0


def test_added_to_vllms_estimate(runner: Any) -> None:
    assert runner.profile_cudagraph_memory() == OWN + 3 * 3 * MIB + 40 * ROW_BYTES
    # Two of windows of up to five rows, with as many rows as there may be requests.
    varying = [_desc(48, 8, None, longest=5), _desc(8, 8, None, longest=5), _desc(48, 8, None, longest=6)]
    runner.cudagraph_manager._capture_descs = {CUDAGraphMode.FULL: varying}
    assert runner.profile_cudagraph_memory() == OWN + 2 * 3 * MIB + 48 * ROW_BYTES


@pytest.mark.parametrize("sizes", [[2048, 1024, 512, 448], [512], [64, 16]])
def test_what_graphs_of_mixed_steps_keep_comes_on_top(
    runner: Any, monkeypatch: pytest.MonkeyPatch, sizes: list[int]
) -> None:
    # vLLM captures them among its own and so measures all but the keys and values that outlive a replay.
    monkeypatch.setattr(runner, "_nwor_mixed_descs", lambda: [_desc(size, size, None) for size in sizes])
    kept = max(40, *(size for size in sizes if size <= 512))
    aside = min(640, sizes[0]) if sizes[0] > 512 else 0
    kv_bytes, partial = 2 * 2 * 2 * 64 * 2, 1024 * 4 * 64 * 4
    expected = OWN + 3 * 3 * MIB + kept * ROW_BYTES + aside * kv_bytes + partial
    assert runner.profile_cudagraph_memory() == expected
    # And so do the graphs of an EAGLE drafter, and the hidden states between them.
    runner.speculator, runner.max_num_reqs = SimpleNamespace(prefill_cudagraph_manager=object()), 4
    runner.model_config.get_hidden_size = lambda: 128
    expected += 2 * sizes[0] * 128 * 2 + (len(sizes) + 3) * LEAST_GRAPH_BYTES
    assert runner.profile_cudagraph_memory() == expected
    # Of a first pass in two parts there are as many once more.
    runner.nwor.state.config.fast_drafting = True
    expected += (len(sizes) + 3) * LEAST_GRAPH_BYTES
    assert runner.profile_cudagraph_memory() == expected


def test_nothing_is_added_where_no_graph_of_stage_comes(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise Unsupported("mla", "not here")

    assert runner.profile_cudagraph_memory() > OWN
    for name in ("check_engine", "check_graphs"):
        with monkeypatch.context() as patch:
            patch.setattr(runner_v2_gpu, name, refuse)
            assert runner.profile_cudagraph_memory() == OWN
    with monkeypatch.context() as patch:
        patch.setattr(runner_v2_gpu, "memory_is_reused", lambda _: True)
        assert runner.profile_cudagraph_memory() == OWN
    runner.cudagraph_manager._capture_descs = {CUDAGraphMode.FULL: FULL[3:]}
    assert runner.profile_cudagraph_memory() == OWN
    runner.cudagraph_manager._capture_descs = {CUDAGraphMode.FULL: FULL}
    runner.nwor.state.config.modes = (Mode.OFF, Mode.COW)
    assert runner.profile_cudagraph_memory() == OWN


def test_an_error_is_logged_and_the_engine_starts(
    runner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner_v2_gpu, "target_layers", lambda _: {}["none"])
    with caplog.at_level("WARNING", "vllm.nwor.runner"):
        assert runner.profile_cudagraph_memory() == OWN
    assert [record.getMessage() for record in caplog.records] == [
        "what the CUDA graphs of `stage` will take is not known: KeyError('none')"
    ]


def test_an_engine_without_graphs_and_the_real_capture(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(GPUModelRunner, "capture_model", lambda self, *, profile_only=False: 12)
        assert runner.capture_model() == 12
    assert runner._nwor_expected_bytes == 0
    assert runner.profile_cudagraph_memory() > OWN
    # What an earlier estimate found does not stay.
    monkeypatch.setattr(GPUModelRunner, "profile_cudagraph_memory", lambda self: 0)
    assert runner.profile_cudagraph_memory() == 0


def test_a_mixed_graph_that_cannot_be_captured_ends_no_start(
    runner: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The sizes are measured anew without such graphs, and the report says why there are none."""
    calls: list[bool] = []

    def profile(self: Any) -> int:
        calls.append(self._nwor_mixed_failed is None)
        if self._nwor_mixed_failed is None:
            self._nwor_profiles_mixed = True
            raise RuntimeError("no graph")
        return OWN

    runner.parallel_config = SimpleNamespace(tensor_parallel_size=1)
    monkeypatch.setattr(GPUModelRunner, "profile_cudagraph_memory", profile)
    assert runner.profile_cudagraph_memory() == OWN
    assert calls == [True, False]
    assert runner._nwor_mixed_descs() == []
    assert "no graph" in runner.nwor.state.mixed_graphs_why_not
    assert "piece by piece" in caplog.text
    # Any other error ends the start, as ever.
    runner._nwor_mixed_failed = None
    monkeypatch.setattr(GPUModelRunner, "profile_cudagraph_memory", lambda self: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        runner.profile_cudagraph_memory()


@pytest.mark.parametrize(
    ("setting", "quantized", "ranks", "rows"),
    [(None, False, 1, 8192), (None, True, 1, 2048), (None, False, 2, 2048), (512, False, 1, 512)],
)
def test_the_largest_graph_follows_from_the_model_where_nobody_sets_it(
    runner: Any, setting: int | None, quantized: bool, ranks: int, rows: int
) -> None:
    runner.vllm_config.quant_config = object() if quantized else None
    runner.parallel_config = SimpleNamespace(tensor_parallel_size=ranks)
    runner.nwor.state.config.mixed_graph_rows = setting
    runner.model = torch.nn.Linear(64, 64)
    assert runner._nwor_largest_graph(2) == rows
