"""Claim: a query in e4m3 stands for the numbers that stock attention gets, in the op and from a layer.

Coverage: queries in e4m3 beside fp8 caches, no scale, one a layer and one a KV head; CPU and CUDA. The cases
of quantized_cases.py compare with a float64 reference (test_verify_attention.py); here it is the query that
the numbers stand for, and what is no such query.
Tolerance: none on a CPU. On CUDA, where a quantized query may be multiplied by another kernel, that of the
output's rounding and of the matrix unit's sums of fp8 products.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor import ops, reference
from nwor.config import NworConfig
from nwor.engine.attention.layer_context import LayerContext, parameters_of
from nwor.modes import Mode
from nwor.windows.window import StagedLayer, Window, group_layers
from nwor.worker_state import WorkerState
from tests.ops.cases import (
    BF16,
    FP16,
    PATTERN,
    TOLERANCE,
    AttentionCase,
    attention_inputs,
    fp8_sum_rounding,
    replace,
)
from tests.ops.quantized_cases import QUANTIZED
from tests.ops.test_verify_attention import call, make_workspace, run
from tests.ops.test_wrong_input import Change, constant, dtype_of, elsewhere, strided

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("scales", [None, [0.5], [4.0, 0.25]], ids=["none", "scalar", "heads"])
@pytest.mark.parametrize("kv_cache_dtype", ["fp8", "fp8_e5m2"])
def test_the_same_query_quantized_or_not(
    device: torch.device, dtype: torch.dtype, scales: list[float] | None, kv_cache_dtype: str
) -> None:
    """Every number of e4m3, times a power of two, is one of float16 and bfloat16."""
    case = replace(QUANTIZED, dtype=dtype, kv_cache_dtype=kv_cache_dtype, query_scales="none", padding_rows=0)
    inputs = attention_inputs(case, device)
    scale = None if scales is None else torch.tensor(scales, device=device)
    run(case, inputs, q_scale=scale)
    assert inputs.lse is not None
    output, lse = inputs.output.view.clone(), inputs.lse.view.clone()
    factor = torch.ones(1, device=device) if scale is None else scale
    factor = factor.repeat_interleave(case.heads // len(factor))[:, None]
    plain = (inputs.arguments["query"].float() * factor).to(dtype)
    run(case, inputs, query=plain, q_scale=None)
    if device.type == "cpu":
        assert torch.equal(output, inputs.output.view)
        assert torch.equal(lse, inputs.lse.view)
    else:
        rounding, of_scores = torch.finfo(dtype).eps, fp8_sum_rounding(case) * float(lse.abs().max())
        torch.testing.assert_close(output, inputs.output.view, atol=2e-3 + of_scores, rtol=rounding)
        torch.testing.assert_close(
            lse, inputs.lse.view, atol=TOLERANCE[BF16] / 4, rtol=fp8_sum_rounding(case)
        )


def test_every_number_of_the_format(device: torch.device) -> None:
    """Subnormal ones and the largest: queries of one number each, which see nothing but their own key."""
    every = torch.arange(256, dtype=torch.uint8, device=device)
    every = every[(every & 0x7F) != 0x7F]  # but for NaN
    count = len(every)
    sizes = {"heads": 1, "kv_heads": 1, "padding_rows": 0}
    case = replace(QUANTIZED, windows=(1,) * count, contexts=(0,) * count, **sizes)
    inputs = attention_inputs(case, device)
    query, key = inputs.arguments["query"], inputs.arguments["key"]
    query.view(torch.uint8).zero_()
    query.view(torch.uint8)[:, 0, 5] = every
    key.fill_(2.0)
    run(case, inputs, k_scale=None, q_scale=None, scale=0.5)
    assert inputs.lse is not None
    # The only logit is the lse. CUDA's is a power of two in between.
    near = {"atol": 0.0, "rtol": 0.0} if device.type == "cpu" else {"atol": 1e-6, "rtol": 1e-5}
    torch.testing.assert_close(inputs.lse.view[0], every.view(E4M3).float(), **near)


def module(scales: torch.Tensor, *, quantizes: bool = True) -> Any:
    """Return as much of one of vLLM's attention layers as its parameters are read from."""
    impl = SimpleNamespace(scale=0.125, sliding_window=(-1, -1), logits_soft_cap=0, sinks=None)
    return SimpleNamespace(impl=impl, query_quant=object() if quantizes else None, _q_scale=scales)


