"""Claim: with vLLM's Triton backend windows are routed past the cache, and other rows to Triton's kernels.

Coverage: vLLM's own classes on a CPU, with stand-ins for the kernels, which need a GPU. What they are called
with in steps of windows alone, beside prompts and after errors; views of caches in each of vLLM's layouts.
What the kernels compute is looked at in test_triton_attn_interpreted.py, and on a GPU in
tests/gpu/test_triton_attn.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backends import triton_attn as stock
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend, FlashAttentionImpl
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheTensor,
    KVQuantMode,
    compute_layout_strides,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from nwor.engine.attention import layer_context
from nwor.engine.attention.attachment import staged_layer
from nwor.engine.attention.cut_metadata import ALIGNMENT, aligned, rest_of
from nwor.engine.attention.flash import NworFlashAttentionImpl
from nwor.engine.attention.layer_context import LayerContext, parameters_of
from nwor.engine.attention.staged_attention import layer_cache_views, stock_attention
from nwor.engine.attention.triton_attn import NworTritonAttentionBackend, NworTritonAttentionImpl
from nwor.modes import Mode
from nwor.windows.window import Window, group_layers
from tests.unit.toy_layers import ToyLayers

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 64, 16, 6
#: Two windows, a prompt's chunk and a whole prompt.
LENGTHS, DRAFTS, ROWS, WINDOW_ROWS = [3, 1, 7, 2], [2, 0, 0, 0], 13, 4
STARTS = torch.tensor([0, 3, 4, 11, 13], dtype=torch.int32)
SLOTS = torch.arange(20, 20 + ROWS)


def metadata_of(tokens: int = ROWS, **more: Any) -> stock.TritonAttentionMetadata:
    segments = torch.empty(0)
    return stock.TritonAttentionMetadata(
        num_actual_tokens=tokens,
        max_query_len=7,
        query_start_loc=STARTS,
        max_seq_len=50,
        seq_lens=torch.tensor([30, 40, 50, 2], dtype=torch.int32),
        block_table=torch.arange(20, dtype=torch.int32).view(4, 5),
        slot_mapping=SLOTS,
        seq_threshold_3D=16,
        num_par_softmax_segments=16,
        softmax_segm_output=segments,
        softmax_segm_max=segments,
        softmax_segm_expsum=segments,
        causal=True,
        **more,
    )


def impl_of(kind: Any = NworTritonAttentionImpl, cache: str = "auto", **more: Any) -> Any:
    return kind(HEADS, SIZE, 0.125, KV_HEADS, None, None, cache, **more)


class Kernels:
    """Stands in for Triton's kernels and for NWOR's, and keeps what they were called with, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.fails = False
        monkeypatch.setattr(stock, "unified_attention", lambda **settings: self._note("attend", settings))
        monkeypatch.setattr(stock, "triton_reshape_and_cache_flash", self._write)
        monkeypatch.setattr(layer_context.ops, "verify_attention", self._verify)

    def _note(self, what: str, arguments: dict[str, Any]) -> None:
        self.calls.append((what, arguments))

    def _write(self, key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, *_: Any) -> None:
        names = ("key", "value", "key_cache", "value_cache", "slots")
        self._note("write", dict(zip(names, (key, value, key_cache, value_cache, slots), strict=True)))

    def _verify(self, *arguments: Any, **settings: Any) -> None:
        if self.fails:
            raise RuntimeError("injected")
        names = ("query", "key", "value", "key_cache", "value_cache", "table", "starts", "lengths", "output")
        self._note("verify", {**dict(zip(names, arguments, strict=False)), **settings})

    def take(self) -> list[str]:
        """Return the names of the calls so far."""
        return [what for what, _ in self.calls]

    def of(self, what: str) -> dict[str, Any]:
        """Return the arguments of the only call of a name."""
        (found,) = [arguments for name, arguments in self.calls if name == what]
        return found


