"""commit_window leaves every byte of every cache as the stock writer would, the accepted tokens written, no
other.

Compared are whole buffers, guard regions and gaps included, with a loop over single tokens and with vLLM's
own writer for CPU caches.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nwor import ops, reference
from tests.ops.cases import (
    BF16,
    FP8,
    FP16,
    FP32,
    LAYOUTS,
    PADDING_ROWS,
    SLOT,
    SLOT_CASES,
    SlotCase,
    SlotInputs,
    slot_inputs,
)


def commit(case: SlotCase, inputs: SlotInputs, **changes: Any) -> None:
    table = ops.make_layer_table(inputs.keys, inputs.values, inputs.key_caches, inputs.value_caches)
    arguments = {
        "commit_counts": inputs.commit_counts,
        "source_dtype": case.dtype,
        "kv_cache_dtype": case.kv_cache_dtype,
        "k_scales": inputs.k_scales,
        "v_scales": inputs.v_scales,
        **inputs.shape,
        **changes,
    }
    ops.commit_window(table, inputs.caches, inputs.slots, inputs.query_start_loc, **arguments)


def expect(case: SlotCase, inputs: SlotInputs, **selection: torch.Tensor) -> list[torch.Tensor]:
    """Return the raw buffers as the reference leaves them, and put the inputs' buffers back as they were."""
    before = inputs.snapshots()
    results = []
    for layer in range(case.layers):
        scales = [None if s is None else s[layer] for s in (inputs.k_scales, inputs.v_scales)]
        results.append(
            reference.commit_window(
                inputs.keys[layer],
                inputs.values[layer],
                inputs.key_caches[layer],
                inputs.value_caches[layer],
                inputs.slots,
                inputs.query_start_loc,
                kv_cache_dtype=case.kv_cache_dtype,
                k_scale=scales[0],
                v_scale=scales[1],
                **selection,
            )
        )
    for layer, (key_cache, value_cache) in enumerate(results):
        inputs.key_caches[layer].copy_(key_cache)
        inputs.value_caches[layer].copy_(value_cache)
    wanted = inputs.snapshots()
    for buffer, old in zip(inputs.buffers, before, strict=True):
        buffer.raw.copy_(old)
    return wanted


def assert_equal(inputs: SlotInputs, wanted: list[torch.Tensor]) -> None:
    for buffer, want in zip(inputs.buffers, wanted, strict=True):
        assert torch.equal(buffer.raw, want)


@pytest.mark.parametrize("case", SLOT_CASES, ids=str)
def test_counts(case: SlotCase, device: torch.device) -> None:
    inputs = slot_inputs(case, device)
    before = inputs.snapshots()
    wanted = expect(case, inputs, commit_counts=inputs.commit_counts)
    assert any(not torch.equal(new, old) for new, old in zip(wanted, before, strict=True))
    commit(case, inputs)
    assert_equal(inputs, wanted)


@pytest.mark.parametrize("case", SLOT_CASES[::2], ids=str)
def test_rejected_counts(case: SlotCase, device: torch.device) -> None:
    """What is left out of each window says the same as what is kept."""
    inputs = slot_inputs(case, device)
    wanted = expect(case, inputs, commit_counts=inputs.commit_counts)
    lengths = inputs.query_start_loc[1:] - inputs.query_start_loc[:-1]
    rejected = lengths - inputs.commit_counts[: len(lengths)]
    commit(case, inputs, commit_counts=None, rejected_counts=rejected)
    assert_equal(inputs, wanted)


def sparse_source(case: SlotCase, device: torch.device) -> torch.Tensor:
    """Accepted path of a tree: slot i of each window takes some later row, the rest is skipped."""
    source, start = [], 0
    for window, count in zip(case.windows, case.counts, strict=True):
        rows = [start + min(2 * i, window - 1) for i in range(count)]
        source += rows + [-1] * (window - count)
        start += window
    return torch.tensor([*source, *[2**30] * PADDING_ROWS], dtype=torch.int32, device=device)


@pytest.mark.parametrize("case", SLOT_CASES[::3], ids=str)
def test_source_index(case: SlotCase, device: torch.device) -> None:
    """The accepted path lands contiguous, whatever rows of the window it is made of."""
    inputs = slot_inputs(case, device)
    source = sparse_source(case, device)
    wanted = expect(case, inputs, source_index=source)
    commit(case, inputs, commit_counts=None, source_index=source)
    assert_equal(inputs, wanted)


