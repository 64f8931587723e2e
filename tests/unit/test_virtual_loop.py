"""Claim: in a closed loop what is chosen serves as much as the best fixed number, also where requests differ.

Coverage: vLLM's scheduler a step ahead of results, with NWOR's choice, in virtual time. A device takes what a
table of costs says that was measured on a GPU, and drafts are accepted by chance. Requests that are alike,
and requests of which half are hard; a table that is wrong; what steps teach.
Tolerance: rates of a few virtual seconds differ by chance, by one or two per cent.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from benchmarks.engine import virtual_loop
from benchmarks.engine.virtual_loop import Load, VirtualServer, read_costs

COSTS = read_costs("h200-8b")


def _rate(folder: Path, load: Load, wanted: str, seconds: float = 8.0, fits: bool = False) -> float:
    server = VirtualServer(folder, COSTS, load, wanted, fits=fits)
    server.run(8.0)
    return server.run(seconds)


@pytest.mark.parametrize(("texts", "numbers"), [("heads", "34"), ("0.3", "12")])
def test_where_requests_are_alike_the_best_number_is_chosen(tmp_path: Path, texts: str, numbers: str) -> None:
    load = Load(16, texts, 160, 200)
    best = max(_rate(tmp_path, load, number) for number in numbers)
    chosen = _rate(tmp_path, load, "auto")
    assert chosen > 0.98 * best
    # Nothing is fitted then, or hardly ever.
    assert _rate(tmp_path, load, "auto", fits=True) == pytest.approx(chosen, rel=0.01)


def test_a_load_that_changes_is_followed_within_a_second(tmp_path: Path) -> None:
    server = VirtualServer(tmp_path, COSTS, Load(64, "heads", 160, 200), "auto")
    for clients in (2, 64):
        server.run(6.0, clients)
    # With few clients rows are nearly free, with many each takes its time.
    for clients, wanted in ((2, {3, 4, 6}), (64, {1, 2}), (2, {3, 4, 6}), (64, {1, 2})):
        while clients < len(server.scheduler.requests):
            server.run(0.1, clients)
        server.run(1.0, clients)
        server.numbers.clear()
        server.run(2.0)
        most = max(server.numbers, key=server.numbers.__getitem__)
        assert most in wanted, clients
        assert server.numbers[most] > 0.7 * sum(server.numbers.values())


def test_where_half_of_the_requests_are_hard_fitted_windows_serve_more(tmp_path: Path) -> None:
    load = Load(16, "half", 160, 200)
    best = max(_rate(tmp_path, load, number, 16.0) for number in "23")
    fitted = _rate(tmp_path, load, "auto", 16.0, fits=True)
    assert fitted > 0.98 * best
    assert fitted > 1.005 * _rate(tmp_path, load, "auto", 16.0)


def test_steps_of_fitted_windows_do_not_mislead_about_costs(tmp_path: Path) -> None:
    """Steps verify fewer drafts than were made, by any number; requests end and begin among them."""
    server = VirtualServer(tmp_path, COSTS, Load(24, "half", 160, 200), "auto", fits=True)
    scheduler, spared = server.scheduler, 0
    observe = scheduler._nwor_lengths.policy.observe_step

    def watched(*given: object) -> None:
        nonlocal spared
        spared += given[5] > 0  # type: ignore[operator]
        observe(*given)

    scheduler._nwor_lengths.policy.observe_step = watched
    for _ in range(6):
        # Whatever pays: some windows are fitted to their requests in many steps.
        scheduler._nwor_bounds.survival()
        scheduler._nwor_bounds.fit(0.2, 4)
        server.run(1.0)
    assert spared > 50
    times = scheduler._nwor_lengths.policy.times
    for drafts in (0, 1, 2, 3, 4):
        assert times.step(24, drafts) == pytest.approx(COSTS.step(24, drafts), rel=0.15), drafts


def test_costs_that_were_measured_wrong_are_unlearnt(tmp_path: Path) -> None:
    """Another program had the device while two numbers were measured."""
    wrong = dataclasses.replace(
        COSTS,
        seconds=tuple(
            tuple(2.0 * cell if COSTS.drafts[place] in (2, 3) else cell for place, cell in enumerate(row))
            for row in COSTS.seconds
        ),
    )
    load = Load(16, "heads", 160, 200)
    server = VirtualServer(tmp_path, COSTS, load, "auto", believed=wrong, fits=True)
    server.run(12.0)
    assert server.run(8.0) > 0.96 * _rate(tmp_path, load, "3")


def test_the_tables_of_costs_are_whole() -> None:
    for path in virtual_loop.COSTS.glob("*.json"):
        costs = read_costs(path.stem)
        assert costs.drafts == virtual_loop.BOUNDS.candidates
        assert len(costs.pass_seconds) == len(costs.requests) == len(costs.seconds)
        assert all(cell > 0 for row in costs.seconds for cell in row)
        assert math.isinf(costs.step(max(costs.requests), 8)) or max(costs.requests) < 128
