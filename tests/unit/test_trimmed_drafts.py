"""Claim: windows whose lengths the device alone knows are planned, committed and counted as they are.

Coverage: V2's runner on a stand-in with real caches on a CPU: mixtures of lengths that are drawn, in `stage`
and `cow`, with prompts behind them and rows written early; what may not be read on the host on the way;
faults; CUDA graphs, stood in for by the captured pass run again. vLLM's own trimming is that of
tests/engine/test_adaptive_cpu.py and of tests/gpu/test_adaptive.py.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

from nwor.counts.records import Treatment
from nwor.counts.window_table import MOST_TREATMENTS, WindowTable
from nwor.engine.cuda_graphs import mixed as mixed_graphs
from nwor.engine.cuda_graphs.mixed import MixedGraphs
from nwor.engine.cuda_graphs.mixed_sizes import descriptors
from nwor.engine.cuda_graphs.v2 import NworCudaGraphManager, stageable
from nwor.engine.model_runner.v2 import NworRunnerV2
from nwor.engine.trimmed_drafts import TrimmedDrafts
from nwor.modes import Mode
from tests.unit.toy_layers import BLOCK, BLOCKS, ToyLayers

#: Rows of the longest window.
LONGEST = 4


class StockRunner:
    """As much of vLLM's runner as is called here."""

    def prepare_attn(self, batch: Any) -> Any:
        """Return block tables and slots."""
        return (), batch.slots[None]


class Runner(NworRunnerV2, StockRunner):  # type: ignore[misc]
    """NWOR's runner on the stand-in, in an engine with adaptive verification."""

    adaptive_verification = object()


class NothingRead(TorchDispatchMode):
    """Lets nobody read a tensor's values on the host, for which the host of a GPU would wait."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"):
            raise AssertionError(f"the host reads a tensor of the device: {name}")
        return func(*args, **(kwargs or {}))


class Step:
    """One step as vLLM prepares it.

    Args:
        others: rows of each request that are no drafts.
        scheduled: draft tokens of each request, as scheduled.
        verified: those that the device left.
        slots: where the rows go; drawn where None.

    """

    def __init__(self, others: list[int], scheduled: list[int], verified: list[int], seed: int = 0) -> None:
        self.verified = verified
        lengths = np.array(others) + verified
        self.starts = [0, *np.cumsum(lengths).tolist()]
        self.rows = self.starts[-1]
        generator = torch.Generator().manual_seed(seed)
        self.slots = torch.randperm(BLOCK * BLOCKS, generator=generator)[: self.rows]
        first_logits = [0, *np.cumsum(np.array(verified) + 1).tolist()]
        self.batch = SimpleNamespace(
            req_ids=[f"r{number}" for number in range(len(others))],
            num_reqs=len(others),
            num_tokens=self.rows,
            num_draft_tokens=sum(verified),
            num_scheduled_tokens=np.array(others, np.int32) + np.array(scheduled, np.int32),
            num_draft_tokens_per_req=np.array(scheduled, np.int32),
            query_start_loc=torch.tensor(self.starts, dtype=torch.int32),
            cu_num_logits=torch.tensor(first_logits, dtype=torch.int32),
            slots=self.slots,
        )

    def drafts(self, number: int) -> list[int]:
        """Return the rows of a request's drafts."""
        end = self.starts[number + 1]
        return list(range(end - self.verified[number], end))


@pytest.fixture
def toy() -> ToyLayers:
    return ToyLayers(longest=LONGEST)


@pytest.fixture
def runner(toy: ToyLayers) -> Any:
    made = object.__new__(Runner)
    made.nwor = toy.window_manager
    return made


def _drawn(seed: int) -> Step:
    """Return a step of up to six windows and up to two prompts behind them."""
    drawn = random.Random(seed)
    windows, prompts = drawn.randint(1, 5), drawn.randint(0, 2)
    scheduled = [drawn.randint(1, LONGEST - 1) for _ in range(windows)] + [0] * prompts
    verified = [drawn.randint(0, count) for count in scheduled]
    if not 0 < sum(verified) < sum(scheduled):
        verified = [0] * len(scheduled)
        scheduled[0], verified[0] = 2, 1
    others = [1] * windows + [drawn.choice([1, 2, LONGEST + 2])] * prompts
    return Step(others, scheduled, verified, seed)