class Layer:
    """One layer of a target model in Triton's attention, bound to a rank."""

    def __init__(self, **more: Any) -> None:
        toy = ToyLayers(layers=1, longest=3)
        self.manager, name = toy.window_manager, toy.names[0]
        self.kv_cache = torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * SIZE)
        one = torch.tensor(1.0)
        self.impl = impl_of(**more)
        self.layer: Any = SimpleNamespace(
            impl=self.impl, kv_cache=self.kv_cache, head_size=SIZE, _k_scale=one, _v_scale=one
        )
        staged = staged_layer(name, self.layer, layer_cache_views, torch.float32)
        window = self.manager.window = Window(group_layers([(0, staged)]))
        parameters = parameters_of(self.layer, 3)
        self.impl.nwor = LayerContext(window, self.manager.state, staged, parameters, torch.empty(0))
        self.query = torch.randn(ROWS, HEADS, SIZE)
        self.key, self.value = torch.randn(2, ROWS, KV_HEADS, SIZE)
        self.output = torch.zeros(ROWS, HEADS, SIZE)

    def begin(self, lengths: list[int], drafts: list[int]) -> None:
        plan = self.manager.plan_step("abcd"[: len(lengths)], lengths, drafts)
        self.manager.begin(plan, STARTS, SLOTS[None])

    def run(self, metadata: Any, **scales: Any) -> torch.Tensor:
        rows = metadata.num_actual_tokens
        self.impl.do_kv_cache_update(self.layer, self.key, self.value, self.kv_cache, SLOTS[:rows])
        result: torch.Tensor = self.impl.forward(
            self.layer, self.query, self.key, self.value, self.kv_cache, metadata, self.output, **scales
        )
        return result


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Kernels:
    return Kernels(monkeypatch)


def test_beside_prompts_triton_gets_the_other_rows_alone(kernels: Kernels) -> None:
    layer = Layer()
    layer.begin(LENGTHS, DRAFTS)
    metadata = metadata_of()
    assert layer.run(metadata) is layer.output
    assert kernels.take() == ["write", "verify", "attend"]
    assert kernels.of("write")["slots"].tolist() == [-1] * WINDOW_ROWS + SLOTS[WINDOW_ROWS:].tolist()
    windows = kernels.of("verify")
    assert windows["query"] is layer.query
    assert windows["starts"].tolist() == [0, 3, 4]
    assert windows["lengths"].tolist() == [30, 40]
    assert windows["table"].tolist() == metadata.block_table[:2].tolist()
    rest = kernels.of("attend")
    # Its kernels search the rows' requests from row 0 on.
    assert rest["cu_seqlens_q"].tolist() == [0, 7, 9]
    assert rest["cu_seqlens_q"].dtype is torch.int32
    for name, whole in (("q", layer.query), ("out", layer.output)):
        assert rest[name].data_ptr() == whole[WINDOW_ROWS:].data_ptr()
        assert len(rest[name]) == ROWS - WINDOW_ROWS
    assert rest["seqused_k"].tolist() == [50, 2]
    assert rest["block_table"].tolist() == metadata.block_table[2:].tolist()
    assert (rest["max_seqlen_q"], rest["max_seqlen_k"], rest["causal"]) == (7, 50, True)
    assert rest["k_descale"].shape == (2, KV_HEADS)


def test_like_layers_share_the_parts(kernels: Kernels) -> None:
    layer = Layer()
    layer.begin(LENGTHS, DRAFTS)
    metadata = metadata_of()
    layer.run(metadata)
    first = kernels.of("attend")["cu_seqlens_q"]
    layer.impl.forward(layer.layer, layer.query, None, None, layer.kv_cache, metadata, layer.output)
    assert kernels.calls[-1][1]["cu_seqlens_q"] is first


def test_a_step_of_windows_alone_is_nothing_for_triton(kernels: Kernels) -> None:
    layer = Layer()
    layer.begin([3, 1], [2, 0])
    layer.run(metadata_of(tokens=WINDOW_ROWS))
    assert kernels.take() == ["verify"]
    assert not layer.kv_cache.any()


