"""Claim: both parts of a step are made once for like layers, and name the rows that they should.

Coverage: FlashAttention's own metadata on a CPU, its schedules stood in for; steps with and without rows
behind the windows, layers of two shapes, slots of two groups, the step after. Attention itself needs a GPU:
tests/gpu/test_mixed_steps.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backends import fa_utils
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata

from nwor.engine.attention import split_step
from nwor.engine.attention.flash import NworFlashAttentionImpl
from nwor.engine.attention.layer_context import LayerContext
from nwor.engine.attention.split_step import SplitStep, split_views
from tests.unit.toy_layers import ToyLayers

SLOTS = torch.tensor([9, 10, 11, 20, 4, 5, 6, 7, 0, 1, 2])
WINDOW_ROWS = 4
CACHE = torch.zeros(4, 2, 16, 16)


@pytest.fixture
def toy() -> ToyLayers:
    return ToyLayers()


@pytest.fixture
def scheduled(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []

    def schedule(**arguments: Any) -> torch.Tensor:
        calls.append(arguments)
        return torch.tensor([len(calls)])

    monkeypatch.setattr(fa_utils, "get_scheduler_metadata", schedule, raising=False)
    return calls


def _begin(toy: ToyLayers) -> None:
    starts = torch.tensor([0, 3, 4, 11], dtype=torch.int32)
    toy.window_manager.begin(toy.window_manager.plan_step("abc", [3, 1, 7], [2, 0, 0]), starts, SLOTS[None])


def _metadata(tokens: int = 11) -> FlashAttentionMetadata:
    return FlashAttentionMetadata(
        num_actual_tokens=tokens,
        max_query_len=7,
        query_start_loc=torch.tensor([0, 3, 4, 11], dtype=torch.int32),
        max_seq_len=50,
        seq_lens=torch.tensor([30, 40, 50], dtype=torch.int32),
        block_table=torch.arange(6, dtype=torch.int32).view(3, 2),
        slot_mapping=SLOTS,
        scheduler_metadata=torch.tensor([99]),
        max_num_splits=5,
    )


def _impl(version: int = 3, heads: int = 4) -> Any:
    impl: Any = SimpleNamespace(
        vllm_flash_attn_version=version,
        num_heads=heads,
        num_kv_heads=2,
        head_size=8,
        sliding_window=(-1, -1),
        logits_soft_cap=0,
        kv_cache_dtype="auto",
    )
    impl.nwor_rest = partial(NworFlashAttentionImpl.nwor_rest, impl)
    return impl


def test_each_part_has_its_own_requests(toy: ToyLayers, scheduled: list[dict[str, Any]]) -> None:
    _begin(toy)
    metadata = _metadata()
    parts = split_views(toy.window, _impl(), metadata, CACHE)
    assert parts.starts.tolist() == [0, 3, 4]
    assert parts.seq_lens.tolist() == [30, 40]
    assert parts.block_table.tolist() == [[0, 1], [2, 3]]
    rest = parts.rest
    assert rest.query_start_loc.tolist() == [4, 11]  # rows of the whole step's tensors
    assert rest.seq_lens.tolist() == [50]
    assert rest.block_table.tolist() == [[4, 5]]
    assert (rest.num_actual_tokens, rest.max_num_splits) == (11, 5)
    assert rest.scheduler_metadata.tolist() == [1]
    (call,) = scheduled
    assert (call["batch_size"], call["num_splits"], call["page_size"]) == (1, 5, 16)
    assert call["cu_seqlens_q"] is rest.query_start_loc
    assert metadata.scheduler_metadata is not None  # the stock step's is untouched
    assert metadata.scheduler_metadata.tolist() == [99]


def test_like_layers_share_and_others_do_not(toy: ToyLayers, scheduled: list[dict[str, Any]]) -> None:
    _begin(toy)
    metadata = _metadata()
    parts = split_views(toy.window, _impl(), metadata, CACHE)
    assert split_views(toy.window, _impl(), metadata, CACHE) is parts
    assert split_views(toy.window, _impl(heads=8), metadata, CACHE) is not parts
    assert split_views(toy.window, _impl(), replace(metadata), CACHE) is not parts
    assert len(scheduled) == 3
    toy.window_manager.drop()
    _begin(toy)
    assert split_views(toy.window, _impl(), metadata, CACHE) is not parts


def test_a_step_of_windows_alone_has_no_rest(toy: ToyLayers, scheduled: list[dict[str, Any]]) -> None:
    _begin(toy)
    assert split_views(toy.window, _impl(), _metadata(tokens=WINDOW_ROWS), CACHE).rest is None
    assert scheduled == []


def test_other_versions_take_no_schedule(toy: ToyLayers, scheduled: list[dict[str, Any]]) -> None:
    _begin(toy)
    assert split_views(toy.window, _impl(version=2), _metadata(), CACHE).rest.scheduler_metadata is None
    assert scheduled == []


def test_slots_of_the_rest_leave_windows_out(toy: ToyLayers) -> None:
    unused: Any = None
    layer = toy.window.groups[0].layers[0]
    layer_context = LayerContext(toy.window, toy.window_manager.state, layer, unused, torch.empty(0))
    _begin(toy)
    rest = layer_context.rest_slots(SLOTS)
    assert rest.tolist() == [-1] * WINDOW_ROWS + SLOTS[WINDOW_ROWS:].tolist()
    assert layer_context.rest_slots(SLOTS) is rest
    other = SLOTS + 1
    assert layer_context.rest_slots(other).tolist() == [-1] * WINDOW_ROWS + other[WINDOW_ROWS:].tolist()
    assert SLOTS.tolist()[:2] == [9, 10]
    toy.window_manager.drop()
    _begin(toy)
    assert layer_context.rest_slots(SLOTS) is not rest


class Streams(SplitStep):
    """Notes, in order, what is launched where, and which launches a stream has waited for."""

    def __init__(self, name: str, aside: bool) -> None:
        rows = torch.zeros(2, dtype=torch.int32)
        kept = {name: (torch.zeros(1, 1, 1),) * 2} if aside else None
        super().__init__(4, rows, rows, {name: SLOTS}, kept, None)
        self.launched: list[tuple[str, frozenset[str]]] = []
        self.seen: dict[str, set[str]] = {"main": set(), "beside": set()}
        self.current = "main"

    def launch(self, what: str) -> None:
        self.launched.append((what, frozenset(self.seen[self.current])))
        self.seen[self.current].add(what)

    def fork(self) -> None:
        self.seen["beside"] |= self.seen["main"]

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.current = "beside"
        yield
        self.current = "main"

    def join(self) -> None:
        self.seen["main"] |= self.seen["beside"]


@pytest.mark.parametrize("aside", [False, True], ids=["kept", "copied"])
def test_attention_of_a_captured_layer_waits_for_its_writes(
    toy: ToyLayers, monkeypatch: pytest.MonkeyPatch, aside: bool
) -> None:
    """A short request without drafts stands among the windows, and may read what another has just written."""
    name = toy.names[0]
    split = toy.window.split = Streams(name, aside)
    monkeypatch.setattr(split_step.ops, "stage_window", lambda *_, **__: split.launch("copy"))
    monkeypatch.setattr(FlashAttentionImpl, "do_kv_cache_update", lambda *_: split.launch("write"))
    monkeypatch.setattr(FlashAttentionImpl, "forward", lambda *_: split.launch("rest"))
    monkeypatch.setattr(split, "rest_of", lambda *_: None)
    impl: Any = object.__new__(NworFlashAttentionImpl)
    impl.nwor = SimpleNamespace(
        window=toy.window,
        layer=toy.window.groups[0].layers[0],
        attend=lambda *_: split.launch("windows"),
    )
    some = torch.zeros(4, 1, 1)
    impl.do_kv_cache_update(None, some, some, CACHE, SLOTS)
    impl.forward(None, some, some, some, CACHE, _metadata(), some)
    split.launch("next")
    waited = dict(split.launched)
    assert "write" in waited["windows"]
    assert "write" in waited["rest"]
    assert "windows" not in waited["rest"]  # beside each other
    assert waited["next"] >= {"write", "windows", "rest", *(["copy"] if aside else [])}
