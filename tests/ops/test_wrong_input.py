"""Every argument of every op: what is wrong with it is said before anything runs, by name.

Each change of one argument of a valid call must raise TypeError or ValueError whose message begins with the
argument's name, and the outputs must be as before.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nwor import ops
from tests.ops.cases import MIXED, PATTERN, SLOT, attention_inputs, replace, slot_inputs
from tests.ops.test_verify_attention import make_workspace

Change = Callable[[Any], Any]


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between the elements of the last dimension."""
    return torch.stack([t, t], dim=-1)[..., 0]


def elsewhere(t: torch.Tensor) -> torch.Tensor:
    return t.to("meta")


def wider(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t, t], dim=-1)


def dtype_of(dtype: torch.dtype) -> Change:
    return lambda t: t.to(dtype)


def constant(value: Any) -> Change:
    return lambda _: value


ATTENTION: list[tuple[str, Change, str]] = [
    ("query", constant([1.0]), "is list, wanted a tensor"),
    ("query", lambda t: t[0], "wanted 3 dimensions"),
    ("query", dtype_of(torch.float64), "dtype is torch.float64"),
    ("query", dtype_of(torch.float8_e4m3fn), "wanted that of key, as kv_cache_dtype is 'auto'"),
    ("query", strided, "wanted 1 in the last dimension"),
    ("query", lambda t: t[:, :7], r"shape is \[16, 7, 64\], wanted heads in a multiple of key's 2"),
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
    ("scale", constant(0.0), "is 0.0, wanted more than 0"),
    ("lse", strided, "wanted 1 in the last dimension"),
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
    ("softcap", constant(-1.0), "is -1.0"),
    ("sinks", constant(torch.ones(7)), r"shape is \[7\], wanted \[8\]"),
    ("sinks", constant(torch.ones(8, dtype=torch.float16)), "dtype is torch.float16"),
    ("ancestor_mask", constant(torch.ones(16, dtype=torch.int32)), "dtype is torch.int32"),
    ("ancestor_mask", constant(torch.ones(15, dtype=torch.int64)), r"wanted \[16\]"),
]


@pytest.mark.parametrize(
    ("name", "change", "message"), ATTENTION, ids=lambda x: x if isinstance(x, str) else ""
)
def test_verify_attention(name: str, change: Change, message: str) -> None:
    inputs = attention_inputs(MIXED, torch.device("cpu"))
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
    arguments[name] = change(arguments[name])
    with pytest.raises((TypeError, ValueError), match=f"^{name}: .*{message}"):
        ops.verify_attention(**arguments)
    assert (inputs.output.raw == PATTERN).all()


def test_fp8_cache_of_the_wrong_dtype() -> None:
    inputs = attention_inputs(replace(MIXED, kv_cache_dtype="fp8"), torch.device("cpu"))
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
    ("plan", lambda t: t.view(2, 2), "wanted 1 dimensions"),
    ("num_heads", constant(7), "is 7, wanted a multiple of num_kv_heads, 2"),
    ("num_heads", constant(0), "is 0, wanted at least 1"),
    ("num_kv_heads", constant(9), "is 9, wanted 1 to 8"),
    ("head_size", constant(0), "is 0"),
    ("max_query_len", constant(65), "is 65, wanted 1 to 64"),
    ("source_dtype", constant(torch.int8), "is torch.int8, wanted one of torch.float32"),
    ("kv_cache_dtype", constant("int8"), "is 'int8', wanted one of auto, fp8"),
    ("sliding_window", constant(0), "is 0, wanted -1 or at least 1"),
    ("sliding_window", constant(-2), "is -2"),
    ("quantized_query", constant(1), "is 1 of type int, wanted a bool"),
    ("quantized_query", constant(True), "is True, wanted False, as kv_cache_dtype is 'auto'"),
]


@pytest.mark.parametrize(("name", "change", "message"), PLAN, ids=lambda x: x if isinstance(x, str) else "")
def test_plan_verify_attention(name: str, change: Change, message: str) -> None:
    arguments: dict[str, Any] = {
        "query_start_loc": torch.tensor([0, 5, 5, 8, 10, 14], dtype=torch.int32),
        "seq_lens": torch.tensor([9, 0, 70, 30, 5], dtype=torch.int32),
        "plan": torch.full((4,), PATTERN, dtype=torch.uint8),
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 64,
        "max_query_len": 5,
        "source_dtype": torch.bfloat16,
    }
    ops.plan_verify_attention(**arguments)
    arguments[name] = change(arguments.get(name))
    with pytest.raises((TypeError, ValueError), match=f"^{name}: .*{message}"):
        ops.plan_verify_attention(**arguments)


