"""Claim: on two GPUs ranks verify the same trees, accept the same nodes, and write nothing else.

Coverage: the demo model and its EAGLE head in bfloat16, split over two GPUs, with CUDA graphs and steps
scheduled ahead; grown trees of 16 nodes; few requests and many; a fault of one rank alone.
Control: trees accept more than the chains of mode `off`, and after the fault windows are chains on both ranks
until the mode is set anew.
Tolerance: counts are equal between ranks; outputs may part from those of `off` where two tokens nearly tie,
nowhere else; cache slots byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.engine.breaking import MESSAGE
from tests.gpu import near_ties, ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    # How vLLM's worker processes end is not what is tested.
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
]
if torch.cuda.device_count() < 2:
    pytest.skip("needs two NVIDIA GPUs", allow_module_level=True)

RANKS, PROMPTS, NEW_TOKENS = 2, 48, 48
TREE: dict[str, Any] = {"nodes": 16, "depth": 6, "width": 4}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ranks.started(
        tmp_path_factory.mktemp("plugin"),
        drafts=TREE["nodes"],
        self_check_interval=5,
        tree=TREE,
        tensor_parallel_size=RANKS,
        max_model_len=1024,
        max_num_seqs=32,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.3,
        kv_cache_memory_bytes=1 << 30,
        num_gpu_blocks_override=4096,
        worker_extension_cls="tests.gpu.tree_rank_probe.TreeRankProbe",
    ) as llm:
        yield llm


def _run(llm: Any, mode: str | None, batch: int = PROMPTS) -> list[Any]:
    """Return what becomes of all prompts in a mode, or in the one in force."""
    from vllm import SamplingParams

    if mode is not None:
        llm.collective_rpc("nwor_set_mode", args=(mode,))
    prompts = ranks.prompts(PROMPTS)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5)
    outputs: list[Any] = []
    for start in range(0, PROMPTS, batch):
        outputs += llm.generate(prompts[start : start + batch], params, use_tqdm=False)
    core = llm.llm_engine.engine_core.engine_core
    while core.batch_queue or core.scheduler.has_requests():
        llm.llm_engine.step()
    return outputs


def _counted(llm: Any, mode: str | None, batch: int = PROMPTS) -> tuple[list[Any], float]:
    """Return outputs, and accepted tokens a window; ranks count alike."""
    llm.collective_rpc("count_start")
    try:
        outputs = _run(llm, mode, batch)
    finally:
        counts = llm.collective_rpc("count_stop")
    print(mode, counts)
    assert counts == [counts[0]] * RANKS
    return outputs, counts[0]["accepted_tokens"] / counts[0]["windows"]


def test_ranks_accept_alike_and_more_than_chains(engine: Any) -> None:
    _run(engine, "off")  # from here on all prompts are in the prefix cache
    expected, chains = _counted(engine, "off")
    for batch in (PROMPTS, 3):
        outputs, accepted = _counted(engine, "stage", batch)
        assert accepted > 1.05 * chains
        near_ties.check(f"by {batch}", outputs, expected)
    for report in engine.collective_rpc("nwor_report"):
        assert (report["mode"], report["fault"], report["unsupported"]) == ("stage", None, None)
        assert report["self_checks"] > 4


def test_no_slot_of_a_rejected_token_changes_on_any_rank(engine: Any) -> None:
    engine.collective_rpc("nwor_set_mode", args=("stage",))
    engine.collective_rpc("probe_start")
    try:
        _run(engine, "stage")
    finally:
        seen = engine.collective_rpc("probe_stop")
    print(seen)
    assert seen == [seen[0]] * RANKS
    assert (seen[0]["stray"], seen[0]["unwritten"], seen[0]["wrong"]) == (0, 0, 0)
    assert min(seen[0]["accepted"], seen[0]["rejected"]) > 1000


@pytest.mark.parametrize("where", ["place", "settle"])
def test_a_fault_of_one_rank_alone(engine: Any, where: str) -> None:
    expected = _run(engine, "off")
    _, trees = _counted(engine, "stage")
    engine.collective_rpc("break_once", args=(where, 4, 1))
    broken = _run(engine, None)
    assert engine.collective_rpc("was_broken") == ["", where]
    near_ties.check("broken", broken, expected)
    first, second = engine.collective_rpc("nwor_report")
    assert (first["mode"], first["fault"]) == ("stage", None)
    assert second["mode"] == "off"
    assert MESSAGE in second["fault"]
    chains = _run(engine, None)
    near_ties.check("chains", chains, expected)
    again, accepted = _counted(engine, "stage")
    near_ties.check("again", again, expected)
    assert accepted > 0.9 * trees
