"""A prepared commit writes what ``commit_window`` writes, to the byte, each time that it is called.

Coverage: every case of the op's own tests; counts and slots that change between two calls; arguments that do
not fit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nwor import ops
from tests.ops.cases import SLOT, SLOT_CASES, SlotCase, SlotInputs, slot_inputs
from tests.ops.test_commit_window import assert_equal, commit


def prepare(case: SlotCase, inputs: SlotInputs, **changes: Any) -> ops.PreparedCommit:
    arguments = {
        "layer_table": ops.make_layer_table(
            inputs.keys, inputs.values, inputs.key_caches, inputs.value_caches
        ),
        "slots": inputs.slots,
        "query_start_loc": inputs.query_start_loc,
        "num_blocks": inputs.key_caches[0].shape[0],
        "source_dtype": case.dtype,
        "kv_cache_dtype": case.kv_cache_dtype,
        "k_scales": inputs.k_scales,
        "v_scales": inputs.v_scales,
        **inputs.shape,
        **changes,
    }
    return ops.PreparedCommit(**arguments)


def rejected_counts(inputs: SlotInputs) -> torch.Tensor:
    lengths = inputs.query_start_loc[1:] - inputs.query_start_loc[:-1]
    return lengths - inputs.commit_counts[: len(lengths)]


def as_the_op_writes(case: SlotCase, inputs: SlotInputs, rejected: torch.Tensor) -> list[torch.Tensor]:
    """Return the raw buffers as the op leaves them, and put the inputs' buffers back as they were."""
    before = inputs.snapshots()
    commit(case, inputs, commit_counts=None, rejected_counts=rejected)
    wanted = inputs.snapshots()
    assert any(not torch.equal(new, old) for new, old in zip(wanted, before, strict=True))
    for buffer, old in zip(inputs.buffers, before, strict=True):
        buffer.raw.copy_(old)
    return wanted


@pytest.mark.parametrize("case", SLOT_CASES, ids=str)
def test_same_bytes_as_the_op(case: SlotCase, device: torch.device) -> None:
    inputs = slot_inputs(case, device)
    rejected = rejected_counts(inputs)
    wanted = as_the_op_writes(case, inputs, rejected)
    prepare(case, inputs)(rejected)
    assert_equal(inputs, wanted)


def test_each_call_reads_counts_slots_and_sources_anew(device: torch.device) -> None:
    inputs = slot_inputs(SLOT, device)
    prepared, rejected = prepare(SLOT, inputs), rejected_counts(inputs)
    lengths = inputs.query_start_loc[1:] - inputs.query_start_loc[:-1]
    before = inputs.snapshots()
    prepared(lengths)  # all are rejected
    assert_equal(inputs, before)
    inputs.slots[:2] = inputs.slots[:2].flip(0)
    for tensor in (*inputs.keys, *inputs.values):
        tensor.neg_()
    wanted = as_the_op_writes(SLOT, inputs, rejected)
    prepared(rejected)
    assert_equal(inputs, wanted)


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("layer_table", lambda t: t.to(torch.int32), TypeError),
        ("layer_table", lambda t: t[:, :8], ValueError),
        ("slots", lambda t: t.to(torch.int32), TypeError),
        ("query_start_loc", lambda t: t.long(), TypeError),
        ("source_dtype", lambda t: torch.float64, TypeError),
        ("kv_cache_dtype", lambda t: "int4", ValueError),
        ("k_scales", lambda t: torch.ones(99), ValueError),
    ],
)
def test_an_argument_that_does_not_fit_is_named(name: str, change: Any, error: type[Exception]) -> None:
    inputs = slot_inputs(SLOT, torch.device("cpu"))
    table = ops.make_layer_table(inputs.keys, inputs.values, inputs.key_caches, inputs.value_caches)
    own = {"layer_table": table, "slots": inputs.slots, "query_start_loc": inputs.query_start_loc}
    with pytest.raises(error, match=name):
        prepare(SLOT, inputs, **{name: change(own.get(name))})


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda counts: counts.tolist(), TypeError),
        (lambda counts: None, TypeError),
        (lambda counts: counts.to("meta"), ValueError),
        (lambda counts: counts.long(), TypeError),
        (lambda counts: counts[:-1], ValueError),
        (lambda counts: counts.repeat_interleave(2)[::2], ValueError),
    ],
)
def test_counts_that_do_not_fit(change: Any, error: type[Exception], device: torch.device) -> None:
    inputs = slot_inputs(SLOT, device)
    before = inputs.snapshots()
    with pytest.raises(error, match="rejected"):
        prepare(SLOT, inputs)(change(rejected_counts(inputs)))
    assert_equal(inputs, before)


