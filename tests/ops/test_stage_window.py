"""stage_window copies the leading rows of all layers aside and touches nothing else."""

from __future__ import annotations

import pytest
import torch

from nwor import ops, reference
from tests.ops.cases import BF16, FP16, FP32, Buffer, guarded


def staged(layers: int, rows: int, device: torch.device, dtype: torch.dtype) -> list[Buffer]:
    return [guarded((rows, 3, 40), dtype, device) for _ in range(layers)]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize(("layers", "num_tokens"), [(1, 1), (3, 0), (3, 9), (48, 5), (150, 12)])
def test_equals_reference(layers: int, num_tokens: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    qkv = [torch.randn(12, 9, 40, generator=generator).to(dtype).to(device) for _ in range(layers)]
    keys = [one[:, 3:6] for one in qkv]
    values = [one[:, 6:].transpose(0, 1).contiguous().transpose(0, 1) for one in qkv]
    staged_keys, staged_values = staged(layers, 16, device, dtype), staged(layers, 12, device, dtype)
    views = [buffer.view for buffer in (*staged_keys, *staged_values)]
    wanted = reference.stage_window([*keys, *values], views, num_tokens)
    ops.stage_window(
        keys,
        values,
        views[:layers],
        views[layers:],
        torch.tensor([num_tokens], dtype=torch.int32, device=device),
    )
    for buffer, want in zip((*staged_keys, *staged_values), wanted, strict=True):
        assert torch.equal(buffer.view.view(torch.uint8), want.view(torch.uint8))
        assert buffer.margins_untouched()


@pytest.mark.parametrize("count", [13, -1])
def test_tokens_that_there_are_not_are_an_error_on_cpu(count: int) -> None:
    device = torch.device("cpu")
    buffers = staged(4, 12, device, FP32)
    views = [[buffer.view] for buffer in buffers]
    before = [buffer.raw.clone() for buffer in buffers]
    with pytest.raises(RuntimeError, match=f"num_tokens: is {count}, but keys has 12 rows"):
        ops.stage_window(*views, torch.tensor([count], dtype=torch.int32))
    for buffer, old in zip(buffers, before, strict=True):
        assert torch.equal(buffer.raw, old)
