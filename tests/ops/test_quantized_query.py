"""Claim: a layer whose queries vLLM quantized attends with the numbers that stock attention gets.

Coverage: queries in e4m3 beside an fp8 cache, one query scale a layer and one a head; CPU and CUDA.
Tolerance: none against a call with the query that the numbers in e4m3 stand for, in the layer's dtype.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor.config import NworConfig
from nwor.engine.binding import LayerBinding, parameters_of
from nwor.modes import Mode
from nwor.state import RankState
from nwor.window import StagedLayer, Window, group_layers
from tests.ops.cases import BF16, FP16, MIXED, AttentionCase, attention_inputs
from tests.ops.test_verify_attention import make_workspace, run

CASE = replace(MIXED, kv_cache_dtype="fp8", layout="combined", with_lse=False, padding_rows=0)


def module(scales: torch.Tensor, *, quantizes: bool = True) -> Any:
    """Return as much of one of vLLM's attention layers as its parameters are read from."""
    impl = SimpleNamespace(scale=0.125, sliding_window=(-1, -1), logits_soft_cap=0, sinks=None)
    return SimpleNamespace(impl=impl, query_quant=object() if quantizes else None, _q_scale=scales)


def bound(
    case: AttentionCase, a: dict[str, Any], scales: torch.Tensor, workspace: torch.Tensor
) -> LayerBinding:
    caches = a["key_cache"], a["value_cache"]
    kinds = case.kv_cache_dtype, a["k_scale"], a["v_scale"], case.dtype
    layer = StagedLayer("0", caches[0], *caches, *kinds, lambda *_: None)
    state = RankState(NworConfig(), Mode.STAGE)
    parameters = parameters_of(module(scales), max(case.windows))
    return LayerBinding(Window(group_layers([(0, layer)])), state, layer, parameters, workspace)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("scales", [[], [0.37], [0.5, 2.0], [0.37, 1.3]], ids=["one", "1", "exact", "heads"])
def test_quantized_queries_are_those_of_stock_attention(
    device: torch.device, dtype: torch.dtype, scales: list[float]
) -> None:
    case = replace(CASE, dtype=dtype)
    inputs = attention_inputs(case, device)
    a = inputs.arguments
    # A scale without dimensions is what vLLM makes where nobody gave one.
    scale = torch.tensor(scales or 0.71, device=device)
    quantized = (a["query"].float() / scale.repeat_interleave(case.heads // scale.numel())[:, None]).to(
        torch.float8_e4m3fn
    )
    workspace = make_workspace(inputs, max(case.windows))
    binding = bound(case, a, scale, workspace)
    output = torch.full_like(inputs.output.view, 7.0)
    sides = a["key"], a["value"]
    binding.attend(quantized, *sides, a["block_table"], a["query_start_loc"], a["seq_lens"], output)

    factor = torch.ones(case.heads, device=device)
    if scale.numel() > 1:
        factor = scale.repeat_interleave(case.heads // scale.numel())
        assert binding.parameters.query_scales is not None
    else:
        assert binding.parameters.query_scales is None
        assert binding.parameters.scale == 0.125 * float(scale)
    query = (quantized.float() * factor[:, None]).to(dtype)
    run(case, inputs, query=query, scale=binding.parameters.scale)
    assert torch.equal(output, inputs.output.view)
    # It would show if the numbers were taken as they come.
    run(case, inputs, query=quantized.to(dtype), scale=0.125)
    assert not torch.equal(output, inputs.output.view)


def test_a_layer_that_does_not_quantize_its_queries_has_no_scale_for_them() -> None:
    parameters = parameters_of(module(torch.tensor(0.37), quantizes=False), 5)
    assert (parameters.scale, parameters.query_scales) == (0.125, None)