def test_what_does_not_lie_in_the_cache_is_an_error_on_a_cpu() -> None:
    inputs = slot_inputs(SLOT, torch.device("cpu"))
    prepared, rejected = prepare(SLOT, inputs), rejected_counts(inputs)
    before = inputs.snapshots()
    inputs.slots[0] = inputs.key_caches[0].shape[0] * SLOT.block_size
    with pytest.raises(RuntimeError, match="slots: element 0"):
        prepared(rejected)
    assert_equal(inputs, before)
    rejected[0] = -1
    with pytest.raises(RuntimeError, match="rejected_counts: element 0"):
        prepared(rejected)


def _tables_of_others(inputs: SlotInputs) -> tuple[ops.LayerTables, torch.Tensor]:
    """Return tables of the inputs' caches, and one of other sources in them."""
    tables = ops.LayerTables(inputs.key_caches, inputs.value_caches)
    others = [
        (key.new_zeros((3, *key.shape[1:])), value.new_zeros((3, *value.shape[1:])))
        for key, value in zip(inputs.keys, inputs.values, strict=True)
    ]
    return tables, tables.of(others)


@pytest.mark.parametrize("case", SLOT_CASES, ids=str)
def test_a_commit_of_other_windows_and_sources_becomes_these(case: SlotCase) -> None:
    inputs = slot_inputs(case, torch.device("cpu"))
    rejected = rejected_counts(inputs)
    wanted = as_the_op_writes(case, inputs, rejected)
    tables, table = _tables_of_others(inputs)
    other = {
        "slots": torch.tensor([2, 1, 0], dtype=torch.int64),
        "query_start_loc": torch.tensor([0, 3], dtype=torch.int32),
        "source_index": torch.tensor([0, 0, -1], dtype=torch.int32),
    }
    prepared = prepare(case, inputs, layer_table=table, **other)
    tables.refill(table, list(zip(inputs.keys, inputs.values, strict=True)))
    assert torch.equal(
        table, ops.make_layer_table(inputs.keys, inputs.values, inputs.key_caches, inputs.value_caches)
    )
    prepared.retarget(inputs.slots, inputs.query_start_loc)
    prepared(rejected)
    assert_equal(inputs, wanted)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda key: key[..., :-1], "keys"),
        (lambda key: key.double(), "keys"),
        (lambda key: key.flatten(1), "keys"),
        (lambda key: key[:-1], "keys"),
        (lambda key: None, "key_caches|keys"),
    ],
)
def test_sources_that_do_not_fit_leave_a_table_as_it_is(change: Any, what: str) -> None:
    inputs = slot_inputs(SLOT, torch.device("cpu"))
    tables, table = _tables_of_others(inputs)
    before = table.clone()
    sources = list(zip(inputs.keys, inputs.values, strict=True))
    changed = change(sources[-1][0])
    sources = sources[:-1] if changed is None else [*sources[:-1], (changed, sources[-1][1])]
    with pytest.raises((TypeError, ValueError), match=what):
        tables.refill(table, sources)
    assert torch.equal(table, before)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("slots", torch.zeros(3, dtype=torch.int32)),
        ("query_start_loc", torch.zeros(0, dtype=torch.int32)),
        ("source_index", torch.zeros(1, dtype=torch.int32)),
    ],
)
def test_windows_that_do_not_fit_are_refused(name: str, wrong: torch.Tensor) -> None:
    inputs = slot_inputs(SLOT, torch.device("cpu"))
    rejected = rejected_counts(inputs)
    wanted = as_the_op_writes(SLOT, inputs, rejected)
    prepared = prepare(SLOT, inputs)
    with pytest.raises((TypeError, ValueError), match=name):
        prepared.retarget(**{"slots": inputs.slots, "query_start_loc": inputs.query_start_loc, name: wrong})
    prepared(rejected)
    assert_equal(inputs, wanted)
