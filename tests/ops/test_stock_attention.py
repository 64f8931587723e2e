"""verify_attention over an unwritten window equals vLLM's CPU path, which writes the window and then attends.

Claim: the same outputs as `off` gives, within rounding of float32 sums, for plain and fp8 caches, sliding
windows, soft caps and sinks. fp8 is where they would part: the stock kernel sees a quantized window.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.ops.cases import BF16, FP16, FP32, AttentionCase, attention_inputs
from tests.ops.test_verify_attention import run

BASE = AttentionCase(
    windows=(5, 1, 3, 5), contexts=(33, 100, 0, 600), layout="columns", block_size=32, padding_rows=0
)
CASES = [
    *[replace(BASE, dtype=dtype) for dtype in (BF16, FP16, FP32)],
    replace(BASE, size=128, dtype=FP32, heads=32, kv_heads=8),
    replace(BASE, size=96, heads=4, kv_heads=4),
    *[
        replace(BASE, kv_cache_dtype=name, dtype=dtype)
        for name in ("fp8_e4m3", "fp8_e5m2")
        for dtype in (BF16, FP32)
    ],
    replace(BASE, sliding_window=40, dtype=FP32),
    replace(BASE, softcap=20.0, dtype=FP32),
    replace(BASE, sinks=FP32, dtype=FP32),
    replace(BASE, sinks=BF16),
]
# One unit in the last place of outputs about 1, and for float32 a few of the sums.
ROUNDING = {FP32: 3e-6, FP16: 2e-3, BF16: 8e-3}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_write_then_attend(case: AttentionCase, stock_cpu: Any) -> None:
    fp8 = case.kv_cache_dtype != "auto"
    if fp8 and not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM has no fp8 caches on this machine's instruction set")
    inputs = attention_inputs(case, torch.device("cpu"))
    a = inputs.arguments
    run(case, inputs)
    got = inputs.output.view.clone()

    # The cache as vLLM lays it out, without NaN: its kernel computes with stale slots too, and masks later.
    blocks, block_size, heads, size = a["key_cache"].shape
    room = torch.zeros(blocks + 8, heads, 2 * block_size, size, dtype=a["key_cache"].dtype)
    room[:blocks] = inputs.caches[0].view.view(blocks, heads, 2 * block_size, size)
    if room.is_floating_point():
        room.nan_to_num_(0.0)
    else:
        nan = 0x7F if case.kv_cache_dtype == "fp8_e4m3" else 0x7D
        room[(room & 0x7F) >= nan] = 0
    key_cache, value_cache = room.chunk(2, dim=2)
    table = a["block_table"].clone()
    fresh, slots = blocks, []
    for i, (window, context) in enumerate(zip(case.windows, case.contexts, strict=True)):
        for t in range(context, context + window):
            if not 0 <= table[i, t // block_size] < fresh:
                table[i, t // block_size] = fresh
                fresh += 1
            slots.append(int(table[i, t // block_size]) * block_size + t % block_size)
    table[table > fresh] = 0
    k_scale, v_scale = (1.0 if s is None else float(s) for s in (a["k_scale"], a["v_scale"]))
    scales = {"k_scale": k_scale, "v_scale": v_scale, "kv_cache_dtype": case.kv_cache_dtype}
    stock_cpu.cpu_attn_reshape_and_cache(
        a["key"], a["value"], key_cache, value_cache, torch.tensor(slots), "vec", **scales
    )
    metadata = stock_cpu.cpu_attn_get_scheduler_metadata(
        len(case.windows),
        case.heads,
        case.kv_heads,
        case.size,
        a["seq_lens"],
        case.dtype,
        a["query_start_loc"],
        True,
        case.sliding_window,
        "vec",
        True,
        kv_cache_dtype=case.kv_cache_dtype,
    )
    want = torch.empty_like(got)
    stock_cpu.cpu_attention_with_kv_cache(
        query=a["query"],
        key_cache=key_cache,
        value_cache=value_cache,
        output=want,
        query_start_loc=a["query_start_loc"],
        seq_lens=a["seq_lens"],
        scale=a["scale"],
        causal=True,
        alibi_slopes=None,
        sliding_window=case.sliding_window,
        block_table=table,
        softcap=case.softcap,
        scheduler_metadata=metadata,
        s_aux=a["sinks"],
        **scales,
    )
    tolerance = ROUNDING[case.dtype]
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


def test_the_engine_may_skip_the_checks() -> None:
    """validate=False changes nothing but the checks."""
    inputs = attention_inputs(BASE, torch.device("cpu"))
    run(BASE, inputs)
    first = inputs.output.raw.clone()
    inputs.output.raw[512:-512] = 0
    run(BASE, inputs, validate=False)
    assert torch.equal(inputs.output.raw, first)