def bound(
    case: AttentionCase, a: dict[str, Any], scales: torch.Tensor, workspace: torch.Tensor
) -> LayerContext:
    caches = a["key_cache"], a["value_cache"]
    kinds = case.kv_cache_dtype, a["k_scale"], a["v_scale"], case.dtype
    layer = StagedLayer("0", caches[0], *caches, *kinds, lambda *_: None)
    state = WorkerState(NworConfig(), Mode.STAGE)
    parameters = parameters_of(module(scales), max(case.windows))
    return LayerContext(Window(group_layers([(0, layer)])), state, layer, parameters, workspace)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("scales", [[], [0.37], [0.5, 2.0], [0.37, 1.3]], ids=["one", "1", "exact", "heads"])
def test_a_layers_queries_are_those_of_stock_attention(
    device: torch.device, dtype: torch.dtype, scales: list[float]
) -> None:
    case = replace(QUANTIZED, dtype=dtype, layout="combined", with_lse=False, padding_rows=0)
    inputs = attention_inputs(case, device)
    a = inputs.arguments
    # A scale without dimensions is what vLLM makes where nobody gave one.
    scale = torch.tensor(scales or 0.71, device=device)
    factor = scale.repeat_interleave(case.heads // scale.numel())[:, None]
    a["query"] = (a["query"].float() / factor).to(E4M3)
    workspace = make_workspace(inputs, max(case.windows))
    layer_context = bound(case, a, scale, workspace)
    output = torch.full_like(inputs.output.view, 7.0)
    rows = a["query"], a["key"], a["value"]
    layer_context.attend(*rows, a["block_table"], a["query_start_loc"], a["seq_lens"], output)

    want, _ = reference.verify_attention(**{**a, "scale": 0.125, "q_scale": scale})
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(output.double(), want, atol=tolerance, rtol=tolerance)
    if scale.numel() > 1:
        assert layer_context.parameters.query_scales is not None
    else:
        assert layer_context.parameters.query_scales is None
        assert layer_context.parameters.scale == 0.125 * float(scale)
    run(case, inputs, scale=layer_context.parameters.scale, q_scale=layer_context.parameters.query_scales)
    assert torch.equal(output, inputs.output.view)
    # It would show if the numbers were taken as they come.
    run(case, inputs, scale=0.125, q_scale=None)
    assert not torch.equal(output, inputs.output.view)


def test_a_layer_that_does_not_quantize_its_queries_has_no_scale_for_them() -> None:
    parameters = parameters_of(module(torch.tensor(0.37), quantizes=False), 5)
    assert (parameters.scale, parameters.query_scales) == (0.125, None)


SOURCES = "torch.float32 or torch.float16 or torch.bfloat16"
# What is changed, how, the argument that the error names, its message.
WRONG: list[tuple[str, Change, str, str]] = [
    ("query", dtype_of(torch.float8_e5m2), "query", f"float8_e5m2, wanted {SOURCES} or torch.float8_e4m3fn"),
    ("query", lambda t: t.view(torch.uint8), "query", "dtype is torch.uint8"),
    ("query", lambda t: t[:, :7], "query", r"shape is \[16, 7, 64\], wanted heads in a multiple of key's 2"),
    ("query", dtype_of(FP16), "key", "dtype is torch.bfloat16, wanted torch.float16"),
    ("query", dtype_of(BF16), "q_scale", "is given, wanted None for a query of torch.bfloat16"),
    ("kv_cache_dtype", constant("auto"), "query", "wanted that of key, as kv_cache_dtype is 'auto'"),
    ("kv_cache_dtype", constant("int8"), "kv_cache_dtype", "is 'int8', wanted one of auto, fp8"),
    ("key", dtype_of(E4M3), "key", f"dtype is torch.float8_e4m3fn, wanted {SOURCES}"),
    ("key", dtype_of(FP16), "value", "dtype is torch.bfloat16, wanted torch.float16"),
    ("value", dtype_of(E4M3), "value", "dtype is torch.float8_e4m3fn, wanted torch.bfloat16"),
    ("output", dtype_of(torch.float32), "output", "dtype is torch.float32, wanted torch.bfloat16"),
    ("output", dtype_of(E4M3), "output", "dtype is torch.float8_e4m3fn, wanted torch.bfloat16"),
    ("sinks", constant(torch.ones(8, dtype=FP16)), "sinks", "wanted torch.float32 or torch.bfloat16"),
    ("sinks", constant(torch.ones(8).to(E4M3)), "sinks", "wanted torch.float32 or torch.bfloat16"),
    ("q_scale", constant(2.0), "q_scale", "is float, wanted a tensor"),
    ("q_scale", constant(torch.ones(3)), "q_scale", r"shape is \[3\], wanted \[\] or \[1\] or \[2\]"),
    ("q_scale", constant(torch.ones(8)), "q_scale", r"shape is \[8\]"),
    ("q_scale", dtype_of(torch.float64), "q_scale", "dtype is torch.float64, wanted torch.float32"),
    ("q_scale", strided, "q_scale", "wanted a contiguous tensor"),
    ("q_scale", elsewhere, "q_scale", "device is meta"),
]


@pytest.mark.parametrize(
    ("name", "change", "named", "message"), WRONG, ids=lambda x: x if isinstance(x, str) else ""
)
def test_what_is_wrong_is_said_by_name(name: str, change: Change, named: str, message: str) -> None:
    inputs = attention_inputs(QUANTIZED, torch.device("cpu"))
    arguments = call(QUANTIZED, inputs)
    ops.verify_attention(**arguments)  # the valid call passes, and is remembered as such
    inputs.output.raw.fill_(PATTERN)
    arguments[name] = change(arguments[name])
    with pytest.raises((TypeError, ValueError), match=f"^{named}: .*{message}"):
        ops.verify_attention(**arguments)
    assert (inputs.output.raw == PATTERN).all()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("query", dtype_of(torch.float8_e5m2), "query: dtype is Float8_e5m2, wanted float32, float16 or"),
        ("query", dtype_of(FP16), "key: dtype is BFloat16, wanted Half"),
        ("query", dtype_of(BF16), "q_scale: is given, wanted none"),
        ("kv_cache_dtype", constant("auto"), "query: dtype is Float8_e4m3fn, wanted BFloat16 beside a cache"),
        ("key", dtype_of(E4M3), "key: dtype is Float8_e4m3fn, wanted float32"),
        ("value", dtype_of(E4M3), "value: dtype is Float8_e4m3fn, wanted BFloat16"),
        ("output", dtype_of(E4M3), "output: dtype is Float8_e4m3fn, wanted BFloat16"),
        ("q_scale", constant(torch.ones(3)), "q_scale: has 3 elements, wanted 1 or 2"),
        ("q_scale", dtype_of(torch.float64), "q_scale: dtype is Double, wanted Float"),
    ],
)
def test_the_op_itself_checks_too(name: str, change: Change, message: str) -> None:
    inputs = attention_inputs(QUANTIZED, torch.device("cpu"))
    arguments = call(QUANTIZED, inputs)
    arguments[name] = change(arguments[name])
    with pytest.raises(RuntimeError, match=message):
        ops.verify_attention(**arguments, validate=False)
    assert (inputs.output.raw == PATTERN).all()
