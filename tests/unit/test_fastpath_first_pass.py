"""Claim: the drafter's first pass is parted exactly where that is safe, and leaves nothing behind.

Coverage: a drafter of vLLM's kind whose model stands in: one layer that asks what it is told of the pass.
What the parts compute is compared with vLLM's own pass in tests/engine/test_first_pass_cpu.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.mtp.speculator import MTPSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

from nwor.engine.fastpath import first_pass
from nwor.engine.fastpath.first_pass import LEAST_ROWS, FirstPass
from nwor.engine.model_runner.v2 import NworRunnerV2

ROWS, HIDDEN, MOST_REQUESTS = 300, 3, 8
#: Rows of each request, and how many of them are rejected.
LENGTHS, REJECTED = (5, 1, 290, 4), (2, 0, 0, 3)


class Impl:
    """One layer's attention: notes metadata, and whether the pass writes."""

    def __init__(self) -> None:
        self.nwor_draft: Any = None
        self.seen: list[tuple[Any, bool]] = []
        self.num_heads, self.num_kv_heads, self.head_size = 2, 1, 4
        self.sliding_window, self.logits_soft_cap = None, None

    def nwor_last_rows(self, metadata: Any, starts: torch.Tensor, lengths: torch.Tensor, _: Any) -> Any:
        return "last", starts.tolist(), lengths.tolist()

    def forward(self, metadata: Any) -> None:
        told = self.nwor_draft
        if told is None:
            self.seen.append((metadata, True))
            return
        self.seen.append(("written" if told.writes else "kept", told.writes))
        self.seen.append((told.metadata_of(self, metadata, torch.zeros(1)), told.writes))


