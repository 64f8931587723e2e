"""commit_window against vLLM's own cache writer: the same bytes for every source, cache dtype and scale.

Coverage: sources as slices of a fused projection, as both writers see them in the engine; vLLM's cache
layout and NHD; magnitudes from far below to far above what fp8 holds, infinities included. Tolerance: none.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BLOCKS, BLOCK, HEADS, SIZE, TOKENS = 7, 16, 4, 64, 30


@pytest.mark.parametrize("layout", ["combined", "nhd"])
@pytest.mark.parametrize("source", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache", ["auto", "fp8", "fp8_e4m3", "fp8_e5m2"])
@pytest.mark.parametrize("scales", ["one", "scalar", "per_head"])
def test_same_bytes_as_the_stock_writer(layout: str, source: torch.dtype, cache: str, scales: str) -> None:
    from nwor import ops

    stock = pytest.importorskip("vllm._custom_ops")
    torch.manual_seed(1)
    fused = torch.randn(TOKENS, 3 * HEADS, SIZE, device="cuda")
    fused = (fused * torch.logspace(-8, 6, TOKENS, device="cuda").view(-1, 1, 1)).to(source)
    fused[3, HEADS:, 0] = float("inf")
    key, value = fused[:, HEADS : 2 * HEADS], fused[:, 2 * HEADS :]
    dtype = source if cache == "auto" else torch.uint8

    def empty() -> tuple[torch.Tensor, torch.Tensor]:
        if layout == "nhd":
            both = torch.zeros(2, BLOCKS, BLOCK, HEADS, SIZE, device="cuda", dtype=dtype)
            return both[0], both[1]
        both = torch.zeros(BLOCKS, HEADS, BLOCK, 2 * SIZE, device="cuda", dtype=dtype)
        halves = both.transpose(1, 2).split(SIZE, dim=-1)
        return halves[0], halves[1]

    slots = torch.randperm(BLOCKS * BLOCK, device="cuda")[:TOKENS]
    slots[5] = -1
    count = {"one": 1, "scalar": 1, "per_head": HEADS}[scales]
    k_scale = torch.ones(1, device="cuda") if scales == "one" else torch.rand(count, device="cuda") + 0.3
    v_scale = torch.ones(1, device="cuda") if scales == "one" else torch.rand(count, device="cuda") + 0.3
    want, got = empty(), empty()
    stock.reshape_and_cache_flash(key, value, *want, slots, cache, k_scale, v_scale)
    table = ops.make_layer_table([key], [value], [got[0]], [got[1]])
    starts = torch.tensor([0, 10, TOKENS], dtype=torch.int32, device="cuda")
    counts = torch.tensor([10, TOKENS - 10], dtype=torch.int32, device="cuda")
    layer_scales = (k_scale.view(1, -1), v_scale.view(1, -1)) if scales == "per_head" else (k_scale, v_scale)
    torch.ops.nwor.commit_window(
        table, list(got), slots, starts, counts, None, HEADS, SIZE, BLOCK, BLOCKS, source, cache,
        *(None, None) if scales == "one" else layer_scales,
    )  # fmt: skip
    for wanted, written in zip(want, got, strict=True):
        assert torch.equal(wanted.contiguous().view(torch.uint8), written.contiguous().view(torch.uint8))
    assert want[0].to(torch.float32).abs().nan_to_num().sum() > 0
