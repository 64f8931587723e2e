"""Bounds of single requests: as asked, and none where drafts are hardly ever accepted."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from nwor.engine.draft_lengths import request_bounds as module
from nwor.engine.draft_lengths.request_acceptance import AVERAGED
from nwor.engine.draft_lengths.request_bounds import (
    PROBE_EVERY,
    RARE,
    TRIAL,
    BoundedDrafts,
    RequestBounds,
    asked_bound,
)
from nwor.engine.stats.figures import RequestFigures

K = 4


def figures(bounds: RequestBounds, request_id: str) -> tuple[int | None, int, str]:
    found = RequestFigures(**vars(RequestSpecDecodeMetrics.new(K)))
    bounds.enter(request_id, found)
    return found.nwor_max_draft_tokens, found.nwor_steps_without_drafts, found.nwor_why_bounded


class Engine:
    """Steps of one request beside others; how many drafts each window has, and what became of them."""

    def __init__(self, watch: bool = True, asked: int | None = None, lag: int = 0) -> None:
        self.bounds = RequestBounds(watch, K)
        self.bounds.add("a", asked)
        self.bounds.add("b", None)
        self.lag = lag
        self.drafts: list[int] = []
        self._later: list[tuple[list[str], list[int], Any]] = []

    def step(self, chance: float, rng: random.Random) -> None:
        bound = self.bounds.active.get("a")
        drafts = len(bound.cut([0] * K)) if bound else K
        self.drafts.append(drafts)
        accepted = 0
        while accepted < drafts and rng.random() < chance:
            accepted += 1
        names = ["b", "a"] if drafts else ["b"]
        self._later.append(
            (names, [K, drafts][: len(names)], np.array([[3, accepted][: len(names)]], np.int32))
        )
        if len(self._later) > self.lag:
            # Steps with the same requests and drafts are told of together.
            while self._later:
                names, made, counts = self._later.pop(0)
                while self._later and self._later[0][:2] == (names, made):
                    counts = np.concatenate([counts, self._later.pop(0)[2]])
                self.bounds.observe(names, np.array(made), counts)


def test_a_request_that_asks_is_cut_in_each_step() -> None:
    bounds = RequestBounds()
    for name, asked in (("none", 0), ("two", 2), ("free", None), ("many", 9)):
        bounds.add(name, asked)
    assert set(bounds.active) == {"none", "two", "many"}
    drafts = [7, 8, 9, 10]
    assert [bounds.active[name].cut(drafts) for name in ("none", "two", "many")] == [[], [7, 8], drafts]
    assert drafts == [7, 8, 9, 10]
    assert figures(bounds, "none") == (0, 1, "asked")
    assert figures(bounds, "two") == (2, 0, "asked")
    assert figures(bounds, "free") == (None, 0, "")
    for name in ("none", "two", "free", "many"):
        bounds.end(name)
    assert bounds.active == {}
    assert figures(bounds, "none") == (None, 0, "")


def test_a_later_turn_of_a_request_may_ask_for_something_else() -> None:
    bounds = RequestBounds()
    bounds.add("a", 0)
    bounds.add("a", 3)
    assert bounds.active["a"].cut([1, 2, 3, 4]) == [1, 2, 3]
    bounds.add("a", None)
    assert bounds.active == {}


@pytest.mark.parametrize("lag", [0, 19])
def test_drafts_that_are_never_accepted_stop(lag: int) -> None:
    engine, rng = Engine(lag=lag), random.Random(1)
    for _ in range(20 * PROBE_EVERY):
        engine.step(0.0, rng)
    first = engine.drafts.index(0)
    assert AVERAGED <= first <= AVERAGED + lag + 1
    after = engine.drafts[first:]
    assert set(after) == {0, 1}
    assert sum(after) == len(after) // PROBE_EVERY
    assert figures(engine.bounds, "a") == (0, after.count(0), "rarely accepted")
    assert figures(engine.bounds, "b") == (None, 0, "")


@pytest.mark.parametrize("chance", [0.35, 0.5, 0.9])
def test_drafts_that_are_accepted_now_and_then_go_on(chance: float) -> None:
    for seed in range(20):
        engine, rng = Engine(), random.Random(seed)
        for _ in range(400):
            engine.step(chance, rng)
        # By chance 32 windows in a row may have next to nothing; that does not last.
        assert engine.drafts.count(K) > 300


@pytest.mark.parametrize("lag", [0, 19])
def test_a_request_comes_back_once_its_drafts_are_accepted(lag: int) -> None:
    engine, rng = Engine(lag=lag), random.Random(2)
    for _ in range(200):
        engine.step(0.0, rng)
    assert "a" in engine.bounds.active
    for _ in range(6 * PROBE_EVERY):
        engine.step(0.8, rng)
    assert engine.drafts[-1] == K
    assert engine.bounds.active == {}
    most, skipped, why = figures(engine.bounds, "a")
    assert (most, why) == (None, "rarely accepted")
    assert skipped == engine.drafts.count(0)


def test_one_accepted_probe_alone_does_not_bring_it_back() -> None:
    engine, rng = Engine(), random.Random(3)
    for _ in range(100):
        engine.step(0.0, rng)
    while engine.drafts[-1] != 1:
        engine.step(1.0 if engine.bounds.active["a"].waited == PROBE_EVERY - 1 else 0.0, rng)
    begun = len(engine.drafts)
    for _ in range(TRIAL + 1):
        engine.step(0.0, rng)
    assert engine.drafts[begun:] == [1] * TRIAL + [0]


def test_the_average_is_that_of_the_latest_windows() -> None:
    """Judged by a sum over all windows, weighted one by one."""
    rng = np.random.default_rng(4)
    bounds = RequestBounds(watch=True)
    bounds.add("a", None)
    windows: list[int] = []
    for _ in range(200):
        steps = int(rng.integers(1, 20))
        part = (rng.random(steps) < 0.11).astype(np.int32)
        windows += part.tolist()
        bounds.observe(["a", "gone"], np.array([K, K]), np.stack([part, part], axis=1))
        weights = [(1 - 1 / AVERAGED) ** age for age in range(len(windows))][::-1]
        mean = sum(w * a for w, a in zip(weights, windows, strict=True)) / sum(weights)
        stopped = "a" in bounds.active
        assert stopped == (len(windows) >= AVERAGED and mean < RARE), (mean, len(windows))
        if stopped:
            return
    pytest.fail("it never fell below the threshold")


def test_a_bound_that_was_asked_for_stays_below_that_of_a_probe() -> None:
    engine, rng = Engine(asked=2), random.Random(5)
    for _ in range(100):
        engine.step(0.0, rng)
    assert set(engine.drafts) == {2, 1, 0}
    assert figures(engine.bounds, "a")[::2] == (0, "rarely accepted")


def test_nothing_stops_where_nobody_watches_and_all_goes_on_once_nobody_does() -> None:
    engine, rng = Engine(watch=False), random.Random(6)
    for _ in range(100):
        engine.step(0.0, rng)
    assert set(engine.drafts) == {K}
    engine.bounds.watch = True
    for _ in range(100):
        engine.step(0.0, rng)
    assert "a" in engine.bounds.active
    engine.bounds.watch = False
    assert engine.bounds.active == {}
    assert figures(engine.bounds, "a")[::2] == (None, "rarely accepted")


def test_rows_are_used_again() -> None:
    bounds = RequestBounds(watch=True)
    for number in range(1000):
        bounds.add(str(number), None)
        bounds.observe([str(number)], np.array([K]), np.zeros((AVERAGED - 1, 1), np.int32))
        assert bounds.active == {}, "windows of another request were counted"
        bounds.end(str(number))
    assert bounds.acceptance._sums.shape[1] <= 4


@pytest.mark.parametrize(
    ("extra", "bound"),
    [(None, None), ({}, None), ({"other": 1}, None), ({module.MAX_DRAFT_TOKENS: 3}, 3),
     ({module.MAX_DRAFT_TOKENS: 0}, 0), ({module.MAX_DRAFT_TOKENS: -1}, None),
     ({module.MAX_DRAFT_TOKENS: "3"}, None)],
)  # fmt: skip
def test_what_a_request_asks_for(extra: Any, bound: int | None) -> None:
    request = SimpleNamespace(request_id="a", sampling_params=SimpleNamespace(extra_args=extra))
    assert asked_bound(request) == bound
    assert asked_bound(SimpleNamespace(request_id="a", sampling_params=None)) is None


def test_the_scheduler_cuts_placeholders_and_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Placeholders, where steps are scheduled ahead, are one list for all requests: it stays as it is."""
    placeholders = [-1] * K

    def init(self: Any) -> None:
        self.vllm_config, self.requests = SimpleNamespace(additional_config={"nwor": {}}), {}

    def schedule(self: Any, output: Any) -> None:
        for name in output.num_scheduled_tokens:
            self.requests[name].spec_token_ids = placeholders

    def draft(self: Any, drafts: Any) -> None:
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            self.requests[name].spec_token_ids = tokens

    def add(self: Any, request: Any) -> None:
        self.requests[request.request_id] = request

    monkeypatch.setattr(Scheduler, "__init__", init)
    monkeypatch.setattr(Scheduler, "_update_after_schedule", schedule)
    monkeypatch.setattr(Scheduler, "update_draft_token_ids", draft)
    monkeypatch.setattr(Scheduler, "add_request", add)
    monkeypatch.setattr(
        Scheduler, "_free_request", lambda self, request: self.requests.pop(request.request_id)
    )
    scheduler: Any = BoundedDrafts()
    for name, bound in (("none", 0), ("two", 2), ("free", None)):
        extra = None if bound is None else {module.MAX_DRAFT_TOKENS: bound}
        scheduler.add_request(
            SimpleNamespace(
                request_id=name, sampling_params=SimpleNamespace(extra_args=extra), spec_token_ids=[]
            )
        )
    requests = scheduler.requests
    scheduler._update_after_schedule(SimpleNamespace(num_scheduled_tokens={"none": 5, "free": 5}))
    assert [requests[name].spec_token_ids for name in ("none", "two", "free")] == [[], [], placeholders]
    assert placeholders == [-1] * K
    scheduler.update_draft_token_ids(
        SimpleNamespace(req_ids=["two", "none"], draft_token_ids=[[1, 2, 3, 4], [5, 6, 7, 8]])
    )
    assert [requests[name].spec_token_ids for name in ("none", "two")] == [[], [1, 2]]
    for name in ("none", "two"):
        scheduler._free_request(requests[name])
    assert scheduler._nwor_bounds.active == {}


