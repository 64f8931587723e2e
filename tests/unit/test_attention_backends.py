"""Claim: windows are staged with the attention backends that are asked for, and what they cannot is refused.

Coverage: vLLM's own classes on a CPU; the registry of backends; layers of vLLM's Triton backend, and what of
its features neither the verify kernel nor the commit has; which backends are extended where none is named.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backends import triton_attn as stock
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from nwor.config import ATTENTION_BACKENDS, NworConfig
from nwor.engine.attention import attachment, backends
from nwor.engine.attention.attachment import check_cache, check_on_cuda
from nwor.engine.attention.choice import AUTO, check_worthwhile, resolved
from nwor.engine.attention.flash import NworFlashAttentionBackend
from nwor.engine.attention.layer_context import parameters_of
from nwor.engine.attention.staged_attention import layer_cache_views
from nwor.engine.attention.triton_attn import NworTritonAttentionBackend
from nwor.engine.eligibility import Unsupported, check_layer, check_triton
from nwor.modes import Mode
from nwor.worker_state import WorkerState

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS = 4, 2, 64, 16, 6
BACKENDS = (NworFlashAttentionBackend, NworTritonAttentionBackend)


def attention_layer(backend: Any, cache: str = "auto", **more: Any) -> Any:
    """Return one of vLLM's plain layers with an implementation of a backend."""
    from vllm.model_executor.layers.attention import Attention

    layer = Attention.__new__(Attention)
    impl = backend.get_impl_cls()(HEADS, SIZE, 0.125, KV_HEADS, None, None, cache, **more)
    one = torch.tensor(1.0)
    for name, value in {
        "impl": impl,
        "attn_backend": backend,
        "kv_cache": torch.zeros(BLOCKS, KV_HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16),
        "head_size": SIZE,
        "_k_scale": one,
        "_v_scale": one,
    }.items():
        object.__setattr__(layer, name, value)
    return layer


def test_a_layer_takes_part_with_the_backends_that_are_named() -> None:
    layer = attention_layer(NworTritonAttentionBackend)
    assert check_layer("layers.0", layer, *BACKENDS) is NworTritonAttentionBackend
    with pytest.raises(Unsupported, match="uses NworTritonAttentionImpl") as verdict:
        check_layer("layers.0", layer, NworFlashAttentionBackend)
    assert verdict.value.reason == "attention_backend"
    plain = attention_layer(stock.TritonAttentionBackend)
    with pytest.raises(Unsupported, match="--nwor-attention-backends") as verdict:
        check_layer("layers.0", plain, NworFlashAttentionBackend)
    assert verdict.value.reason == "attention_backend"


def config_of(fused: bool = False) -> Any:
    return SimpleNamespace(
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(fuse_attn_quant=fused))
    )


@pytest.mark.parametrize(
    ("more", "fused", "reason"),
    [
        ({}, False, None),
        ({"cache": "fp8"}, False, None),
        ({"cache": "fp8_e4m3"}, False, None),
        ({"cache": "fp8_e5m2"}, False, "cache_format"),
        ({"cache": "fp8_per_token_head"}, False, "cache_format"),
        ({"cache": "int8_per_token_head"}, False, "cache_format"),
        ({"cache": "int4_per_token_head"}, False, "cache_format"),
        ({"chunk_lookback": 1}, False, "attention_feature"),
        ({}, True, "attention_feature"),
    ],
)
def test_what_the_kernels_do_not_compute_is_refused(
    more: dict[str, Any], fused: bool, reason: str | None
) -> None:
    layer = attention_layer(NworTritonAttentionBackend, **more)
    assert check_layer("layers.0", layer, *BACKENDS).nwor_check is check_triton
    if reason is None:
        check_triton("layers.0", layer, config_of(fused))
        return
    with pytest.raises(Unsupported) as verdict:
        check_triton("layers.0", layer, config_of(fused))
    assert verdict.value.reason == reason


def test_alibi_is_refused_with_triton_too() -> None:
    layer = attention_layer(NworTritonAttentionBackend)
    layer.impl.alibi_slopes = torch.ones(HEADS)
    with pytest.raises(Unsupported, match="ALiBi"):
        check_layer("layers.0", layer, *BACKENDS)


