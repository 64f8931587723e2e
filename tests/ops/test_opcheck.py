"""torch.library.opcheck on every op: schemas tell the truth about mutation, fakes agree, tracing works."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nwor import ops
from tests.ops.cases import MIXED, SLOT, SlotInputs, attention_inputs, slot_inputs
from tests.ops.quantized_cases import QUANTIZED
from tests.ops.test_verify_attention import make_workspace

#: All that opcheck does but test_schema: that one compares arguments by arithmetic, which float8 has not.
WITHOUT_ARITHMETIC = (
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize(
    "case",
    [
        MIXED,
        replace(MIXED, kv_cache_dtype="fp8", tree=True, sinks=torch.float32, with_lse=False),
        QUANTIZED,
    ],
    ids=str,
)
def test_verify_attention(case: type[MIXED], device: torch.device) -> None:
    inputs = attention_inputs(case, device)
    inputs.output.view.zero_()
    lse = None
    if inputs.lse is not None:
        lse = inputs.lse.view.zero_()
    a = inputs.arguments
    # NaN in unused slots would compare unequal to itself.
    for name in ("key_cache", "value_cache"):
        if a[name].is_floating_point():
            a[name].nan_to_num_(0.0)
    torch.library.opcheck(
        torch.ops.nwor.verify_attention.default,
        (
            *[a[name] for name in ("query", "key", "value", "key_cache", "value_cache")],
            *[a[name] for name in ("block_table", "query_start_loc", "seq_lens")],
            inputs.output.view,
            make_workspace(inputs, 5),
            lse,
            a["scale"],
            5,
            a["kv_cache_dtype"],
            a["k_scale"],
            a["v_scale"],
            a["sliding_window"],
            a["softcap"],
            a["sinks"],
            a["ancestor_mask"],
            None,
            a["q_scale"],
        ),
        test_utils=WITHOUT_ARITHMETIC if case.query_scales else "ALL",
    )


@pytest.mark.parametrize("last", [("auto", -1), ("fp8", -1, True)], ids=["auto", "quantized"])
def test_plan_verify_attention(last: tuple[str | int | bool, ...], device: torch.device) -> None:
    arguments = attention_inputs(MIXED, device).arguments
    plan = ops.make_verify_plan(device)
    if plan is None:
        plan = torch.zeros(0, dtype=torch.uint8)
    torch.library.opcheck(
        torch.ops.nwor.plan_verify_attention.default,
        (arguments["query_start_loc"], arguments["seq_lens"], plan, 8, 2, 64, 5, MIXED.dtype, *last),
    )


def shape_of(inputs: SlotInputs) -> tuple[int, ...]:
    return tuple(inputs.shape[name] for name in ("num_kv_heads", "head_size", "block_size", "num_blocks"))


def zeroed(inputs: SlotInputs) -> SlotInputs:
    for buffer in inputs.buffers:
        buffer.raw.zero_()
    return inputs


# The table holds addresses: what runs on copies of the arguments still writes to the original's caches.
# Checks that compare such copies see equal ones; test_schema and test_faketensor are not affected.
@pytest.mark.parametrize("layout", ["combined", "hnd"])
def test_commit_window(layout: str, device: torch.device) -> None:
    inputs = zeroed(slot_inputs(replace(SLOT, layout=layout), device))
    table = ops.make_layer_table(inputs.keys, inputs.values, inputs.key_caches, inputs.value_caches)
    first = (table, inputs.caches, inputs.slots, inputs.query_start_loc)
    last = (*shape_of(inputs), SLOT.dtype, "auto", None, None)
    op = torch.ops.nwor.commit_window.default
    torch.library.opcheck(op, (*first, inputs.commit_counts, None, *last))
    source = torch.zeros(len(inputs.slots), dtype=torch.int32, device=device)
    torch.library.opcheck(op, (*first, None, source, *last))


def test_log_and_restore(device: torch.device) -> None:
    inputs = zeroed(slot_inputs(replace(SLOT, layout="combined"), device))
    table = ops.make_cache_table(inputs.key_caches, inputs.value_caches)
    log = ops.make_slot_log(SLOT.layers, len(inputs.slots), SLOT.heads, SLOT.size, 2, device)
    arguments = (table, inputs.caches, log, inputs.slots, inputs.query_start_loc)
    torch.library.opcheck(torch.ops.nwor.log_slots.default, (*arguments, *shape_of(inputs)))
    torch.library.opcheck(
        torch.ops.nwor.restore_slots.default, (*arguments, inputs.commit_counts, *shape_of(inputs))
    )


def test_stage_window(device: torch.device) -> None:
    lists = [[torch.rand(6, 2, 16, device=device) for _ in range(3)] for _ in range(4)]
    count = torch.tensor([4], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.nwor.stage_window.default, (*lists, count))


def test_argmax_rows(device: torch.device) -> None:
    logits = torch.rand(3, 5000, device=device)
    output = torch.zeros(3, dtype=torch.int64, device=device)
    workspace = ops.make_argmax_workspace(3, device)
    torch.library.opcheck(torch.ops.nwor.argmax_rows.default, (logits, output, workspace))


@pytest.mark.parametrize(
    "name",
    [
        "argmax_rows",
        "commit_window",
        "log_slots",
        "plan_verify_attention",
        "restore_slots",
        "stage_window",
        "verify_attention",
    ],
)
def test_every_written_argument_is_declared(name: str) -> None:
    schema = getattr(torch.ops.nwor, name).default._schema
    written = {
        argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write
    }
    assert (
        written
        == {
            "argmax_rows": {"output", "workspace"},
            "commit_window": {"caches"},
            "restore_slots": {"caches"},
            "log_slots": {"log"},
            "plan_verify_attention": {"plan"},
            "stage_window": {"staged_keys", "staged_values"},
            "verify_attention": {"output", "workspace", "lse"},
        }[name]
    )
    assert not schema.returns


def test_ops_trace_without_a_graph_break(device: torch.device) -> None:
    """Under torch.compile the ops stay in one graph and give the eager result."""
    inputs = slot_inputs(replace(SLOT, layout="combined"), device)
    keys = [key.clone() for key in inputs.keys]
    staged = [torch.zeros_like(key) for key in keys]
    count = torch.tensor([5], dtype=torch.int32, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        torch.ops.nwor.stage_window(keys, keys, staged, staged, count)
        return staged[0] + x

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    one = torch.ones((), dtype=SLOT.dtype, device=device)
    got = compiled(one)
    want = torch.zeros_like(keys[0])
    want[:5] = keys[0][:5]
    assert torch.equal(got, want + one)
