"""Which steps' seconds say what a step costs: time that is moved between neighbours changes nothing.

Coverage: steps for themselves and in groups; what ends a group; groups where nothing counts for itself. The
choice of draft tokens under mixes of steps with prompts, by wrong measurements, beside the best fixed number;
and after another program had the device for a while.
"""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
import pytest

from nwor.config import DraftBounds
from nwor.draft_costs import StepCosts
from nwor.engine.draft_lengths.policy import DraftLengthPolicy
from nwor.engine.draft_lengths.step_groups import MOST_STEPS, StepGroups
from nwor.engine.draft_lengths.step_times import StepTimes

#: A step of 64 requests with two drafts takes 10 ms, a row of a prompt beside it 25 us.
COSTS = StepCosts((1, 64), (0, 2), ((0.005, 0.006), (0.006, 0.010)), (64, 1024), (0.005, 0.005 + 960 * 25e-6))
PURE, ROW = 0.010, 25e-6


class Seen:
    """A :class:`StepTimes` that notes what it is told."""

    def __init__(self) -> None:
        self.pure: list[float] = []
        self.groups: list[tuple[int, float, float, float]] = []
        self.times = StepTimes(COSTS)
        self.times.observe = lambda _, __, seconds, summed=False: self.pure.append(seconds)  # type: ignore[method-assign]
        self.times.observe_prompts = lambda *group: self.groups.append(group)  # type: ignore[method-assign]

    def run(self, steps: list[tuple[int, float]]) -> None:
        groups = StepGroups(self.times)
        for prompt, seconds in steps:
            groups.add(64, 2, prompt, seconds)


def test_steps_count_for_themselves_between_others_without_prompts() -> None:
    seen = Seen()
    seen.run([(0, 1.0), (0, 2.0), (0, 3.0), (400, 4.0), (0, 5.0), (0, 6.0), (0, 7.0), (0, 8.0)])
    assert seen.pure == [1.0, 2.0, 6.0, 7.0]  # the last waits for the next
    ((steps, seconds, without, adds),) = seen.groups
    assert (steps, seconds) == (3, 3.0 + 4.0 + 5.0)
    assert without == pytest.approx(3 * PURE)
    assert adds == pytest.approx(400 * ROW)


@pytest.mark.parametrize("forward", [True, False])
def test_moved_time_changes_nothing(forward: bool) -> None:
    random = Random(3)
    prompts = [0] * 4 + [random.choice([0, 0, 0, 0, 0, 0, 500, 900]) for _ in range(4000)]
    true = [PURE + 1.3 * ROW * prompt for prompt in prompts]
    shown = list(true)
    pairs = (
        pairwise(range(len(prompts))) if forward else (pair[::-1] for pair in pairwise(range(len(prompts))))
    )
    for index, neighbour in pairs:
        if prompts[index]:
            moved = 0.4 * true[index]
            shown[index] -= moved
            shown[neighbour] += moved
    seen = Seen()
    seen.run(list(zip(prompts, shown, strict=True)))
    assert len(seen.pure) > 500
    assert seen.pure == pytest.approx([PURE] * len(seen.pure))
    assert len(seen.groups) > 300
    for _, seconds, without, adds in seen.groups:
        assert (seconds - without) / adds == pytest.approx(1.3)


def test_a_step_whose_seconds_are_not_known_is_nobodys_neighbour() -> None:
    seen = Seen()
    seen.run([(0, 1.0), (400, 0.0), (0, 2.0), (0, 3.0), (0, 4.0), (400, 5.0), (0, 6.0), (0, 7.0)])
    assert seen.pure == [1.0, 2.0, 3.0]
    assert [(steps, seconds) for steps, seconds, *_ in seen.groups] == [(3, 4.0 + 5.0 + 6.0)]


