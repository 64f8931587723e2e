"""Claim: an engine with NWOR stages its windows, whatever engine this process had before.

Coverage: the demo model on a CPU; an engine of stock vLLM first, whose attention classes vLLM keeps.
Control: where that choice is not forgotten, every window goes direct.
"""

from __future__ import annotations

from typing import Any

import pytest

from nwor.engine import worker_cpu
from nwor.engine.attention import backends
from tests.engine import engines

pytestmark = pytest.mark.engine


def _run_after_stock(nwor: dict[str, Any]) -> dict[str, Any]:
    """Return what an engine reports whose process has had one of stock vLLM."""
    from vllm import SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    AttentionBackendEnum.CPU_ATTN.clear_override()
    backends.forget_choices()
    settings = {"max_num_seqs": 4, "num_gpu_blocks_override": 64}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": [40 + place for place in range(20)]}]
    with engines.one_at_a_time() as make:
        make(**settings, additional_config={}, speculative_config=engines.eagle(3)).generate(prompts, params)
        llm = make(**settings, additional_config={"nwor": nwor}, speculative_config=engines.eagle(3))
        llm.generate(prompts, params)
        report: dict[str, Any] = llm.collective_rpc("nwor_report")[0]
    return report


def test_windows_are_staged() -> None:
    report = _run_after_stock({"mode": "stage"})
    assert (report["unsupported"], report["fault"]) == (None, None)
    assert report["counts"]["direct_windows"] == {}
    assert report["counts"]["commit_bytes"] > 0


def test_windows_are_direct_where_the_choice_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_cpu, "forget_choices", lambda: None)
    report = _run_after_stock({"mode": "stage"})
    assert report["unsupported"]["reason"] == "attention_backend"
    assert report["counts"]["commit_bytes"] == 0
