"""Claim: the profile of a decode step adds up each kernel's runs, finds when none ran and what a step
took, shows what differs.

Coverage: overlapping and unordered runs, kernels that a turn or a mode lacks, one mode alone; torch's own
profiler on the CPU's operators. Kernels themselves run on a GPU only.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit import benchmark_modules


@pytest.fixture
def kernel_times() -> Iterator[Any]:
    with benchmark_modules.imported("engine", "kernel_times") as module:
        yield module


def test_runs_add_up_and_gaps_are_idle(kernel_times: Any) -> None:
    spans = [("b", 30.0, 40.0), ("a", 0.0, 10.0), ("a", 5.0, 20.0), ("c", 12.0, 15.0), ("a", 44.0, 50.0)]
    kernels, idle, span = kernel_times.by_name(spans, 2)
    assert kernels == {"a": (1.5, 15.5), "b": (0.5, 5.0), "c": (0.5, 1.5)}
    assert idle == (10.0 + 4.0) / 2
    assert span == 50.0 / 2
    assert kernel_times.by_name([], 2) == ({}, 0.0, 0.0)


def test_a_step_ends_with_the_last_end(kernel_times: Any) -> None:
    # Kernels that begin while another runs, and end before it does; times count from anywhere.
    spans = [("product", 1000.0, 1090.0), ("early", 1080.0, 1085.0), ("inside", 1082.0, 1084.0)]
    kernels, idle, span = kernel_times.by_name(spans, 1)
    assert sum(taken for _, taken in kernels.values()) == 97.0
    assert (idle, span) == (0.0, 90.0)


def test_medians_of_turns(kernel_times: Any) -> None:
    turns = [
        ({"a": (1.0, 5.0)}, 1.0, 30.0),
        ({"a": (1.0, 7.0), "b": (1.0, 3.0)}, 2.0, 10.0),
        ({"a": (1.0, 90.0)}, 9.0, 20.0),
    ]
    wanted = ({"a": (1.0, 7.0), "b": (0.0, 0.0)}, 2.0, 20.0)
    assert kernel_times.middle([kernel_times.Times(*turn) for turn in turns]) == wanted


def test_what_differs_most_stands_first(kernel_times: Any) -> None:
    off = {"same": (2.0, 50.0), "write": (32.0, 60.0), "stock": (32.0, 400.0)}
    stage = {"same": (2.0, 51.0), "verify": (32.0, 350.0)}
    seen = {"off": kernel_times.Times(off, 9.0, 519.0), "stage": kernel_times.Times(stage, 8.0, 380.0)}
    lines = kernel_times.table(seen)
    assert lines[0] == "| | off | stage |"
    assert lines[2:5] == ["| kernels | 510 | 401 |", "| idle | 9 | 8 |", "| step | 519 | 380 |"]
    assert [line.split("`")[1] for line in lines[5:]] == ["stock", "verify", "write", "same"]
    assert lines[5].endswith("| 32 x, 400.0 | 0 x, 0.0 |")
    alone = kernel_times.table({"off": seen["off"]})
    assert [line.split("`")[1] for line in alone[5:]] == ["stock", "write", "same"]


def test_profile_of_operators(kernel_times: Any) -> None:
    numbers = torch.ones(64, 64)

    def run(steps: int) -> None:
        for _ in range(steps):
            torch.mm(numbers, numbers)

    kernels, idle, span = kernel_times.profile(SimpleNamespace(run=run), 5, "cpu")
    calls, taken = kernels["aten::mm"]
    assert calls == 1
    assert 0 < taken <= span  # runs of one operator, one after another
    assert 0 <= idle < span
