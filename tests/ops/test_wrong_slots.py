"""Every argument of commit_window, log_slots and restore_slots: what is wrong is said before anything runs.

Each change of one argument of a valid call must raise TypeError or ValueError whose message begins with the
argument's name, and the outputs must be as before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from nwor import ops
from tests.ops.cases import FP32, SLOT, SlotInputs, guarded, replace, slot_inputs
from tests.ops.wrong_arguments import Change, alter, constant, dtype_of, elsewhere, strided

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
    ("num_blocks", constant(2**63), "is 9223372036854775808, wanted 0 to 9223372036854775807"),
    (
        "caches",
        lambda c: [one.double() for one in c],
        "dtype is torch.float64, wanted one of 1, 2 or 4 bytes",
    ),
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
def test_commit_window(name: str, change: Change, message: str, device: torch.device) -> None:
    inputs = slot_inputs(replace(SLOT, layout="combined"), device)
    before = inputs.snapshots()
    arguments = {**slot_call(inputs), "commit_counts": inputs.commit_counts, "source_dtype": SLOT.dtype}
    alter(arguments, name, change, device)
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
def test_log_and_restore(op: str, name: str, change: Change, message: str, device: torch.device) -> None:
    if op == "log" and name == "commit_counts":
        pytest.skip("log_slots takes no counts")
    inputs = slot_inputs(replace(SLOT, layout="combined"), device)
    before = inputs.snapshots()
    log = ops.make_slot_log(SLOT.layers, len(inputs.slots), SLOT.heads, SLOT.size, 2, device)
    arguments = {**slot_call(inputs), "log": log}
    if op == "restore":
        arguments["commit_counts"] = inputs.commit_counts
    alter(arguments, name, change, device)
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
def test_more_than_the_caches_hold(
    op: str, layout: str, name: str, value: int, validate: bool, device: torch.device
) -> None:
    """One tensor a layer for keys and values, and one for each; the wrapper's checks, and the op's own."""
    inputs = slot_inputs(replace(SLOT, layout=layout), device)
    before = inputs.snapshots()
    arguments = {**slot_call(inputs), "validate": validate}
    assert len(arguments["caches"]) == SLOT.layers * (1 if layout == "combined" else 2)
    arguments.setdefault("num_blocks", inputs.key_caches[0].shape[0])
    arguments[name] = value
    if op == "commit":
        call: Callable[..., None] = ops.commit_window
        arguments |= {"commit_counts": inputs.commit_counts, "source_dtype": SLOT.dtype}
    else:
        arguments["log"] = ops.make_slot_log(SLOT.layers, len(inputs.slots), SLOT.heads, SLOT.size, 2, device)
        call = ops.log_slots
        if op == "restore":
            arguments["commit_counts"] = inputs.commit_counts
            call = ops.restore_slots
    with pytest.raises(ValueError if validate else RuntimeError, match=rf"caches.*{name} {value}\b"):
        call(**arguments)
    assert all(torch.equal(buffer.raw, old) for buffer, old in zip(inputs.buffers, before, strict=True))


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
def test_layer_table(name: str, change: Change, message: str, device: torch.device) -> None:
    inputs = slot_inputs(SLOT, device)
    arguments = {one: getattr(inputs, one) for one in ("keys", "values", "key_caches", "value_caches")}
    arguments[name] = change(arguments[name])
    with pytest.raises((TypeError, ValueError), match=rf"^{name}[^:]*: .*{message}"):
        ops.make_layer_table(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda some: some[:2], "has 2 tensors, wanted 3"),
        (lambda some: [*some[:2], some[2][:, :1]], "shape is"),
        (lambda some: [*some[:2], some[2][0]], "wanted 3 dimensions"),
        (lambda some: [*some[:2], some[2].double()], "dtype is torch.float64"),
        (lambda some: [*some[:2], strided(some[2])], "wanted 1 in the last dimension"),
        (lambda some: [*some[:2], elsewhere(some[2])], "device is meta"),
    ],
)
def test_tables_of_known_caches(change: Change, message: str, device: torch.device) -> None:
    inputs = slot_inputs(SLOT, device)
    tables = ops.LayerTables(inputs.key_caches, inputs.value_caches)
    whole = ops.make_layer_table(inputs.keys, inputs.values, inputs.key_caches, inputs.value_caches)
    assert torch.equal(tables.of(list(zip(inputs.keys, inputs.values, strict=True))), whole)
    wrong = change(inputs.keys), [*inputs.values][: len(change(inputs.keys))]
    with pytest.raises((TypeError, ValueError), match=rf"^keys[^:]*: .*{message}"):
        tables.of(list(zip(*wrong, strict=True)))


@pytest.mark.parametrize("op", ["commit", "log", "restore"])
def test_caches_of_too_few_layers_where_the_op_alone_checks(op: str, device: torch.device) -> None:
    inputs = slot_inputs(replace(SLOT, layout="combined"), device)
    call, arguments = call_of(op, inputs)
    arguments["caches"] = arguments["caches"][:2]
    with pytest.raises(RuntimeError, match=r"caches:? has 2 tensors"):
        call(**arguments, validate=False)


def call_of(op: str, inputs: SlotInputs) -> tuple[Callable[..., None], dict[str, Any]]:
    """Return an op and a valid call's arguments."""
    arguments = slot_call(inputs)
    if op == "commit":
        return ops.commit_window, arguments | {
            "commit_counts": inputs.commit_counts,
            "source_dtype": SLOT.dtype,
        }
    device = inputs.slots.device
    arguments["log"] = ops.make_slot_log(SLOT.layers, len(inputs.slots), SLOT.heads, SLOT.size, 2, device)
    if op == "log":
        return ops.log_slots, arguments
    return ops.restore_slots, arguments | {"commit_counts": inputs.commit_counts}


