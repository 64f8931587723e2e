"""Claim: requests get as many drafts as are worth their rows, and get more again once those are accepted.

Coverage: bounds by simulated acceptance; probes; what was asked for; what answers, the admin report and the
policy are told; the end of fitting.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from nwor.counts.records import WorkerFacts
from nwor.engine.draft_lengths import fitting
from nwor.engine.draft_lengths.lookup import DraftLengths
from nwor.engine.draft_lengths.policy import DraftLengthPolicy
from nwor.engine.draft_lengths.request_bounds import PROBE_EVERY, RequestBounds
from nwor.engine.stats.figures import RequestFigures
from tests.unit.cost_table import BOUNDS, COSTS


def _window(chance: Callable[[int], float], drafts: int, rng: random.Random) -> int:
    accepted = 0
    while accepted < drafts and rng.random() < chance(accepted):
        accepted += 1
    return accepted


def _fitted(chances: dict[str, float], seed: int = 1) -> RequestBounds:
    """Return bounds of requests that were watched for 40 windows, before anything is fitted."""
    bounds, rng, names = RequestBounds(True, 8, lambda: list(chances)), random.Random(seed), list(chances)
    for name in names:
        bounds.add(name, None)
    for _ in range(40):
        found = [[_window(lambda _, n=name: chances[n], 4, rng) for name in names]]
        bounds.observe(names, np.full(len(names), 4), np.array(found, np.int32))
    return bounds


CHANCES = {f"easy{place}": 0.9 for place in range(8)} | {f"hard{place}": 0.22 for place in range(8)}


def test_few_requests_are_not_fitted() -> None:
    asked: list[int] = []
    requests = SimpleNamespace(survival=lambda: asked.append(1), fit=lambda *_: None, lengths=dict)
    policy = DraftLengthPolicy(BOUNDS, requests=requests)
    policy.take_costs(COSTS)
    policy._look(3)
    assert asked == []
    policy._look(4)
    assert asked == [1]


def test_no_request_has_fewer_drafts_than_the_bounds_say() -> None:
    bounds = _fitted(CHANCES)
    bounds.survival()
    bounds.fit(0.25, 4, 2)
    assert set(bounds.lengths()) <= {2, 3}
    assert bounds.lengths()[2] >= 8


def test_windows_that_were_made_before_are_no_probes() -> None:
    bounds = _fitted(CHANCES)
    bounds.survival()
    bounds.fit(0.25, 4)
    bound = bounds.active["hard0"]
    for _ in range(3):
        bounds.observe(["hard0"], np.array([4]), np.array([[4]], np.int32))
    assert bound.idle
    assert bound.trial == 0
    bounds.observe(["hard0"], np.array([1]), np.array([[1]], np.int32))
    assert bound.trial > 0


@pytest.mark.parametrize(("least", "back"), [(0.2, True), (0.5, False)])
def test_a_request_comes_back_where_its_drafts_are_worth_their_rows(least: float, back: bool) -> None:
    bounds = _fitted(CHANCES)
    bounds.survival()
    bounds.fit(0.4, 4)
    assert bounds.active["hard0"].idle
    bounds._least = least
    for accepted in (1, 1, 0, 1, 0, 0, 0, 0, 0):
        bounds.observe(["hard0"], np.array([1]), np.array([[accepted]], np.int32))
    # 2 of 8 in the trial: as many as a fifth needs, fewer than a half does.
    assert ("hard0" not in bounds.active) == back


def test_lengths_stay_near_whole_windows_once_windows_are_fitted() -> None:
    survival = np.array([[0.9, 0.8, 0.7, 0.6], [0.3, 0.1, 0.0, 0.0]])
    gained = float(fitting.gains(survival)[0, 3])
    for before, bounded in ((0.0, True), (0.2, False)):
        bounds = RequestBounds(True, 4, lambda: ["a", "b"])
        bounds.add("a", None)
        bounds.add("b", None)
        bounds._least = before
        bounds._looked = ["a", "b"], survival
        bounds.fit(1.05 * gained, 4)  # a twentieth more than the fourth draft of the first gains
        assert ("a" in bounds.active) == bounded


def test_a_bound_of_ones_own_is_no_fit() -> None:
    bounds = _fitted(CHANCES)
    bounds.add("hard1", 0)
    bounds.add("easy1", 1)
    bounds.survival()
    bounds.fit(0.25, 4)
    for name, asked in (("hard1", 0), ("easy1", 1)):
        found = RequestFigures(**vars(RequestSpecDecodeMetrics.new(4)))
        bounds.enter(name, found)
        assert (found.nwor_max_draft_tokens, found.nwor_why_bounded) == (asked, "asked")
        assert bounds.active[name].fitted is None


def test_hard_requests_get_fewer_drafts_and_probe_where_they_get_none() -> None:
    bounds = _fitted(CHANCES)
    assert bounds.survival() is not None
    bounds.fit(0.25, 4)
    assert {name for name in CHANCES if name.startswith("hard")} <= set(bounds.active)
    hard = bounds.active["hard0"]
    assert (hard.fitted, hard.idle) == (0, True)
    made = [len(hard.cut([0] * 4)) for _ in range(2 * PROBE_EVERY)]
    assert sorted(set(made)) == [0, 1]
    assert made.count(1) == 2
    easy = bounds.active.get("easy0")
    assert easy is None or easy.fitted >= 2
    assert sum(bounds.lengths().values()) == len(bounds.active)
    # Where the least gain is enough, nothing is bounded.
    bounds.survival()
    bounds.fit(1e-9, 8)
    assert bounds.lengths() == {}


def test_answers_and_the_admin_report_tell_of_fitted_windows() -> None:
    bounds = _fitted(CHANCES)
    bounds.add("easy1", 1)
    bounds.add("hard1", 3)

    def told(name: str) -> tuple[int | None, str]:
        found = RequestFigures(**vars(RequestSpecDecodeMetrics.new(4)))
        bounds.enter(name, found)
        return found.nwor_max_draft_tokens, found.nwor_why_bounded

    policy = DraftLengthPolicy(BOUNDS, requests=bounds)
    assert policy.explain()["bounded_requests"] == {}
    for least in (0.15, 0.4, 0.0):
        bounds.survival()
        policy._fit(least)
        count = sum(told(name)[0] is not None for name in CHANCES)
        explained = policy.explain()
        assert explained["least_gain"] == least
        if least:
            assert sum(explained["bounded_requests"].values()) in (count, count - 1)
            assert ("1" if least == 0.15 else "0") in explained["bounded_requests"]
            assert told("hard0") == ((1, "fitted") if least == 0.15 else (0, "rarely accepted"))
        assert told("easy1") == (1, "asked")
    assert told("hard0") == (None, "rarely accepted")
    assert told("hard1") == (3, "rarely accepted")


def test_a_fitted_request_comes_back_by_its_probes_and_by_the_next_look() -> None:
    bounds = _fitted(CHANCES)
    bounds.survival()
    bounds.fit(0.25, 4)
    bound = bounds.active["hard0"]
    for _ in range(PROBE_EVERY):
        drafts = len(bound.cut([0] * 4))
    assert drafts == 1
    bounds.observe(["hard0"], np.array([1]), np.array([[1]], np.int32))
    for _ in range(8):
        assert len(bound.cut([0] * 4)) == 1
        bounds.observe(["hard0"], np.array([1]), np.array([[1]], np.int32))
    assert "hard0" not in bounds.active
    survival = bounds.survival()
    assert survival is not None
    assert survival[list(CHANCES).index("hard0"), 0] > 0.3  # what it was before is forgotten


def test_what_was_asked_for_and_chains_beside_trees_keep_their_bounds() -> None:
    bounds = _fitted(CHANCES)
    bounds.add("easy1", 1)
    survival = bounds.survival()
    assert survival is not None
    assert survival[1, 0] > 0.7
    assert survival[1, 1:].tolist() == [0.0] * 7
    bounds.fit(0.25, 4)
    assert len(bounds.active["easy1"].cut([0] * 4)) == 1
    hard = bounds.active["hard1"]
    hard.fitted = 1
    assert len(hard.cut([0] * 16, 8)) == 16  # trees are not fitted
    assert len(hard.cut([0] * 4)) == 1


def test_nothing_is_fitted_once_numbers_are_not_chosen() -> None:
    for end in ("fixed", "watch", "alike"):
        bounds = _fitted(CHANCES)
        lengths = DraftLengths(BOUNDS, requests=bounds)
        lengths.take_costs(COSTS)
        lengths.follow(WorkerFacts("stage", 1, 1))
        lengths.policy.estimates.observe(4, np.array([4, 0] * 40, np.int32))
        lengths[16]
        bounds.survival()
        lengths.policy._fit(0.25)
        assert bounds.lengths()
        assert lengths.explain()["least_gain"] == 0.25
        if end == "fixed":
            lengths.follow(WorkerFacts("stage", 1, 1)._replace(draft_tokens="2"))
        elif end == "watch":
            bounds.watch = False
            assert bounds.survival() is None
        else:
            bounds.acceptance.clear()
            lengths.policy._look(16)
        assert bounds.lengths() == {}
        assert bounds.active == {}
        assert end == "watch" or lengths.explain()["least_gain"] == 0


def test_what_the_policy_is_told_of_steps_with_prompts_and_shorter_windows() -> None:
    lengths = DraftLengths(BOUNDS, requests=_fitted(CHANCES))
    told: list[tuple[Any, ...]] = []
    lengths.policy.observe_step = lambda *given: told.append(given)  # type: ignore[method-assign]

    def step(made: int, windows: list[int], prompts: list[int] = []) -> tuple[Any, ...]:  # noqa: B006
        drafts = {str(place): [0] * count for place, count in enumerate(windows) if count}
        rows = {str(place): 1 + count for place, count in enumerate(windows)}
        rows |= {f"p{place}": count for place, count in enumerate(prompts)}
        scheduled = SimpleNamespace(
            scheduled_spec_decode_tokens=drafts,
            num_scheduled_tokens=rows,
            num_spec_tokens_to_schedule=made,
            total_num_scheduled_tokens=sum(rows.values()),
        )
        lengths.observe_step(scheduled, 1, busy=True)
        requests, drafts_of, prompt, _, seconds, spared = told[-1]
        return requests, drafts_of, prompt, seconds > 0, spared

    step(4, [4, 4])
    assert step(4, [4, 4]) == (2, 4, 0, True, 0)
    assert step(4, [4, 1, 0]) == (3, 4, 0, True, 7)
    # Rows of windows are a request's own and its drafts, also where it is a prompt.
    assert step(4, [4, 2], [100]) == (3, 4, 99, True, 6)
    assert step(4, [], [100, 50]) == (2, 4, 148, True, 8)
    assert step(2, [4, 4]) == (2, 4, 0, False, 0)  # made before the number changed
    assert step(2, [2, 1]) == (2, 2, 0, True, 1)
    assert step(0, [2, 1]) == (2, 2, 0, False, 0)
    assert step(0, [0, 0]) == (2, 0, 0, True, 0)
