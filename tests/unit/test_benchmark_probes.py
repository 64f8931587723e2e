"""Claim: times that thread blocks noted become when a launch's stations are reached, and how far apart.

Coverage: thread blocks that had no work, or did not come to a station; medians over launches; the stations'
names. No GPU is needed for any of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit import benchmark_modules


@pytest.fixture
def probes() -> Iterator[Any]:
    with benchmark_modules.imported("kernels", "probes") as module:
        yield module


#: Of four thread blocks: one without work, and one that was never launched.
TIMES = torch.tensor([[1000, 1200, 1900], [1064, 1300, 1700], [1032, 0, 0], [0, 0, 0]])


def test_stations_are_counted_from_the_first_thread_block(probes: Any) -> None:
    assert probes.of_launch(TIMES) == [(0, 32, 64), (200, 250, 300), (700, 800, 900)]
    assert probes.of_launch(TIMES[2:]) == [(0, 0, 0), None, None]


def test_from_station_to_station_of_the_same_thread_block(probes: Any) -> None:
    assert probes.of_blocks(TIMES) == [(200, 218, 236), (400, 550, 700)]
    assert probes.of_blocks(TIMES[2:]) == [None, None]


def test_medians_over_launches(probes: Any) -> None:
    launches = [[(0, 1, 2), None, (5, 5, 5)], [(0, 3, 9), None, None], [(0, 2, 4), (1, 1, 1), (7, 8, 9)]]
    assert probes.middle(launches) == [(0, 2, 4), None, (6, 6.5, 7)]
    assert probes.line("end", (1500, 2000, 123456)) == f"{'end':>26} " + "    1.50     2.00   123.46"
    assert probes.line("end", None).split() == ["end", "-"]


def test_stations_are_those_of_the_kernels(probes: Any) -> None:
    source = (benchmark_modules.BENCHMARKS.parent / "csrc" / "cuda" / "verify" / "probes.cuh").read_text()
    names = source.split("enum class Station : int { ")[1].split(" }")[0].split(", ")
    words = ["".join(f" {c.lower()}" if c.isupper() else c for c in name[1:]).strip() for name in names]
    assert tuple(words) == probes.STATIONS
    assert f"kStations = {len(words)};" in source
