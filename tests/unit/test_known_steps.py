"""What is worked out once for steps of one shape, and when it no longer holds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nwor.config import NworConfig
from nwor.engine.commit_timer import EVERY, CommitTimer
from nwor.engine.plan import MOST_KNOWN
from nwor.engine.rank import Rank
from nwor.modes import Mode
from nwor.window import StagedLayer, Window, WindowBatch, group_layers

HEADS, SIZE, BLOCK = 2, 8, 4
STARTS = torch.tensor([0, 3, 5, 5, 5], dtype=torch.int32)
SLOTS = torch.tensor([[4, 5, 6, 17, 18, -1, -1, -1]])


@pytest.fixture
def rank() -> Rank:
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=2))
    rank = Rank(config, NworConfig.from_mapping({"mode": "stage"}), torch.device("cpu"))
    layers = []
    for number in range(3):
        cache = torch.zeros(6, BLOCK, 2, HEADS, SIZE)

        def write(key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor, cache: Any = cache) -> None:
            cache[slots // BLOCK, slots % BLOCK, 0], cache[slots // BLOCK, slots % BLOCK, 1] = key, value

        views = cache[:, :, 0], cache[:, :, 1]
        layer = StagedLayer(f"layer{number}", cache, *views, "auto", None, None, torch.float32, write)
        layers.append((0, layer))
    rank.window = Window(group_layers(layers))
    return rank


def plan(rank: Rank, query_lens: Any = (3, 2), drafts: Any = (2, 1), names: str = "ab") -> Any:
    return rank.plan_step(names, query_lens, drafts)


def begin(
    rank: Rank, starts: torch.Tensor = STARTS, slots: torch.Tensor = SLOTS, **shape: Any
) -> WindowBatch:
    rank.begin(plan(rank, **shape), starts, slots)
    assert rank.window is not None
    batch = rank.window.batch
    assert batch is not None
    rank.drop()
    return batch


def test_arrays_and_lists_say_the_same(rank: Rank) -> None:
    known = plan(rank).known
    for dtype in (np.int32, np.int64):
        assert plan(rank, np.array([3, 2], dtype), np.array([2, 1], dtype)).known is known
    assert plan(rank, [3, 2], [1, 2]).known is not known
    assert plan(rank, [2, 3], [2, 1]).known is not known
    assert plan(rank, [3, 2], [0, 0]) is None


def test_the_requests_of_a_plan_are_its_own(rank: Rank) -> None:
    names = ["a", "b"]
    made = rank.plan_step(names, [3, 2], [2, 1])
    assert made is not None
    names[0] = "another"
    assert list(made.request_ids) == ["a", "b"]


def test_a_switch_or_a_refusal_is_planned_anew(rank: Rank) -> None:
    first = plan(rank)
    assert (first.mode, first.num_requests, first.direct_reason) == (Mode.STAGE, 2, None)
    rank.state.switch(Mode.OFF)
    assert (plan(rank).mode, plan(rank).num_requests) == (Mode.OFF, 0)
    rank.state.switch(Mode.COW)
    assert (plan(rank).mode, plan(rank).num_requests) == (Mode.COW, 2)
    rank.refuse("mla")
    assert (plan(rank).num_requests, plan(rank).direct_reason) == (0, "mla")
    assert first.mode is Mode.STAGE


def test_a_plan_that_fails_leaves_others_of_its_shape_alone(rank: Rank) -> None:
    failed, direct = plan(rank), plan(rank)
    failed.fail()
    direct.go_direct("graph")
    assert failed.faulty
    assert (direct.num_requests, direct.direct_reason) == (0, "graph")
    later = plan(rank)
    assert not later.faulty
    assert (later.num_requests, later.direct_reason) == (2, None)
    assert rank.account(failed, [1, 0]).windows["a"] == ("stage", "fault", 2, 1)
    assert rank.account(direct, [1, 0]).windows["b"] == ("stage", "graph", 1, 0)
    assert rank.account(later, [1, 0]).windows["b"] == ("stage", "", 1, 0)


def test_a_batch_is_made_once_while_its_tensors_stay_where_they_are(rank: Rank) -> None:
    batch = begin(rank)
    assert batch.query_start_loc.tolist() == [0, 3, 5]
    assert {key: value.tolist() for key, value in batch.slots.items()} == {0: [4, 5, 6, 17, 18]}
    assert begin(rank, STARTS[:3], SLOTS[:, :5]) is batch
    assert begin(rank, STARTS.clone()) is not batch
    other = begin(rank, slots=SLOTS + 1)
    assert other.slots[0].tolist() == [5, 6, 7, 18, 19]
    assert begin(rank, query_lens=[2, 3], drafts=[1, 2]) is not batch


def test_slots_by_key_are_taken_as_they_come(rank: Rank) -> None:
    rank.begin(plan(rank), STARTS, {0: SLOTS[0]})
    rank.drop()
    rank.begin(plan(rank), STARTS, {0: SLOTS[0] + 1})
    assert rank.window is not None
    assert rank.window.batch is not None
    assert rank.window.batch.slots[0].tolist() == [5, 6, 7, 18, 19]


def test_a_replayed_window_is_committed_from_where_its_graph_left_it(rank: Rank) -> None:
    """The commit is prepared once; each step's slots, counts, keys and values are its own."""
    window = rank.window
    assert window is not None
    sources = {
        name: (torch.zeros(8, HEADS, SIZE), torch.zeros(8, HEADS, SIZE)) for name in window.layer_names
    }
    captured, starts, slots = window.captured(sources), STARTS.clone(), SLOTS.clone()
    prepared = []
    for step in range(3):
        slots[0, :5] = SLOTS[0, :5].roll(step)
        rank.begin(plan(rank), starts, slots)
        window.adopt(captured)
        for key, value in sources.values():
            key.normal_()
            value.normal_()
        prepared.append(window._commits_of(window.batch))
        for layer in window.groups[0].layers:
            layer.kv_cache.zero_()
        made = rank.finish(torch.tensor([step, 1], dtype=torch.int32))
        assert made is not None
        assert rank.state.fault is None
        kept = [*range(3 - step), 3]
        for layer in window.groups[0].layers:
            lines = layer.kv_cache.flatten(0, 1)
            expected = torch.zeros_like(lines)
            for row in kept:
                expected[slots[0, row]] = torch.stack([side[row] for side in sources[layer.name]])
            assert torch.equal(lines, expected)
    assert prepared[0] is prepared[1] is prepared[2]
    again = window.captured(sources)
    rank.begin(plan(rank), starts, slots)
    window.adopt(again)
    assert window._commits_of(window.batch) is not prepared[0]


def test_what_is_remembered_is_bounded(rank: Rank) -> None:
    for number in range(3 * MOST_KNOWN):
        plan(rank, [3, 10 + number], [2, 0])
    assert len(rank._planner._known) <= MOST_KNOWN


def test_one_commit_of_eight_is_timed_on_a_gpu_and_each_on_a_cpu() -> None:
    timer = CommitTimer(torch.device("cuda"))
    assert [timer.due() for _ in range(2 * EVERY)] == ([True] + [False] * (EVERY - 1)) * 2
    assert all(CommitTimer(torch.device("cpu")).due() for _ in range(EVERY))
