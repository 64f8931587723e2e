"""Claim: draft layers attend for the rows that a pass is about, and write where it writes.

Coverage: layers of NWOR's FlashAttention and CPU backends, vLLM's own methods stood in for; metadata of last
rows; which metadata are causal. What comes out is compared with vLLM's own pass in
tests/engine/test_first_pass_cpu.py and tests/gpu/test_first_pass.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata

from nwor.engine.attention import flash
from nwor.engine.attention.cpu import NworCPUAttentionImpl
from nwor.engine.attention.draft_pass import AllWritten, LastRowsPass, WrittenPass, attending, is_causal
from nwor.engine.attention.flash import NworFlashAttentionImpl
from nwor.engine.attention.split_step import splits_for

CACHE = torch.zeros(4, 1, 2, 8)


@pytest.fixture(params=[NworFlashAttentionImpl, NworCPUAttentionImpl])
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A draft layer; its implementation notes what vLLM's own methods are called with."""
    stock = FlashAttentionImpl if request.param is NworFlashAttentionImpl else CPUAttentionBackendImpl
    impl = object.__new__(request.param)
    impl.num_heads, impl.num_kv_heads, impl.head_size = 2, 1, 4
    impl.sliding_window, impl.logits_soft_cap = (-1, -1), 0.0
    impl.calls = []
    monkeypatch.setattr(
        stock, "do_kv_cache_update", lambda self, *args: self.calls.append(("written", args[-1]))
    )
    monkeypatch.setattr(
        stock, "forward", lambda self, *args, **_: self.calls.append(("attended", args[5])) or args[6]
    )
    return SimpleNamespace(impl=impl, layer_name="draft")


def run(layer: Any, metadata: Any) -> None:
    """Run a layer as vLLM does: keys and values are written, then it attends."""
    rows = torch.zeros(3, 1, 4)
    layer.impl.do_kv_cache_update(layer, rows, rows, CACHE, "slots")
    layer.impl.forward(layer, rows, rows, rows, CACHE, metadata, torch.zeros(3, 8))


def test_a_layer_that_is_told_of_no_pass_is_vllms(layer: Any) -> None:
    run(layer, "step")
    assert layer.impl.calls == [("written", "slots"), ("attended", "step")]


def test_the_first_part_ends_when_keys_and_values_are_written(layer: Any) -> None:
    with attending([layer], WrittenPass()), pytest.raises(AllWritten):
        run(layer, "step")
    assert layer.impl.calls == [("written", "slots")]
    assert layer.impl.nwor_draft is None
    # Handlers of errors on the way of a model's call, torch.fx's among them, let it pass.
    assert not issubclass(AllWritten, Exception)


def test_a_pass_without_attention_does_not_end(layer: Any) -> None:
    with attending([layer], WrittenPass()):
        run(layer, None)
    assert layer.impl.calls == [("written", "slots"), ("attended", None)]


def test_the_second_part_attends_for_last_rows_and_writes_nothing(layer: Any) -> None:
    made: list[Any] = []

    def last_rows(metadata: Any, starts: Any, seq_lens: Any, kv_cache: Any) -> Any:
        made.append((metadata, starts, seq_lens, kv_cache is CACHE))
        return f"last of {metadata}"

    layer.impl.nwor_last_rows = last_rows
    with attending([layer], LastRowsPass("starts", "lengths")):  # type: ignore[arg-type]
        run(layer, "step")
    assert layer.impl.calls == [("attended", "last of step")]
    assert made == [("step", "starts", "lengths", True)]


def test_metadata_of_last_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "scheduled", lambda impl, metadata, kv_cache: metadata)
    step = FlashAttentionMetadata(
        num_actual_tokens=300,
        max_query_len=290,
        query_start_loc=torch.tensor([0, 5, 6, 296, 300], dtype=torch.int32),
        max_seq_len=500,
        seq_lens=torch.tensor([106, 101, 490, 304], dtype=torch.int32),
        block_table=torch.arange(16, dtype=torch.int32).view(4, 4),
        slot_mapping=torch.arange(300),
        scheduler_metadata=torch.ones(3),
        max_num_splits=32,
    )
    starts, lengths = torch.tensor([0, 1, 2, 3]), torch.tensor([104, 101, 490])
    impl = object.__new__(NworFlashAttentionImpl)
    last = impl.nwor_last_rows(step, starts, lengths, CACHE)
    assert (last.num_actual_tokens, last.max_query_len, last.max_seq_len) == (3, 1, 500)
    assert last.query_start_loc is starts
    assert last.seq_lens is lengths
    assert last.block_table.tolist() == step.block_table[:3].tolist()
    assert len(last.slot_mapping) == 3
    assert last.max_num_splits == splits_for(3) == 32
    many = torch.zeros(4, dtype=torch.int32).expand(256, 4)
    wide = FlashAttentionMetadata(**{**vars(step), "block_table": many})
    assert impl.nwor_last_rows(wide, starts, torch.zeros(256), CACHE).max_num_splits == splits_for(256) < 32
    # Where nothing is captured FlashAttention chooses.
    eager = FlashAttentionMetadata(**{**vars(step), "max_num_splits": 0})
    assert impl.nwor_last_rows(eager, starts, lengths, CACHE).max_num_splits == 0


def test_which_steps_are_causal() -> None:
    layers = [SimpleNamespace(layer_name=name) for name in ("a", "b")]

    def step(causal: Any, ranges: Any = None) -> Any:
        return SimpleNamespace(causal=causal, mm_prefix_query_range_tensor=ranges)

    assert is_causal({"a": step(True), "b": SimpleNamespace(causal=True), "c": step(False)}, layers)
    assert not is_causal({"a": step(True), "b": step(False)}, layers)
    assert not is_causal({"a": step(True), "b": step(torch.ones(2, dtype=torch.bool))}, layers)
    assert not is_causal({"a": step(True), "b": step(True, torch.zeros(3, 2))}, layers)
    assert not is_causal({"a": step(True)}, layers)
    assert not is_causal(None, layers)
    assert not is_causal([{"a": step(True), "b": step(True)}], layers)
