r"""Claim: with vLLM's FlashInfer backend windows are staged where that was asked for, and all is as in `off`.

FlashInfer compiles its kernels when they are first asked for, which takes
minutes. Where that is too long, or where there is no nvcc, compile them elsewhere and carry the folder over:

    python benchmarks/kernels/flashinfer_modules.py --engine --out modules
    export NWOR_FLASHINFER_MODULES=$PWD/modules VLLM_HAS_FLASHINFER_CUBIN=1 VLLM_USE_FLASHINFER_SAMPLER=0

This runs them, and the engine's tests with FlashInfer in FlashAttention's place:

    python -m pytest -rs -s tests/gpu/test_flashinfer_attn.py
    NWOR_TEST_ATTENTION=flashinfer python -m pytest -rs -s tests/gpu/test_engine.py \
        tests/gpu/test_mixed_steps.py tests/gpu/test_capture_errors.py tests/gpu/test_rounding.py

Coverage: the demo model on V2 and V1, with the setting and without. On Hopper each with XQA, which has full
graphs of windows, and with FlashInfer's own kernels, which have none and plan on the host. Steps of windows
alone and beside prompts; cache slots by the self-check; outputs beside those of `off`.
Tolerance: outputs part at near-ties only, as two bfloat16 kernels do.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nwor.engine.attention.target_layers import target_layers
from tests.gpu import demo_engine, flashinfer_modules, near_ties

pytestmark = [pytest.mark.gpu, pytest.mark.engine]
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
if (why_not := flashinfer_modules.why_not()) is not None:
    pytest.skip(why_not, allow_module_level=True)

#: Whether decodes run in kernels of TensorRT-LLM: XQA on compute capability 9 and 12, trtllm-gen on 10.
WAYS = {"trtllm": None, "native": False}
# Some are longer than a step's rows: their chunks stand beside windows.
PROMPTS = [
    f"class Item{i}:\n    def method_{i}(self, a, b):\n        return a + b\n" * (1 + 5 * (i % 7 == 6))
    for i in range(48)
]


def _run(llm: Any, mode: str) -> dict[str, Any]:
    from vllm import SamplingParams

    llm.collective_rpc("nwor_set_mode", args=(mode,))
    llm.collective_rpc("nwor_reset_stats")
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True, logprobs=5)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    core = llm.llm_engine.engine_core.engine_core
    while core.batch_queue or core.scheduler.has_requests():
        llm.llm_engine.step()
    tokens, logprobs = near_ties.read(outputs)
    return {"tokens": tokens, "logprobs": logprobs}


def _start(name: str, nwor: dict[str, Any], way: str, asked: bool = True) -> Any:
    return demo_engine.start(
        name,
        nwor,
        backend="flashinfer",
        asked=asked,
        max_model_len=1024,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        attention_config={"use_trtllm_attention": WAYS[way]},
    )


@pytest.mark.parametrize("way", WAYS)
def test_where_it_is_not_asked_for_windows_are_direct_and_the_reason_is_shown(way: str) -> None:
    with _start("graphs", {"mode": "stage", "attention_backends": ["flash"]}, way, asked=False) as llm:
        _run(llm, "off")  # prompts are cached from then on
        off, stage = _run(llm, "off"), _run(llm, "stage")
        report = llm.collective_rpc("nwor_report")[0]
    assert report["unsupported"]["reason"] == "attention_backend"
    assert "name flashinfer" in report["unsupported"]["detail"]
    assert report["counts"]["direct_windows"].keys() == {"attention_backend"}
    assert (report["fault"], report["mode"], report["counts"]["commit_bytes"]) == (None, "off", 0)
    difference, gap = near_ties.differences(stage, off)
    assert difference <= near_ties.MOST_DIFFERENCE
    assert gap <= near_ties.MOST_GAP


@pytest.mark.parametrize("name", ["graphs", "piecewise", "eager", "v1-graphs", "v1-eager"])
@pytest.mark.parametrize("way", WAYS)
def test_where_it_is_asked_for_windows_are_staged(name: str, way: str) -> None:
    with _start(name, {"mode": "off", "self_check_interval": 3}, way) as llm:
        runner = demo_engine.runner(llm)
        layers = target_layers(runner).values()
        assert {type(layer.impl).__name__ for layer in layers} == {"NworFlashInferImpl"}
        _run(llm, "off")
        off, stage = _run(llm, "off"), _run(llm, "stage")
        report = llm.collective_rpc("nwor_report")[0]
        synchronizing = demo_engine.own_synchronizations(llm, lambda: _run(llm, "stage"))
    counts = report["counts"]
    assert (report["unsupported"], report["fault"], report["mode"]) == (None, None, "stage")
    assert counts["direct_windows"] == {}
    assert counts["commit_bytes"] > 0
    assert counts["rejected_tokens"] > 0
    assert report["self_checks"] > 3
    difference, gap = near_ties.differences(stage, off)
    same = sum(x == y for x, y in zip(stage["tokens"], off["tokens"], strict=True))
    print(
        f"{name}, {way}: {same} of {len(PROMPTS)} outputs as in off, the others part at gaps up to {gap:.3f}"
    )
    assert difference <= near_ties.MOST_DIFFERENCE
    assert gap <= near_ties.MOST_GAP
    assert synchronizing == []
    # FlashInfer's own kernels have no full graphs of windows.
    if name.endswith("graphs"):
        assert (report["capture_seconds"] > 0) == (way == "trtllm")
