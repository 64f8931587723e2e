"""Every argument of attention and its plan: what is wrong with it is said before anything runs, by name.

Each change of one argument of a valid call must raise TypeError or ValueError whose message begins with the
argument's name, and the outputs must be as before.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nwor import ops
from tests.ops.cases import MIXED, PATTERN, attention_inputs, replace
from tests.ops.test_verify_attention import make_workspace
from tests.ops.wrong_arguments import Change, alter, constant, dtype_of, elsewhere, expanded, strided, wider

ATTENTION: list[tuple[str, Change, str]] = [
    ("query", constant([1.0]), "is list, wanted a tensor"),
    ("query", lambda t: t[0], "wanted 3 dimensions"),
    ("query", dtype_of(torch.float64), "dtype is torch.float64"),
    ("query", dtype_of(torch.float8_e4m3fn), "wanted that of key, as kv_cache_dtype is 'auto'"),
    ("query", strided, "wanted 1 in the last dimension"),
    ("query", lambda t: t[:, :7], r"shape is \[16, 7, 64\], wanted heads in a multiple of key's 2"),
    ("query", lambda t: t[:, :0], r"shape is \[16, 0, 64\], wanted at least 1 head"),
    (
        "query",
        lambda t: t[..., :0],
        r"shape is \[16, 8, 0\], wanted at least 1 head|head size is 0, wanted one of",
    ),
    ("key", constant(None), "is NoneType, wanted a tensor"),
    ("key", lambda t: t[:3], r"shape is \[3, 2, 64\], wanted \[16, 2, 64\]"),
    ("key", dtype_of(torch.float16), "dtype is torch.float16, wanted torch.bfloat16"),
    ("key", elsewhere, "device is meta"),
    ("key", strided, "wanted 1 in the last dimension"),
    ("value", wider, r"wanted \[16, 2, 64\]"),
    ("value", dtype_of(torch.float32), "dtype is torch.float32"),
    ("value", strided, "wanted 1 in the last dimension"),
    ("output", lambda t: t[:, :4], r"wanted \[16, 8, 64\]"),
    ("output", dtype_of(torch.float32), "dtype is torch.float32"),
    ("output", strided, "wanted 1 in the last dimension"),
    ("output", expanded, r"strides are \[0, 64, 1\] for shape .*wanted a place of its own"),
    ("output", lambda t: t.as_strided(t.shape, (256, 32, 1)), "wanted a place of its own"),
    ("key_cache", lambda t: t[0], "wanted 4 dimensions"),
    ("key_cache", dtype_of(torch.float16), "dtype is torch.float16, wanted torch.bfloat16"),
    ("key_cache", lambda t: t[:, :, :1], "wanted"),
    ("key_cache", elsewhere, "device is meta"),
    ("value_cache", lambda t: t[:-1], "wanted"),
    ("value_cache", lambda t: t.view(torch.uint8), "wanted"),
    ("block_table", dtype_of(torch.int64), "dtype is torch.int64, wanted torch.int32"),
    ("block_table", lambda t: t[:2], "wanted at least 5 rows"),
    ("block_table", lambda t: t[0], "wanted 2 dimensions"),
    ("block_table", strided, "wanted 1 in the last dimension"),
    ("query_start_loc", dtype_of(torch.int64), "dtype is torch.int64, wanted torch.int32"),
    ("query_start_loc", lambda t: t[:0], "wanted at least 1"),
    ("query_start_loc", strided, "strides are"),
    ("seq_lens", dtype_of(torch.int64), "dtype is torch.int64"),
    ("seq_lens", lambda t: t[:4], "wanted at least 5"),
    ("workspace", lambda t: t[:100], r"shape is \[100\], wanted at least"),
    ("workspace", dtype_of(torch.int8), "dtype is torch.int8"),
    ("lse", dtype_of(torch.float64), "dtype is torch.float64"),
    ("lse", lambda t: t.t(), r"wanted \[8, 16\]"),
    ("scale", constant(float("nan")), "is nan, wanted a finite number"),
    ("scale", constant("1"), "wanted a number"),
    ("scale", constant(1e39), "wanted a finite number in float32"),
    ("scale", constant(10**400), "wanted a finite number in float32"),
    ("scale", constant(0.0), "is 0.0, wanted more than 0"),
    ("lse", strided, "wanted 1 in the last dimension"),
    ("lse", expanded, "wanted a place of its own"),
    ("plan", constant(torch.zeros(8)), "dtype is torch.float32, wanted torch.uint8"),
    ("plan", constant(torch.zeros(8, dtype=torch.uint8, device="meta")), "device is meta"),
    ("max_query_len", constant(0), "is 0, wanted 1 to 64"),
    ("max_query_len", constant(65), "is 65, wanted 1 to 64"),
    ("max_query_len", constant(2.0), "wanted an int"),
    ("kv_cache_dtype", constant("int8"), "is 'int8', wanted one of auto, fp8"),
    ("k_scale", constant(2.0), "wanted a tensor"),
    ("k_scale", constant(torch.ones(3)), r"shape is \[3\], wanted \[\] or \[1\] or \[2\]"),
    ("k_scale", constant(torch.ones(0)), r"shape is \[0\]"),
    ("v_scale", constant(torch.ones(2, dtype=torch.float64)), "dtype is torch.float64"),
    ("v_scale", constant(torch.ones(2, device="meta")), "device is meta"),
    ("q_scale", constant(torch.ones(1)), "is given, wanted None for a query of torch.bfloat16"),
    ("sliding_window", constant(0), "is 0, wanted -1 or at least 1"),
    ("sliding_window", constant(-2), "is -2"),
    ("sliding_window", constant(2**63), "is 9223372036854775808, wanted -1 to 9223372036854775807"),
    ("softcap", constant(-1.0), "is -1.0"),
    ("softcap", constant(1e39), "wanted a finite number in float32"),
    ("sinks", constant(torch.ones(7)), r"shape is \[7\], wanted \[8\]"),
    ("sinks", constant(torch.ones(8, dtype=torch.float16)), "dtype is torch.float16"),
    ("ancestor_mask", constant(torch.ones(16, dtype=torch.int32)), "dtype is torch.int32"),
    ("ancestor_mask", constant(torch.ones(15, dtype=torch.int64)), r"wanted \[16\]"),
]


@pytest.mark.parametrize(
    ("name", "change", "message"), ATTENTION, ids=lambda x: x if isinstance(x, str) else ""
)
def test_verify_attention(name: str, change: Change, message: str, device: torch.device) -> None:
    inputs = attention_inputs(MIXED, device)
    assert inputs.lse is not None
    arguments = {
        **inputs.arguments,
        "output": inputs.output.view,
        "lse": inputs.lse.view,
        "workspace": make_workspace(inputs, 5),
        "max_query_len": 5,
        "plan": None,
    }
    ops.verify_attention(**arguments)  # the valid call passes, and is remembered as such
    inputs.output.raw.fill_(PATTERN)
    alter(arguments, name, change, device)
    with pytest.raises((TypeError, ValueError), match=f"^{name}: .*({message})"):
        ops.verify_attention(**arguments)
    assert (inputs.output.raw == PATTERN).all()


def test_fp8_cache_of_the_wrong_dtype(device: torch.device) -> None:
    inputs = attention_inputs(replace(MIXED, kv_cache_dtype="fp8"), device)
    inputs.arguments["key_cache"] = inputs.arguments["key_cache"].view(torch.float8_e5m2)
    with pytest.raises(TypeError, match=r"key_cache: dtype is torch\.float8_e5m2, wanted torch\.uint8 or"):
        ops.verify_attention(
            **inputs.arguments,
            output=inputs.output.view,
            workspace=make_workspace(inputs, 5),
            max_query_len=5,
        )


PLAN: list[tuple[str, Change, str]] = [
    ("query_start_loc", constant([0, 5]), "is list, wanted a tensor"),
    ("query_start_loc", dtype_of(torch.int64), "dtype is torch.int64, wanted torch.int32"),
    ("query_start_loc", lambda t: t[:0], "wanted at least 1"),
    ("seq_lens", lambda t: t[:4], "wanted at least 5"),
    ("seq_lens", elsewhere, "device is meta"),
    ("plan", dtype_of(torch.int8), "dtype is torch.int8, wanted torch.uint8"),
    ("plan", lambda t: t.view(2, -1), "wanted 1 dimensions"),
    ("num_heads", constant(7), "is 7, wanted a multiple of num_kv_heads, 2"),
    ("num_heads", constant(0), "is 0, wanted at least 1"),
    ("num_kv_heads", constant(9), "is 9, wanted 1 to 8"),
    ("head_size", constant(0), "is 0"),
    ("max_query_len", constant(65), "is 65, wanted 1 to 64"),
    ("source_dtype", constant(torch.int8), "is torch.int8, wanted one of torch.float"),
    ("kv_cache_dtype", constant("int8"), "is 'int8', wanted one of auto, fp8"),
    ("sliding_window", constant(0), "is 0, wanted -1 or at least 1"),
    ("sliding_window", constant(-2), "is -2"),
    ("quantized_query", constant(1), "is 1 of type int, wanted a bool"),
    ("quantized_query", constant(True), "is True, wanted False, as kv_cache_dtype is 'auto'"),
]


@pytest.mark.parametrize(("name", "change", "message"), PLAN, ids=lambda x: x if isinstance(x, str) else "")
def test_plan_verify_attention(name: str, change: Change, message: str, device: torch.device) -> None:
    plan = ops.make_verify_plan(device)
    arguments: dict[str, Any] = {
        "query_start_loc": torch.tensor([0, 5, 5, 8, 10, 14], dtype=torch.int32, device=device),
        "seq_lens": torch.tensor([9, 0, 70, 30, 5], dtype=torch.int32, device=device),
        "plan": torch.zeros(4, dtype=torch.uint8) if plan is None else plan,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 64,
        "max_query_len": 5,
        "source_dtype": torch.bfloat16,
    }
    ops.plan_verify_attention(**arguments)
    alter(arguments, name, change, device)
    with pytest.raises((TypeError, ValueError), match=f"^{name}: .*{message}"):
        ops.plan_verify_attention(**arguments)


@pytest.mark.parametrize(
    ("position", "value", "name"),
    [
        (1, 0, "num_heads"),
        (2, 9, "num_kv_heads"),
        (3, 0, "head_size"),
        (4, 65, "max_query_len"),
    ],
)
def test_workspace_size(position: int, value: int, name: str, device: torch.device) -> None:
    arguments: list[Any] = [device, 8, 2, 64, 5]
    arguments[position] = value
    with pytest.raises(ValueError, match=f"^{name}: is {value}"):
        ops.verify_attention_workspace_size(*arguments)


def test_the_op_itself_checks_too(device: torch.device) -> None:
    """Without the wrapper's checks a wrong shape is still an error by name, and nothing runs."""
    inputs = attention_inputs(MIXED, device)
    arguments = {**inputs.arguments, "output": inputs.output.view, "workspace": make_workspace(inputs, 5)}
    arguments["value"] = arguments["value"][:, :1]
    with pytest.raises(
        RuntimeError,
        match=r"value(: shape is \[16, 1, 64\], wanted size 2 in dimension 1| must be \[16, 2, 64\])",
    ):
        ops.verify_attention(**arguments, max_query_len=5, validate=False)
    arguments = {
        **inputs.arguments,
        "output": inputs.output.view,
        "workspace": torch.zeros(8, dtype=torch.uint8, device=device),
    }
    with pytest.raises(RuntimeError, match=r"workspace:? has 8 bytes.* at least"):
        ops.verify_attention(**arguments, max_query_len=5, validate=False)
    assert (inputs.output.raw == PATTERN).all()