@pytest.mark.parametrize(
    ("dtype", "cache", "size", "capability", "reason"),
    [
        (torch.bfloat16, torch.bfloat16, SIZE, (8, 0), None),
        (torch.bfloat16, torch.bfloat16, SIZE, (12, 0), None),
        (torch.bfloat16, torch.bfloat16, SIZE, (7, 5), "attention_feature"),
        (torch.float32, torch.float32, SIZE, (9, 0), "attention_feature"),
        (torch.bfloat16, torch.float16, SIZE, (9, 0), "cache_format"),
        (torch.bfloat16, torch.bfloat16, 80, (9, 0), "attention_feature"),
    ],
)
def test_what_the_cuda_library_is_not_compiled_for_is_refused(
    dtype: torch.dtype, cache: torch.dtype, size: int, capability: tuple[int, int], reason: str | None
) -> None:
    layer = attention_layer(NworTritonAttentionBackend)
    object.__setattr__(layer, "kv_cache", layer.kv_cache.to(cache))
    layer.impl.head_size = size
    if reason is None:
        check_on_cuda("layers.0", layer, dtype, capability)
        return
    with pytest.raises(Unsupported) as verdict:
        check_on_cuda("layers.0", layer, dtype, capability)
    assert verdict.value.reason == reason


def test_what_a_layer_computes_is_read_as_flashattentions_is() -> None:
    sinks = torch.ones(HEADS)
    layer = attention_layer(NworTritonAttentionBackend, sinks=sinks, logits_soft_cap=30.0)
    layer.impl.sliding_window = (127, 0)
    parameters = parameters_of(layer, 5)
    assert (parameters.scale, parameters.sliding_window, parameters.softcap) == (0.125, 128, 30.0)
    assert parameters.sinks is sinks
    assert parameters_of(attention_layer(NworTritonAttentionBackend), 5).sliding_window == -1


@pytest.mark.parametrize(
    ("shape", "strides", "offset", "fits"),
    [
        ((4, 16, 2, 64), (4096, 64, 2048, 1), 0, True),  # head by head
        ((4, 16, 2, 64), (4096, 256, 128, 1), 0, True),  # token by token
        ((4, 16, 2, 64), (4096, 64, 2048, 1), 64, True),
        ((4, 16, 2, 64), (4096, 1, 2048, 16), 0, False),  # transposed, as keys packed for AMD's kernels are
        ((4, 16, 2, 64), (4096, 68, 2048, 1), 0, False),  # with something behind each token
        ((4, 16, 2, 64), (4096, 64, 2048, 1), 4, False),
    ],
)
def test_a_cache_that_kernels_cannot_read_is_refused_before_a_step(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, fits: bool
) -> None:
    cache = torch.zeros(1 << 15, dtype=torch.bfloat16).as_strided(shape, strides, offset)
    layer: Any = SimpleNamespace(name="layers.0", key_cache=cache, value_cache=cache)
    if fits:
        check_cache(layer)
        return
    with pytest.raises(Unsupported, match=r"layers\.0") as verdict:
        check_cache(layer)
    assert verdict.value.reason == "cache_format"