@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
@pytest.mark.parametrize("mode", ["stage", "cow"])
@pytest.mark.parametrize("seed", range(12))
def test_every_mixture(toy: ToyLayers, runner: Any, seed: int, mode: str, early: bool) -> None:
    step, drawn = _drawn(seed), random.Random(100 + seed)
    rank = toy.window_manager
    rank.state.switch(Mode(mode))
    runner._nwor_early = early
    with NothingRead():
        runner.prepare_attn(step.batch)
    # The next step writes there before this one's output has come.
    step.batch.cu_num_logits.fill_(-7)
    assert rank.plan is not None
    assert rank.window is not None
    batch = rank.window.batch
    assert batch is not None
    # Prompts that are no longer than a window stand among the windows.
    own = next((i for i, rows in enumerate(np.diff(step.starts)) if rows > LONGEST), len(step.verified))
    assert (batch.num_requests, batch.num_tokens) == (own, step.starts[own])
    toy.forward(step.slots)
    drafts = [step.drafts(number) for number in range(len(step.verified))]
    hidden = {row for rows in drafts for row in rows} if early else set(range(step.starts[own]))
    held_back = hidden if mode == "stage" else set()
    assert toy.written(step.slots) == [row for row in range(step.rows) if row not in held_back]
    rejected = [drawn.randint(0, count) for count in step.verified]
    plan = rank.finish(torch.tensor(rejected, dtype=torch.int32))
    assert plan is not None
    assert rank.state.fault is None
    dropped = {row for rows, count in zip(drafts, rejected, strict=True) for row in rows[len(rows) - count :]}
    assert toy.written(step.slots) == [row for row in range(step.rows) if row not in dropped]
    others = torch.ones(BLOCK * BLOCKS, dtype=torch.bool)
    others[step.slots] = False
    assert all(not cache.flatten(0, 1)[others].any() for cache in toy.caches.values())

    sampled = [1 + verified - count for verified, count in zip(step.verified, rejected, strict=True)]
    record = rank.account_sampled(plan, sampled)
    assert record.treatment.draft_counts == step.verified
    windows = sum(map(bool, step.verified))
    assert record.all_windows == windows
    counts = rank.state.counts
    assert (counts.windows, counts.draft_tokens) == (windows, sum(step.verified))
    assert counts.rejected_tokens == sum(rejected)
    assert counts.direct_windows == {}
    if mode == "stage":
        assert record.treatment.held_bytes == step.starts[own] * rank.state.engine_source_bytes


def test_rows_of_drafts_are_found_on_the_device() -> None:
    for seed in range(40):
        step = _drawn(seed)
        requests = len(step.verified)
        trimmed = TrimmedDrafts(step.batch.cu_num_logits, step.rows)
        for leading in range(1, requests + 1):
            starts = step.batch.query_start_loc[: leading + 1]
            rows = trimmed.rows(starts, step.starts[leading]).nonzero().flatten().tolist()
            assert rows == [row for number in range(leading) for row in step.drafts(number)]


def test_what_the_device_leaves_in_full_or_takes_as_a_whole_is_known(runner: Any) -> None:
    rank = runner.nwor
    runner.prepare_attn(Step([1, 1], [3, 3], [3, 3]).batch)
    plan = rank.plan
    assert plan.trimmed is None
    assert (plan.draft_counts, plan.num_tokens) == ([3, 3], 8)
    rank.drop()
    steps = rank.state.steps
    runner.prepare_attn(Step([1, 1], [3, 3], [0, 0]).batch)
    assert rank.plan is None
    assert rank.window.batch is None
    assert rank.state.steps == steps


def test_steps_of_other_lengths_have_plans_of_their_own(runner: Any) -> None:
    rank, known = runner.nwor, []
    for verified in ([3, 2], [2, 3], [1, 1], [3, 3], [2, 3]):
        runner.prepare_attn(Step([1, 1], [3, 3], verified).batch)
        known.append(rank.plan.known)
        assert rank.plan.num_tokens == rank.window.batch.num_tokens == 2 + sum(verified)
        rank.drop()
    # Of the same sum, the host knows no difference.
    assert known[0] is known[1] is known[4]
    assert len({*map(id, known)}) == 3


