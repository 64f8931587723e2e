"""Claim: each request's acceptance is estimated from its windows and others', if they differ beyond chance.

Coverage: simulated windows with known chances; requests that are alike and that are not; rows used again.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("vllm")


from nwor.engine.draft_lengths.request_acceptance import RequestAcceptance

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


@pytest.mark.parametrize("chances", [(0.7,) * 4, (0.9, 0.7, 0.6, 0.5), (0.5, 0.8, 0.9, 0.9)])
def test_requests_that_are_alike_are_hardly_ever_taken_for_different(chances: tuple[float, ...]) -> None:
    names = [str(number) for number in range(32)]
    found = 0
    for seed in range(40):
        acceptance = _observed({name: lambda place: chances[place] for name in names}, 40, seed)
        found += acceptance.survival(names) is not None
    assert found <= 3


def test_windows_of_no_request_are_nobodys() -> None:
    acceptance = RequestAcceptance(8)
    for name in "abcd":
        acceptance.add(name)
    rng = random.Random(1)
    for _ in range(40):
        found = [[_window(lambda _: 0.7, 4, rng) for _ in range(4)] + [0, 0]]
        few = acceptance.observe([*"abcd", "x", "y"], np.full(6, 4), np.array(found, np.int32), 0.1)
        assert few.tolist() == []  # not those either, of which nothing was ever accepted
    assert acceptance.survival([*"abcd", "x", "y"]) is None


def test_a_tree_that_was_cut_is_no_chain() -> None:
    acceptance = RequestAcceptance(8)
    for name in "ab":
        acceptance.add(name)
    acceptance.observe(["a", "b"], np.array([16, 3]), np.array([[4, 3]], np.int32))
    assert not acceptance._sums[3:].any()
    acceptance.observe(["a", "b"], np.array([8, 3]), np.array([[4, 3]], np.int32))
    assert acceptance._sums[3:].any()


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
        assert not acceptance._sums[3:, acceptance._rows[name]].any()
        acceptance.end(name)
        acceptance.end(name)
    assert acceptance._sums.shape[1] <= 4
    assert acceptance.survival(["0", "gone"]) is None
