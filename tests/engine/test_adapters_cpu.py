"""Claim: LoRA adapters beside base requests, under an EAGLE head, cost neither a token, in any mode.

Coverage: the demo model on the CPU in float32 with a random adapter; requests of both kinds in one batch,
greedy.
The reference is an engine without a drafter, which gets each kind by itself.
Tolerance: none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import adapters
from tests.engine import engines
from tests.engine.runner import V2

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(V2, reason="stock vLLM cannot serve an adapter in runner V2 on a CPU"),
]

PROMPTS = [f"def item_{index}(self, a, b):\n    " for index in range(4)]


@pytest.fixture(scope="module")
def make() -> Iterator[Any]:
    with engines.one_at_a_time() as make_engine:
        yield make_engine


def _tokens(llm: Any, adapter: list[Any]) -> list[tuple[int, ...]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    outputs = llm.generate(PROMPTS[: len(adapter)], params, lora_request=adapter, use_tqdm=False)
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_adapters_and_base_requests_in_one_batch(make: Any, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    adapter = LoRARequest("adapter", 1, adapters.write(tmp_path / "adapter"))
    settings = {"enable_lora": True, "max_loras": 2, "max_num_seqs": 8, "enable_prefix_caching": False}
    alone = make(speculative_config=None, **settings)
    base, adapted = _tokens(alone, [None] * 4), _tokens(alone, [adapter] * 4)
    assert all(one != other for one, other in zip(base, adapted, strict=True))
    llm = make(
        worker_extension_cls="tests.engine.cache_probe.CacheProbe",
        **settings,
    )
    kinds = [None, adapter, adapter, None]
    expected = [adapted[index] if kind else base[index] for index, kind in enumerate(kinds)]
    for mode in ("off", "stage", "cow"):
        llm.collective_rpc("nwor_set_mode", args=(mode,))
        assert _tokens(llm, kinds) == expected, mode
    counts = llm.collective_rpc("nwor_report")[0]["counts"]
    assert counts["committed_tokens"] > 0