@pytest.mark.parametrize(
    ("position", "value", "name"),
    [
        (1, 0, "max_batch"),
        (2, 0, "num_heads"),
        (3, 9, "num_kv_heads"),
        (4, 0, "head_size"),
        (5, 65, "max_query_len"),
    ],
)
def test_workspace_size(position: int, value: int, name: str) -> None:
    arguments: list[Any] = ["cpu", 4, 8, 2, 64, 5]
    arguments[position] = value
    with pytest.raises(ValueError, match=f"^{name}: is {value}"):
        ops.verify_attention_workspace_size(*arguments)


COMMON: list[tuple[str, Change, str]] = [
    ("layer_table", lambda t: t[0], "wanted 2 dimensions"),
    ("layer_table", dtype_of(torch.int32), "dtype is torch.int32"),
    ("layer_table", lambda t: t[:, :12].contiguous(), r"wanted \[3, 16\]"),
    ("layer_table", strided, "strides are"),
    ("caches", constant([]), "is empty"),
    ("caches", constant(torch.zeros(3)), "is Tensor, wanted a list"),
    ("caches", lambda c: c[:2], "has 2 tensors, wanted 3"),
    ("caches", lambda c: [*c[:2], c[2].to(torch.float32)], "dtype is torch.float32"),
    ("caches", lambda c: [*c[:2], elsewhere(c[2])], "device is meta"),
    ("slots", dtype_of(torch.int32), "dtype is torch.int32, wanted torch.int64"),
    ("slots", lambda t: t[None], "wanted 1 dimensions"),
    ("slots", strided, "strides are"),
    ("slots", elsewhere, "device is meta"),
    ("query_start_loc", dtype_of(torch.int64), "dtype is torch.int64"),
    ("num_kv_heads", constant(0), "is 0, wanted at least 1"),
    ("head_size", constant(-1), "is -1"),
    ("block_size", constant(16.0), "wanted an int"),
    ("num_blocks", constant(-1), "is -1"),
    ("commit_counts", dtype_of(torch.int64), "dtype is torch.int64, wanted torch.int32"),
    ("commit_counts", lambda t: t[:2], "wanted at least 4"),
]
COMMIT: list[tuple[str, Change, str]] = [
    *COMMON,
    ("commit_counts", constant(None), "given none, wanted exactly one"),
    ("source_index", constant(torch.zeros(12, dtype=torch.int32)), "given commit_counts, source_index"),
    ("rejected_counts", constant(torch.zeros(4, dtype=torch.int32)), "given commit_counts, rejected_counts"),
    ("source_dtype", constant(torch.float64), "is torch.float64"),
    ("source_dtype", constant(torch.float16), "dtype is torch.bfloat16"),
    ("kv_cache_dtype", constant("fp4"), "is 'fp4', wanted one of"),
    ("kv_cache_dtype", constant(["fp8"]), "wanted a string"),
    ("kv_cache_dtype", constant("fp8"), "dtype is torch.bfloat16"),
    ("k_scales", constant(torch.ones(2)), r"shape is \[2\], wanted \[3\]"),
    ("v_scales", constant(torch.ones(3, 5)), r"shape is \[3, 5\]"),
    ("v_scales", constant(torch.ones(3, dtype=torch.float16)), "dtype is torch.float16"),
]
MOVE: list[tuple[str, Change, str]] = [
    ("log", lambda t: t[:, :1], "shape is"),
    ("log", lambda t: t[:, :, :5].contiguous(), "wanted .*at least 12"),
    ("log", lambda t: t[..., :9].contiguous(), "shape is"),
    ("log", dtype_of(torch.int8), "dtype is torch.int8"),
    ("log", strided, "wanted a contiguous tensor"),
]


def slot_call(inputs: Any) -> dict[str, Any]:
    return {
        "layer_table": ops.make_layer_table(
            inputs.keys, inputs.values, inputs.key_caches, inputs.value_caches
        ),
        "caches": inputs.caches,
        "slots": inputs.slots,
        "query_start_loc": inputs.query_start_loc,
        **inputs.shape,
    }


@pytest.mark.parametrize(("name", "change", "message"), COMMIT, ids=lambda x: x if isinstance(x, str) else "")
def test_commit_window(name: str, change: Change, message: str) -> None:
    inputs = slot_inputs(replace(SLOT, layout="combined"), torch.device("cpu"))
    before = inputs.snapshots()
    arguments = {**slot_call(inputs), "commit_counts": inputs.commit_counts, "source_dtype": SLOT.dtype}
    arguments[name] = change(arguments.get(name))
    begin = rf"^({name}|caches|commit_counts, rejected_counts, source_index)[^:]*: "
    if name == "caches":
        begin = r"^caches[^:]*: "
    with pytest.raises((TypeError, ValueError), match=f"{begin}.*{message}"):
        ops.commit_window(**arguments)
    assert all(torch.equal(buffer.raw, old) for buffer, old in zip(inputs.buffers, before, strict=True))


