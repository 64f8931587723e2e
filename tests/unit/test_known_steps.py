"""What is worked out once for steps of one shape, and when it no longer holds."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nwor.config import NworConfig
from nwor.engine.stats.commit_timer import EVERY, CommitTimer
from nwor.engine.step_plan import MOST_KNOWN
from nwor.engine.window_manager import WindowManager
from nwor.modes import Mode
from nwor.windows.window import StagedLayer, Window, WindowBatch, group_layers

HEADS, SIZE, BLOCK = 2, 8, 4
STARTS = torch.tensor([0, 3, 5, 5, 5], dtype=torch.int32)
SLOTS = torch.tensor([[4, 5, 6, 17, 18, -1, -1, -1]])


@pytest.fixture
def window_manager() -> WindowManager:
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=2))
    window_manager = WindowManager(config, NworConfig.from_mapping({"mode": "stage"}), torch.device("cpu"))
    layers = []
    for number in range(3):
        cache = torch.zeros(6, BLOCK, 2, HEADS, SIZE)

        def write(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, cache: Any = cache) -> None:
            cache[slots // BLOCK, slots % BLOCK, 0], cache[slots // BLOCK, slots % BLOCK, 1] = key, value

        views = cache[:, :, 0], cache[:, :, 1]
        layer = StagedLayer(f"layer{number}", cache, *views, "auto", None, None, torch.float32, write)
        layers.append((0, layer))
    window_manager.window = Window(group_layers(layers))
    return window_manager


def plan(
    window_manager: WindowManager, query_lens: Any = (3, 2), drafts: Any = (2, 1), names: str = "ab"
) -> Any:
    return window_manager.plan_step(names, query_lens, drafts)


def begin(
    window_manager: WindowManager, starts: torch.Tensor = STARTS, slots: torch.Tensor = SLOTS, **shape: Any
) -> WindowBatch:
    window_manager.begin(plan(window_manager, **shape), starts, slots)
    assert window_manager.window is not None
    batch = window_manager.window.batch
    assert batch is not None
    window_manager.drop()
    return batch


def test_arrays_and_lists_say_the_same(window_manager: WindowManager) -> None:
    known = plan(window_manager).known
    for dtype in (np.int32, np.int64):
        assert plan(window_manager, np.array([3, 2], dtype), np.array([2, 1], dtype)).known is known
    assert plan(window_manager, [3, 2], [1, 2]).known is not known
    assert plan(window_manager, [2, 3], [2, 1]).known is not known
    assert plan(window_manager, [3, 2], [0, 0]) is None


def test_the_requests_of_a_plan_are_its_own(window_manager: WindowManager) -> None:
    for numbers in (([3, 2], [2, 1], False, False), ([3, 3], [2, 2], False, True)):
        names = ["a", "b"]
        made = window_manager.plan_step(names, *numbers)
        assert made is not None
        names[0] = "another"
        assert list(made.request_ids) == ["a", "b"]


def full(window_manager: WindowManager, requests: int) -> Any:
    names = [f"r{number}" for number in range(requests)]
    return window_manager.plan_step(names, [3] * requests, [2] * requests, False, True)


def test_a_full_step_is_known_by_its_number_of_requests(window_manager: WindowManager) -> None:
    made = full(window_manager, 2)
    assert (made.num_requests, made.num_tokens, made.draft_counts) == (2, 6, [2, 2])
    assert full(window_manager, 2).known is made.known
    assert full(window_manager, 3).draft_counts == [2, 2, 2]
    assert full(window_manager, 2).known is made.known
    # The numbers say the same, and others say something else.
    assert plan(window_manager, [3, 3], [2, 2]).treatment == made.treatment
    assert plan(window_manager).num_tokens == 5
    assert full(window_manager, 2).known is made.known


def test_a_full_step_is_planned_anew_after_a_switch_or_a_refusal(window_manager: WindowManager) -> None:
    staged = full(window_manager, 2)
    window_manager.state.switch(Mode.OFF)
    assert (full(window_manager, 2).mode, full(window_manager, 2).num_requests) == (Mode.OFF, 0)
    window_manager.state.switch(Mode.STAGE)
    assert (full(window_manager, 2).mode, full(window_manager, 2).num_requests) == (Mode.STAGE, 2)
    window_manager.state.fail("commit", RuntimeError("broken"))
    assert full(window_manager, 2).mode is Mode.OFF
    window_manager.state.switch(Mode.STAGE)
    window_manager.refuse("mla")
    assert (full(window_manager, 2).num_requests, full(window_manager, 2).direct_reason) == (0, "mla")
    assert staged.mode is Mode.STAGE


def test_a_switch_or_a_refusal_is_planned_anew(window_manager: WindowManager) -> None:
    first = plan(window_manager)
    assert (first.mode, first.num_requests, first.direct_reason) == (Mode.STAGE, 2, None)
    window_manager.state.switch(Mode.OFF)
    assert (plan(window_manager).mode, plan(window_manager).num_requests) == (Mode.OFF, 0)
    window_manager.state.switch(Mode.COW)
    assert (plan(window_manager).mode, plan(window_manager).num_requests) == (Mode.COW, 2)
    window_manager.refuse("mla")
    assert (plan(window_manager).num_requests, plan(window_manager).direct_reason) == (0, "mla")
    assert first.mode is Mode.STAGE


def test_a_plan_that_fails_leaves_others_of_its_shape_alone(window_manager: WindowManager) -> None:
    failed, direct = plan(window_manager), plan(window_manager)
    failed.fail()
    direct.go_direct("graph")
    assert failed.faulty
    assert (direct.num_requests, direct.direct_reason) == (0, "graph")
    later = plan(window_manager)
    assert not later.faulty
    assert (later.num_requests, later.direct_reason) == (2, None)
    assert window_manager.account(failed, [1, 0]).windows["a"] == ("stage", "fault", 2, 1)
    assert window_manager.account(direct, [1, 0]).windows["b"] == ("stage", "graph", 1, 0)
    assert window_manager.account(later, [1, 0]).windows["b"] == ("stage", "", 1, 0)


def test_a_batch_is_made_once_while_its_tensors_stay_where_they_are(window_manager: WindowManager) -> None:
    batch = begin(window_manager)
    assert batch.query_start_loc.tolist() == [0, 3, 5]
    assert {key: value.tolist() for key, value in batch.slots.items()} == {0: [4, 5, 6, 17, 18]}
    assert begin(window_manager, STARTS[:3], SLOTS[:, :5]) is batch
    assert begin(window_manager, STARTS.clone()) is not batch
    other = begin(window_manager, slots=SLOTS + 1)
    assert other.slots[0].tolist() == [5, 6, 7, 18, 19]
    assert begin(window_manager, query_lens=[2, 3], drafts=[1, 2]) is not batch


def test_a_batch_of_several_keys_is_made_anew_where_they_lie_further_apart(
    window_manager: WindowManager,
) -> None:
    memory = torch.arange(32)
    near, far = memory.as_strided((2, 5), (8, 1)), memory.as_strided((2, 5), (16, 1))
    batch = begin(window_manager, slots=near)
    assert begin(window_manager, slots=near[:, :5]) is batch
    assert begin(window_manager, slots=far).slots[1].tolist() == [16, 17, 18, 19, 20]
    assert begin(window_manager, slots=near).slots[1].tolist() == [8, 9, 10, 11, 12]


def test_slots_by_key_are_taken_as_they_come(window_manager: WindowManager) -> None:
    window_manager.begin(plan(window_manager), STARTS, {0: SLOTS[0]})
    window_manager.drop()
    window_manager.begin(plan(window_manager), STARTS, {0: SLOTS[0] + 1})
    assert window_manager.window is not None
    assert window_manager.window.batch is not None
    assert window_manager.window.batch.slots[0].tolist() == [5, 6, 7, 18, 19]


def test_a_replayed_window_is_committed_from_where_its_graph_left_it(window_manager: WindowManager) -> None:
    """The commit is prepared once; each step's slots, counts, keys and values are its own."""
    window = window_manager.window
    assert window is not None
    sources = {
        name: (torch.zeros(8, HEADS, SIZE), torch.zeros(8, HEADS, SIZE)) for name in window.layer_names
    }
    captured, starts, slots = window.captured(sources), STARTS.clone(), SLOTS.clone()
    prepared = []
    for step in range(3):
        slots[0, :5] = SLOTS[0, :5].roll(step)
        window_manager.begin(plan(window_manager), starts, slots)
        window.adopt(captured)
        for key, value in sources.values():
            key.normal_()
            value.normal_()
        prepared.append(window._commits_of(window.batch))
        for layer in window.groups[0].layers:
            layer.kv_cache.zero_()
        made = window_manager.finish(torch.tensor([step, 1], dtype=torch.int32))
        assert made is not None
        assert window_manager.state.fault is None
        kept = [*range(3 - step), 3]
        for layer in window.groups[0].layers:
            lines = layer.kv_cache.flatten(0, 1)
            expected = torch.zeros_like(lines)
            for row in kept:
                expected[slots[0, row]] = torch.stack([side[row] for side in sources[layer.name]])
            assert torch.equal(lines, expected)
    assert prepared[0] is prepared[1] is prepared[2]
    again = window.captured(sources)
    window_manager.begin(plan(window_manager), starts, slots)
    window.adopt(again)
    assert window._commits_of(window.batch) is not prepared[0]