def test_a_step_whose_seconds_are_not_known_ends_a_group() -> None:
    seen = Seen()
    seen.run([(0, 1.0), (0, 1.0), (400, 2.0), (400, 3.0), (400, 0.0), (400, 4.0), (0, 0.0), (0, 1.0)])
    assert [(steps, seconds) for steps, seconds, *_ in seen.groups] == [(3, 1.0 + 2.0 + 3.0), (1, 4.0)]


def test_prompts_in_every_step_are_added_up_in_parts() -> None:
    seen = Seen()
    seen.run([(400, 0.022)] * (2 * MOST_STEPS + 1))
    assert [group[0] for group in seen.groups] == [MOST_STEPS, MOST_STEPS]
    # 10 ms and what prompts add, 10 ms as well, took 2 ms longer: prompts do.
    assert seen.pure == pytest.approx([PURE, PURE])
    _, seconds, without, adds = seen.groups[-1]
    assert (seconds - without) / adds == pytest.approx(1.2)


def test_behind_a_group_that_was_too_long_nothing_counts_for_itself() -> None:
    seen = Seen()
    seen.run([(0, PURE)] * 2 + [(400, 0.02)] * MOST_STEPS + [(0, 99.0), (0, PURE), (0, PURE)])
    assert max(seen.pure) == PURE
    assert sum(group[1] for group in seen.groups) > 99.0


@pytest.mark.parametrize("odd", [{"requests": 0}, {"drafts": 5}])
def test_steps_that_were_not_measured_say_nothing(odd: dict[str, Any]) -> None:
    seen = Seen()
    groups = StepGroups(seen.times)
    for prompt in (0, 0, 400, 0, 0, 0):
        groups.add(**({"requests": 64, "drafts": 2, "prompt": prompt, "seconds": 0.01} | odd))
    assert not seen.pure
    assert not seen.groups


#: Requests of the simulated engine, rows of a prompt, and how often drafts up to a position are accepted.
REQUESTS, PROMPT, ACCEPTED = 64, 400, np.array([0.8, 0.64, 0.5, 0.4])
BOUNDS = DraftBounds.parse("auto:0-4")


def _true(requests: int, drafts: int) -> float:
    """Return a step's seconds: memory bounds it, then its rows do."""
    return max(0.005, 0.0036 + 27e-6 * requests * (drafts + 1)) + 0.0006 * drafts


def _measured(too_dear: float) -> StepCosts:
    """Return a measurement that has every step with drafts too dear."""
    requests = (1, 16, 32, 64, 128, 256)
    seconds = tuple(
        tuple(_true(some, k) * (too_dear if k else 1.0) for k in BOUNDS.candidates) for some in requests
    )
    return StepCosts(requests, BOUNDS.candidates, seconds, (64, 1024), (0.005, 0.005 + 960 * ROW))


def _rate(policy: DraftLengthPolicy | None, drafts: int, share: float, steps: int, moved: float) -> float:
    """Return the tokens a second of an engine of which so many steps have prompts."""
    random, made, tokens, seconds, carried = np.random.default_rng(5), drafts, 0, 0.0, 0.0
    for _ in range(steps):
        chosen = drafts if policy is None else policy.choose(REQUESTS)
        prompt = PROMPT if random.random() < share else 0
        took = _true(REQUESTS, made) + ROW * prompt
        accepted = (random.random((REQUESTS, 1)) < ACCEPTED[None, :made]).sum(1).astype(np.int32)
        tokens, seconds = tokens + REQUESTS + int(accepted.sum()), seconds + took
        leaves = moved * took if prompt else 0.0
        shown, carried = took + carried - leaves, leaves
        if policy is not None:
            if made:
                policy.estimates.observe(made, accepted)
            policy.observe_step(REQUESTS, made, prompt, REQUESTS, shown if made == chosen else 0.0)
        made = chosen
    return tokens / seconds


