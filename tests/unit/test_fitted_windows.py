"""Claim: windows fit their requests where that serves more, and stay alike where requests do not differ.

Coverage: the estimate of each request against known chances, and none where requests are alike; the choice
of drafts against every choice there is; what steps of fewer rows cost; bounds and how requests come back; a
closed loop of easy and hard requests, on the device that a table of costs describes, against fixed numbers.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm")

from nwor.config import DraftBounds
from nwor.counts.records import WorkerFacts
from nwor.draft_costs import StepCosts
from nwor.engine.draft_lengths import fitting, measurement
from nwor.engine.draft_lengths.lookup import DraftLengths
from nwor.engine.draft_lengths.policy import DraftLengthPolicy
from nwor.engine.draft_lengths.request_acceptance import RequestAcceptance
from nwor.engine.draft_lengths.request_bounds import PROBE_EVERY, RequestBounds
from nwor.engine.draft_lengths.step_estimates import StepEstimates

BOUNDS = DraftBounds(0, 8)
CHAINS = BOUNDS.candidates
PASS = 0.2e-3
#: Milliseconds of steps of an 8B model on an H200, by requests, with 0, 1, 2, 3, 4, 6 and 8 draft tokens.
TABLE = {
    1: (5.26, 5.26, 5.54, 5.83, 6.15, 6.73, 7.36),
    16: (5.64, 5.64, 6.05, 6.29, 6.76, 7.61, 8.37),
    32: (6.01, 6.01, 6.60, 7.04, 7.69, 9.39, 11.2),
    64: (6.84, 6.84, 8.01, 8.84, 10.7, 15.2, 17.5),
    128: (8.22, 8.88, 11.8, 13.6, 17.1, 24.1, 30.0),
}
COSTS = StepCosts(
    tuple(TABLE),
    CHAINS,
    tuple(tuple(value / 1e3 for value in row) for row in TABLE.values()),
    (16, 64, 512),
    (0.0066, 0.0069, 0.0125),
    (PASS,) * len(TABLE),
)
EASY, HARD = 0.85, 0.2


def _window(chance: Callable[[int], float], drafts: int, rng: random.Random) -> int:
    accepted = 0
    while accepted < drafts and rng.random() < chance(accepted):
        accepted += 1
    return accepted


def _observed(chances: dict[str, Callable[[int], float]], windows: int, seed: int) -> RequestAcceptance:
    acceptance, rng = RequestAcceptance(8), random.Random(seed)
    for name in chances:
        acceptance.add(name)
    names = list(chances)
    for _ in range(windows):
        found = [[_window(chances[name], 4, rng) for name in names]]
        acceptance.observe(names, np.full(len(names), 4), np.array(found, np.int32))
        acceptance.survival(names)
    return acceptance


def test_requests_that_are_alike_are_hardly_ever_taken_for_different() -> None:
    names = [str(number) for number in range(32)]
    found = 0
    for seed in range(40):
        acceptance = _observed({name: lambda _: 0.7 for name in names}, 30, seed)
        found += acceptance.survival(names) is not None
    assert found <= 3


def test_chances_of_requests_that_differ() -> None:
    chances: dict[str, Callable[[int], float]] = {}
    for number in range(32):
        chance = (EASY, HARD)[number % 2]
        # Later drafts are a little less likely.
        chances[str(number)] = lambda place, chance=chance: chance * (1.0, 0.9, 0.9, 0.9)[place]
    survival = _observed(chances, 200, 1).survival([*chances, "new"])
    assert survival is not None
    assert survival.shape == (33, 8)
    assert (np.diff(survival, axis=1) <= 0).all()
    for first, chance in ((0, EASY), (1, HARD)):
        mean = survival[first:32:2].mean(axis=0)
        assert mean[0] == pytest.approx(chance, abs=0.06)
        assert mean[3] == pytest.approx(chance**4 * 0.9**3, abs=0.08)
    # One that is new is like the others on the average, and may be easy: a chain's end is likelier then.
    assert 0.3 < survival[32, 0] < 0.7
    assert survival[32, 3] > survival[32, 0] ** 4


def test_few_windows_say_little_where_requests_hardly_differ() -> None:
    chances: dict[str, Callable[[int], float]] = {
        str(number): lambda _, number=number: 0.6 + 0.1 * (number % 2) for number in range(64)
    }
    acceptance = _observed(chances, 200, 2)
    acceptance.add("late")
    names = [*chances, "late"]
    acceptance.observe(["late"], np.array([4]), np.array([[0], [0]], np.int32))
    survival = acceptance.survival(names)
    assert survival is not None
    assert survival[-1, 0] > 0.55  # two windows without any: chance, most likely


def test_rows_are_used_again_and_trees_say_nothing_of_chains() -> None:
    acceptance = RequestAcceptance(8)
    for number in range(100):
        name = str(number)
        acceptance.add(name)
        acceptance.add(name)
        acceptance.observe([name, "gone"], np.array([60, 60]), np.full((3, 2), 8, np.int32))
        assert acceptance._sums[3:, acceptance._rows[name]].tolist() == [0, 0]
        acceptance.end(name)
        acceptance.end(name)
    assert acceptance._sums.shape[1] <= 4
    assert acceptance.survival(["0", "gone"]) is None


@pytest.mark.parametrize("seed", range(20))
def test_the_drafts_taken_are_the_best_of_all(seed: int) -> None:
    """Compared with every choice of lengths, by time over the geometric mean of tokens."""
    rng = np.random.default_rng(seed)
    survival = np.cumprod(rng.random((4, 3)), axis=1)
    floor, row = rng.uniform(4, 12), rng.uniform(0.05, 1.0)

    def seconds(rows: Any) -> Any:
        return np.maximum(floor, row * rows) + 1.0

    plan = fitting.fitted(fitting.gains(survival), 3, lambda rows, tokens: seconds(rows) / tokens)
    tokens = 1.0 + np.concatenate((np.zeros((4, 1)), np.cumsum(survival, axis=1)), axis=1)
    best = min(
        seconds(4.0 + sum(choice))
        / (4.0 * math.prod(tokens[place, drafts] for place, drafts in enumerate(choice)) ** 0.25)
        for choice in itertools.product(range(4), repeat=4)
    )
    assert seconds(plan.rows) / plan.tokens == pytest.approx(best, rel=1e-9)
    chosen = fitting.lengths(fitting.gains(survival), plan.least, np.full(4, -1.0))
    assert 4 + chosen.sum() == plan.rows


def test_lengths_stay_while_gains_hardly_change() -> None:
    gained = np.array([[0.5, 0.31, 0.1], [0.5, 0.29, 0.1], [0.5, 0.2, 0.1]])
    assert fitting.lengths(gained, 0.3, np.full(3, -1.0)).tolist() == [2, 1, 1]
    assert fitting.lengths(gained, 0.3, np.array([1.0, 2.0, 2.0])).tolist() == [1, 2, 1]
    assert fitting.lengths(gained, 0.3, np.array([0.0, 3.0, 0.0])).tolist() == [1, 2, 1]


def _verifying(requests: int, drafts: int, rows: float) -> float:
    """Return the seconds of a step by what was measured."""
    estimates = StepEstimates(BOUNDS)
    estimates.take_costs(COSTS)
    return estimates.verifying(requests, drafts, rows)


def test_a_step_of_fewer_rows_costs_what_its_rows_and_passes_do() -> None:
    for requests, drafts in itertools.product((16, 64, 100), CHAINS):
        whole = _verifying(requests, drafts, requests * (drafts + 1.0))
        assert whole == pytest.approx(COSTS.step(requests, drafts), rel=1e-9)
    # 64 requests that make 8 drafts each and verify 2 of them: the rows of 2 drafts, 6 passes more.
    assert _verifying(64, 8, 64 * 3.0) == pytest.approx(COSTS.step(64, 2) + 6 * PASS)
    assert (np.diff([_verifying(64, 8, rows) for rows in range(64, 64 * 9)]) >= 0).all()
    assert COSTS.passes(64, 0) == COSTS.passes(64, 1) == 0
    assert COSTS.plain()["pass_milliseconds"]["16"] == 0.2


def test_the_time_of_a_pass_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch
    from vllm.v1.worker.gpu import warmup

    class Steps:
        """Steps that take a millisecond and, for each request, 2 us a row and 30 us a pass but the first."""

        seconds = 0.0

        def __init__(self, *_: Any) -> None: ...

        def blocks(self, count: int, tokens: int) -> int:
            return count * tokens

        def begin(self, count: int, prompt: int, room: int, drafts: int) -> None:
            self.count, self.left = count, room

        def step(self, drafts: int, then: int) -> None:
            self.left -= 1 + drafts
            assert self.left >= 0
            Steps.seconds = 1e-3 + self.count * (2e-6 * (1 + drafts) + 30e-6 * max(then - 1, 0))

        def end(self) -> None: ...

    def seconds(device: Any, step: Callable[[], None], steps: int) -> float:
        for _ in range(steps):
            step()
        return Steps.seconds

    monkeypatch.setattr(measurement, "_Requests", Steps)
    monkeypatch.setattr(measurement, "_seconds", seconds)
    monkeypatch.setattr(warmup, "_warmup_block_counter", lambda runner: None)
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        kv_cache_config=SimpleNamespace(num_blocks=1 << 20),
        kv_connector=SimpleNamespace(set_disabled=lambda disabled: None),
        max_model_len=2048,
        max_num_tokens=8192,
        max_num_reqs=64,
    )
    worker = SimpleNamespace(model_runner=runner)
    costs = measurement.measure(worker, BOUNDS)
    assert costs.requests == (1, 4, 16, 64)
    assert costs.pass_seconds == pytest.approx([30e-6 * count for count in costs.requests])
    assert costs.passes(16, 4) == pytest.approx(3 * 16 * 30e-6)
    assert measurement.measure(worker, DraftBounds(0, 1)).pass_seconds == (0.0,) * 4


class _Loop:
    """A closed loop of requests on the device that :data:`COSTS` describes.

    Args:
        chance: returns the chance of each draft of a new request, by place.
        clients: requests that run.
        fixed: draft tokens of every step; None where they are chosen.
        fits: whether windows may be fitted to requests.

    """

    def __init__(
        self, chance: Callable[[random.Random], float], clients: int, fixed: int | None, fits: bool = True
    ) -> None:
        self.chance, self.clients, self.fixed = chance, clients, fixed
        self.new, self.rng = random.Random(1), random.Random(2)
        self.running: dict[str, Any] = {}
        self.bounds = RequestBounds(True, 8, lambda: list(self.running))
        self.policy = DraftLengthPolicy(BOUNDS, requests=self.bounds if fits else None)
        self.policy.take_costs(COSTS)
        self.made = self.count = 0

    def run(self, seconds: float) -> float:
        """Return the tokens of a second."""
        tokens = took = 0.0
        while took < seconds:
            given, now = self._step()
            tokens, took = tokens + given, took + now
        return tokens / took

    def _step(self) -> tuple[int, float]:
        while len(self.running) < self.clients:
            self.count += 1
            chance, left = self.chance(self.new), max(20, int(self.new.lognormvariate(math.log(200), 0.5)))
            name = str(self.count)
            self.running[name] = SimpleNamespace(chance=lambda _, c=chance: c, left=left, drafts=0)
            self.bounds.add(name, None)
        made = self.policy.choose(self.clients) if self.fixed is None else self.fixed
        windows = {name: one for name, one in self.running.items() if one.drafts}
        accepted = [_window(one.chance, one.drafts, self.rng) for one in windows.values()]
        drafts = np.array([one.drafts for one in windows.values()], np.int64)
        seconds = _verifying(self.clients, made, float(self.clients + drafts.sum()))
        tokens = self.clients + sum(accepted)
        if self.fixed is None:
            if windows:
                self.bounds.observe(list(windows), drafts, np.array([accepted], np.int32))
            for count in set(drafts.tolist()):
                self.policy.estimates.observe(count, np.array(accepted)[drafts == count])
            known, spared = made == self.made, made * self.clients - int(drafts.sum())
            self.policy.observe_step(
                self.clients, made, 0, tokens, seconds if known else 0.0, spared if known else 0
            )
        self.made = made
        for one, count in zip(windows.values(), accepted, strict=True):
            one.left -= count
        for name, one in list(self.running.items()):
            one.left -= 1
            if one.left <= 0:
                del self.running[name]
                self.bounds.end(name)
                continue
            bound = self.bounds.active.get(name) if self.fixed is None else None
            one.drafts = len(bound.cut([0] * made)) if bound else made
        return tokens, seconds


def _either(rng: random.Random) -> float:
    return rng.choice((EASY, HARD))


@pytest.mark.parametrize("clients", [16, 64, 128])
def test_a_loop_of_easy_and_hard_requests_is_served_as_with_the_best_number_or_better(clients: int) -> None:
    best = max(_Loop(_either, clients, k).run(8.0) for k in (1, 2, 3, 4))
    loop = _Loop(_either, clients, None)
    loop.run(2.0)
    assert loop.run(8.0) > 0.98 * best
    if clients == 64:
        alike = _Loop(_either, clients, None, fits=False)
        alike.run(2.0)
        assert loop.run(8.0) > 1.015 * alike.run(8.0)


def test_requests_that_are_alike_keep_windows_alike() -> None:
    loop = _Loop(lambda _: 0.72, 64, None)
    bounded = 0
    for _ in range(300):
        loop._step()
        bounded += bool(loop.bounds.lengths())
    assert bounded < 15


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


def test_steps_that_spare_rows_teach_what_whole_ones_take() -> None:
    """A device that is slower than measured: steps with fitted windows show it, as whole ones would."""
    found = []
    for spared in (0, 64):
        policy = DraftLengthPolicy(BOUNDS)
        policy.take_costs(COSTS)
        assert policy.times is not None
        for _ in range(60):
            seconds = 0.002 + _verifying(64, 3, 64 * 4.0 - spared)
            policy.observe_step(64, 3, 0, 120.0, seconds, spared)
            policy.estimates.plans(64, CHAINS)  # what steps take is looked at anew
        found.append(policy.times.step(64, 3) - COSTS.step(64, 3))
    assert found[0] == pytest.approx(0.002, rel=0.1)
    assert found[1] == pytest.approx(found[0], rel=0.25)
