"""Claim: drafts get rows in the order of what they gain, until the next one costs more time than it is worth.

Coverage: the choice of drafts against every choice there is; what steps of fewer rows cost, and what they
teach; the time of a pass. Bounds of requests are in test_fitted_bounds.py, loops in test_virtual_loop.py.
"""

from __future__ import annotations

import dataclasses
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
from nwor.draft_costs import StepCosts
from nwor.engine.draft_lengths import fitting, measurement
from nwor.engine.draft_lengths.policy import DraftLengthPolicy
from nwor.engine.draft_lengths.step_estimates import StepEstimates
from nwor.engine.draft_lengths.step_groups import StepGroups
from nwor.engine.draft_lengths.step_times import StepTimes
from tests.unit.cost_table import BOUNDS, CHAINS, COSTS, PASS, TABLE


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


def test_every_request_keeps_the_fewest_drafts_that_were_asked_for() -> None:
    survival = np.cumprod(np.array([[0.9, 0.9, 0.9, 0.9], [0.1, 0.1, 0.1, 0.1]]), axis=1)
    plan = fitting.fitted(fitting.gains(survival), 4, lambda rows, tokens: (8.0 + rows) / tokens, 2)
    assert plan.rows >= 2 * 3
    without = fitting.fitted(fitting.gains(survival), 4, lambda rows, tokens: (8.0 + rows) / tokens)
    assert without.rows < plan.rows


def test_lengths_stay_while_gains_hardly_change() -> None:
    gained = np.array([[0.5, 0.31, 0.1], [0.5, 0.29, 0.1], [0.5, 0.2, 0.1]])
    assert fitting.lengths(gained, 0.3, np.full(3, -1.0)).tolist() == [2, 1, 1]
    assert fitting.lengths(gained, 0.3, np.array([1.0, 2.0, 2.0])).tolist() == [1, 2, 1]
    assert fitting.lengths(gained, 0.3, np.array([0.0, 3.0, 0.0])).tolist() == [1, 2, 1]


def _verifying(requests: int, drafts: int, rows: float) -> float:
    """Return the seconds of a step by what was measured."""
    estimates = StepEstimates(BOUNDS)
    estimates.take_costs(COSTS)
    return COSTS.step(requests, drafts) - estimates.saved(requests, drafts, rows)


def test_a_step_of_fewer_rows_costs_what_its_rows_and_passes_do() -> None:
    for requests, drafts in itertools.product((16, 64, 100), CHAINS):
        assert _verifying(requests, drafts, requests * (drafts + 1.0)) == COSTS.step(requests, drafts)
    # 64 requests that make 8 drafts each and verify 2 of them: the rows of 2 drafts, 6 passes more.
    assert _verifying(64, 8, 64 * 3.0) == pytest.approx(COSTS.step(64, 2) + 6 * PASS)
    assert (np.diff([_verifying(64, 8, rows) for rows in range(64, 64 * 9)]) >= 0).all()
    assert COSTS.passes(64, 0) == COSTS.passes(64, 1) == 0
    assert COSTS.plain()["pass_milliseconds"]["16"] == 0.2


@pytest.mark.parametrize("looks", [True, False])
@pytest.mark.parametrize("scale", [0.4, 1.0, 1.3])
def test_steps_of_fewer_rows_teach_what_whole_ones_take(scale: float, looks: bool) -> None:
    """A device that takes another time than measured shows it, and what is learnt does not run away."""
    policy = DraftLengthPolicy(BOUNDS)
    policy.take_costs(COSTS)
    assert policy.times is not None
    # One number was measured far too short: what it costs is not what fewer rows of others save.
    for _ in range(20):
        policy.times.observe(64, 1, 0.03)
    rng = random.Random(1)
    for step in range(2000):
        spared = rng.choice((6, 40, 100))
        policy.observe_step(64, 3, 0, 120.0, scale * _verifying(64, 3, 256.0 - spared), spared)
        if looks and step % 16 == 0:
            policy.estimates.plans(64, CHAINS)
    assert policy.times.step(64, 3) == pytest.approx(scale * COSTS.step(64, 3), rel=0.1)
    fitted = policy.estimates.seconds(64, 3, fitting.Plan(156.0, 100.0, 0.1))
    assert fitted == pytest.approx(scale * _verifying(64, 3, 156.0), rel=0.12)
    assert policy.estimates.saved(64, 3, 64 * 9.0) == 0.0
    assert policy.estimates.saved(4096, 8, 4096.0) >= 0.0
    nothing = StepCosts((1,), (2, 3), ((math.inf, math.inf),), pass_seconds=(PASS,))
    assert StepTimes(nothing).saved(1, 3, (2, 3), np.array([1.0, 2.0])).tolist() == [0.0, 0.0]