class Speculator(TargetDependentARSpeculator):
    """A drafter whose model says of each row which token it had, and which position."""

    load_draft_model = None  # type: ignore[assignment]

    def __init__(self) -> None:
        self.max_num_reqs, self.device = MOST_REQUESTS, torch.device("cpu")
        self.dp_size = self.dcp_size = 1
        self.pcp_manager, self.supports_mm_inputs = None, False
        self.layers = [SimpleNamespace(layer_name="draft.0", impl=Impl())]
        starts = torch.tensor([0, *LENGTHS]).cumsum(0)
        ends = starts[1:] - 1 - torch.tensor(REJECTED)
        self.last_token_indices = torch.zeros(MOST_REQUESTS, dtype=torch.int64)
        self.last_token_indices[:4] = ends
        positions = torch.cat([torch.arange(length) + 100 * i for i, length in enumerate(LENGTHS)])
        lengths = torch.zeros(MOST_REQUESTS, dtype=torch.int32)
        lengths[:4] = positions[starts[1:] - 1] + 1
        self.input_buffers: Any = SimpleNamespace(
            positions=positions, input_ids=torch.arange(ROWS) + 1000, seq_lens=lengths
        )
        self.hidden_states = torch.arange(float(ROWS))[:, None].expand(-1, HIDDEN).clone()
        self.idx_mapping = torch.arange(MOST_REQUESTS)
        self.draft_tokens = torch.full((MOST_REQUESTS, 2), -7)
        self.sample_src_positions = torch.zeros(MOST_REQUESTS, dtype=torch.int64)
        self.temperature = self.seeds = self.current_draft_step = self.draft_logits = None
        self.passes: list[tuple[int, CUDAGraphMode]] = []
        self.captured: list[Any] = []

    def _run_model(self, num_tokens: int, metadata: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        mode = kwargs.get("cudagraph_runtime_mode", args[2] if len(args) > 2 else CUDAGraphMode.NONE)
        self.passes.append((num_tokens, mode))
        for layer in self.layers:
            layer.impl.forward((metadata or {}).get(layer.layer_name))
        buffers = self.input_buffers
        states = torch.stack(
            [
                self.hidden_states[:num_tokens, 0],
                buffers.input_ids[:num_tokens].float(),
                buffers.positions[:num_tokens].float(),
            ],
            dim=1,
        )
        return states, -states

    def sample_draft(self, states: torch.Tensor, *_: Any) -> torch.Tensor:  # type: ignore[override]
        return states[:, 1].long()

    def capture(self) -> None:
        for arguments in self.captured:
            self._prefill(4, ROWS, _metadata(self), None, None, arguments)


def _metadata(speculator: Speculator, causal: Any = True) -> dict[str, Any]:
    return {layer.layer_name: SimpleNamespace(causal=causal) for layer in speculator.layers}


def _result(speculator: Speculator) -> list[Any]:
    buffers = speculator.input_buffers
    return [
        speculator.draft_tokens[:, 0].tolist(),
        speculator.hidden_states[:4].tolist(),
        buffers.positions[:4].tolist(),
        speculator.sample_src_positions.tolist(),
    ]


@pytest.fixture
def expected() -> list[Any]:
    """What vLLM's own pass leaves."""
    speculator = Speculator()
    speculator._prefill(4, ROWS, _metadata(speculator), None, None)
    return _result(speculator)


def test_two_parts_leave_what_one_leaves(expected: list[Any]) -> None:
    speculator = Speculator()
    FirstPass(speculator, speculator.layers)
    metadata = _metadata(speculator)
    speculator._prefill(4, ROWS, metadata, None, None, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE)
    assert _result(speculator) == expected
    assert speculator.passes == [(ROWS, CUDAGraphMode.PIECEWISE), (4, CUDAGraphMode.NONE)]
    # The last row of each request, and what stands before it: not what was rejected.
    last = ("last", [0, 1, 2, 3, 4], [3, 101, 490, 301])
    (layer,) = speculator.layers
    assert layer.impl.seen == [("written", True), ("kept", False), (last, False)]
    assert layer.impl.nwor_draft is None
    assert "_run_model" not in vars(speculator)


def test_requests_that_pad_a_graph_are_empty() -> None:
    speculator = Speculator()
    first = FirstPass(speculator, speculator.layers)
    first.last_rows(6, 6, _metadata(speculator), None)
    (layer,) = speculator.layers
    assert layer.impl.seen[-1][0] == ("last", [0, 1, 2, 3, 4, 4, 4], [3, 101, 490, 301, 0, 0])


@pytest.mark.parametrize(
    ("rows", "causal", "known", "mode"),
    [
        (LEAST_ROWS - 1, True, True, CUDAGraphMode.NONE),
        (ROWS, False, True, CUDAGraphMode.NONE),
        (ROWS, torch.ones(4, dtype=torch.bool), True, CUDAGraphMode.NONE),
        (ROWS, True, False, CUDAGraphMode.PIECEWISE),
    ],
    ids=["few rows", "not causal", "causal by request", "no metadata"],
)
def test_other_passes_stay_one(rows: int, causal: Any, known: bool, mode: CUDAGraphMode) -> None:
    speculator = Speculator()
    FirstPass(speculator, speculator.layers)
    metadata = _metadata(speculator, causal) if known else None
    speculator._prefill(1, rows, metadata, None, None, mode, None)
    assert speculator.passes == [(rows, mode)]
    assert speculator.layers[0].impl.seen == [(metadata and metadata["draft.0"], True)]


def test_all_pieces_of_a_graph_are_captured() -> None:
    speculator = Speculator()
    FirstPass(speculator, speculator.layers).next_drafts = 0
    speculator.captured = [CUDAGraphMode.PIECEWISE, CUDAGraphMode.NONE]
    speculator.capture()
    assert speculator.passes == [
        (ROWS, CUDAGraphMode.PIECEWISE),
        (ROWS, CUDAGraphMode.NONE),
        (4, CUDAGraphMode.NONE),
    ]
    del speculator.passes[:]
    speculator._prefill(4, ROWS, _metadata(speculator), None, None, CUDAGraphMode.PIECEWISE)
    assert speculator.passes == [(ROWS, CUDAGraphMode.PIECEWISE)]


@pytest.mark.parametrize("skip", [False, True], ids=["0.32", "0.33"])
@pytest.mark.parametrize("rows", [ROWS, 4])
def test_a_step_without_drafts_ends_with_the_first_part(rows: int, skip: bool) -> None:
    speculator = Speculator()
    first = FirstPass(speculator, speculator.layers)
    first.next_drafts = None if skip else 0
    first.replay_last_rows = lambda num_reqs: pytest.fail("nothing is drafted")
    speculator._prefill(4, rows, _metadata(speculator), None, None, **({"skip_sample": True} if skip else {}))
    assert speculator.passes == [(rows, CUDAGraphMode.NONE)]
    assert speculator.layers[0].impl.seen == [("written", True)]
    assert speculator.draft_tokens.unique().tolist() == [-7]


def test_the_second_part_replays_a_graph_where_there_is_one() -> None:
    speculator, asked = Speculator(), []
    first = FirstPass(speculator, speculator.layers)
    first.replay_last_rows = lambda num_reqs: asked.append(num_reqs) or len(asked) > 1
    speculator.captured = [CUDAGraphMode.NONE]
    speculator.capture()
    assert asked == []
    del speculator.passes[:]
    for passes in (2, 3):
        speculator._prefill(4, ROWS, _metadata(speculator), None, None)
        assert len(speculator.passes) == passes
    assert asked == [4, 4]


def test_an_error_leaves_nothing_behind_and_later_passes_are_vllms(
    expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    speculator = Speculator()
    FirstPass(speculator, speculator.layers)
    (layer,) = speculator.layers
    layer.impl.nwor_last_rows = None
    with pytest.raises(TypeError):
        speculator._prefill(4, ROWS, _metadata(speculator), None, None)
    assert layer.impl.nwor_draft is None
    assert "_run_model" not in vars(speculator)
    assert "from the next step on it runs in one" in caplog.text
    again = Speculator()
    vars(speculator).update(
        {name: vars(again)[name] for name in ("input_buffers", "hidden_states", "passes")}
    )
    speculator._prefill(4, ROWS, _metadata(speculator), None, None)
    assert speculator.passes == [(ROWS, CUDAGraphMode.NONE)]
    assert _result(speculator) == expected


def _config(**settings: Any) -> Any:
    return SimpleNamespace(**{"lora_config": None, "kv_transfer_config": None, **settings})


class Known(EagleSpeculator):
    """A drafter of vLLM's kind."""

    def __init__(self, **settings: Any) -> None:
        self.dp_size = self.dcp_size = 1
        self.pcp_manager, self.supports_mm_inputs = None, False
        vars(self).update(settings)


def test_why_a_pass_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, why_not = Speculator().layers, FirstPass.why_not
    assert why_not(Known(), layers, _config()) is None
    for speculator, own, config, words in (
        (None, [], _config(), "no drafter"),
        (Speculator(), layers, _config(), "another kind"),
        (SimpleNamespace(), layers, _config(), "another kind"),
        (object.__new__(MTPSpeculator), layers, _config(), "another kind"),
        (Known(), [], _config(), "more than one layer"),
        (Known(), 2 * layers, _config(), "more than one layer"),
        (Known(), [SimpleNamespace(impl=object())], _config(), "backend"),
        (Known(), layers, _config(lora_config=object()), "adapters"),
        (Known(), layers, _config(kv_transfer_config=object()), "connector"),
        (Known(pcp_manager=object()), layers, _config(), "ranks"),
        (Known(dcp_size=2), layers, _config(), "ranks"),
        (Known(dp_size=2), layers, _config(), "ranks"),
        (Known(supports_mm_inputs=True), layers, _config(), "embeddings"),
    ):
        assert words in (why_not(speculator, own, config) or ""), words
    monkeypatch.setattr(first_pass, "changed", lambda *_: "_prefill is not the known one")
    assert why_not(Known(), layers, _config()) == "_prefill is not the known one"


class _Stock:
    def finish_requests(self, scheduler_output: Any) -> None:
        pass


class _Runner(NworRunnerV2, _Stock):  # type: ignore[misc]
    use_pp = False


def test_only_steps_with_rows_say_that_no_drafts_are_made() -> None:
    runner: Any = object.__new__(_Runner)
    mixed, first = SimpleNamespace(), SimpleNamespace()
    runner.nwor, runner._nwor_first_pass = SimpleNamespace(mixed=mixed), first
    for rows, drafts, expected in ((5, 0, 0), (5, 3, 3), (0, 0, None)):
        step = SchedulerOutput.make_empty()
        step.total_num_scheduled_tokens, step.num_spec_tokens_to_schedule = rows, drafts
        runner.finish_requests(step)
        assert (mixed.next_drafts, first.next_drafts) == (expected, expected)
