"""Claim: the kernel benchmark commits each layer's window to its cache, also where layers share caches.

Coverage: caches of five layers for all of them, and of all; on the CPU. Tolerance: none, bytes.
"""

from __future__ import annotations

import pytest
import torch

from tests.unit.benchmark_modules import imported


@pytest.mark.parametrize("distinct", [5, 32])
def test_layers_may_share_caches(distinct: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with imported("kernels", "device") as device:
        monkeypatch.setattr(device, "DEVICE", "cpu")
        cell = device.Cell((8, 2, 64), False, 3, 40, 2)
        pool = device.CachePool(cell.layer_bytes * distinct + 4095, fp8=False)
        step = device.Step(cell, pool)
        assert step.distinct == distinct
        # Layers that share a cache have the same window there: who of them writes last is left open.
        step.fused[distinct:] = step.fused[torch.arange(distinct, device.LAYERS) % distinct]
        pool.storage.zero_()
        device.run_nwor(step, torch.empty(0)).commit()
        blocks, places = step.slots // device.BLOCK_SIZE, step.slots % device.BLOCK_SIZE
        for layer in range(device.LAYERS):
            assert torch.equal(step.key_caches[layer][blocks, places], step.keys[layer])
            assert torch.equal(step.value_caches[layer][blocks, places], step.values[layer])
        written = 2 * cell.tokens * cell.heads[1] * cell.heads[2] * distinct
        assert int((pool.storage.view(torch.bfloat16) != 0).sum()) <= written