class UntestedBackend(NworTritonAttentionBackend):
    """With a cache that it sees in a way of its own, transposed."""

    nwor_untested = "on a machine"

    @staticmethod
    def nwor_cache_views(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
        key_cache, value_cache = layer_cache_views(layer)
        return value_cache, key_cache


@pytest.mark.parametrize("backend", [NworTritonAttentionBackend, UntestedBackend])
def test_a_backend_sees_its_caches_and_the_log_says_what_nobody_has_tried(
    monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    said: list[str] = []
    log = SimpleNamespace(warning=lambda text, *more: said.append(text % more))
    monkeypatch.setattr(attachment, "logger", log)
    config = config_of()
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    config.parallel_config = SimpleNamespace(tensor_parallel_size=1)
    state = WorkerState(NworConfig(), Mode.STAGE)
    layer = attention_layer(backend)
    made = attachment.Attachment(config, torch.device("cpu"), state, 5)
    window, ((module, context),) = made.layer_contexts(
        {"layers.0": layer}, {"layers.0": 0}, layer_cache_views, (backend,)
    )
    assert module is layer
    assert window.layer_names == {"layers.0"}
    key_cache, value_cache = layer_cache_views(layer)
    untested = backend is UntestedBackend
    assert context.layer.key_cache.data_ptr() == (value_cache if untested else key_cache).data_ptr()
    text = "windows are staged with TRITON_ATTN attention, of which no test has run on a machine"
    assert said == ([text] if untested else [])


# The setting.


def test_the_default_is_flash_and_flashinfer_where_vllm_prefers_it() -> None:
    assert NworConfig().attention_backends == ("auto",)
    assert {*backends.BACKENDS, AUTO} == set(ATTENTION_BACKENDS)
    for capability in (None, (8, 0), (9, 0), (12, 0)):
        assert resolved(("auto",), capability) == ("flash",)
    for capability in ((10, 0), (10, 3)):
        assert resolved(("auto",), capability) == ("flash", "flashinfer")
        assert resolved(("triton", "auto", "flash"), capability) == ("triton", "flash", "flashinfer")
        assert resolved(("flash",), capability) == ("flash",)
    assert backends.extended_backends(("auto",)) == (NworFlashAttentionBackend,)
    assert backends.extended_backends(("triton", "flash")) == BACKENDS[::-1]


def test_a_backend_that_is_not_installed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    monkeypatch.delitem(sys.modules, "vllm.v1.attention.backends.flashinfer", raising=False)
    assert backends.extended_backends(("flashinfer", "flash")) == (NworFlashAttentionBackend,)


FLASHINFER = SimpleNamespace(get_name=lambda: "FLASHINFER")


def expected_to_pay(
    names: tuple[str, ...],
    major: int,
    longest: int,
    heads: int = 32,
    cache: str = "auto",
    backend: Any = None,
) -> bool:
    impl = SimpleNamespace(num_heads=heads, num_kv_heads=8, kv_cache_dtype=cache)
    layer = SimpleNamespace(impl=impl)
    try:
        check_worthwhile("layers.0", layer, backend or FLASHINFER, names, (major, 0), longest)
    except Unsupported:
        return False
    return True


def test_flashinfer_that_nobody_named_is_staged_where_that_is_expected_to_pay() -> None:
    auto = ("auto",)
    assert expected_to_pay(auto, 10, 4)  # four heads for each KV head: 16 rows
    assert not expected_to_pay(auto, 10, 5)
    assert not expected_to_pay(auto, 10, 3, heads=64)
    assert expected_to_pay(auto, 10, 2, heads=64)
    assert not expected_to_pay(auto, 10, 2, cache="fp8")
    assert expected_to_pay(("auto", "flashinfer"), 10, 64, cache="fp8")
    assert expected_to_pay(auto, 10, 64, backend=NworFlashAttentionBackend)
    assert expected_to_pay(auto, 9, 64)
    layer = SimpleNamespace(impl=SimpleNamespace(num_heads=8, num_kv_heads=1, kv_cache_dtype="auto"))
    with pytest.raises(Unsupported, match=r"40 query rows.*name flashinfer in attention_backends") as verdict:
        check_worthwhile("layers.0", layer, FLASHINFER, auto, (10, 0), 5)
    assert verdict.value.reason == "attention_backend"


@pytest.fixture
def registry() -> Any:
    """Leave the registry as it was."""
    members = tuple(member for each in backends.BACKENDS.values() for member in each)
    before = {member: member.get_path() for member in members if member.is_overridden()}
    for member in members:
        member.clear_override()
    yield members
    for member in members:
        member.clear_override()
        if member in before:
            backends.register_backend(member, before[member])


def test_an_engine_has_the_backends_that_it_asks_for(registry: Any) -> None:
    flash, triton, flashinfer, *rocm = registry
    backends.register(("auto",))
    assert flash.get_class() is NworFlashAttentionBackend
    assert not any(other.is_overridden() for other in registry[1:])
    backends.register(("flash",))
    assert flash.get_class() is NworFlashAttentionBackend
    assert triton.get_class() is stock.TritonAttentionBackend
    backends.register(("flash", "triton"))
    assert (flash.get_class(), triton.get_class()) == BACKENDS
    backends.register(("flashinfer", "rocm"))
    assert not flash.is_overridden()
    assert flashinfer.get_path() == "nwor.engine.attention.flashinfer.NworFlashInferBackend"
    assert all(member.is_overridden() for member in rocm)
    # The next engine of the process has not asked for it.
    backends.register(("flash",))
    assert flash.get_class() is NworFlashAttentionBackend
    assert triton.get_class() is stock.TritonAttentionBackend
    # Somebody else's stays.
    backends.register_backend(AttentionBackendEnum.TRITON_ATTN, "some.module.Backend")
    backends.register(("flash",))
    assert triton.get_path() == "some.module.Backend"