@pytest.mark.parametrize("value", [-1, 6, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("which", ["commit_counts", "rejected_counts"])
@pytest.mark.parametrize("op", ["commit", "restore"])
def test_counts_that_a_window_has_not_are_errors_on_cpu(op: str, which: str, value: int) -> None:
    inputs = slot_inputs(SLOT, torch.device("cpu"))
    before = inputs.snapshots()
    call, arguments = call_of(op, inputs)
    counts = arguments.pop("commit_counts")
    counts[0] = value
    with pytest.raises(RuntimeError, match=f"{which}: element 0 is {value}, but the window has 5 tokens"):
        call(**arguments, **{which: counts})
    assert all(torch.equal(buffer.raw, old) for buffer, old in zip(inputs.buffers, before, strict=True))


@pytest.mark.parametrize("side", [0, 1], ids=["keys", "values"])
@pytest.mark.parametrize("validate", [True, False])
@pytest.mark.parametrize("op", ["commit", "log", "restore"])
def test_table_of_another_shape_is_an_error_on_cpu(op: str, validate: bool, side: int) -> None:
    """Blocks of 4 tokens of 16 heads hold as many numbers as blocks of 16 tokens of 4 heads, elsewhere."""
    shapes = [(3, 16, 4, 8), (3, 16, 4, 8)]
    shapes[side] = (3, 4, 16, 8)
    buffers = [guarded(shape, FP32, torch.device("cpu")) for shape in shapes]
    caches = [buffer.view for buffer in buffers]
    strides = [torch.tensor([cache.data_ptr(), *cache.stride()]) for cache in caches]
    key = torch.ones(5, 4, 8)
    rows = [key.data_ptr(), key.data_ptr(), 32, 8, 32, 8]
    table = torch.tensor([[*rows, strides[0][0], strides[1][0], *strides[0][1:], *strides[1][1:]]])
    before = [buffer.raw.clone() for buffer in buffers]
    arguments: dict[str, Any] = {
        "layer_table": table,
        "caches": caches,
        "slots": torch.arange(43, 48),
        "query_start_loc": torch.tensor([0, 5], dtype=torch.int32),
        "num_kv_heads": 4,
        "head_size": 8,
        "block_size": 16,
        "num_blocks": 3,
    }
    call: Callable[..., None] = ops.commit_window
    if op != "commit":
        arguments["log"] = ops.make_slot_log(1, 5, 4, 8, 4, "cpu")
        call = ops.log_slots if op == "log" else ops.restore_slots
    if op != "log":
        arguments["commit_counts"] = torch.tensor([3], dtype=torch.int32)
    if op == "commit":
        arguments["source_dtype"] = FP32
    with pytest.raises(RuntimeError, match="layer_table: layer 0 has places outside caches"):
        call(**arguments, validate=validate)
    assert all(torch.equal(buffer.raw, old) for buffer, old in zip(buffers, before, strict=True))


@pytest.mark.parametrize("stride", [2**62, -1, -(2**63)])
@pytest.mark.parametrize("column", range(8, 16))
def test_table_of_wild_strides_is_an_error_on_cpu(column: int, stride: int) -> None:
    inputs = slot_inputs(SLOT, torch.device("cpu"))
    call, arguments = call_of("commit", inputs)
    arguments["layer_table"][1, column] = stride
    with pytest.raises(RuntimeError, match="layer_table: layer 1 has places outside caches"):
        call(**arguments)


def test_commit_by_a_table_without_sources_is_an_error_on_cpu() -> None:
    inputs = slot_inputs(SLOT, torch.device("cpu"))
    before = inputs.snapshots()
    call, arguments = call_of("commit", inputs)
    arguments["layer_table"] = ops.make_cache_table(inputs.key_caches, inputs.value_caches)
    with pytest.raises(RuntimeError, match="layer_table: layer 0 has no sources"):
        call(**arguments)
    assert all(torch.equal(buffer.raw, old) for buffer, old in zip(inputs.buffers, before, strict=True))


def test_no_blocks_at_all(device: torch.device) -> None:
    """Where there are no blocks, all slots are negative, and nothing is written."""
    inputs = slot_inputs(SLOT, device)
    before = inputs.snapshots()
    inputs.slots.fill_(-1)
    for op in ("commit", "log", "restore"):
        call, arguments = call_of(op, inputs)
        call(**{**arguments, "num_blocks": 0})
    assert all(torch.equal(buffer.raw, old) for buffer, old in zip(inputs.buffers, before, strict=True))


@pytest.mark.parametrize("name", ["layers", "rows", "num_kv_heads", "head_size", "element_size"])
@pytest.mark.parametrize(("value", "message"), [(-1, "is -1, wanted at least 0"), (2.0, "wanted an int")])
def test_slot_log_of_no_size(name: str, value: Any, message: str) -> None:
    sizes = {"layers": 1, "rows": 2, "num_kv_heads": 3, "head_size": 4, "element_size": 2, name: value}
    with pytest.raises((TypeError, ValueError), match=rf"^{name}: .*{message}"):
        ops.make_slot_log(**sizes, device="cpu")
