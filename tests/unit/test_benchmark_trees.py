"""Arms of the benchmark of trees and of adaptive verification: their flags, and what is told of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.unit.benchmark_modules import imported


@pytest.fixture
def trees() -> Iterator[Any]:
    with imported("engine", "trees") as module:
        yield module


@pytest.mark.parametrize(
    ("arm", "flags"),
    [
        ("stock@4", ["--k", "4"]),
        ("stage@4+v9000", ["--k", "4", "--modes", "stage", "--draft-vocabulary", "9000"]),
        ("grown@16x6x4", ["--k", "16", "--modes", "stage", "--tree", "16,6,4,grown"]),
        ("stock@7+adaptive", ["--k", "7", "--adaptive"]),
        ("stage@7+adaptive", ["--k", "7", "--modes", "stage", "--adaptive"]),
    ],
)
def test_flags_of_an_arm(trees: Any, arm: str, flags: list[str]) -> None:
    assert trees.command_of(arm) == flags


@pytest.mark.parametrize("arm", ["grown@16x6x4+adaptive", "off@4"])
def test_what_is_no_arm(trees: Any, arm: str) -> None:
    with pytest.raises(ValueError, match=arm.replace("+", r"\+")):
        trees.command_of(arm)


def _record(kind: str, tokens: list[int]) -> dict[str, Any]:
    cell = {"context": 512, "batch": 64, "steps": 10, "seconds": {kind: [1.0, 3.0]}, "tokens": {kind: tokens}}
    return {"cells": [cell]}


def test_tokens_a_second_are_told_where_an_arm_is_adaptive(trees: Any) -> None:
    fixed, adaptive = _record("stock", [100, 100]), _record("stage", [200, 300])
    assert trees.measured({"stock@2": fixed, "stage@2": fixed}) == ""
    table = trees.measured({"stock@2": fixed, "stage@7+adaptive": adaptive, "grown@16x6x4": fixed})
    assert "| stock@2 | 50 |" in table
    assert "| stage@7+adaptive | 125 |" in table
    assert "grown" not in table
