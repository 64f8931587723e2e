"""Arguments that are slices of larger tensors, as micro-batches and persistent buffers hand them out.

Rows, slots and windows are counted from the beginning of the slice; nothing outside it is read or written.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nwor import ops, reference
from tests.ops.cases import (
    ENDS,
    LONG,
    MIXED,
    PATTERN,
    SLOT,
    TOLERANCE,
    AttentionCase,
    attention_inputs,
    slot_inputs,
)
from tests.ops.test_commit_window import assert_equal, commit
from tests.ops.test_verify_attention import make_workspace, run


def shifted(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a copy whose heads begin an element behind what is aligned, and the NaN that it lies in."""
    wider = tensor.new_full((*tensor.shape[:2], tensor.shape[2] + 3), torch.nan)
    return wider[..., 1:-2].copy_(tensor), wider


def test_second_half_of_a_batch(device: torch.device) -> None:
    """The windows from the third on, by slices whose query_start_loc begins at 0 again."""
    inputs = attention_inputs(MIXED, device)
    arguments, first = inputs.arguments, sum(MIXED.windows[:2])
    run(MIXED, inputs)
    whole = inputs.output.view.clone()
    inputs.output.raw.fill_(PATTERN)
    part = {name: arguments[name][first:] for name in ("query", "key", "value")}
    part |= {name: arguments[name][2:] for name in ("block_table", "seq_lens")}
    ops.verify_attention(
        **{**arguments, **part, "query_start_loc": arguments["query_start_loc"][2:] - first},
        output=inputs.output.view[first:],
        workspace=make_workspace(inputs, 5),
        max_query_len=5,
    )
    rows = sum(MIXED.windows)
    tolerance = TOLERANCE[MIXED.dtype]
    torch.testing.assert_close(
        inputs.output.view[first:rows], whole[first:rows], atol=tolerance, rtol=tolerance
    )
    assert (inputs.output.view[:first].contiguous().view(torch.uint8) == PATTERN).all()
    assert (inputs.output.view[rows:].contiguous().view(torch.uint8) == PATTERN).all()


@pytest.mark.parametrize(
    "case",
    [
        MIXED,
        ENDS[1],
        replace(ENDS[1], kv_cache_dtype="fp8"),
        ENDS[3],
        replace(ENDS[3], heads=8),  # more query rows than one warpgroup keeps
        replace(LONG, size=256),
    ],
    ids=str,
)
def test_rows_that_are_not_aligned(case: AttentionCase, device: torch.device) -> None:
    """Query, key, value and output begin, and go on, where no vector does."""
    inputs = attention_inputs(case, device)
    arguments = inputs.arguments
    for name in ("query", "key", "value"):
        arguments[name], _ = shifted(arguments[name])
    output, wider = shifted(inputs.output.view)
    run(case, inputs, output=output)
    want, _ = reference.verify_attention(**arguments)
    rows, tolerance = sum(case.windows), TOLERANCE[case.dtype]
    torch.testing.assert_close(output[:rows].double(), want[:rows], atol=tolerance, rtol=tolerance)
    assert torch.equal(output[rows:], inputs.output.view[rows:])
    assert wider[..., :1].isnan().all()
    assert wider[..., -2:].isnan().all()


def test_windows_that_begin_later(device: torch.device) -> None:
    """query_start_loc need not begin with 0: the rows before belong to someone else."""
    inputs = attention_inputs(MIXED, device)
    arguments, first = inputs.arguments, sum(MIXED.windows[:2])
    for name in ("query_start_loc", "seq_lens", "block_table"):
        arguments[name] = arguments[name][2:]
    run(MIXED, inputs)
    want, _ = reference.verify_attention(**arguments)
    rows, tolerance = sum(MIXED.windows), TOLERANCE[MIXED.dtype]
    got = inputs.output.view[first:rows].double()
    torch.testing.assert_close(got, want[first:rows], atol=tolerance, rtol=tolerance)
    assert (inputs.output.view[:first].contiguous().view(torch.uint8) == PATTERN).all()


def test_commit_of_the_second_half(device: torch.device) -> None:
    inputs = slot_inputs(SLOT, device)
    commit(SLOT, inputs)
    wanted = inputs.snapshots()
    halves = slot_inputs(SLOT, device)
    first = sum(SLOT.windows[:2])
    table = ops.make_layer_table(halves.keys, halves.values, halves.key_caches, halves.value_caches)
    for begin, end, row in ((0, 2, 0), (2, 4, first)):
        ops.commit_window(
            # The table's rows count from the sources' beginning, so the second half gets a table of its own.
            table
            if row == 0
            else ops.make_layer_table(
                [key[row:] for key in halves.keys],
                [value[row:] for value in halves.values],
                halves.key_caches,
                halves.value_caches,
            ),
            halves.caches,
            halves.slots[row:],
            halves.query_start_loc[begin : end + 1] - row,
            commit_counts=halves.commit_counts[begin:end],
            source_dtype=SLOT.dtype,
            **halves.shape,
        )
    assert_equal(halves, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_host_never_waits() -> None:
    """Checks, tables and ops of a whole step with torch's synchronization check set to raise."""
    device = torch.device("cuda", torch.cuda.current_device())
    attention, slots = attention_inputs(MIXED, device), slot_inputs(SLOT, device)
    workspace = make_workspace(attention, 5)
    log = ops.make_slot_log(SLOT.layers, len(slots.slots), SLOT.heads, SLOT.size, 2, device)
    staged = [[torch.zeros_like(key) for key in slots.keys] for _ in range(2)]
    count = torch.tensor([3], dtype=torch.int32, device=device)
    logits, indices = torch.rand(2, 9000, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(MIXED, attention, workspace=workspace)
        table = ops.make_cache_table(slots.key_caches, slots.value_caches)
        arguments = (table, slots.caches, log, slots.slots, slots.query_start_loc)
        ops.log_slots(*arguments, **slots.shape)
        ops.restore_slots(*arguments, slots.commit_counts, **slots.shape)
        ops.stage_window(slots.keys, slots.values, *staged, count)
        commit(SLOT, slots)
        ops.argmax_rows(logits, indices, ops.make_argmax_workspace(2, device))
    finally:
        torch.cuda.set_sync_debug_mode("default")