def test_blocks_of_no_tokens_where_the_op_alone_checks(device: torch.device) -> None:
    inputs = attention_inputs(MIXED, device)
    arguments = {**inputs.arguments, "output": inputs.output.view, "workspace": make_workspace(inputs, 5)}
    for name in ("key_cache", "value_cache"):
        arguments[name] = arguments[name][:, :0]
    with pytest.raises(RuntimeError, match="key_cache"):
        ops.verify_attention(**arguments, max_query_len=5, validate=False)
    assert (inputs.output.raw == PATTERN).all()


@pytest.mark.parametrize("name", ["query", "key", "value", "key_cache"])
def test_output_in_the_memory_of_what_is_read(name: str) -> None:
    """Addresses are looked at in each call, so that a call remembered as right is refused as well."""
    inputs = attention_inputs(replace(MIXED, heads=2, block_size=32), torch.device("cpu"))
    read = torch.zeros(17 * 2 * 64, dtype=MIXED.dtype)
    arguments = {**inputs.arguments, "workspace": make_workspace(inputs, 5), "max_query_len": 5}
    shape = arguments[name].shape
    rows = shape if name != "key_cache" else (1, 16, 2, 64)
    arguments[name] = read[: 16 * 2 * 64].view(rows)
    if name == "key_cache":
        for argument in ("seq_lens", "query_start_loc"):
            arguments[argument] = torch.zeros_like(arguments[argument])
        arguments["value_cache"] = torch.zeros_like(arguments[name])
    ops.verify_attention(**arguments, output=inputs.output.view)
    for first in (0, 1, 64, 100):  # the same place, or one that overlaps it
        output = read[first : first + 16 * 2 * 64].view(16, 2, 64)
        before = read.clone()
        with pytest.raises(RuntimeError, match=f"output: lies in the memory of {name}"):
            ops.verify_attention(**arguments, output=output)
        assert torch.equal(read, before)


def test_output_between_the_rows_of_what_is_read() -> None:
    """Slices of one tensor that have no element in common are no error."""
    inputs = attention_inputs(MIXED, torch.device("cpu"))
    whole = torch.cat([inputs.arguments["query"], torch.zeros(16, 8, 64, dtype=MIXED.dtype)], dim=1)
    arguments = {**inputs.arguments, "workspace": make_workspace(inputs, 5), "max_query_len": 5}
    arguments["query"] = whole[:, :8]
    ops.verify_attention(**arguments, output=inputs.output.view)
    ops.verify_attention(**arguments, output=whole[:, 8:])
    rows = sum(MIXED.windows)
    assert torch.equal(whole[:rows, 8:], inputs.output.view[:rows])