@pytest.mark.parametrize(
    ("name", "change", "message"), [*COMMON, *MOVE], ids=lambda x: x if isinstance(x, str) else ""
)
@pytest.mark.parametrize("op", ["log", "restore"])
def test_log_and_restore(op: str, name: str, change: Change, message: str) -> None:
    if op == "log" and name == "commit_counts":
        pytest.skip("log_slots takes no counts")
    inputs = slot_inputs(replace(SLOT, layout="combined"), torch.device("cpu"))
    before = inputs.snapshots()
    log = ops.make_slot_log(SLOT.layers, len(inputs.slots), SLOT.heads, SLOT.size, 2, "cpu")
    arguments = {**slot_call(inputs), "log": log}
    if op == "restore":
        arguments["commit_counts"] = inputs.commit_counts
    arguments[name] = change(arguments[name])
    with pytest.raises((TypeError, ValueError), match=rf"^{name}[^:]*: .*{message}"):
        (ops.log_slots if op == "log" else ops.restore_slots)(**arguments)
    assert all(torch.equal(buffer.raw, old) for buffer, old in zip(inputs.buffers, before, strict=True))
    assert not log.any()


GEOMETRY = [
    ("num_kv_heads", 3), ("head_size", 128), ("block_size", 17), ("num_blocks", 10**9),
    ("num_kv_heads", 200_000), ("head_size", 10**7), ("num_kv_heads", 2**62),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), GEOMETRY)
@pytest.mark.parametrize("layout", ["combined", "nhd"])
@pytest.mark.parametrize("op", ["commit", "log", "restore"])
@pytest.mark.parametrize("validate", [True, False])
def test_more_than_the_caches_hold(op: str, layout: str, name: str, value: int, validate: bool) -> None:
    """One tensor a layer for keys and values, and one for each; the wrapper's checks, and the op's own."""
    inputs = slot_inputs(replace(SLOT, layout=layout), torch.device("cpu"))
    before = inputs.snapshots()
    arguments = {**slot_call(inputs), "validate": validate}
    assert len(arguments["caches"]) == SLOT.layers * (1 if layout == "combined" else 2)
    arguments.setdefault("num_blocks", inputs.key_caches[0].shape[0])
    arguments[name] = value
    if op == "commit":
        call: Callable[..., None] = ops.commit_window
        arguments |= {"commit_counts": inputs.commit_counts, "source_dtype": SLOT.dtype}
    else:
        arguments["log"] = ops.make_slot_log(SLOT.layers, len(inputs.slots), SLOT.heads, SLOT.size, 2, "cpu")
        call = ops.log_slots
        if op == "restore":
            arguments["commit_counts"] = inputs.commit_counts
            call = ops.restore_slots
    with pytest.raises(ValueError if validate else RuntimeError, match=rf"caches.*{name} {value}\b"):
        call(**arguments)
    assert all(torch.equal(buffer.raw, old) for buffer, old in zip(inputs.buffers, before, strict=True))


LISTS = ("keys", "values", "staged_keys", "staged_values")
STAGE: list[tuple[Change, str]] = [
    (constant([]), "is empty"),
    (lambda some: [*some, some[0]], "has 3 tensors, wanted 2"),
    (lambda some: [some[0], some[1][0]], "wanted 3 dimensions"),
    (lambda some: [some[0], some[1][:, :1]], "shape is"),
    (lambda some: [some[0], some[1].half()], "dtype is torch.float16"),
    (lambda some: [some[0], elsewhere(some[1])], "device is meta"),
    (lambda some: [some[0], strided(some[1])], "wanted 1 in the last dimension"),
    (lambda some: [some[0], 3], "is int, wanted a tensor"),
]


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize(("change", "message"), STAGE, ids=[message for _, message in STAGE])
def test_stage_window(name: str, change: Change, message: str) -> None:
    arguments: dict[str, Any] = {one: [torch.zeros(6, 2, 16) for _ in range(2)] for one in LISTS}
    arguments["num_tokens"] = torch.tensor([3], dtype=torch.int32)
    arguments[name] = change(arguments[name])
    if name == "keys" and "has 3" in message:
        name, message = "values", "has 2 tensors, wanted 3"
    with pytest.raises((TypeError, ValueError), match=rf"^{name}[^:]*: .*{re.escape(message)}"):
        ops.stage_window(**arguments)


