"""Claim: compiled in one piece, as vLLM does on a CPU by default, `stage` still gives the tokens of `off`.

The compiler reuses the memory of keys and values once their layer has attended; a window has to be copied
aside before. Coverage: the demo model in float32, Inductor. Tolerance: none.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine import engines

pytestmark = [
    pytest.mark.engine,
    # vLLM's packed weights free themselves while the compiler traces, which the compiler does not like.
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
]


def test_windows_survive_a_compiler_that_reuses_memory() -> None:
    from vllm import SamplingParams

    prompts = [f"class Item{i}:\n    def method_{i}(self, a, b):\n        return a + b" for i in range(12)]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    seen: dict[str, Any] = {}
    with engines.one_at_a_time() as make:
        llm = make(
            enforce_eager=False,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            num_gpu_blocks_override=64,
        )
        compilation = llm.llm_engine.vllm_config.compilation_config
        assert compilation.mode.name == "DYNAMO_TRACE_ONCE"
        assert compilation.backend == "inductor"
        for mode in ("off", "stage", "cow"):
            llm.collective_rpc("nwor_set_mode", args=(mode,))
            llm.collective_rpc("nwor_reset_stats")
            tokens = [tuple(o.outputs[0].token_ids) for o in llm.generate(prompts, params, use_tqdm=False)]
            report = llm.collective_rpc("nwor_report")[0]
            assert report["fault"] is None
            seen[mode] = tokens, report["counts"]
    off = seen["off"]
    for mode in ("stage", "cow"):
        tokens, counts = seen[mode]
        assert tokens == off[0]
        assert counts["accepted_tokens"] == off[1]["accepted_tokens"] > 0
        assert counts["direct_windows"] == {}
    staged = seen["stage"][1]
    assert staged["stage_bytes"] == staged["baseline_bytes"]  # float32, as the cache: every row was copied
    assert seen["cow"][1]["stage_bytes"] == 0
