"""Windows counted for many steps at once are the windows counted one by one."""

from __future__ import annotations

import pickle
import sys
import threading
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nwor.config import NworConfig
from nwor.counts.histogram import count_kinds
from nwor.counts.records import StepRecord, Treatment, WorkerFacts
from nwor.counts.window_table import WindowTable
from nwor.modes import Mode
from nwor.worker_state import WorkerState

FACTS = WorkerFacts("stage", 0, 10)


def int32(numbers: list[int]) -> bytes:
    return np.array(numbers, np.int32).tobytes()


@st.composite
def treatments(draw: Any, requests: int) -> Treatment:
    drafts = draw(st.lists(st.integers(0, 5), min_size=requests, max_size=requests))
    staged = draw(st.integers(0, requests))
    mode, outside = draw(st.sampled_from([("off", ""), ("stage", "batch_order"), ("cow", "graph")]))
    inside = draw(st.sampled_from(["", "fault"]))
    return Treatment(mode, int32(drafts), staged, 0, inside, outside)


@st.composite
def steps(draw: Any) -> list[StepRecord]:
    """Steps of some requests, which come, go and change places; some steps are like the one before."""
    records: list[StepRecord] = []
    for _ in range(draw(st.integers(1, 8))):
        if not records or draw(st.booleans()):
            requests = draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=8))
            treatment = draw(treatments(len(requests)))
        sampled = [draw(st.integers(0, 1 + drafts)) for drafts in treatment.draft_counts]
        records.append(StepRecord(requests, treatment, int32(sampled), FACTS, 0))
    return records


@given(steps())
def test_kinds_of_a_step(records: list[StepRecord]) -> None:
    for record in records:
        windows = record.windows
        assert count_kinds(record.treatment, [record.sampled] * 3) == {
            kind: 3 * times for kind, times in Counter(windows.values()).items()
        }


@given(steps(), st.data())
def test_a_table_of_steps_that_requests_end_between(records: list[StepRecord], data: Any) -> None:
    table, model, everything = WindowTable(), {}, Counter()
    ended: set[str] = set()
    for record in records:
        accepted, names, gone = table.add(
            record.request_ids, record.treatment, [record.sampled], lambda request: request not in ended
        )
        assert dict(zip(names, accepted[0].tolist(), strict=True)) == {
            request: kind[3] for request, kind in record.windows.items()
        }
        late = [] if gone is None else [name for name, late in zip(names, gone, strict=True) if late]
        assert set(late) == ended & record.windows.keys()
        for request, kind in record.windows.items():
            everything[kind] += 1
            if request not in ended:
                model.setdefault(request, Counter())[kind] += 1
        for request in data.draw(st.sets(st.sampled_from("abcdefgh"))):
            assert table.of(request) == model.pop(request, {})
            table.end(request)
            ended.add(request)
        if data.draw(st.booleans()):
            assert table.drain() == everything
            everything = Counter()
        for request in data.draw(st.sets(st.sampled_from(sorted(ended)))) if ended else ():
            ended.discard(request)  # begins anew under the same name
            table.forget_requests()
    assert {request: table.of(request) for request in model} == model
    assert table.drain() == everything
    assert table.drain() == {}


def test_a_table_grows_by_rows_and_by_columns() -> None:
    table, model = WindowTable(), {}
    for number in range(40):
        ids = [f"{number}-{index}" for index in range(5)]
        treatment = Treatment("stage", int32([1 + number % 30] * 5), 5, 0)
        table.add(ids, treatment, [int32([1 + index % 2 for index in range(5)])], lambda _: True)
        for index, request in enumerate(ids):
            model[request] = {("stage", "", 1 + number % 30, index % 2): 1}
    assert {request: table.of(request) for request in model} == model
    assert sum(table.drain().values()) == 200


def test_more_tokens_than_a_window_has_are_an_error() -> None:
    treatment = Treatment("stage", int32([4, 2]), 2, 7)
    with pytest.raises(ValueError, match="more tokens"):
        count_kinds(treatment, [int32([5, 4])])


def test_a_record_survives_its_journey_and_is_small() -> None:
    ids = [f"cmpl-{number:032x}-0" for number in range(64)]
    record = StepRecord(ids, Treatment("stage", int32([4] * 64), 64, 320), int32([3] * 64), FACTS, 64)
    assert pickle.loads(pickle.dumps(record)) == record
    # The requests' names go home with the step's output anyway, and are pickled once.
    alone = len(pickle.dumps((ids, record))) - len(pickle.dumps(ids))
    assert alone < 1200
    assert record.windows == dict.fromkeys(ids, ("stage", "", 4, 2))


def test_a_rank_counts_when_asked() -> None:
    state = WorkerState(NworConfig(), Mode.STAGE, token_bytes=10)
    treatment = Treatment("stage", int32([4, 0, 2]), 2, 6, outside="batch_order")
    for _ in range(300):
        state.count(treatment, int32([3, 1, 2]), 2)
    assert state.windows == 600
    assert len(state._waiting) < 300
    assert state.tally.kinds == {("stage", "", 4, 2): 300, ("stage", "batch_order", 2, 1): 300}
    state.count(treatment, int32([1, 1, 1]), 2)
    state.reset()
    assert state.tally.kinds == {}
    assert state.windows == 602


def test_a_rank_reports_while_another_thread_counts() -> None:
    treatments = [
        (Treatment("stage", int32([drafts]), 1, drafts + 1), int32([accepted + 1]))
        for drafts in range(1, 60)
        for accepted in range(0, drafts + 1, 7)
    ]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(20):
            state = WorkerState(NworConfig(), Mode.STAGE, token_bytes=10)
            thread = threading.Thread(
                target=lambda own: [own.count(treatment, sampled, 1) for treatment, sampled in treatments],
                args=[state],
            )
            thread.start()
            while thread.is_alive():
                assert state.report()["counts"]["windows"] <= len(treatments)
            thread.join()
            assert state.counts.windows == len(treatments)
    finally:
        sys.setswitchinterval(interval)


def test_facts_are_the_same_until_the_mode_is_switched() -> None:
    state = WorkerState(NworConfig(), Mode.STAGE, token_bytes=10, ranks=2)
    facts = state.facts
    assert facts == WorkerFacts("stage", 0, 20)
    assert state.facts is facts
    state.switch(Mode.OFF)
    assert state.facts == WorkerFacts("off", 1, 20)
    state.fail("test", RuntimeError("nothing"))
    state.switch(Mode.COW)
    assert state.facts == WorkerFacts("cow", 2, 20)
