"""Windows of an earlier pipeline stage: when their drafts are committed, what is left out, how it counts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from nwor.config import NworConfig
from nwor.counts.records import EarlierStages, StepRecord, Tally, Treatment, WorkerFacts
from nwor.engine.pipeline_parallel.cut_short import CutShort
from nwor.engine.pipeline_parallel.deferral import Deferral
from nwor.engine.pipeline_parallel.freed import FreedRequests, freed_by
from nwor.engine.stats.step_messages import announce, in_flight_of
from nwor.engine.step_plan import KnownStep, StepPlan, takes_over_blocks
from nwor.errors import WindowStateError
from nwor.modes import Mode
from nwor.windows.window import StagedLayer, Window, WindowBatch, group_layers
from nwor.worker_state import WorkerState

HEADS, SIZE, BLOCK, LAYERS = 2, 8, 4, 3
#: Two requests with three drafts each and, between them, a prompt's two rows.
REQUESTS, LENGTHS, DRAFTS = ["a", "p", "b"], [4, 2, 4], [3, 0, 3]
SLOTS = [0, 1, 2, 3, 8, 9, 20, 21, 22, 23]
#: Rows that are no drafts, and those of a's and b's drafts.
REST, OF_A, OF_B = [0, 4, 5, 6], [1, 2, 3], [7, 8, 9]


class Stage:
    """A rank's window with real caches, and its deferral."""

    def __init__(self) -> None:
        self.caches = [torch.zeros(8, BLOCK, 2, HEADS, SIZE) for _ in range(LAYERS)]
        layers = [(0, self._layer(index, cache)) for index, cache in enumerate(self.caches)]
        self.window = Window(group_layers(layers))
        self.state = WorkerState(NworConfig(), Mode.STAGE)
        self.deferral = Deferral(self.window, self.state, 2)
        self.keys: list[torch.Tensor] = []

    def _layer(self, index: int, cache: torch.Tensor) -> StagedLayer:
        def direct_write(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor) -> None:
            there = slots >= 0
            cache[slots[there] // BLOCK, slots[there] % BLOCK, 0] = key[there]
            cache[slots[there] // BLOCK, slots[there] % BLOCK, 1] = value[there]

        views = cache[:, :, 0], cache[:, :, 1]
        return StagedLayer(str(index), cache, *views, "auto", None, None, torch.float32, direct_write)

    def forward(self, mode: Mode = Mode.STAGE, early: dict | None = None) -> None:
        """Run the layers of a step with a window batch."""
        starts = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
        batch = WindowBatch(mode, 3, 10, starts, {0: torch.tensor(SLOTS)}, early)
        self.window.begin(batch)
        self.keys = [torch.randn(10, HEADS, SIZE) for _ in range(LAYERS)]
        for index, key in enumerate(self.keys):
            if mode is Mode.STAGE:
                self.window.stage(str(index), key, -key)
            else:
                self.window.groups[0].layers[index].direct_write(key, -key, batch.slots[0])

    def hold(self, mode: Mode = Mode.STAGE, *, copy: bool = False) -> None:
        treatment = Treatment(mode.value, np.array(DRAFTS, np.int32).tobytes(), 3, 10)
        plan = StepPlan(KnownStep(treatment, LENGTHS), REQUESTS)
        self.deferral.hold(plan, None, copy=copy)

    def written(self, keys: list[torch.Tensor] | None = None) -> list[int]:
        """Return the rows of the step that stand in the cache, the same in all layers."""
        found = []
        for cache, key in zip(self.caches, keys or self.keys, strict=True):
            lines = cache.flatten(0, 1)[torch.tensor(SLOTS)]
            assert torch.equal(lines[:, 0], -lines[:, 1])
            found.append([row for row in range(10) if torch.equal(lines[row, 0], key[row])])
        assert all(rows == found[0] for rows in found)
        return found[0]


def rejected(*counts: int):
    return lambda: torch.tensor(counts, dtype=torch.int32)


@pytest.fixture
def stage() -> Stage:
    torch.manual_seed(3)
    return Stage()


def test_drafts_wait_until_vllm_takes_the_counts_in(stage):
    stage.deferral.next_step(0, set())
    stage.forward()
    stage.hold()
    assert stage.window.batch is None
    assert stage.written() == REST
    stage.deferral.expect(rejected(1, 0, 3))
    stage.deferral.next_step(1, set())
    assert stage.written() == REST
    stage.deferral.next_step(2, set())
    assert stage.written() == sorted([*REST, 1, 2])
    assert stage.deferral.pending == ()
    assert stage.state.fault is None


def test_what_the_scheduler_has_heard_of_is_committed_at_once(stage):
    stage.deferral.next_step(0, set())
    stage.forward()
    stage.hold()
    stage.deferral.expect(rejected(0, 0, 2))
    stage.deferral.next_step(0, {"a"})  # a has ended with that result: its blocks are in the prefix cache
    assert stage.written() == sorted([*REST, *OF_A, 7])


@pytest.mark.parametrize("inference", [False, True], ids=["", "slots-of-inference-mode"])
def test_a_request_freed_meanwhile_is_left_out(stage, inference):
    with torch.inference_mode(inference):
        stage.deferral.next_step(0, set())
        stage.forward()
        stage.hold()
    stage.deferral.expect(rejected(0, 0, 0))
    stage.deferral.next_step(1, {"a", "other"})
    stage.deferral.next_step(2, set())
    assert stage.written() == sorted([*REST, *OF_B])


def test_freed_in_the_step_that_would_commit(stage):
    stage.deferral.next_step(0, set())
    stage.forward()
    stage.hold()
    stage.deferral.expect(rejected(0, 0, 0))
    stage.deferral.next_step(1, set())
    stage.deferral.next_step(2, {"b"})
    assert stage.written() == sorted([*REST, *OF_A])


def test_counts_that_nobody_needs_are_not_waited_for(stage):
    def never() -> torch.Tensor:
        raise AssertionError("asked for")

    stage.deferral.next_step(0, set())
    stage.forward()
    stage.hold()
    stage.deferral.expect(never)
    stage.deferral.next_step(1, {"a", "b", "p"})
    stage.deferral.next_step(2, set())
    assert stage.written() == REST
    assert stage.state.fault is None


def test_keys_that_the_next_step_overwrites_are_copied(stage):
    stage.deferral.next_step(0, set())
    stage.forward()
    stage.hold(copy=True)
    stage.deferral.expect(rejected(0, 0, 0))
    keys = [key.clone() for key in stage.keys]
    for key in stage.keys:
        key.zero_()
    stage.deferral.next_step(0, set())
    assert stage.written(keys) == list(range(10))


def test_restoring_waits_too(stage):
    stage.deferral.next_step(0, set())
    stage.forward(Mode.COW)
    stage.hold(Mode.COW)
    assert stage.written() == list(range(10))
    stage.deferral.expect(rejected(3, 0, 1))
    stage.deferral.next_step(1, {"b"})
    stage.deferral.next_step(2, set())
    assert stage.written() == sorted([*REST, *OF_B])


def test_rows_written_as_the_layers_ran_are_not_committed_again(stage):
    slots = torch.tensor(SLOTS)
    draft = torch.zeros(10, dtype=torch.bool)
    draft[[*OF_A, *OF_B]] = True
    stage.deferral.next_step(0, set())
    starts = torch.tensor([0, 4, 6, 10], dtype=torch.int32)
    masked = {0: torch.where(draft, slots, -1)}
    stage.window.begin(WindowBatch(Mode.STAGE, 3, 10, starts, masked, {0: torch.where(~draft, slots, -1)}))
    stage.keys = [torch.randn(10, HEADS, SIZE) for _ in range(LAYERS)]
    for index, key in enumerate(stage.keys):
        stage.window.stage(str(index), key, -key)
    assert stage.written() == REST
    stage.caches[0][0, 0] = 7.0  # row 0's slot: nothing touches it again
    stage.hold()
    stage.deferral.expect(rejected(0, 0, 0))
    stage.deferral.next_step(0, set())
    assert (stage.caches[0][0, 0] == 7.0).all()
    stage.caches[0][0, 0, 0], stage.caches[0][0, 0, 1] = stage.keys[0][0], -stage.keys[0][0]
    assert stage.written() == list(range(10))


def test_a_step_without_counts_is_written_as_stock_code_does(stage):
    stage.deferral.next_step(0, set())
    stage.forward()
    stage.hold()
    stage.deferral.expect(None)
    assert stage.written() == list(range(10))
    assert "sends no counts" in stage.state.fault
    assert stage.state.mode is Mode.OFF


def lost() -> torch.Tensor:
    raise RuntimeError("lost")


def test_an_error_in_the_commit_is_a_fault(stage):
    stage.deferral.next_step(0, set())
    stage.forward()
    stage.hold()
    stage.deferral.expect(lost)
    stage.deferral.next_step(0, set())
    assert stage.written() == list(range(10))
    assert "lost" in stage.state.fault


def test_an_error_in_the_commit_leaves_blocks_with_other_owners_alone(stage):
    stage.deferral.next_step(0, set())
    stage.forward()
    stage.hold()
    stage.deferral.expect(lost)
    stage.deferral.next_step(1, {"a"})
    stage.deferral.next_step(2, set())
    assert stage.written() == sorted([*REST, *OF_B])
    assert "lost" in stage.state.fault


def test_an_error_while_a_batch_is_held_loses_nothing(stage, monkeypatch):
    def broken(*args: object) -> None:
        raise RuntimeError("no launch")

    stage.forward()
    monkeypatch.setattr(stage.window, "finish", broken)
    with pytest.raises(RuntimeError, match="no launch"):
        stage.hold()
    assert stage.written() == list(range(10))
    assert stage.deferral.pending == ()


def test_a_batch_that_fell_back_is_not_held(stage):
    stage.forward()
    stage.window.finish_direct()
    with pytest.raises(WindowStateError, match="direct writes"):
        stage.window.release(copy=False)


def test_freed_requests_are_remembered_as_long_as_an_earlier_step_is_under_way():
    freed = FreedRequests()
    freed.note(5, 2, {"a"})
    assert [freed.since(step, "a") for step in (3, 4, 5)] == [True, True, False]
    assert not freed.since(4, "b")
    freed.note(6, 2, set())
    assert freed.since(4, "a")
    freed.note(7, 2, set())
    assert not freed.since(4, "a")


def test_what_a_scheduled_step_says():
    new = [SimpleNamespace(req_id="n", num_computed_tokens=0)]
    cached = SimpleNamespace(req_ids=["r", "s"], num_computed_tokens=[32, 32], resumed_req_ids=set())
    step = SimpleNamespace(
        finished_req_ids={"f"}, preempted_req_ids=None, scheduled_new_reqs=new, scheduled_cached_reqs=cached
    )
    assert freed_by(step) == {"f", "n"}
    assert not takes_over_blocks(step)
    cached.resumed_req_ids = {"s"}
    assert takes_over_blocks(step)
    cached.resumed_req_ids, new[0].num_computed_tokens = set(), 16
    assert takes_over_blocks(step)
    assert in_flight_of(step) == 0
    announce(step, 2)
    assert in_flight_of(step) == 2


@pytest.mark.parametrize("counted_first", [True, False])
def test_the_last_stage_counts_what_the_others_leave_out(counted_first):
    state = WorkerState(NworConfig(), Mode.STAGE, token_bytes=10, other_token_bytes=30, ranks=2)
    cut_short = CutShort(state)
    windows = {"a": ("stage", "", 4, 3), "b": ("cow", "", 4, 1), "c": ("stage", "fault", 4, 2)}
    cut_short.next_step(0, set())
    if counted_first:
        cut_short.count(1, windows)
        cut_short.next_step(1, {"a", "c", "other"})
        cut_short.next_step(2, {"b"})
    else:
        cut_short.next_step(1, {"a", "c", "other"})
        cut_short.next_step(2, {"b"})
        cut_short.count(1, windows)
    assert state.tally.extra == {"commit": -3 * 60, "restore": -3 * 60}
    state.tally.add(windows["a"])
    assert state.counts.commit_bytes == 4 * 80 - 3 * 60


def test_a_request_that_ended_with_the_result_leaves_nothing_out():
    state = WorkerState(NworConfig(), Mode.STAGE, token_bytes=10, other_token_bytes=30)
    cut_short = CutShort(state)
    cut_short.next_step(0, set())
    cut_short.count(1, {"a": ("stage", "", 4, 3)})
    cut_short.next_step(0, {"a"})
    assert state.tally.extra == {}


@pytest.mark.parametrize(("in_the_step", "per_token"), [(0, 15), (20, 20)])
def test_copies_are_staging_bytes_and_counted_once(in_the_step, per_token):
    """Where all stages copy as the layers run, those before the last do not copy again afterwards."""
    earlier = EarlierStages(token_bytes=30, copied_bytes=15)
    treatment = Treatment("stage", b"", 0, 0, copied_bytes=in_the_step)
    record = StepRecord([], treatment, b"", WorkerFacts("stage", 0, 40, earlier), 0)
    assert record.copies(("stage", "", 4, 1)) == {"stage": 5 * per_token}
    assert record.copies(("cow", "", 4, 1)) == record.copies(("off", "", 4, 1)) == {}
    assert record.copies(("stage", "fault", 4, 1)) == {}
    assert earlier.missing(("off", "", 4, 1)) == {}
    counts = Tally({("stage", "", 4, 1): 1}, record.copies(("stage", "", 4, 1))).counts(40)
    assert (counts.commit_bytes, counts.stage_bytes) == (80, 5 * per_token)
    assert counts.saved_bytes == 200 - 80 - 5 * per_token
