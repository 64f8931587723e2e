"""verify_attention and commit_window over shapes that nobody thought of."""

from __future__ import annotations

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ops import test_commit_window, test_slot_log, test_verify_attention
from tests.ops.cases import (
    BF16,
    FP8,
    FP16,
    FP32,
    LAYOUTS,
    AttentionCase,
    SlotCase,
    attention_inputs,
    slot_inputs,
)

# The device fixture is the same for every example.
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def attention_cases(draw: st.DrawFn) -> AttentionCase:
    batch = draw(st.integers(1, 4))
    kv_heads = draw(st.integers(1, 4))
    kv_cache_dtype = draw(st.sampled_from(["auto", "auto", *FP8]))
    quantized = kv_cache_dtype != "auto"
    return AttentionCase(
        windows=tuple(draw(st.lists(st.integers(0, 12), min_size=batch, max_size=batch))),
        contexts=tuple(draw(st.lists(st.integers(0, 300), min_size=batch, max_size=batch))),
        heads=kv_heads * draw(st.integers(1, 6)),
        kv_heads=kv_heads,
        size=draw(st.sampled_from([8, 64, 64, 96, 128, 256])),
        block_size=draw(st.sampled_from([1, 16, 32, 48, 128])),
        dtype=draw(st.sampled_from([BF16, FP16, FP32])),
        kv_cache_dtype=kv_cache_dtype,
        per_head_scales=draw(st.booleans()),
        query_scales=draw(st.sampled_from([None, "none", "scalar", "head"])) if quantized else None,
        layout=draw(st.sampled_from(LAYOUTS)),
        sliding_window=draw(st.sampled_from([-1, -1, 1, 7, 100])),
        softcap=draw(st.sampled_from([0.0, 0.0, 10.0])),
        sinks=draw(st.sampled_from([None, FP32])),
        tree=draw(st.booleans()),
        padding_rows=draw(st.integers(0, 3)),
        seed=draw(st.integers(0, 1000)),
    )


@few
@given(case=attention_cases())
def test_verify_attention_equals_reference(case: AttentionCase, device: torch.device) -> None:
    if sum(case.windows) + case.padding_rows == 0 or (device.type == "cuda" and not case.runs_on_cuda):
        return
    inputs = attention_inputs(case, device)
    test_verify_attention.run(case, inputs)
    test_verify_attention.check(case, inputs)


@st.composite
def slot_cases(draw: st.DrawFn) -> SlotCase:
    windows = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=6)))
    kv_cache_dtype = draw(st.sampled_from(["auto", *FP8]))
    block_size = draw(st.sampled_from([1, 4, 16, 80]))
    return SlotCase(
        windows=windows,
        counts=tuple(draw(st.integers(0, window)) for window in windows),
        layers=draw(st.integers(1, 4)),
        heads=draw(st.integers(1, 5)),
        size=draw(st.sampled_from([1, 7, 16, 64, 96])),
        block_size=block_size,
        blocks=64 // block_size + 2,
        dtype=draw(st.sampled_from([BF16, FP16, FP32])),
        kv_cache_dtype=kv_cache_dtype,
        scales=draw(st.sampled_from(["none", "scalar", "head"])) if kv_cache_dtype != "auto" else "none",
        layout=draw(st.sampled_from(LAYOUTS)),
        seed=draw(st.integers(0, 1000)),
    )


@few
@given(case=slot_cases())
def test_commit_equals_reference(case: SlotCase, device: torch.device) -> None:
    inputs = slot_inputs(case, device)
    wanted = test_commit_window.expect(case, inputs, commit_counts=inputs.commit_counts)
    test_commit_window.commit(case, inputs)
    test_commit_window.assert_equal(inputs, wanted)


@few
@given(case=slot_cases())
def test_log_and_restore_equal_reference(case: SlotCase, device: torch.device) -> None:
    test_slot_log.test_log_then_restore(case, False, device)