def test_other_steps_are_stock(kernels: Kernels) -> None:
    layer = Layer()
    metadata = metadata_of()
    layer.run(metadata)  # no window is open
    layer.impl.nwor = None  # of a draft layer
    layer.run(metadata)
    assert kernels.take() == ["write", "attend"] * 2
    for what, call in kernels.calls:
        if what == "write":
            assert call["slots"].tolist() == SLOTS.tolist()
        else:
            assert call["cu_seqlens_q"] is STARTS
            assert len(call["q"]) == ROWS
    output = layer.impl.forward(layer.layer, layer.query, None, None, layer.kv_cache, None, layer.output)
    assert not output.any()  # a profiling run


def test_after_an_error_the_whole_step_is_stock(kernels: Kernels) -> None:
    layer = Layer()
    layer.begin(LENGTHS, DRAFTS)
    kernels.fails = True
    layer.run(metadata_of())
    assert_written_before_it_is_read(kernels)
    assert "injected" in (layer.manager.state.fault or "")


def assert_written_before_it_is_read(kernels: Kernels) -> None:
    """The window's rows, held back, come to the cache; then all rows of the step attend."""
    assert kernels.take() == ["write", "write", "attend"]
    rest, window = (call["slots"].tolist() for what, call in kernels.calls if what == "write")
    assert rest == [-1] * WINDOW_ROWS + SLOTS[WINDOW_ROWS:].tolist()
    assert window == SLOTS[:WINDOW_ROWS].tolist()
    assert kernels.of("attend")["cu_seqlens_q"] is STARTS
    assert len(kernels.of("attend")["q"]) == ROWS


def test_a_quantized_output_finds_windows_in_the_cache(kernels: Kernels) -> None:
    layer = Layer()
    layer.begin(LENGTHS, DRAFTS)
    scale = torch.tensor(0.5)
    layer.run(metadata_of(), output_scale=scale)
    assert_written_before_it_is_read(kernels)
    assert kernels.of("attend")["output_scale"] is scale
    assert "quantizes its output" in (layer.manager.state.fault or "")
    assert layer.manager.state.mode is Mode.OFF


def test_a_part_keeps_what_the_kernels_are_chosen_by() -> None:
    metadata = metadata_of()
    rest = rest_of(metadata, 2, WINDOW_ROWS)
    changed = {"num_actual_tokens", "query_start_loc", "seq_lens", "block_table", "slot_mapping"}
    for name, value in vars(metadata).items():
        if name not in changed:
            assert getattr(rest, name) is value, name
    assert rest.num_actual_tokens == ROWS - WINDOW_ROWS
    assert rest.slot_mapping.tolist() == SLOTS[WINDOW_ROWS:].tolist()
    assert metadata.query_start_loc is STARTS
    assert STARTS.tolist() == [0, 3, 4, 11, 13]


@pytest.mark.parametrize(
    "more",
    [{"mm_prefix_range_tensor": torch.zeros(4, 1, 2)}, {"rswa_prefix_lens": torch.zeros(4)}],
    ids=["images", "rswa"],
)
def test_what_cannot_be_cut_is_an_error(more: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(more))):
        rest_of(metadata_of(**more), 2, WINDOW_ROWS)
    metadata = metadata_of()
    metadata.causal = torch.ones(4, dtype=torch.int32)
    with pytest.raises(ValueError, match="causal"):
        rest_of(metadata, 2, WINDOW_ROWS)


def test_addresses_for_which_triton_would_compile_anew_are_copied() -> None:
    whole = torch.arange(64, dtype=torch.int32)
    assert whole.data_ptr() % ALIGNMENT == 0
    assert aligned(whole[4:]).data_ptr() == whole[4:].data_ptr()
    part = aligned(whole[5:])
    assert part.data_ptr() % ALIGNMENT == 0
    assert part.tolist() == whole[5:].tolist()