def test_a_request_that_needs_chains_beside_trees_has_them_and_no_answer_tells() -> None:
    bounds = RequestBounds(watch=True)
    bounds.add("a", None, chain=True)
    bounds.add("b", 2, chain=True)
    steps = ((60, 6), (16, 6), (14, 4), (6, None), (4, None), (0, None))
    assert [len(bounds.active["a"].cut([0] * drafts, deep)) for drafts, deep in steps] == [6, 6, 4, 6, 4, 0]
    assert len(bounds.active["b"].cut([0] * 60, 6)) == 2
    assert figures(bounds, "a") == figures(RequestBounds(), "a")
    assert figures(bounds, "b")[0] == 2
    bounds.end("a")
    assert set(bounds.active) == {"b"}


@pytest.mark.parametrize(
    ("params", "drafts", "kept"),
    [
        ({}, 16, 16),
        ({}, 14, 14),
        ({"presence_penalty": 0.5}, 16, 6),
        ({"presence_penalty": 0.5}, 14, 4),  # trees of 14 nodes are 4 deep, and so is what they find
        ({"presence_penalty": 0.5}, 5, 5),
        ({"bad_words": ["no"]}, 16, 6),
    ],
)
def test_the_scheduler_bounds_requests_that_need_chains(
    params: dict[str, Any], drafts: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams

    monkeypatch.setattr(Scheduler, "__init__", lambda self, config: setattr(self, "vllm_config", config))
    monkeypatch.setattr(Scheduler, "add_request", lambda self, request: None)
    config = SimpleNamespace(
        additional_config={"nwor": {"tree": {"nodes": 16, "depth": 6}}},
        model_config=SimpleNamespace(logits_processors=None),
    )
    scheduler = type("Bounded", (BoundedDrafts, Scheduler), {})(config)
    request = SimpleNamespace(
        request_id="a", sampling_params=SamplingParams(**params), spec_token_ids=[0] * drafts
    )
    scheduler.add_request(request)
    scheduler.requests = {"a": request}
    scheduler._nwor_cut({"a"})
    assert len(request.spec_token_ids) == kept