def test_each_layer_has_its_own_cache_and_source(device: torch.device) -> None:
    """One slot mapping serves all layers, but no layer's tokens or cache stand for another's."""
    inputs = slot_inputs(SLOT, device)
    commit(SLOT, inputs)
    for layer in range(SLOT.layers):
        block, offset = divmod(int(inputs.slots[0]), SLOT.block_size)
        assert torch.equal(inputs.key_caches[layer][block, offset], inputs.keys[layer][0])
        assert torch.equal(inputs.value_caches[layer][block, offset], inputs.values[layer][0])


def test_nothing_accepted_writes_nothing(device: torch.device) -> None:
    inputs = slot_inputs(SLOT, device)
    before = inputs.snapshots()
    commit(SLOT, inputs, commit_counts=torch.zeros_like(inputs.commit_counts))
    assert_equal(inputs, before)
    inputs.slots.fill_(-1)
    commit(SLOT, inputs)
    assert_equal(inputs, before)
    inputs.query_start_loc.fill_(0)
    commit(SLOT, inputs, commit_counts=torch.zeros_like(inputs.commit_counts))
    assert_equal(inputs, before)


def test_float8_tensors(device: torch.device) -> None:
    """Caches that arrive as float8 tensors are the same bytes."""
    case = replace(SLOT, kv_cache_dtype="fp8", scales="scalar", layout="hnd")
    inputs = slot_inputs(case, device)
    wanted = expect(case, inputs, commit_counts=inputs.commit_counts)
    inputs.caches = [cache.view(torch.float8_e4m3fn) for cache in inputs.caches]
    commit(case, inputs)
    assert_equal(inputs, wanted)


SPECIAL = [0.0, -0.0, 1e-30, -1e-30, 2**-9, 2**-10, -(2**-17), 447.9, 448.1, -1e6, 57344.0, 65504.0]
SPECIAL += [float("inf"), float("-inf"), 2**-6 * (1 - 2**-11), 0.1, -0.3, 1.0625, 1.1875, 17.0]
SPECIAL += [2**-14 * 0.999]


@pytest.mark.parametrize("kv_cache_dtype", FP8)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("scale", [1.0, 0.7, 3.0, 1e-25, 1e25])
def test_fp8_of_every_magnitude(
    kv_cache_dtype: str, dtype: torch.dtype, scale: float, device: torch.device
) -> None:
    """Saturation, subnormals, ties, zeros and infinities, and numbers over all binades of the format."""
    case = replace(SLOT, windows=(40,), counts=(40,), dtype=dtype, kv_cache_dtype=kv_cache_dtype, layers=1)
    inputs = slot_inputs(case, device)
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(43 * 2 * 64, generator=generator) * 2.0 ** torch.randint(
        -20, 18, (43 * 2 * 64,), generator=generator
    )
    values[: len(SPECIAL)] = torch.tensor(SPECIAL)
    if dtype != FP16 and not 2.0**-60 <= scale <= 2.0**60:
        values *= scale  # without that all quotients are zero, or too large; float16 has no such numbers
    inputs.keys[0] = values.view(43, 2, 64).to(dtype).to(device)
    inputs.k_scales = torch.full((1,), scale, device=device)
    inputs.v_scales = torch.full((1,), scale, device=device)
    inputs.slots[:] = torch.arange(43, device=device)
    wanted = expect(case, inputs, commit_counts=inputs.commit_counts)
    commit(case, inputs)
    assert_equal(inputs, wanted)


def stock_isas(case: SlotCase) -> list[str]:
    """The layouts of vLLM's CPU writer that this shape and machine have."""
    fp8 = case.kv_cache_dtype != "auto"
    if fp8 and not torch.cpu._is_avx512_supported():
        return []
    return ["vec"] if fp8 or case.size % 32 == 0 else ["vec16"]


STOCK_CASES = [
    *[
        replace(SLOT, dtype=dtype, layout="columns", block_size=block_size, size=size)
        for dtype in (BF16, FP16, FP32)
        for block_size, size in ((32, 64), (64, 128), (128, 256), (32, 80))
    ],
    *[
        replace(SLOT, dtype=dtype, layout="columns", block_size=32, kv_cache_dtype=name, scales=scales)
        for dtype in (BF16, FP16, FP32)
        for name in FP8
        for scales in ("none", "scalar")
    ],
    replace(SLOT, layout="columns", block_size=16, size=80, heads=16),
    replace(SLOT, layout="columns", block_size=32, heads=32, size=32),
    replace(SLOT, layout="columns", block_size=32, heads=1, size=32),
]


