r"""Claim: with vLLM's Triton backend windows are staged where that was asked for, and all is as in `off`.

This runs them, and the engine's tests with Triton in FlashAttention's place:

    NWOR_TEST_ATTENTION=triton python -m pytest -rs -s tests/gpu/test_triton_attn.py \
        tests/gpu/test_engine.py tests/gpu/test_mixed_steps.py tests/gpu/test_features.py \
        tests/gpu/test_capture_errors.py tests/gpu/test_rounding.py

Coverage: one layer with vLLM's own kernels beside `verify_attention` and the commit: bfloat16, float16, fp8
caches and queries, both orders of heads and tokens in the cache, sliding window, soft cap, sinks. The demo
model on V2 and V1, with the setting and without.
Tolerance: rows behind the windows and the cache none; windows' rows as two bfloat16 kernels differ, with fp8
by what stock attention loses on the softmax's weights. With a calibrated scale Triton's writer divides
approximately: one element in 10,000 of an fp8 cache may be the next number.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nwor.engine.attention.target_layers import target_layers
from tests.gpu import demo_engine

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.triton_steps import FEATURES, ROWS, Case, Step, check  # noqa: E402

HEADS = [(4, 2, 64), (4, 1, 128), (4, 2, 96), (4, 2, 256)]
NATIVE_FP8 = torch.cuda.get_device_capability() >= (8, 9)

CASES = [
    *(Case("cuda", torch.bfloat16, heads=HEADS[0], feature=feature) for feature in FEATURES),
    *(Case("cuda", torch.bfloat16, heads=heads, heads_first=False) for heads in HEADS),
    Case("cuda", torch.float16, heads=HEADS[1]),
    *(Case("cuda", torch.bfloat16, "fp8", heads=HEADS[0], feature=feature) for feature in FEATURES),
    *(Case("cuda", torch.bfloat16, "fp8_e4m3", heads=heads, heads_first=False) for heads in HEADS),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_staged_step_is_that_of_off(case: Case) -> None:
    if case.cache != "auto" and not NATIVE_FP8:
        pytest.skip("Triton's backend has fp8 caches from compute capability 8.9 on")
    check(case, 2e-2 if case.cache == "auto" else 0.1)


@pytest.mark.parametrize("scale", [1.0, 0.25, 0.0173, 0.73])
def test_commits_hold_what_tritons_writer_makes_of_keys_and_values(scale: float) -> None:
    if not NATIVE_FP8:
        pytest.skip("Triton's backend has fp8 caches from compute capability 8.9 on")
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    from nwor import ops

    step = Step(Case("cuda", torch.bfloat16, "fp8", heads=(4, 2, 128), scale=scale))
    # Numbers of every size, some beyond what the format holds.
    step.key *= torch.logspace(-4, 3, ROWS, device="cuda").view(-1, 1, 1).to(torch.bfloat16) * scale
    step.value *= torch.logspace(-4, 3, ROWS, device="cuda").view(-1, 1, 1).to(torch.bfloat16) * scale
    stock, own = step.layer(TritonAttentionImpl), step.layer(TritonAttentionImpl)
    stock.impl.do_kv_cache_update(stock, step.key, step.value, stock.kv_cache, step.slots)
    caches = own.kv_cache.transpose(1, 2).split(128, dim=-1)
    tables = ops.LayerTables([caches[0]], [caches[1]])
    scales = torch.full((1, 1), scale, device="cuda")
    commit = ops.PreparedCommit(
        tables.of([(step.key, step.value)]),
        step.slots,
        step.metadata.query_start_loc,
        num_kv_heads=2,
        head_size=128,
        block_size=own.kv_cache.shape[2],
        num_blocks=own.kv_cache.shape[0],
        source_dtype=torch.bfloat16,
        kv_cache_dtype="fp8",
        k_scales=scales,
        v_scales=scales,
        source_index=None,
    )
    commit(torch.zeros(len(step.metadata.seq_lens), dtype=torch.int32, device="cuda"))
    rows = slice(0, ROWS)
    theirs, ours = step.lines(stock.kv_cache, rows), step.lines(own.kv_cache, rows)
    differ = theirs != ours
    print(f"scale {scale}: {int(differ.sum())} of {differ.numel()} elements differ")
    assert int((theirs.int() - ours.int()).abs().max()) <= 1  # neighbours in the format
    assert differ.float().mean() <= (0 if scale in (1.0, 0.25) else 1e-4)
    untouched = torch.ones(own.kv_cache.shape[0] * own.kv_cache.shape[2], dtype=torch.bool, device="cuda")
    untouched[step.slots] = False
    same = (own.kv_cache == step.cache).all(dim=-1).all(dim=1).flatten()
    assert bool(same[untouched].all())


PROMPTS = [f"class Item{i}:\n    def method_{i}(self, a, b):\n        return a + b\n" for i in range(48)]


def _tokens(llm: Any, mode: str) -> list[tuple[int, ...]]:
    from vllm import SamplingParams

    llm.collective_rpc("nwor_set_mode", args=(mode,))
    llm.collective_rpc("nwor_reset_stats")
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    core = llm.llm_engine.engine_core.engine_core
    while core.batch_queue or core.scheduler.has_requests():
        llm.llm_engine.step()
    return [tuple(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.engine
@pytest.mark.parametrize("name", ["graphs", "v1-graphs"])
def test_without_the_setting_windows_are_direct_and_the_reason_is_shown(name: str) -> None:
    with demo_engine.start(
        name, {"mode": "stage"}, backend="triton", asked=False, max_model_len=512, max_num_seqs=16
    ) as llm:
        off, stage = _tokens(llm, "off"), _tokens(llm, "stage")
        report = llm.collective_rpc("nwor_report")[0]
    assert report["unsupported"]["reason"] == "attention_backend"
    assert "--nwor-attention-backends" in report["unsupported"]["detail"]
    assert report["counts"]["direct_windows"].keys() == {"attention_backend"}
    assert (report["fault"], report["mode"], report["counts"]["commit_bytes"]) == (None, "off", 0)
    assert stage == off


@pytest.mark.engine
@pytest.mark.parametrize("name", ["graphs", "v1-graphs", "fp8", "v1-eager"])
def test_with_the_setting_windows_are_staged(name: str) -> None:
    from vllm.v1.attention.ops.triton_unified_attention import kernel_unified_attention as kernel

    def compiled() -> int:
        return sum(len(caches[0]) for caches in getattr(kernel, "device_caches", {}).values())

    if name == "fp8" and not NATIVE_FP8:
        pytest.skip("Triton's backend has fp8 caches from compute capability 8.9 on")
    with demo_engine.start(
        name,
        {"mode": "off", "self_check_interval": 3},
        backend="triton",
        max_model_len=512,
        max_num_seqs=16,
        max_num_batched_tokens=256,
    ) as llm:
        # The drafter of model runner V1 chooses a backend for itself.
        layers = target_layers(demo_engine.runner(llm)).values()
        assert {type(layer.impl).__name__ for layer in layers} == {"NworTritonAttentionImpl"}
        _tokens(llm, "off")
        before = compiled()
        _tokens(llm, "stage")
        report = llm.collective_rpc("nwor_report")[0]
        print(f"{name}: {compiled() - before} variants of Triton's attention compiled for staged steps")
    counts = report["counts"]
    assert (report["unsupported"], report["fault"], report["mode"]) == (None, None, "stage")
    assert counts["direct_windows"] == {}
    assert counts["commit_bytes"] > 0
    assert counts["rejected_tokens"] > 0
    assert report["self_checks"] > 3
    if not name.startswith("v1"):
        # Mixed steps run piece by piece.
        assert "FlashAttention 3" in report["mixed_graphs"]["why_not"]
        assert report["mixed_graphs"]["steps"] == 0
    if not name.endswith("eager"):
        assert report["capture_seconds"] > 0
