"""Model runner V1: what a step commits and when, how it is counted, and how its batch is ordered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import reorder_batch_to_split_decodes_and_prefills
from vllm.v1.outputs import AsyncModelRunnerOutput

from nwor.engine.attention.flash import NworFlashAttentionBackend
from nwor.engine.attention.triton_attn import NworTritonAttentionBackend
from nwor.engine.model_runner import v1 as runner_v1
from nwor.engine.model_runner.v1 import NworRunnerV1
from nwor.engine.stats.step_messages import record_of
from nwor.engine.step_plan import rejected_drafts, rejected_on_device
from nwor.modes import Mode
from tests.unit.toy_layers import ToyLayers

VOCABULARY = 100
#: Two windows, one of them short, and a prompt behind them; the last two rows pad the batch.
REQUESTS, DRAFTS, LENGTHS = ["a", "b", "p"], {"a": [7, 7, 7], "b": [7]}, {"a": 4, "b": 2, "p": 5}
SLOTS = torch.tensor([0, 1, 2, 3, 8, 9, 20, 21, 22, 23, 24, -1, -1])
#: Of a's drafts one is accepted, of b's the only one. The prompt's chunk is unfinished.
SAMPLED = torch.tensor([[7, 5, -1, -1], [7, 6, -1, -1], [3, -1, -1, -1]], dtype=torch.int32)


@pytest.mark.parametrize(
    ("sampled", "drafts", "expected"),
    [
        ([[1, 2, 3], [1, -1, -1]], [2, 2], [0, 2]),
        ([[1, 2, 3], [1, -1, -1], [4, 5, -1], [9, -1, -1]], [2, 0, 1, 1], [0, 0, 0, 1]),
        # An id outside the vocabulary is no token to vLLM; a row without any has nothing accepted.
        ([[1, VOCABULARY, -1], [VOCABULARY, -1, -1]], [2, 2], [2, 2]),
        ([[VOCABULARY, -1], [VOCABULARY, -1]], [1, 0], [1, 0]),
    ],
)
def test_rejected_drafts(sampled, drafts, expected):
    ids = torch.tensor(sampled, dtype=torch.int32)
    rejected = rejected_drafts(ids, drafts, VOCABULARY)
    on_device = rejected_on_device(ids, drafts, VOCABULARY)
    assert (on_device.tolist(), on_device.dtype) == (expected, torch.int32)
    assert rejected.dtype == torch.int32
    assert rejected.tolist() == expected


class Arriving(AsyncModelRunnerOutput):
    """An output whose tokens are on the host only once it is asked for."""

    def __init__(self, result: Any) -> None:
        self._result = result

    def get_output(self) -> Any:
        return self._result

    def get_kv_connector_output(self) -> Any:
        """Return None, as without a KV connector; later versions of vLLM ask for it."""
        return None


class StockRunner:
    """As much of vLLM's runner as the mixin touches."""

    def __init__(self, toy: ToyLayers, *, ahead: bool) -> None:
        self.toy, self.ahead, self.nwor = toy, ahead, toy.window_manager
        self.input_batch = SimpleNamespace(req_ids=list(REQUESTS), vocab_size=VOCABULARY, generators={})
        self.execute_model_state = SimpleNamespace()
        self.parallel_config = SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1)
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(layer_names=["draft", *toy.names])]
        )
        self.query_start_loc = SimpleNamespace(gpu=torch.tensor([0, 4, 6, 11, 11, 11], dtype=torch.int32))
        self.seen_by_drafter: list[int] | None = None
        self.trimmed: Any = None
        self.failing = ""

    def execute_model(self, scheduled: Any) -> None:
        self._prepare_inputs(self.trimmed or scheduled, np.array([4, 2, 5]))
        self._model_forward()

    def _prepare_inputs(self, scheduled: Any, lengths: Any) -> None:
        pass

    def _model_forward(self) -> None:
        self.toy.forward(SLOTS)
        if self.failing == "forward":
            raise MemoryError

    def _sample(self, logits: Any, metadata: Any) -> Any:
        return SimpleNamespace(sampled_token_ids=SAMPLED)

    def sample_tokens(self, grammar: Any) -> Any:
        self._sample(None, None)
        if self.failing == "drafter":
            raise MemoryError
        self.seen_by_drafter = self.toy.written(SLOTS)
        result = SimpleNamespace(sampled_token_ids=[[7, 5], [7, 6], []])
        return Arriving(result) if self.ahead else result


class Runner(NworRunnerV1, StockRunner):  # type: ignore[misc]
    pass


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> ToyLayers:
    layers = ToyLayers()
    context = SimpleNamespace(slot_mapping=dict.fromkeys(layers.names, SLOTS))
    monkeypatch.setattr(runner_v1, "get_forward_context", lambda: context)
    return layers


def _step(drafts: dict[str, list[int]] = DRAFTS) -> Any:
    cached = SimpleNamespace(req_ids=REQUESTS, num_computed_tokens=[9, 9, 9], resumed_req_ids=set())
    return SimpleNamespace(
        num_scheduled_tokens=LENGTHS,
        scheduled_spec_decode_tokens=drafts,
        scheduled_new_reqs=[],
        scheduled_cached_reqs=cached,
    )