def test_prompts_beside_windows_count_by_the_rows_that_there_are() -> None:
    """Beside few rows a prompt adds little; taken for many, it would seem to take less than measured."""
    factors = []
    # Up to 256 rows there is room for more; beyond, each takes its time.
    costs = dataclasses.replace(COSTS, rows=(64, 256, 512), row_seconds=(0.0066, 0.0068, 0.0125))
    for rows in (None, 64.0):
        times = StepTimes(costs)
        groups = StepGroups(times)
        for place in range(64):
            prompt = 64 if place % 2 else 0
            seconds = costs.step(64, 4) + (costs.beside(64, 64) if prompt else 0.0)
            groups.add(64, 4, prompt, seconds, rows)
        factors.append(times.prompts)
    assert factors[1] == pytest.approx(1.0, abs=0.05)
    assert factors[0] < 0.9


def test_plans_count_what_requests_asked_for_and_those_that_are_not_scheduled() -> None:
    estimates = StepEstimates(BOUNDS)
    estimates.take_costs(COSTS)
    survival = np.cumprod(np.tile([[0.9], [0.2]], (32, 8)), axis=1)
    survival[:16, 1:] = 0.0  # bounded to one by their own wish
    plans = estimates.plans(64, CHAINS, survival)
    asked = estimates.plans(32, CHAINS, survival)
    for drafts in CHAINS:
        # Half as many are scheduled: half the rows and tokens.
        if not estimates.fits:
            assert asked[drafts].rows == pytest.approx(plans[drafts].rows / 2)
    alike = StepEstimates(BOUNDS)
    alike.take_costs(dataclasses.replace(COSTS, seconds=tuple((0.01,) * 7 for _ in TABLE)))
    found = alike.plans(64, CHAINS, survival)
    assert not alike.fits  # rows cost nothing there
    assert found[4].rows == 64 + 16 + 48 * 4


def test_fitting_is_taken_up_for_more_than_it_is_kept_for() -> None:
    survival = np.cumprod(np.tile([[0.8], [0.45]], (32, 8)), axis=1)
    savings = []
    for begin, keep, fits in ((0.0, 0.0, False), (1.0, 1.0, False), (1.0, 0.0, True), (1.0, 0.0, False)):
        estimates = StepEstimates(BOUNDS)
        estimates.take_costs(COSTS)
        estimates.fits = fits
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(fitting, "BEGIN", begin)
            patch.setattr(fitting, "KEEP", keep)
            estimates.plans(64, CHAINS, survival)
        savings.append(estimates.fits)
    assert savings == [True, False, True, False]
    assert 0 < fitting.KEEP < fitting.BEGIN


def test_rows_are_dearer_where_prompts_run_beside_them() -> None:
    survival = np.cumprod(np.tile([[0.85], [0.3]], (32, 8)), axis=1)
    rows = []
    for prompts in (False, True):
        estimates = StepEstimates(BOUNDS)
        # Rows of windows are free, but make prompts beside them longer.
        flat = tuple((0.01,) * 7 for _ in TABLE)
        costs = dataclasses.replace(COSTS, seconds=flat, rows=(64, 512, 1024), row_seconds=(0.01, 0.01, 0.03))
        estimates.take_costs(costs)
        for _ in range(64):
            estimates.observe_mix(480 if prompts else 0, 100.0)
        plans = estimates.plans(64, CHAINS, survival)
        rows.append(min(plan.rows for k, plan in plans.items() if k == 4))
    assert rows[1] < rows[0] - 30


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

    class Clock:
        def __init__(self, device: Any, alone: bool) -> None: ...

        def seconds(self, step: Callable[[], None], steps: int) -> float:
            for _ in range(steps):
                step()
            return Steps.seconds

    monkeypatch.setattr(measurement, "_Requests", Steps)
    monkeypatch.setattr(measurement, "StepClock", Clock)
    monkeypatch.setattr(warmup, "_warmup_block_counter", lambda runner: None)
    runner = SimpleNamespace(
        device=torch.device("cpu"),
        kv_cache_config=SimpleNamespace(num_blocks=1 << 20),
        kv_connector=SimpleNamespace(set_disabled=lambda disabled: None),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        max_model_len=2048,
        max_num_tokens=8192,
        max_num_reqs=64,
    )
    worker = SimpleNamespace(model_runner=runner)
    assert measurement.measure(worker, BOUNDS).pass_seconds == ()
    costs = measurement.measure(worker, BOUNDS, fits=True)
    assert costs.requests == (1, 4, 16, 64)
    assert costs.pass_seconds == pytest.approx([30e-6 * count for count in costs.requests])
    assert costs.passes(16, 4) == pytest.approx(3 * 16 * 30e-6)
    assert measurement.measure(worker, DraftBounds(0, 1), fits=True).pass_seconds == (0.0,) * 4
    # Where all chains are long, by the shortest.
    runner.max_model_len = 8192
    long = measurement.measure(worker, DraftBounds(9, 63), fits=True)
    assert long.pass_seconds == pytest.approx([30e-6 * count for count in long.requests])