def test_drafts_behind_a_prompt_leave_nobody_knowing_where_windows_end(toy: ToyLayers, runner: Any) -> None:
    step = Step([1, 6, 3], [3, 0, 2], [2, 0, 1])
    runner.prepare_attn(step.batch)
    plan = toy.window_manager.plan
    assert plan is not None
    assert (plan.num_requests, plan.num_tokens, plan.direct_reason) == (0, 0, "batch_order")
    toy.forward(step.slots)
    assert toy.written(step.slots) == list(range(step.rows))
    record = toy.window_manager.account_sampled(plan, [2, 1, 1])
    assert record.windows == {"r0": ("stage", "batch_order", 2, 1), "r2": ("stage", "batch_order", 1, 0)}


def test_in_mode_off_windows_are_counted_as_they_were_verified(toy: ToyLayers, runner: Any) -> None:
    rank = toy.window_manager
    rank.state.switch(Mode.OFF)
    step = Step([1, 1], [3, 3], [1, 2])
    runner.prepare_attn(step.batch)
    plan = rank.plan
    assert plan is not None
    assert rank.window is not None
    assert rank.window.batch is None
    assert rank.account_sampled(plan, [1, 3]).windows == {"r0": ("off", "", 1, 0), "r1": ("off", "", 2, 2)}


def test_a_step_whose_counts_cannot_be_copied_is_direct(
    toy: ToyLayers, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr("nwor.engine.window_manager.TrimmedDrafts", fail)
    step = Step([1, 1], [3, 3], [1, 2])
    runner.prepare_attn(step.batch)
    toy.forward(step.slots)
    assert toy.written(step.slots) == list(range(step.rows))
    plan = toy.window_manager.plan
    assert plan is not None
    assert (plan.num_requests, plan.direct_reason) == (0, "fault")
    assert "no memory" in str(toy.window_manager.state.fault)


def test_nothing_is_chosen_where_the_device_chooses(runner: Any) -> None:
    runner.use_pp, runner.lora_config = False, None
    assert "adaptive verification" in str(runner.nwor_why_no_costs())


FULL = CUDAGraphMode.FULL
VARYING = BatchExecutionDescriptor(FULL, 16, 4, max_query_len=LONGEST)
PIECES = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 16, None)


def test_graphs_of_any_lengths_may_consist_of_windows() -> None:
    assert stageable(VARYING, LONGEST)
    assert not stageable(VARYING, LONGEST - 1)
    assert not stageable(BatchExecutionDescriptor(FULL, 16, 4), LONGEST)
    assert not stageable(BatchExecutionDescriptor(FULL, 16, 4, max_query_len=1), LONGEST)
    assert stageable(BatchExecutionDescriptor(FULL, 16, 4, uniform_token_count=4), LONGEST)
    assert not stageable(PIECES, LONGEST)


def _manager(toy: ToyLayers) -> Any:
    stock = object.__new__(ModelCudaGraphManager)
    stock.graphs = {VARYING: object()}
    manager: Any = NworCudaGraphManager.adopt(stock, toy.window_manager)
    mixed = descriptors(16, 4, [0])
    manager.mixed.graphs = dict.fromkeys(mixed)
    manager.mixed._by_loras = {0: mixed[::-1]}
    return manager