def spec_of(dtype: torch.dtype) -> FullAttentionSpec:
    quantized = dtype is torch.uint8
    return FullAttentionSpec(
        block_size=BLOCK,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        dtype=dtype,
        kv_quant_mode=KVQuantMode.FP8_PER_TENSOR if quantized else KVQuantMode.NONE,
    )


@pytest.mark.parametrize("layout", list(KVCacheLayout), ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8], ids=["bf16", "fp8"])
def test_views_are_those_that_vllm_writes_and_reads(
    kernels: Kernels, layout: KVCacheLayout, dtype: torch.dtype
) -> None:
    spec, layers = spec_of(dtype), ["a", "b", "c"]
    assert stock.TritonAttentionBackend.customize_spec(spec) == FlashAttentionBackend.customize_spec(spec)
    strides = compute_layout_strides(spec, BLOCKS, len(layers), layout)
    size = BLOCKS * len(layers) * spec.page_size_bytes
    place = KVCacheTensor(size, layers, layer_stride=strides[0], block_stride=strides[1])
    caches = create_kv_cache_views(
        torch.zeros(size, dtype=torch.int8), spec, BLOCKS, layout, place, kernel_block_size=BLOCK
    )
    one = torch.tensor(1.0)
    for cache in caches:
        impl = impl_of(cache="fp8" if dtype is torch.uint8 else "auto")
        layer: Any = SimpleNamespace(impl=impl, kv_cache=cache, head_size=SIZE, _k_scale=one, _v_scale=one)
        kernels.calls.clear()
        rows = torch.zeros(ROWS, KV_HEADS, SIZE)
        impl.do_kv_cache_update(layer, rows, rows, cache, SLOTS)
        query = torch.zeros(ROWS, HEADS, SIZE)
        impl.forward(layer, query, rows, rows, cache, metadata_of(), query)
        written, read = kernels.of("write"), kernels.of("attend")
        for own, name, short in zip(
            layer_cache_views(layer), ("key_cache", "value_cache"), "kv", strict=True
        ):
            assert own.shape == (BLOCKS, BLOCK, KV_HEADS, SIZE)
            for theirs in (written[name], read[short]):
                assert (own.data_ptr(), own.shape, own.stride()) == (
                    theirs.data_ptr(),
                    theirs.shape,
                    theirs.stride(),
                )
            # What the kernels of commit and attention ask for.
            assert own.stride(-1) == 1
            assert all(stride * own.element_size() % 16 == 0 for stride in own.stride()[:-1])


def test_the_stock_writer_is_found_past_our_own(kernels: Kernels) -> None:
    layer = Layer()
    layer.begin([3, 1], [2, 0])
    rows = layer.key[:WINDOW_ROWS]
    stock_attention(layer.impl).do_kv_cache_update(layer.layer, rows, rows, layer.kv_cache, SLOTS[:4])
    assert kernels.take() == ["write"]
    layer.impl.nwor.layer.direct_write(rows, rows, SLOTS[:4])
    assert kernels.take() == ["write"] * 2
    assert layer.impl.nwor.window.sources == {}  # nothing was staged
    for own, theirs in ((NworFlashAttentionImpl, FlashAttentionImpl), (NworTritonAttentionImpl, None)):
        found = stock_attention(object.__new__(own)).do_kv_cache_update.__func__
        assert found is (theirs or stock.TritonAttentionImpl).do_kv_cache_update


def test_the_backend_stays_vllms_to_whoever_asks() -> None:
    assert type(rest_of(metadata_of(), 2, WINDOW_ROWS)) is stock.TritonAttentionMetadata
    assert NworTritonAttentionBackend.get_name() == "TRITON_ATTN"
    assert not NworTritonAttentionBackend.forward_includes_kv_cache_update
    assert issubclass(NworTritonAttentionBackend.get_builder_cls(), stock.TritonAttentionMetadataBuilder)
    assert NworTritonAttentionBackend.get_builder_cls().supports_draft_decode_metadata_update
