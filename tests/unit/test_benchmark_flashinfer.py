"""Claim: the causal mask that the kernel benchmark gives FlashInfer has a bit for each token that is seen.

Coverage: windows of one word and of two, every row and every bit. FlashInfer itself runs on a GPU only.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks" / "kernels"


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, whose neighbours are scripts that import one another by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    before = set(sys.modules)
    spec = importlib.util.spec_from_file_location("benchmark_flashinfer_ways", FOLDER / "flashinfer_ways.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("cells", "device", "flashinfer_modules"):
        if name not in before:
            sys.modules.pop(name, None)


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
