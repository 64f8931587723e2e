"""verify_attention equals a float64 reference over every layout, format and kind of mask, and touches nothing
else.

Caches hold NaN wherever there is no context, the window's own slots included, so a result without NaN shows
that neither stale slots nor other requests' were read. Errors are absolute, on outputs of unit scale.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from nwor import ops, reference
from tests.ops.cases import (
    ATTENTION_CASES,
    BF16,
    FLOAT_SUM_ROUNDING,
    FP8,
    FP32,
    LONG,
    MIXED,
    PAIRS,
    PATTERN,
    TOLERANCE,
    AttentionCase,
    AttentionInputs,
    attention_inputs,
    fp8_sum_rounding,
)
from tests.ops.quantized_cases import QUANTIZED, QUANTIZED_CASES


def make_workspace(inputs: AttentionInputs, max_query_len: int) -> torch.Tensor:
    query, key = inputs.arguments["query"], inputs.arguments["key"]
    size = ops.verify_attention_workspace_size(
        query.device, query.shape[1], key.shape[1], query.shape[2], max_query_len
    )
    return torch.zeros(size, dtype=torch.uint8, device=query.device)


def run(case: AttentionCase, inputs: AttentionInputs, **changes: Any) -> None:
    ops.verify_attention(**call(case, inputs, **changes))


def call(case: AttentionCase, inputs: AttentionInputs, **changes: Any) -> dict[str, Any]:
    """Return the arguments of the call, by name."""
    longest = max(max(case.windows), 1)
    return {
        **inputs.arguments,
        "output": inputs.output.view,
        "lse": None if inputs.lse is None else inputs.lse.view,
        "workspace": make_workspace(inputs, longest),
        "max_query_len": longest,
        **changes,
    }


def check_planned(case: AttentionCase, inputs: AttentionInputs) -> None:
    """Attend without a plan and with one: no bit of what is written may differ. A CPU plans nothing."""
    arguments = call(case, inputs)
    query, key = arguments["query"], arguments["key"]
    plan = ops.make_verify_plan(query.device)
    if plan is None:
        return
    ops.plan_verify_attention(
        arguments["query_start_loc"],
        arguments["seq_lens"],
        plan,
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_size=query.shape[2],
        max_query_len=arguments["max_query_len"],
        source_dtype=key.dtype,
        kv_cache_dtype=arguments.get("kv_cache_dtype", "auto"),
        sliding_window=arguments.get("sliding_window", -1),
        quantized_query=query.dtype is torch.float8_e4m3fn,
    )
    assert plan.any()
    rows = sum(case.windows)
    written = [arguments["output"][:rows]]
    if inputs.lse is not None:
        written.append(arguments["lse"][:, :rows])
    results = []
    for given in (None, plan):
        for part in written:
            part.fill_(float("nan"))
        ops.verify_attention(**arguments, plan=given)
        results.append([part.clone().contiguous().view(torch.uint8) for part in written])
    for alone, planned in zip(*results, strict=True):
        assert torch.equal(alone, planned)


def check(case: AttentionCase, inputs: AttentionInputs) -> None:
    """Compare output and lse with the reference, and padding rows and margins with the pattern."""
    want, want_lse = reference.verify_attention(**inputs.arguments)
    rows = sum(case.windows)
    got = inputs.output.view[:rows].to(torch.float64)
    tolerance = TOLERANCE[case.dtype]
    rounding = fp8_sum_rounding(case) if got.is_cuda and case.query_scales is not None else FLOAT_SUM_ROUNDING
    scores = want_lse[:, :rows].abs().nan_to_num(posinf=0.0).T[..., None]  # a row's are as large as its lse
    allowed = tolerance + tolerance * want[:rows].abs() + rounding * scores
    assert ((got - want[:rows]).abs() <= allowed).all(), (got - want[:rows]).abs().max()
    assert (inputs.output.view[rows:].contiguous().view(torch.uint8) == PATTERN).all()
    assert inputs.output.margins_untouched()
    if inputs.lse is not None:
        got_lse = inputs.lse.view[:, :rows].to(torch.float64)
        relative = 1e-6
        if case.query_scales is not None and got_lse.is_cuda:  # whatever the source dtype
            tolerance, relative = TOLERANCE[BF16], fp8_sum_rounding(case)
        torch.testing.assert_close(got_lse, want_lse[:, :rows], atol=max(tolerance / 4, 5e-6), rtol=relative)
        assert (inputs.lse.view[:, rows:].contiguous().view(torch.uint8) == PATTERN).all()
        assert inputs.lse.margins_untouched()
    check_planned(case, inputs)


@pytest.mark.parametrize("case", [*ATTENTION_CASES, *QUANTIZED_CASES], ids=str)
def test_equals_reference(case: AttentionCase, device: torch.device) -> None:
    if device.type == "cuda" and not case.runs_on_cuda:
        pytest.skip("a layout, dtype or head size that only the CPU serves")
    inputs = attention_inputs(case, device)
    before = [buffer.raw.clone() for buffer in inputs.caches]
    run(case, inputs)
    check(case, inputs)
    for buffer, old in zip(inputs.caches, before, strict=True):
        assert torch.equal(buffer.raw, old), "the op wrote to a cache"


@pytest.mark.parametrize(
    "case",
    [
        LONG,
        replace(LONG, size=128, kv_heads=1),
        replace(LONG, size=256),
        replace(PAIRS, contexts=(300, 1500) * 8),
        replace(PAIRS, contexts=(300, 1500) * 8, kv_cache_dtype="fp8", query_scales="head"),
        replace(QUANTIZED, windows=(5, 2), contexts=(3000, 1)),
    ],
    ids=str,
)
def test_scores_that_rise_along_the_context(case: AttentionCase, device: torch.device) -> None:
    """Each tile's scores exceed what came before, so that sums are shrunk time and again."""
    inputs = attention_inputs(case, device)
    key_cache, table = inputs.arguments["key_cache"], inputs.arguments["block_table"]
    cache = key_cache if case.kv_cache_dtype == "auto" else key_cache.view(FP8[case.kv_cache_dtype])
    for request, context in enumerate(case.contexts):
        for page in range(context // case.block_size):
            block = int(table[request, page])
            grown = cache[block].float() * (1 + page * case.block_size / 64)
            cache[block] = grown.clamp(-240, 240).to(cache.dtype)
    run(case, inputs)
    check(case, inputs)


def test_window_slots_are_never_read(device: torch.device) -> None:
    """Whatever lies in the slots that the window's tokens will go to, the result is the same."""
    inputs = attention_inputs(MIXED, device)
    run(MIXED, inputs)
    first = inputs.output.view.clone()
    key_cache, table = inputs.arguments["key_cache"], inputs.arguments["block_table"]
    for request, (window, context) in enumerate(zip(MIXED.windows, MIXED.contexts, strict=True)):
        for t in range(context, min(context + window, -(-context // MIXED.block_size) * MIXED.block_size)):
            key_cache[int(table[request, t // MIXED.block_size]), t % MIXED.block_size] = 1e4
    run(MIXED, inputs)
    assert torch.equal(inputs.output.view[: sum(MIXED.windows)], first[: sum(MIXED.windows)])


@pytest.mark.parametrize("case", [MIXED, LONG, QUANTIZED], ids=str)
def test_same_bits_every_time(case: AttentionCase, device: torch.device) -> None:
    """Deterministic for a batch shape, with a workspace full of another call's leftovers too."""
    inputs = attention_inputs(case, device)
    workspace = make_workspace(inputs, 64)
    results = []
    for _ in range(3):
        inputs.output.raw.fill_(PATTERN)
        run(case, inputs, workspace=workspace)
        results.append(inputs.output.raw.clone())
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("case", [MIXED, QUANTIZED], ids=str)
def test_nan_in_the_window_reaches_its_rows_only(case: AttentionCase, device: torch.device) -> None:
    inputs = attention_inputs(case, device)
    query = inputs.arguments["query"]
    query[2] = float("nan")
    run(case, inputs)
    rows = sum(case.windows)
    nan_rows = inputs.output.view[:rows].isnan().all(dim=2).all(dim=1).nonzero().flatten().tolist()
    assert nan_rows == [2]


def test_empty_ancestor_mask_sees_nothing(device: torch.device) -> None:
    case = AttentionCase(windows=(2,), contexts=(20,), tree=True)
    inputs = attention_inputs(case, device)
    inputs.arguments["ancestor_mask"][1] = 0
    run(case, inputs)
    check(case, inputs)
    assert (inputs.output.view[1] == 0).all()
    assert inputs.lse is not None
    assert (inputs.lse.view[:, 1] == -torch.inf).all()


def test_sink_of_no_weight_beside_nothing_seen(device: torch.device) -> None:
    """A sink of -inf is none, for a row that sees nothing as well."""
    case = AttentionCase(windows=(2,), contexts=(20,), tree=True, sinks=FP32)
    inputs = attention_inputs(case, device)
    inputs.arguments["ancestor_mask"][1] = 0
    inputs.arguments["sinks"].fill_(-torch.inf)
    run(case, inputs)
    check(case, inputs)
    assert (inputs.output.view[1] == 0).all()


def test_context_of_131072_tokens(device: torch.device) -> None:
    """Scores are spread so far that a few tokens, anywhere in the context, make up most of a row.

    With scores as of random numbers all values would nearly cancel, and any output near zero would pass.
    """
    case = AttentionCase(
        windows=(3,),
        contexts=(131072,),
        heads=2,
        kv_heads=1,
        block_size=256,
        dtype=FP32 if device.type == "cpu" else BF16,
    )
    inputs = attention_inputs(case, device)
    inputs.arguments["scale"] *= 4
    run(case, inputs)
    check(case, inputs)
    assert inputs.output.view[:3].abs().mean() > 0.1


def test_chain_mask_equals_no_mask(device: torch.device) -> None:
    inputs = attention_inputs(MIXED, device)
    run(MIXED, inputs)
    first = inputs.output.view.clone()
    chain = [2 ** (i + 1) - 1 for window in MIXED.windows for i in range(window)]
    mask = torch.tensor([*chain, *[0] * MIXED.padding_rows], device=device)
    run(MIXED, inputs, ancestor_mask=mask)
    assert torch.equal(inputs.output.view, first)


def test_larger_max_query_len_changes_nothing(device: torch.device) -> None:
    inputs = attention_inputs(MIXED, device)
    run(MIXED, inputs, max_query_len=64, workspace=make_workspace(inputs, 64))
    check(MIXED, inputs)


@pytest.mark.parametrize("query_scales", [None, "head"])
def test_row_strides_of_every_kind(query_scales: str | None, device: torch.device) -> None:
    """Head-major query and output, lse with gaps; caches as float8 tensors instead of bytes."""
    case = AttentionCase(
        windows=(3, 2),
        contexts=(20, 40),
        kv_cache_dtype="fp8",
        query_scales=query_scales,
        padding_rows=0,
        with_lse=False,
    )
    inputs = attention_inputs(case, device)
    arguments = inputs.arguments
    for name in ("query", "key", "value"):
        arguments[name] = arguments[name].transpose(0, 1).contiguous().transpose(0, 1)
    for name in ("key_cache", "value_cache"):
        arguments[name] = arguments[name].view(torch.float8_e4m3fn)
    output = torch.empty(8, 5, 64, dtype=case.dtype, device=device).transpose(0, 1)
    lse = torch.empty(8, 9, device=device)[:, 2:7]
    run(case, inputs, output=output, lse=lse)
    want, want_lse = reference.verify_attention(**arguments)
    torch.testing.assert_close(output.double(), want, atol=TOLERANCE[case.dtype], rtol=TOLERANCE[case.dtype])
    torch.testing.assert_close(lse.double(), want_lse, atol=5e-3, rtol=1e-3)


@pytest.mark.parametrize("kernels", ["baseline", "avx2", "avx512"])
def test_every_instruction_set(kernels: str) -> None:
    """The kernels that this machine would not choose give the right results too (where it can run them)."""
    script = (
        "import sys, torch\n"
        "from nwor import ops\n"
        "from tests.ops import cases, quantized_cases, test_verify_attention as t\n"
        "if ops.LIBRARIES.cpu_kernels != sys.argv[1]: sys.exit(77)\n"
        "for case in cases.ATTENTION_CASES[::3] + quantized_cases.QUANTIZED_CASES[::3]:\n"
        "    inputs = cases.attention_inputs(case, torch.device('cpu'))\n"
        "    t.run(case, inputs)\n"
        "    t.check(case, inputs)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, kernels],
        env={**os.environ, "NWOR_CPU_KERNELS": kernels, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if done.returncode == 77:
        pytest.skip(f"this machine has no {kernels}")
    assert done.returncode == 0, done.stderr


def test_fewer_threads_and_small_workspace() -> None:
    """A workspace for one thread serves, and any number of threads gives the same within rounding."""
    case = AttentionCase(windows=(4,), contexts=(2000,), dtype=FP32, kv_heads=1)
    inputs = attention_inputs(case, torch.device("cpu"))
    threads = torch.get_num_threads()
    small = torch.zeros(ops.LIBRARIES.cpu_workspace_size(1, case.size), dtype=torch.uint8)
    try:
        torch.set_num_threads(3)
        for workspace in (small, make_workspace(inputs, 4)):
            run(case, inputs, workspace=workspace)
            check(case, inputs)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("query_start_loc", 1, 40, "query_start_loc: window 0 has length 40"),
        ("seq_lens", 0, 2, "seq_lens: is 2 for request 0"),
        ("seq_lens", 1, 10**6, "block_table: has"),
        ("block_table", (0, 1), -1, r"block_table: entry \[0, 1\] is -1"),
        ("block_table", (0, 1), 10**6, r"block_table: entry \[0, 1\] is 1000000"),
    ],
)
def test_lengths_out_of_range_are_errors_on_cpu(name: str, index: Any, value: int, message: str) -> None:
    inputs = attention_inputs(MIXED, torch.device("cpu"))
    inputs.arguments[name][index] = value
    with pytest.raises(RuntimeError, match=message):
        run(MIXED, inputs)
    assert (inputs.output.raw == PATTERN).all()
