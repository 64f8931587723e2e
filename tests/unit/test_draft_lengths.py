"""Claim: the number of drafts follows from costs, acceptance and prompts, and does not go back and forth.

Coverage: estimates against exact chances and simulated windows; interpolation; the choice against all numbers
tried by simulation; bounds, hysteresis, probing; what the scheduler is told, by mode and by request.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from nwor.config import DraftBounds
from nwor.counts.records import StepRecord, Treatment, WorkerFacts
from nwor.draft_costs import StepCosts, settle
from nwor.engine.draft_lengths import policy as policies
from nwor.engine.draft_lengths.acceptance import AcceptanceEstimate
from nwor.engine.draft_lengths.lookup import DraftLengths
from nwor.engine.draft_lengths.policy import DraftLengthPolicy
from nwor.errors import ConfigError

BOUNDS = DraftBounds(0, 8)
CHANCES = (0.73, 0.71, 0.67, 0.69, 0.69, 0.69, 0.69, 0.69)


def _costs(floor: float = 0.008, row: float = 27e-6, draft: float = 0.0005) -> StepCosts:
    """A device on which rows are free up to a floor, and drafts take their time one after the other."""
    numbers, requests = DraftBounds(0, 8).candidates, (1, 4, 16, 64, 128, 256)
    table = tuple(tuple(max(floor, row * b * (k + 1)) + draft * max(k, 1) for k in numbers) for b in requests)
    rows = (16, 64, 128, 256, 512, 1024, 2048, 4096)
    return StepCosts(requests, numbers, table, rows, tuple(max(floor, row * size) for size in rows))


def _windows(generator: np.random.Generator, drafts: int, count: int) -> Any:
    accepted = np.zeros(count, np.int32)
    going = np.ones(count, bool)
    for chance in CHANCES[:drafts]:
        going &= generator.random(count) < chance
        accepted += going
    return accepted


def test_estimates_come_to_the_chances() -> None:
    generator, estimate = np.random.default_rng(1), AcceptanceEstimate(8)
    for _ in range(400):
        estimate.add(8, _windows(generator, 8, 32))
    assert estimate.chances == pytest.approx(CHANCES, abs=0.08)
    assert estimate.tokens[0] == 1
    assert estimate.tokens[3] == pytest.approx(1 + 0.73 + 0.73 * 0.71 + 0.73 * 0.71 * 0.67, abs=0.1)


def test_positions_that_nobody_tries_are_taken_for_the_one_before() -> None:
    estimate = AcceptanceEstimate(8)
    estimate.add(2, np.array([2] * 90 + [1] * 10, np.int32))
    chances = estimate.chances
    assert chances[0] > 0.95
    assert chances[1] == pytest.approx(0.9, abs=0.02)
    assert chances[2:] == pytest.approx([chances[1]] * 6)


def test_an_estimate_follows_the_text() -> None:
    estimate = AcceptanceEstimate(4)
    estimate.add(4, np.full(5000, 4, np.int32))
    assert estimate.chances[0] > 0.99
    for _ in range(100):
        estimate.add(4, np.zeros(64, np.int32))
    assert estimate.chances[0] < 0.05


def test_costs_between_and_beyond_what_was_measured() -> None:
    costs = StepCosts((1, 4), (0, 2), ((1.0, 2.0), (4.0, 5.0)), (10, 20), (1.0, 3.0))
    assert costs.step(1, 0) == 1.0
    assert costs.step(2, 2) == 3.0
    assert costs.step(7, 0) == 7.0
    assert costs.beside(10, 10) == pytest.approx(2.0)
    assert costs.beside(15, 5) == pytest.approx(1.0)
    assert StepCosts((1,), (0,), ((1.0,),)).beside(10, 10) == 0.0
    assert costs.plain()["milliseconds"] == {"1": [1000.0, 2000.0], "4": [4000.0, 5000.0]}


@pytest.mark.parametrize("requests", [1, 4, 16, 64, 128, 256])
def test_the_number_is_the_one_that_gives_most_tokens(requests: int) -> None:
    """Compared with every number held to for a long time, on the device that the costs describe."""
    costs, generator = _costs(), np.random.default_rng(requests)

    def rate(number: Any, steps: int) -> float:
        tokens = seconds = 0.0
        for _ in range(steps):
            drafts = number(requests)
            accepted = _windows(generator, drafts, requests)
            took = costs.step(requests, drafts)
            tokens += requests + accepted.sum()
            seconds += took
            if number == policy.choose:
                if drafts:
                    policy.estimates.observe(drafts, accepted)
                policy.observe_step(requests, drafts, 0, requests + accepted.sum(), took)
        return tokens / seconds

    policy = DraftLengthPolicy(BOUNDS)
    policy.take_costs(costs)
    rate(policy.choose, 300)  # until it knows the text
    steps = max(1500, 8000 // requests)  # so many that chance is small against what is allowed
    best = max(rate(lambda _, k=k: k, steps) for k in DraftBounds(0, 8).candidates)
    assert rate(policy.choose, steps) > 0.97 * best


def test_hopeless_drafts_are_left_out_and_tried_again() -> None:
    policy = DraftLengthPolicy(BOUNDS)
    policy.take_costs(_costs())
    made = []
    for _ in range(2000):
        drafts = policy.choose(256)
        made.append(drafts)
        if drafts:
            policy.estimates.observe(drafts, np.zeros(256, np.int32))
    assert policy.chosen == 0
    late = made[1000:]
    assert late.count(0) == pytest.approx(len(late) * (1 - 3 / policies.PROBE_EVERY), rel=0.01)
    assert set(late) == {0, 1}
    for _ in range(2000):  # another text
        drafts = policy.choose(256)
        if drafts:
            policy.estimates.observe(drafts, np.full(256, drafts, np.int32))
    assert policy.chosen >= 1


def test_near_ties_do_not_go_back_and_forth() -> None:
    policy, generator = DraftLengthPolicy(BOUNDS), np.random.default_rng(3)
    policy.take_costs(_costs())
    changes, before = 0, None
    for step in range(3000):
        drafts = policy.choose(60 + step % 3)
        policy.estimates.observe(drafts, _windows(generator, drafts, 60))
        if step > 300:
            changes += policy.chosen != before
        before = policy.chosen
    assert changes <= 6


def test_a_change_of_load_is_followed_in_the_step_that_shows_it() -> None:
    policy, generator = DraftLengthPolicy(BOUNDS), np.random.default_rng(3)
    policy.take_costs(_costs())
    for _ in range(200):
        policy.estimates.observe(8, _windows(generator, 8, 16))
    few = policy.choose(1)
    many = policy.choose(256)
    assert few >= 3
    assert many <= 1
    assert policy.choose(1) == few


def test_long_contexts_make_longer_windows_pay() -> None:
    policy, generator = DraftLengthPolicy(BOUNDS), np.random.default_rng(3)
    policy.take_costs(_costs())
    for _ in range(200):
        policy.estimates.observe(8, _windows(generator, 8, 16))
    short = policy.choose(64)
    for _ in range(400):
        policy.observe_step(64, 2, 0, 140.0, _costs().step(64, 2) + 0.03)
    policy._until_look = 0
    assert policy.choose(64) > short


def test_prompts_cost_more_beside_longer_windows() -> None:
    """Rows are free up to a floor: windows that fill it leave prompts none of them."""
    chosen = {}
    for prompt in (0, 128):
        policy, generator = DraftLengthPolicy(BOUNDS), np.random.default_rng(3)
        policy.take_costs(_costs())
        for _ in range(200):
            policy.estimates.observe(8, _windows(generator, 8, 16))
        for _ in range(2000):
            policy.observe_step(32, 4, prompt, 80.0, 0.0)
        chosen[prompt] = policy.choose(32)
    assert chosen[128] < chosen[0]


def test_one_request_brings_enough_windows_to_a_probe() -> None:
    policy = DraftLengthPolicy(BOUNDS)
    policy.take_costs(_costs(floor=0.0, row=0.001))
    made = [policy.choose(1) for _ in range(4 * policies.PROBE_EVERY)]
    probes = [index for index, drafts in enumerate(made) if drafts != policy.chosen]
    runs = [list(run) for _, run in itertools.groupby(enumerate(probes), lambda pair: pair[1] - pair[0])]
    assert {len(run) for run in runs} == {policies.PROBE_WINDOWS}


def test_the_fixed_number_lies_within_narrower_bounds() -> None:
    lengths = DraftLengths(BOUNDS)
    lengths.follow(WorkerFacts("off", 0, 1, None, "auto:5-6"))
    assert lengths[4] == 6


@pytest.mark.parametrize("wanted", ["5", "7", "auto:5-5", "auto:7-7"])
def test_numbers_without_graphs_are_refused(wanted: str) -> None:
    with pytest.raises(ConfigError, match="not prepared at the start"):
        settle(BOUNDS, wanted)


def test_settings_come_to_one_form() -> None:
    assert settle(BOUNDS, " AUTO ") == str(BOUNDS)
    assert settle(BOUNDS, "03") == "3"
    assert settle(DraftBounds(1, 8), "0") == "0"
    assert settle(BOUNDS, "auto:5-6") == "auto:5-6"


def test_costs_never_fall_beyond_what_was_measured() -> None:
    costs = StepCosts((1, 2), (0,), ((0.005,), (0.0049,)))
    assert costs.step(64, 0) == 0.0049


def test_steps_without_a_record_carry_what_has_changed() -> None:
    lengths = DraftLengths(BOUNDS)
    lengths.take_costs(_costs())
    lengths.follow(WorkerFacts("stage", 0, 1, None, "0"))
    assert lengths[4] == 0
    lengths.follow(WorkerFacts("stage", 0, 1, None, "auto:1-8"))
    assert lengths[4] > 0


def test_bounds_hold() -> None:
    policy = DraftLengthPolicy(DraftBounds(2, 3), BOUNDS)
    policy.take_costs(_costs())
    made = set()
    for requests in itertools.islice(itertools.cycle((1, 256)), 2000):
        drafts = policy.choose(requests)
        made.add(drafts)
        policy.estimates.observe(drafts, np.zeros(requests, np.int32))
    assert made <= {2, 3}
    assert DraftBounds(1, 5).candidates == (1, 2, 3, 4, 5)


def _record(facts: WorkerFacts, drafts: list[int], sampled: list[int]) -> StepRecord:
    as_bytes = [np.array(values, np.int32).tobytes() for values in (drafts, sampled)]
    treatment = Treatment(facts.mode, as_bytes[0], len(drafts), sum(drafts) + len(drafts))
    return StepRecord([str(index) for index in range(len(drafts))], treatment, as_bytes[1], facts, 0)


def test_the_scheduler_gets_a_fixed_number_where_none_is_chosen() -> None:
    lengths = DraftLengths(BOUNDS)
    assert lengths[5] == 4
    assert lengths.explain()["auto"] is False
    lengths.take_costs(_costs())
    lengths.observe(_record(WorkerFacts("off", 0, 1), [4], [2]))
    assert lengths[256] == 4
    assert "off" in lengths.explain()["why"]
    lengths.observe(_record(WorkerFacts("stage", 1, 1), [4], [2]))
    assert lengths[256] < 4
    assert lengths.explain()["auto"] is True
    lengths.observe(_record(WorkerFacts("stage", 1, 1, None, "3"), [4], [2]))
    assert lengths[256] == 3
    lengths.observe(_record(WorkerFacts("stage", 1, 1, None, "auto:5-6"), [4], [2]))
    assert lengths[256] in (5, 6)
    assert sum(lengths.drain().values()) == 5
    assert lengths.drain() == {}


def test_windows_of_several_lengths_are_told_apart() -> None:
    lengths = DraftLengths(BOUNDS)
    lengths.take_costs(_costs())
    facts = WorkerFacts("stage", 0, 1)
    for _ in range(64):
        lengths.observe(_record(facts, [3, 0, 1, 3], [4, 1, 1, 1]))
    chances = lengths.policy.estimates.acceptance.chances
    # Of three windows with a first draft one accepts it, and then all of its drafts.
    assert chances[0] == pytest.approx(1 / 3, abs=0.05)
    assert chances[1] > 0.9


def test_steps_tell_prompts_from_windows() -> None:
    seen: list[tuple[Any, ...]] = []
    lengths = DraftLengths(BOUNDS)
    lengths.policy.observe_step = lambda *found: seen.append(found)  # type: ignore[method-assign]
    step = SimpleNamespace(
        scheduled_spec_decode_tokens={"a": [-1] * 3, "b": [-1] * 3},
        num_scheduled_tokens={"a": 4, "b": 4, "c": 100},
        num_spec_tokens_to_schedule=3,
        total_num_scheduled_tokens=108,
    )
    lengths.observe_step(step, 5, busy=True)
    lengths.observe_step(step, 5, busy=False)
    assert [found[:4] for found in seen] == [(3, 3, 99, 5)] * 2
    assert seen[1][4] == 0.0


@pytest.mark.parametrize("text", ["4", "auto:", "auto:8-1", "auto:0-0", "auto:1-64", "AUTO"])
def test_wrong_bounds_are_told(text: str) -> None:
    with pytest.raises(ConfigError, match="auto"):
        DraftBounds.parse(text)


def test_bounds_read_and_write() -> None:
    assert DraftBounds.parse("auto") == BOUNDS
    assert DraftBounds.parse(str(DraftBounds(1, 6))) == DraftBounds(1, 6)
    assert DraftBounds(0, 2).fixed == 2
    assert DraftBounds(5, 8).fixed == 5
