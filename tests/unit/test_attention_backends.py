"""Claim: windows are staged with the attention backends that are asked for, and what they cannot is refused.

Coverage: vLLM's own classes on a CPU; the registry of backends; layers of vLLM's Triton backend, and what of
its features neither the verify kernel nor the commit has.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backends import triton_attn as stock
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from nwor.config import ATTENTION_BACKENDS, NworConfig
from nwor.engine.attention import backends
from nwor.engine.attention.attachment import check_on_cuda
from nwor.engine.attention.flash import NworFlashAttentionBackend
from nwor.engine.attention.layer_context import parameters_of
from nwor.engine.attention.triton_attn import NworTritonAttentionBackend
from nwor.engine.eligibility import Unsupported, check_layer, check_triton

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


# The setting.


def test_flash_alone_is_the_default() -> None:
    assert NworConfig().attention_backends == ("flash",)
    assert set(backends.BACKENDS) == set(ATTENTION_BACKENDS)
    assert backends.extended_backends(("flash",)) == (NworFlashAttentionBackend,)
    assert backends.extended_backends(("triton", "flash")) == BACKENDS[::-1]


@pytest.fixture
def registry() -> Any:
    """Leave the registry as it was."""
    members = (AttentionBackendEnum.FLASH_ATTN, AttentionBackendEnum.TRITON_ATTN)
    before = {member: member.get_path() for member in members if member.is_overridden()}
    for member in members:
        member.clear_override()
    yield members
    for member in members:
        member.clear_override()
        if member in before:
            backends.register_backend(member, before[member])


def test_an_engine_has_the_backends_that_it_asks_for(registry: Any) -> None:
    flash, triton = registry
    backends.register(("flash",))
    assert flash.get_class() is NworFlashAttentionBackend
    assert triton.get_class() is stock.TritonAttentionBackend
    backends.register(("flash", "triton"))
    assert (flash.get_class(), triton.get_class()) == BACKENDS
    # The next engine of the process has not asked for it.
    backends.register(("flash",))
    assert flash.get_class() is NworFlashAttentionBackend
    assert triton.get_class() is stock.TritonAttentionBackend
    # Somebody else's stays.
    backends.register_backend(AttentionBackendEnum.TRITON_ATTN, "some.module.Backend")
    backends.register(("flash",))
    assert triton.get_path() == "some.module.Backend"
