"""Claim: what is not copied again is what it was, and whatever else is copied as vLLM does it.

Coverage: arrays that stay, change in place, differ in length or dtype; lists, tensors and given outputs. The
stock function is a stand-in that copies on the host and counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from nwor.engine.fastpath.h2d_cache import H2DCache


class Stock:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(
        self, data: Any, device: Any = None, dtype: torch.dtype | None = None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        self.calls += 1
        made = torch.as_tensor(data).clone().to(dtype or torch.as_tensor(data).dtype)
        return made if out is None else out.copy_(made)


@pytest.fixture
def copies() -> tuple[H2DCache, Stock]:
    stock = Stock()
    return H2DCache(stock), stock


def test_an_array_that_stays_is_copied_once(copies):
    fast, stock = copies
    array = np.arange(6, dtype=np.int32)
    first = fast(array, device="cpu", dtype=torch.int64)
    again = fast(np.arange(6, dtype=np.int32), device="cpu", dtype=torch.int64)
    assert again is first
    assert first.dtype is torch.int64
    assert (stock.calls, fast.repeated) == (1, 1)


def test_every_change_is_copied_also_one_in_place(copies):
    fast, stock = copies
    array = np.arange(6, dtype=np.int32)
    before = fast(array, device="cpu")
    array[3] = 70
    after = fast(array, device="cpu")
    assert after.tolist() == [0, 1, 2, 70, 4, 5]
    assert before.tolist() == [0, 1, 2, 3, 4, 5]  # a step under way may still read it
    array[3] = 3
    assert fast(array, device="cpu").tolist() == [0, 1, 2, 3, 4, 5]
    assert (stock.calls, fast.repeated) == (3, 0)


def test_arrays_that_differ_in_length_or_dtype_do_not_meet(copies):
    fast, stock = copies
    seen = [
        fast(np.zeros(4, np.int32), device="cpu"),
        fast(np.zeros(5, np.int32), device="cpu"),
        fast(np.zeros(4, np.int64), device="cpu"),
        fast(np.zeros(4, np.int32), device="cpu", dtype=torch.int64),
    ]
    assert [(tuple(t.shape), t.dtype) for t in seen] == [
        ((4,), torch.int32),
        ((5,), torch.int32),
        ((4,), torch.int64),
        ((4,), torch.int64),
    ]
    assert stock.calls == 4
    assert fast(np.zeros(4, np.int32), device="cpu") is seen[0]


@pytest.mark.parametrize("data", [[1, 2, 3], torch.tensor([1, 2, 3]), np.ones((2, 2), np.int32)])
def test_lists_tensors_and_tables_are_copied_each_time(copies, data):
    fast, stock = copies
    fast(data, device="cpu")
    fast(data, device="cpu")
    assert (stock.calls, fast.repeated) == (2, 0)


def test_a_given_output_is_written_each_time(copies):
    fast, stock = copies
    array, out = np.arange(3, dtype=np.int32), torch.empty(3, dtype=torch.int32)
    fast(array, out=out)
    out.fill_(9)  # somebody else writes there, too
    assert fast(array, out=out) is out
    assert out.tolist() == [0, 1, 2]
    assert stock.calls == 2
