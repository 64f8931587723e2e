"""log_slots and restore_slots: after write and restore, rejected slots hold the bytes of before, accepted the
new.

Compared are the whole log and the whole caches, guard regions included.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from nwor import ops, reference
from tests.ops.cases import SLOT, SLOT_CASES, SlotCase, SlotInputs, guarded, slot_inputs
from tests.ops.test_commit_window import assert_equal


def fill_random(inputs: SlotInputs, seed: int) -> None:
    """Fill whole caches with random bytes: NaN and infinities among them, since bytes are what is moved."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in inputs.buffers:
        raw = buffer.view.view(torch.uint8) if buffer.view.is_contiguous() else buffer.raw
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


def common(inputs: SlotInputs) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return ops.make_cache_table(inputs.key_caches, inputs.value_caches), inputs.caches


def row_bytes(case: SlotCase, inputs: SlotInputs) -> int:
    return case.heads * case.size * inputs.key_caches[0].element_size()


@pytest.mark.parametrize("rejected", [False, True], ids=["kept", "rejected"])
@pytest.mark.parametrize("case", SLOT_CASES, ids=str)
def test_log_then_restore(case: SlotCase, rejected: bool, device: torch.device) -> None:
    inputs = slot_inputs(case, device)
    fill_random(inputs, 1)
    before = inputs.snapshots()
    before_views = [cache.clone() for cache in (*inputs.key_caches, *inputs.value_caches)]
    table, caches = common(inputs)
    rows = len(inputs.slots) + 2
    log = guarded((case.layers, 2, rows, row_bytes(case, inputs)), torch.uint8, device)
    wanted_log = log.raw.clone()
    ops.log_slots(table, caches, log.view, inputs.slots, inputs.query_start_loc, **inputs.shape)
    assert_equal(inputs, before)
    got_log, log.raw = log.raw.clone(), wanted_log
    want_view = wanted_log[512 : 512 + log.view.numel()].view(log.view.shape)
    for layer in range(case.layers):
        for which, cache in enumerate((inputs.key_caches[layer], inputs.value_caches[layer])):
            for row, data in reference.log_slots(cache, inputs.slots, inputs.query_start_loc).items():
                want_view[layer, which, row] = data
    assert torch.equal(got_log, wanted_log)

    # The direct writes of a step: here every draft and first token's slot changes.
    fill_random(inputs, 2)
    every = [*inputs.key_caches, *inputs.value_caches]
    restored = [
        reference.restore_slots(cache, old, inputs.slots, inputs.query_start_loc, inputs.commit_counts)
        for cache, old in zip(every, before_views, strict=True)
    ]
    after = inputs.snapshots()
    for cache, want in zip(every, restored, strict=True):
        cache.copy_(want)
    wanted = inputs.snapshots()
    for buffer, old in zip(inputs.buffers, after, strict=True):
        buffer.raw.copy_(old)
    counts = {"commit_counts": inputs.commit_counts}
    if rejected:
        lengths = inputs.query_start_loc[1:] - inputs.query_start_loc[:-1]
        counts = {"rejected_counts": lengths - inputs.commit_counts[: len(lengths)]}
    ops.restore_slots(table, caches, log.view, inputs.slots, inputs.query_start_loc, **counts, **inputs.shape)
    assert_equal(inputs, wanted)


def test_first_token_is_never_restored(device: torch.device) -> None:
    """A count of 0 restores the drafts alone: the first row was never logged."""
    case = replace(SLOT, windows=(3,), counts=(0,))
    inputs = slot_inputs(case, device)
    fill_random(inputs, 3)
    table, caches = common(inputs)
    log = ops.make_slot_log(case.layers, len(inputs.slots), case.heads, case.size, 2, device)
    before = [cache.clone() for cache in inputs.key_caches]
    ops.log_slots(table, caches, log, inputs.slots, inputs.query_start_loc, **inputs.shape)
    for cache in (*inputs.key_caches, *inputs.value_caches):
        cache.fill_(7.0)
    ops.restore_slots(
        table, caches, log, inputs.slots, inputs.query_start_loc, inputs.commit_counts, **inputs.shape
    )
    for cache, old in zip(inputs.key_caches, before, strict=True):
        slots = [divmod(int(slot), case.block_size) for slot in inputs.slots[:3]]
        assert (cache[slots[0]] == 7.0).all()
        for slot in slots[1:]:
            assert torch.equal(cache[slot].view(torch.uint8), old[slot].view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("count", [6, 2**30, 2**31 - 1])
def test_more_kept_than_a_window_has_restores_nothing_on_cuda(count: int) -> None:
    """The CPU refuses such counts; where nobody looks at them, they must not lead out of the log."""
    inputs = slot_inputs(replace(SLOT, windows=(3, 5), counts=(3, 5)), torch.device("cuda"))
    before = inputs.snapshots()
    table, caches = common(inputs)
    log = ops.make_slot_log(SLOT.layers, len(inputs.slots), SLOT.heads, SLOT.size, 2, "cuda")
    counts = torch.full_like(inputs.commit_counts, count)
    ops.restore_slots(table, caches, log, inputs.slots, inputs.query_start_loc, counts, **inputs.shape)
    assert_equal(inputs, before)


def test_layer_table_with_sources_serves_too(device: torch.device) -> None:
    inputs = slot_inputs(SLOT, device)
    logs: list[Any] = []
    full = ops.make_layer_table(inputs.keys, inputs.values, inputs.key_caches, inputs.value_caches)
    for table in (full, common(inputs)[0]):
        log = ops.make_slot_log(SLOT.layers, len(inputs.slots), SLOT.heads, SLOT.size, 2, device)
        ops.log_slots(table, inputs.caches, log, inputs.slots, inputs.query_start_loc, **inputs.shape)
        logs.append(log)
    assert torch.equal(*logs)
    assert logs[0].any()
