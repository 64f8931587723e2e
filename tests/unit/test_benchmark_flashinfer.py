"""Claim: the causal mask that the kernel benchmark gives FlashInfer has a bit for each token that is seen.

Coverage: windows of one word and of two, every row and every bit. FlashInfer itself runs on a GPU only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.unit import benchmark_modules


@pytest.fixture
def ways() -> Iterator[Any]:
    with benchmark_modules.imported("kernels", "flashinfer_ways") as module:
        yield module


@pytest.mark.parametrize("window", [1, 2, 5, 9, 32, 33, 64])
def test_draft_mask_has_a_bit_for_each_token_that_is_seen(ways: Any, window: int) -> None:
    mask = ways.draft_mask(window, 3)
    words = -(-window // 32)
    assert mask.shape == (3, window, 2 * words)
    assert mask.dtype == torch.uint16
    assert mask.is_contiguous()
    for request in mask.tolist():
        for row, halves in enumerate(request):
            bits = sum(half << (16 * i) for i, half in enumerate(halves))
            assert bits == (1 << (row + 1)) - 1