def test_a_commit_is_that_of_its_batch_and_its_graph(window_manager: WindowManager) -> None:
    """Two graphs and two batch sizes in turns: each step's rows come from where its own graph left them."""
    window = window_manager.window
    assert window is not None
    graphs = [
        window.captured(
            {
                name: (torch.full((8, HEADS, SIZE), value), torch.full((8, HEADS, SIZE), value))
                for name in window.layer_names
            }
        )
        for value in (1.0, 2.0)
    ]
    starts, slots = STARTS.clone(), SLOTS.clone()
    cache = window.groups[0].layers[0].kv_cache
    for shape, graph in ((0, 0), (0, 1), (1, 1), (1, 1), (0, 1), (0, 0), (1, 0), (0, 0)):
        requests, rows = ((2, [4, 5, 6, 17, 18]), (1, [4, 5, 6]))[shape]
        made = window_manager.plan_step("ab"[:requests], [3, 2][:requests], [2, 1][:requests])
        window_manager.begin(made, starts, slots)
        window.adopt(graphs[graph])
        cache.zero_()
        window_manager.finish(torch.zeros(requests, dtype=torch.int32))
        assert window_manager.state.fault is None
        lines = cache.flatten(0, 1)
        assert lines[rows].eq(graph + 1).all()
        assert lines.count_nonzero() == lines[rows].numel()