def test_windows_alone_run_in_vllms_sizes_and_others_in_graphs_of_mixed_steps(
    toy: ToyLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = _manager(toy)
    for own, expected in ((VARYING, VARYING), (PIECES, manager.mixed._by_loras[0][-1])):
        monkeypatch.setattr(ModelCudaGraphManager, "dispatch", lambda self, *_, own=own: own)
        assert manager.dispatch(3, 11, None, 0, LONGEST) is expected
        assert manager.mixed.chosen is (None if expected is VARYING else expected)


def test_a_trimmed_step_is_committed_from_where_its_graph_left_it(
    toy: ToyLayers, runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The graph of so many rows and requests serves any division of the rows among them."""
    manager = _manager(toy)
    window = toy.window
    sources = {name: (torch.randn(16, 2, 8), torch.randn(16, 2, 8)) for name in toy.names}
    manager.stage._sources = {VARYING: window.captured(sources)}
    replayed: list[Any] = []
    monkeypatch.setattr(
        ModelCudaGraphManager, "run_fullgraph", lambda self, desc: replayed.append(self.graphs)
    )
    for verified, rejected in (([3, 0, 1], [2, 0, 0]), ([1, 2, 1], [1, 1, 1]), ([0, 3, 1], [0, 0, 1])):
        for cache in toy.caches.values():
            cache.zero_()
        step = Step([1, 1, 1], [3, 3, 3], verified, seed=sum(rejected))
        runner.prepare_attn(step.batch)
        manager.run_fullgraph(VARYING)
        toy.made = {name: key[: step.rows] for name, (key, _) in sources.items()}
        for key, value in sources.values():
            value.copy_(-key)
        assert toy.written(step.slots) == []
        plan = toy.window_manager.finish(torch.tensor(rejected, dtype=torch.int32))
        dropped = {
            row
            for number, count in enumerate(rejected)
            for row in step.drafts(number)[step.verified[number] - count :]
        }
        assert toy.written(step.slots) == [row for row in range(step.rows) if row not in dropped]
        assert plan is not None
        assert plan.direct_reason is None
        assert toy.window_manager.state.fault is None
    assert all(graphs is manager.stage_graphs for graphs in replayed)
    assert len(replayed) == 3


@pytest.mark.parametrize("early", [False, True], ids=["", "early"])
@pytest.mark.parametrize("seed", range(8))
def test_a_mixed_steps_graph_serves_every_mixture(
    toy: ToyLayers, runner: Any, monkeypatch: pytest.MonkeyPatch, seed: int, early: bool
) -> None:
    monkeypatch.setattr(mixed_graphs, "weak_sources", dict)
    step, drawn = _drawn(seed), random.Random(100 + seed)
    rank, size = toy.window_manager, 64
    slots = torch.full((1, size), -1)
    starts = torch.full((size + 1,), step.rows, dtype=torch.int32)
    passes: dict[Any, Any] = {}

    def run(wrap: Any) -> dict[Any, None]:
        for desc in descriptors(size, 8, [0]):
            passes[desc] = wrap(desc, lambda _: toy.forward_split(), False)
            passes[desc](FULL)
        return dict.fromkeys(passes)

    mixed = rank.mixed = MixedGraphs(rank)
    mixed.capture(descriptors(size, 8, [0]), slots, starts, run)
    for cache in toy.caches.values():
        cache.zero_()
    desc = mixed.choose(len(step.verified), step.rows, 0)
    assert desc is not None
    slots[0, : step.rows] = step.slots
    starts[: len(step.starts)] = step.batch.query_start_loc
    runner._nwor_early = early
    runner.prepare_attn(step.batch)
    mixed.prepare(desc)
    left = mixed._sources[desc].sources
    passes[desc](FULL)
    for name, (key, value) in left.items():
        key.copy_(toy.made[name])
        value.copy_(-toy.made[name])
    assert rank.plan is not None
    own = set(range(rank.plan.num_tokens))
    hidden = {row for number in range(len(step.verified)) for row in step.drafts(number)} if early else own
    assert toy.written(step.slots) == [row for row in range(step.rows) if row not in hidden]
    rejected = [drawn.randint(0, count) for count in step.verified]
    rank.finish(torch.tensor(rejected, dtype=torch.int32))
    assert rank.state.fault is None
    dropped = {
        row
        for number, count in enumerate(rejected)
        for row in step.drafts(number)[step.verified[number] - count :]
    }
    assert toy.written(step.slots) == [row for row in range(step.rows) if row not in dropped]


def test_what_a_table_remembers_of_steps_that_are_all_different_is_bounded() -> None:
    table, requests = WindowTable(), [f"r{number}" for number in range(4)]
    sampled = np.ones(4, np.int32).tobytes()
    for number in range(4 * MOST_TREATMENTS):
        drafts = np.array([number >> 6 & 3, number >> 4 & 3, number >> 2 & 3, number & 3], np.int32)
        table.add(requests, Treatment("stage", drafts.tobytes(), 4, 4 + number), [sampled], lambda _: True)
        assert table._roster is not None
        assert len(table._roster.cells) <= MOST_TREATMENTS
    assert sum(table.drain().values()) == 4 * (4 * MOST_TREATMENTS) * 3 // 4
