"""Cases of verify_attention whose queries are quantized to e4m3, as vLLM has them beside fp8 caches."""

from __future__ import annotations

from tests.ops.cases import BF16, ENDS, FP16, FP32, LAYOUTS, LONG, MIXED, PAIRS, AttentionCase, replace

QUANTIZED = replace(MIXED, kv_cache_dtype="fp8", query_scales="head")

QUANTIZED_CASES = [
    *[replace(QUANTIZED, query_scales=scales) for scales in ("none", "scalar", "head")],
    *[
        replace(QUANTIZED, dtype=dtype, kv_cache_dtype=name, per_head_scales=True, query_scales=scales)
        for dtype in (BF16, FP16, FP32)
        for name in ("fp8_e4m3", "fp8_e5m2")
        for scales in ("scalar", "head")
    ],
    *[replace(QUANTIZED, layout=layout, size=128) for layout in LAYOUTS[1:]],
    # Heads: MHA, GQA with odd groups, MQA; all sizes, and sizes that fill no vector.
    *[replace(QUANTIZED, heads=heads, kv_heads=kv_heads) for heads, kv_heads in ((4, 4), (21, 3), (12, 1))],
    replace(QUANTIZED, heads=32, kv_heads=1, size=128),
    *[replace(QUANTIZED, size=size, heads=16) for size in (96, 128, 256)],
    *[replace(QUANTIZED, size=size, dtype=FP32) for size in (8, 20, 33)],
    # Lengths: nothing but a token, empty windows between, no context, the longest window, many pieces.
    AttentionCase(windows=(1,), contexts=(0,), kv_cache_dtype="fp8", query_scales="scalar"),
    replace(QUANTIZED, windows=(0, 0, 2, 0), contexts=(0, 1, 16, 0)),
    replace(QUANTIZED, windows=(64, 1, 33), contexts=(100, 63, 65)),
    replace(QUANTIZED, windows=(4, 4, 4), contexts=(15, 16, 1000), block_size=32, padding_rows=9),
    replace(LONG, kv_cache_dtype="fp8", query_scales="head"),
    replace(LONG, kv_cache_dtype="fp8_e5m2", query_scales="head", kv_heads=1, size=128, sliding_window=700),
    *[replace(case, kv_cache_dtype="fp8", query_scales="scalar") for case in ENDS],
    replace(ENDS[1], kv_cache_dtype="fp8", query_scales="head", sliding_window=50),
    replace(ENDS[1], kv_cache_dtype="fp8", query_scales="head", tree=True, block_size=24),
    replace(ENDS[3], kv_cache_dtype="fp8", query_scales="head", heads=8),
    # Many rows of large heads.
    replace(PAIRS, kv_cache_dtype="fp8", query_scales="head"),
    replace(PAIRS, kv_cache_dtype="fp8_e5m2", query_scales="scalar", block_size=24, sinks=FP32, softcap=20.0),
    replace(PAIRS, kv_cache_dtype="fp8", query_scales="head", windows=(5, 4, 0, 3) * 4, tree=True),
    replace(PAIRS, kv_cache_dtype="fp8", query_scales="head", sliding_window=70),
    # What is hidden from the softmax, and what is done to its logits.
    *[replace(QUANTIZED, sliding_window=tokens) for tokens in (1, 4, 64)],
    replace(QUANTIZED, softcap=5.0),
    replace(QUANTIZED, sinks=FP32),
    replace(QUANTIZED, sinks=BF16, heads=16, softcap=20.0, sliding_window=40),
    replace(QUANTIZED, sinks=FP16, dtype=FP16),
    replace(QUANTIZED, tree=True),
    replace(QUANTIZED, tree=True, dtype=FP32, sliding_window=4),
    replace(QUANTIZED, windows=(64, 20, 1, 63), contexts=(70, 500, 3, 0), tree=True, sinks=FP32),
    replace(QUANTIZED, with_lse=False, padding_rows=0),
]