ARGMAX: list[tuple[str, Change, str]] = [
    ("logits", constant([1.0]), "is list, wanted a tensor"),
    ("logits", lambda t: t[0], "wanted 2 dimensions"),
    ("logits", lambda t: t[:, :0], r"shape is \[3, 0\], wanted 1 to 2147483647 columns"),
    ("logits", dtype_of(torch.float64), "dtype is torch.float64"),
    ("logits", strided, "wanted 1 in the last dimension"),
    ("output", constant(None), "is NoneType, wanted a tensor"),
    ("output", lambda t: t[:2], r"shape is \[2\], wanted \[3\]"),
    ("output", wider, r"shape is \[6\], wanted \[3\]"),
    ("output", dtype_of(torch.int32), "dtype is torch.int32, wanted torch.int64"),
    ("output", strided, "strides are"),
    ("output", elsewhere, "device is meta"),
    ("workspace", lambda t: t[:5], r"shape is \[5\], wanted at least 6 elements"),
    ("workspace", dtype_of(torch.uint8), "dtype is torch.uint8, wanted torch.int64"),
    ("workspace", strided, "strides are"),
    ("workspace", elsewhere, "device is meta"),
]


@pytest.mark.parametrize(("name", "change", "message"), ARGMAX, ids=lambda x: x if isinstance(x, str) else "")
def test_argmax_rows(name: str, change: Change, message: str) -> None:
    output = torch.full((3,), -7)
    arguments = {
        "logits": torch.rand(3, 40),
        "output": output,
        "workspace": ops.make_argmax_workspace(3, "cpu"),
    }
    arguments[name] = change(arguments[name])
    with pytest.raises((TypeError, ValueError), match=f"^{name}: .*{message}"):
        ops.argmax_rows(**arguments)
    # The op itself refuses it too, where the checks in Python are left out. (Meta tensors go to its fake.)
    if message != "device is meta":
        with pytest.raises(RuntimeError):
            torch.ops.nwor.argmax_rows(*arguments.values())
    assert (output == -7).all()


def test_argmax_workspace_of_no_size() -> None:
    with pytest.raises(ValueError, match=r"^rows: is -1"):
        ops.make_argmax_workspace(-1, "cpu")


@pytest.mark.parametrize("count", [torch.tensor([3]), torch.zeros(2, dtype=torch.int32), 3], ids=str)
def test_stage_window_count(count: Any) -> None:
    lists = [[torch.zeros(6, 2, 16)] for _ in LISTS]
    with pytest.raises((TypeError, ValueError), match=r"^num_tokens: "):
        ops.stage_window(*lists, count)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("keys", lambda some: some[:2], "has 2 tensors, wanted 3"),
        ("keys", lambda some: [*some[:2], some[2][:, :1]], "shape is"),
        ("values", lambda some: [*some[:2], some[2].float()], "dtype is torch.float32"),
        ("values", lambda some: [*some[:2], strided(some[2])], "wanted 1 in the last dimension"),
        ("values", lambda some: [*some[:2], elsewhere(some[2])], "device is meta"),
        ("key_caches", lambda some: [*some[:2], some[2][0]], "wanted 4 dimensions"),
        ("value_caches", lambda some: [*some[:2], some[2].float()], "dtype is torch.float32"),
        ("value_caches", lambda some: some[:1], "has 1 tensors, wanted 3"),
    ],
)
def test_layer_table(name: str, change: Change, message: str) -> None:
    inputs = slot_inputs(SLOT, torch.device("cpu"))
    arguments = {one: getattr(inputs, one) for one in ("keys", "values", "key_caches", "value_caches")}
    arguments[name] = change(arguments[name])
    with pytest.raises((TypeError, ValueError), match=rf"^{name}[^:]*: .*{message}"):
        ops.make_layer_table(**arguments)


def test_the_op_itself_checks_too() -> None:
    """Without the wrapper's checks a wrong shape is still an error by name, and nothing runs."""
    inputs = attention_inputs(MIXED, torch.device("cpu"))
    arguments = {**inputs.arguments, "output": inputs.output.view, "workspace": make_workspace(inputs, 5)}
    arguments["value"] = arguments["value"][:, :1]
    with pytest.raises(RuntimeError, match=r"value: shape is \[16, 1, 64\], wanted size 2 in dimension 1"):
        ops.verify_attention(**arguments, max_query_len=5, validate=False)
    arguments = {
        **inputs.arguments,
        "output": inputs.output.view,
        "workspace": torch.zeros(8, dtype=torch.uint8),
    }
    with pytest.raises(RuntimeError, match="workspace: has 8 bytes, wanted at least"):
        ops.verify_attention(**arguments, max_query_len=5, validate=False)
    assert (inputs.output.raw == PATTERN).all()