@pytest.mark.parametrize("case", STOCK_CASES, ids=str)
@pytest.mark.parametrize("spread", [1.0, 300.0])
def test_equals_the_stock_cpu_writer(case: SlotCase, spread: float, stock_cpu: Any) -> None:
    """All bytes of the caches as vLLM's cpu_attn_reshape_and_cache leaves them for the same tokens."""
    isas = stock_isas(case)
    if not isas:
        pytest.skip("vLLM has no fp8 caches on this machine's instruction set")
    inputs = slot_inputs(case, torch.device("cpu"))
    for tensors in (inputs.keys, inputs.values):
        for tensor in tensors:
            tensor.mul_(torch.logspace(-4, 0, tensor.shape[0], base=spread).view(-1, 1, 1).to(tensor.dtype))
    before = inputs.snapshots()
    accepted = inputs.slots.clone()
    keep = torch.zeros(len(accepted), dtype=torch.bool)
    starts = inputs.query_start_loc.tolist()
    for start, count in zip(starts[:-1], case.counts, strict=True):
        keep[start : start + count] = True
    accepted[~keep] = -1
    for layer, cache in enumerate(inputs.caches):
        halves = cache.view(case.blocks, case.heads, 2 * case.block_size, case.size).chunk(2, dim=2)
        stock_cpu.cpu_attn_reshape_and_cache(
            inputs.keys[layer],
            inputs.values[layer],
            *halves,
            accepted,
            isas[0],
            k_scale=1.0 if inputs.k_scales is None else float(inputs.k_scales[layer]),
            v_scale=1.0 if inputs.v_scales is None else float(inputs.v_scales[layer]),
            kv_cache_dtype=case.kv_cache_dtype,
        )
    wanted = inputs.snapshots()
    for buffer, old in zip(inputs.buffers, before, strict=True):
        buffer.raw.copy_(old)
    commit(case, inputs)
    assert_equal(inputs, wanted)
    assert any(not torch.equal(new, old) for new, old in zip(wanted, before, strict=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "columns"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("kv_cache_dtype", ["auto", *FP8])
@pytest.mark.parametrize("scales", ["none", "scalar"])
def test_equals_the_stock_cuda_writer(
    layout: str, dtype: torch.dtype, kv_cache_dtype: str, scales: str
) -> None:
    """All bytes of the caches as vLLM's reshape_and_cache_flash leaves them for the same tokens."""
    stock = pytest.importorskip("vllm._custom_ops")
    case = replace(SLOT, layout=layout, dtype=dtype, kv_cache_dtype=kv_cache_dtype, scales=scales)
    inputs = slot_inputs(case, torch.device("cuda"))
    before = inputs.snapshots()
    keep = torch.zeros(len(inputs.slots), dtype=torch.bool)
    for start, count in zip(inputs.query_start_loc.tolist()[:-1], case.counts, strict=True):
        keep[start : start + count] = True
    accepted = torch.where(keep.cuda(), inputs.slots, -1)
    one = torch.ones(1, device="cuda")
    for layer in range(case.layers):
        # The stock writer takes a token's heads as adjacent, whatever the strides of its sources say.
        stock.reshape_and_cache_flash(
            inputs.keys[layer].contiguous(),
            inputs.values[layer].contiguous(),
            inputs.key_caches[layer],
            inputs.value_caches[layer],
            accepted,
            kv_cache_dtype,
            one if inputs.k_scales is None else inputs.k_scales[layer : layer + 1],
            one if inputs.v_scales is None else inputs.v_scales[layer : layer + 1],
        )
    wanted = inputs.snapshots()
    for buffer, old in zip(inputs.buffers, before, strict=True):
        buffer.raw.copy_(old)
    commit(case, inputs)
    assert_equal(inputs, wanted)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("slots", 0, 9 * 16, "slots: element 0 is 144, wanted below 144"),
        ("commit_counts", 1, 2, "commit_counts: element 1 is 2, but the window has 1"),
        ("query_start_loc", 4, 100, "query_start_loc: window 3 ends at row 100"),
        ("query_start_loc", 1, 7, "query_start_loc: decreases at 1"),
    ],
)
def test_values_out_of_range_are_errors_on_cpu(name: str, index: int, value: int, message: str) -> None:
    """And nothing is written before the error."""
    inputs = slot_inputs(SLOT, torch.device("cpu"))
    before = inputs.snapshots()
    getattr(inputs, name)[index] = value
    with pytest.raises(RuntimeError, match=message):
        commit(SLOT, inputs)
    assert_equal(inputs, before)


def test_source_row_out_of_range_is_an_error_on_cpu() -> None:
    inputs = slot_inputs(SLOT, torch.device("cpu"))
    source = sparse_source(SLOT, torch.device("cpu"))
    source[0] = len(inputs.slots)
    with pytest.raises(RuntimeError, match="source_index: element 0 is 12, but there are 12 rows"):
        commit(SLOT, inputs, commit_counts=None, source_index=source)
