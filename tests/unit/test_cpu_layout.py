"""Claim: under speculation a CPU cache has a layout that strides express wherever vLLM's kernels have one.

Coverage: layouts of each instruction set and dtype, looked at by writing into a cache. The builder of vLLM's
CPU backend on a processor that says that it has AMX, whether or not it has; with and without speculation and
a KV connector. The tokens: tests/engine, tests/server.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm import _custom_ops as ops
from vllm.v1.attention.backends import cpu_attn
from vllm.v1.kv_cache_interface import FullAttentionSpec

from nwor.engine.attention.cpu import NworCPUAttentionMetadataBuilder
from nwor.engine.attention.cpu_layout import cache_views
from nwor.engine.eligibility import Unsupported

#: Whether vLLM is a build for CPUs: another lacks what writes into their caches.
KERNELS = hasattr(torch.ops._C, "cpu_attn_reshape_and_cache")
needs_kernels = pytest.mark.skipif(not KERNELS, reason="vLLM's kernels for CPUs are not there")
SPECULATION = SimpleNamespace(num_speculative_tokens=4)


@needs_kernels
@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_views_show_what_vllm_writes(isa: str, dtype: torch.dtype) -> None:
    cache = torch.zeros(3, 2, 32, 128, dtype=dtype)
    key, value = torch.randn(2, 5, 2, 64).to(dtype)
    slots = torch.tensor([70, 3, 31, 32, 95])
    parts = cache.view(3, 2, 64, 64).chunk(2, dim=2)
    ops.cpu_attn_reshape_and_cache(key, value, *parts, slots, isa)
    for written, view in zip((key, value), cache_views(cache, isa), strict=True):
        assert torch.equal(view[slots // 32, slots % 32], written)
        assert view.count_nonzero() == written.count_nonzero()


@needs_kernels
def test_an_eight_bit_cache() -> None:
    if not torch.cpu._is_avx512_supported():
        pytest.skip("vLLM has no float8 cache for this processor")
    cache = torch.zeros(3, 2, 32, 128, dtype=torch.uint8)
    key_cache, _ = cache_views(cache, "vec", "fp8_e4m3")
    assert key_cache.shape == (3, 32, 2, 64)


@needs_kernels
@pytest.mark.parametrize(("isa", "dtype"), [("amx", torch.bfloat16), ("unheard-of", torch.float32)], ids=str)
def test_other_layouts_are_refused(isa: str, dtype: torch.dtype) -> None:
    with pytest.raises(Unsupported, match=isa):
        cache_views(torch.zeros(3, 2, 32, 128, dtype=dtype), isa)


def layout(
    monkeypatch: pytest.MonkeyPatch, builder: type, dtype: torch.dtype = torch.bfloat16, **settings: Any
) -> tuple[str, str, int | None]:
    """Return the layout that a builder takes, its layer's, and the longest window to stand first."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    monkeypatch.setattr(cpu_attn, "get_num_attention_heads_from_layers", lambda *_: 4)
    monkeypatch.setattr(cpu_attn.current_platform, "get_cpu_architecture", lambda: cpu_attn.CpuArchEnum.X86)
    layer = SimpleNamespace(impl=SimpleNamespace(sliding_window=(-1, -1)))
    monkeypatch.setattr(cpu_attn, "get_layers_from_vllm_config", lambda *_: {"layer": layer})
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(),
        model_config=SimpleNamespace(dtype=dtype),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context={"layer": layer}),
        **{"speculative_config": SPECULATION, "kv_transfer_config": None, **settings},
    )
    spec = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=dtype)
    made = builder(spec, ["layer"], config, torch.device("cpu"))
    return made.isa, layer.isa, made.reorder_batch_threshold


def test_vllm_packs_bfloat16_for_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout(monkeypatch, cpu_attn.CPUAttentionMetadataBuilder)[:2] == ("amx", "amx")


def test_under_speculation_the_cache_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout(monkeypatch, NworCPUAttentionMetadataBuilder) == ("vec", "vec", 5)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"speculative_config": None}, "amx"),
        ({"kv_transfer_config": SimpleNamespace()}, "amx"),
        ({"dtype": torch.float32}, "vec"),
        ({"dtype": torch.float16}, "vec"),
    ],
    ids=["no speculation", "KV connector", "float32", "float16"],
)
def test_elsewhere_it_is_as_vllm_chose(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], expected: str
) -> None:
    isa, of_layer, _ = layout(monkeypatch, NworCPUAttentionMetadataBuilder, **settings)
    assert (isa, of_layer) == (expected, expected)