def test_counts_that_do_not_fit_are_a_fault_in_any_step(window_manager: WindowManager) -> None:
    """Also in one whose commit was prepared before; its window is written directly."""
    window = window_manager.window
    assert window is not None
    sources = {name: (torch.ones(8, HEADS, SIZE), torch.ones(8, HEADS, SIZE)) for name in window.layer_names}
    captured = window.captured(sources)
    cache = window.groups[0].layers[0].kv_cache
    for counts, fault in ((torch.zeros(2), False), (torch.zeros(1), True)):
        cache.zero_()
        window_manager.begin(plan(window_manager), STARTS, SLOTS)
        window.adopt(captured)
        made = window_manager.finish(counts.to(torch.int32))
        assert made is not None
        assert (made.faulty, window_manager.state.fault is not None) == (fault, fault)
        assert cache.flatten(0, 1)[[4, 5, 6, 17, 18]].eq(1).all()


def test_what_is_remembered_is_bounded(window_manager: WindowManager) -> None:
    for number in range(3 * MOST_KNOWN):
        plan(window_manager, [3, 10 + number], [2, 0])
    assert len(window_manager._planner._known) <= MOST_KNOWN


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_one_commit_of_eight_is_timed_on_a_gpu_and_each_on_a_cpu(
    window_manager: WindowManager, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Event:
        """Stands for one of CUDA's."""

        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            recorded.append(window_manager.state.steps)

    recorded: list[int] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    window_manager.timer = timer = CommitTimer(torch.device(kind))
    monkeypatch.setattr(timer, "_add", lambda seconds: recorded.append(window_manager.state.steps))
    for _ in range(2 * EVERY):
        window_manager.begin(plan(window_manager), STARTS, SLOTS)
        assert window_manager.window is not None
        for name in window_manager.window.layer_names:
            window_manager.window.stage(name, torch.ones(5, HEADS, SIZE), torch.ones(5, HEADS, SIZE))
        window_manager.finish(torch.zeros(2, dtype=torch.int32))
    assert window_manager.state.fault is None
    assert recorded == ([*range(1, 2 * EVERY + 1)] if kind == "cpu" else [1, 1, 1 + EVERY, 1 + EVERY])


def test_a_timer_says_whether_something_waits_to_be_drained() -> None:
    timer = CommitTimer(torch.device("cpu"))
    assert not timer.waiting
    with timer:
        pass
    assert timer.waiting
    assert timer.drain()[0] == 1
    assert not timer.waiting
    assert timer.drain() == (0, 0.0)


def test_two_threads_read_a_timer_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[threading.Thread] = []
    drained: list[tuple[int, float]] = []
    made: list[object] = []

    class Event:
        """Stands for one of CUDA's; those of the first measurement have passed, those of the second not."""

        def __init__(self, enable_timing: bool) -> None:
            made.append(self)
            self.passed = len(made) <= 2

        def record(self) -> None:
            pass

        def query(self) -> bool:
            passed = self.passed
            if not others:  # another thread asks just now
                others.append(threading.Thread(target=lambda: drained.append(timer.drain())))
                others[0].start()
                others[0].join(0.3)
            return passed

        def elapsed_time(self, end: Event) -> float:
            assert self.passed
            assert end.passed
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    timer = CommitTimer(torch.device("cuda"))
    for _ in range(2):
        with timer:
            pass
    drained.append(timer.drain())
    others[0].join()
    assert sorted(drained) == [(0, 0.0), (1, 0.002)]
    assert timer.waiting