@pytest.mark.parametrize("share", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(("too_dear", "moved"), [(1.0, 0.3), (1.5, 0.0), (1.5, 0.2)])
def test_a_choice_by_wrong_costs_gets_near_the_best_under_every_mix(
    share: float, too_dear: float, moved: float
) -> None:
    best = max(_rate(None, drafts, share, 600, 0.0) for drafts in BOUNDS.candidates)
    policy = DraftLengthPolicy(BOUNDS)
    policy.take_costs(_measured(too_dear))
    _rate(policy, 0, share, 1500, moved)
    found = _rate(policy, policy.chosen, share, 1500, moved) / best
    assert found > 0.8, found


class _Loaded:
    """An engine under heavy load, whose host is late with results, most of all of steps with prompts.

    Args:
        requests: that run.
        chance: of each draft, that it is accepted after those before.
        share: of the steps, about so many have prompts.
        seed: of chance.

    """

    def __init__(self, requests: int, chance: float, share: float, seed: int) -> None:
        self._requests, self._random = requests, np.random.default_rng(seed)
        self._curve = np.cumprod(np.full(max(BOUNDS.candidates), chance))
        self._prompts = -np.log(1.0 - share) / (requests * self._tokens(1))
        self._policy = DraftLengthPolicy(BOUNDS)
        self._policy.take_costs(_measured(1.0))
        self._made, self._late, self._busy = self._policy.chosen, 0.0, 1.0

    def _tokens(self, drafts: int) -> float:
        return 1.0 + float(self._curve[:drafts].sum())

    def regret(self, drafts: int) -> float:
        """Return how much longer a token takes than with the best number, relative."""
        prompts, requests = self._prompts * ROW * PROMPT / 2, self._requests
        seconds = {k: _true(requests, k) / (requests * self._tokens(k)) + prompts for k in BOUNDS.candidates}
        return seconds[drafts] / min(seconds.values()) - 1.0

    def run(self, steps: int, least: float = 1.0, most: float = 1.0, changes: float = 0.0) -> float:
        """Return the mean regret of the choices while steps take ``least`` to ``most`` times as long.

        Args:
            steps: how many.
            least: see above.
            most: see above.
            changes: chance of a step that begins another such factor.

        """
        policy, random, requests, regrets = self._policy, self._random, self._requests, []
        self._busy = random.uniform(least, most)
        for _ in range(steps):
            chosen, made = policy.choose(requests), self._made
            regrets.append(self.regret(policy.chosen))
            prompt = PROMPT // 2 * int(random.poisson(self._prompts * requests * self._tokens(made)))
            if random.random() < changes:
                self._busy = random.uniform(least, most)
            took = (_true(requests, made) + ROW * prompt) * self._busy * random.normal(1.0, 0.03)
            accepted = (random.random((requests, 1)) < self._curve[None, :made]).sum(1).astype(np.int32)
            late = 0.2 * took * random.random() if prompt else 0.0
            late += 0.02 if random.random() < 0.01 else 0.0
            shown, self._late = max(took + late - self._late, 0.0002), late
            if made:
                policy.estimates.observe(made, accepted)
            tokens = requests + float(accepted.sum())
            policy.observe_step(requests, made, prompt, tokens, shown if made == chosen else 0.0)
            self._made = chosen
        return float(np.mean(regrets))


@pytest.mark.parametrize(("requests", "chance"), [(128, 0.6), (256, 0.4), (256, 0.75)])
def test_a_device_that_was_busy_under_heavy_load_is_known_soon_after(requests: int, chance: float) -> None:
    regrets = []
    for seed in range(6):
        engine = _Loaded(requests, chance, (0.75, 0.9)[seed // 3], seed)
        engine.run(800)
        engine.run(1500, *[(2.0, 3.0, 0.01), (1.0, 4.0, 0.02), (2.5, 4.0, 0.003)][seed % 3])
        engine.run(500)
        regrets.append(engine.run(1800))
    assert sum(regrets) / len(regrets) < 0.015, regrets