@pytest.mark.parametrize("ahead", [False, True])
def test_a_step_is_committed_before_the_drafter_and_counted_on_arrival(toy, ahead):
    runner = Runner(toy, ahead=ahead)
    runner.execute_model(_step())
    assert toy.window.staging
    assert toy.written(SLOTS) == [6, 7, 8, 9, 10]  # the prompt, behind the windows
    output = runner.sample_tokens(None)
    # Two of a's drafts were rejected. What the drafter reads is there already.
    assert runner.seen_by_drafter == [0, 1, 4, 5, 6, 7, 8, 9, 10]
    if ahead:
        assert toy.window_manager.state.windows == 0
        runner.input_batch.req_ids.reverse()  # vLLM changes its list when it takes the next step in
        output = output.get_output()
    record = record_of(output)
    assert record is not None
    assert record.windows == {"a": ("stage", "", 3, 1), "b": ("stage", "", 1, 1)}
    assert toy.window_manager.state.counts.accepted_tokens == 2
    assert toy.window_manager.state.counts.draft_tokens == 4


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.STAGE])
def test_a_step_without_drafts_or_in_mode_off_writes_as_the_layers_run(toy, mode):
    toy.window_manager.state.switch(mode)
    runner = Runner(toy, ahead=False)
    runner.execute_model(_step(DRAFTS if mode is Mode.OFF else {}))
    assert not toy.window.staging
    assert toy.written(SLOTS) == list(range(11))
    record = record_of(runner.sample_tokens(None))
    assert (record is not None) == (mode is Mode.OFF)
    assert toy.window_manager.plan is None


def test_the_record_that_the_step_runs_by_counts_not_what_the_scheduler_sent(toy):
    runner = Runner(toy, ahead=False)
    # As where drafts are made on the GPU by n-grams: the step runs by a copy with fewer of them.
    runner.trimmed = _step({"b": [7]})
    runner.execute_model(_step())
    assert toy.window_manager.plan is not None
    assert toy.window_manager.plan.draft_counts == [0, 1, 0]


@pytest.mark.parametrize("failing", ["forward", "drafter"])
def test_a_step_that_fails_leaves_nothing_behind(toy, failing):
    runner = Runner(toy, ahead=False)
    runner.failing = failing

    def step() -> Any:
        runner.execute_model(_step())
        return runner.sample_tokens(None)

    with pytest.raises(MemoryError):
        step()
    assert toy.window.batch is None
    runner.failing = ""
    record = record_of(step())
    assert record is not None
    assert record.all_windows == 2


@pytest.mark.parametrize("failing", ["commit", "counts"])
def test_a_failing_commit_writes_directly_and_turns_nwor_off(toy, monkeypatch, failing):
    def broken(*args: Any) -> None:
        raise RuntimeError("no launch")

    runner = Runner(toy, ahead=False)
    runner.execute_model(_step())
    if failing == "commit":
        monkeypatch.setattr(toy.window, "commit", broken)
    else:
        monkeypatch.setattr(runner_v1, "rejected_drafts", broken)
    record = record_of(runner.sample_tokens(None))
    assert runner.seen_by_drafter == list(range(11))
    assert record is not None
    assert record.windows["a"] == ("stage", "fault", 3, 1)
    assert toy.window_manager.state.mode is Mode.OFF
    assert "no launch" in (toy.window_manager.state.fault or "")


class ToyBatch:
    """As much of vLLM's persistent batch as its reordering touches."""

    def __init__(self, requests: dict[str, tuple[int, int, int]]) -> None:
        """Take rows, computed tokens and prompt tokens by request."""
        self.req_ids = list(requests)
        self.num_computed_tokens_cpu = np.array([computed for _, computed, _ in requests.values()])
        self.num_prompt_tokens = np.array([prompt for _, _, prompt in requests.values()])

    def swap_states(self, i: int, j: int) -> None:
        ids = self.req_ids
        ids[i], ids[j] = ids[j], ids[i]
        for numbers in (self.num_computed_tokens_cpu, self.num_prompt_tokens):
            numbers[[i, j]] = numbers[[j, i]]


@pytest.mark.parametrize("backend", [NworFlashAttentionBackend, NworTritonAttentionBackend])
@pytest.mark.parametrize("v2", [False, True])
def test_windows_are_asked_to_stand_first_on_v1_only(monkeypatch, v2, backend):
    def init(self: Any, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    for stock in (FlashAttentionMetadataBuilder, TritonAttentionMetadataBuilder):
        monkeypatch.setattr(stock, "__init__", init)
    speculative = SimpleNamespace(num_speculative_tokens=4)
    config = SimpleNamespace(speculative_config=speculative, use_v2_model_runner=v2)
    threshold = backend.get_builder_cls()(config).reorder_batch_threshold
    if v2:
        assert threshold is None
        return
    rows = {
        "new": (40, 0, 40),
        "w1": (5, 30, 20),
        "chunk": (60, 64, 200),
        "tail": (3, 197, 200),
        "w2": (3, 9, 8),
    }
    batch = ToyBatch(rows)
    scheduled = SimpleNamespace(num_scheduled_tokens={name: one[0] for name, one in rows.items()})
    reorder_batch_to_split_decodes_and_prefills(batch, scheduled, decode_threshold=threshold)
    assert sorted(batch.req_ids[:2]) == ["w1", "w2"]
    assert batch.req_ids[2:] == ["tail", "chunk", "new"]
