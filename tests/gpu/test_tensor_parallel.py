"""Claim: on two GPUs every rank stages, and each accepts and writes what it has to, in every mode.

Coverage: the demo model and its EAGLE head in bfloat16, split over two GPUs, on vLLM's executor of several
processes, with CUDA graphs and steps scheduled ahead; the plugin comes into the workers by its entry point.
Tolerance: counts are equal, between ranks and to vLLM's own; acceptance within counting noise of `off`;
outputs may part from those of `off` where two tokens nearly tie, nowhere else; cache slots byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpu import near_ties, ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.engine,
    # How vLLM's worker processes end is not what is tested.
    pytest.mark.filterwarnings("default::pytest.PytestUnraisableExceptionWarning"),
]
if torch.cuda.device_count() < 2:
    pytest.skip("needs two NVIDIA GPUs", allow_module_level=True)

RANKS = 2
K = 4
PROMPTS = 128
NEW_TOKENS = 64


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with ranks.started(
        tmp_path_factory.mktemp("plugin"),
        drafts=K,
        self_check_interval=5,
        tensor_parallel_size=RANKS,
        max_model_len=1024,
        max_num_seqs=64,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.3,
        # Says how much there is without measuring it: other programs may use the GPUs meanwhile.
        kv_cache_memory_bytes=1 << 30,
        num_gpu_blocks_override=4096,
        worker_extension_cls="tests.gpu.rank_probe.RankProbe",
    ) as llm:
        yield llm


def _core(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core


def _run(llm: Any, mode: str) -> list[Any]:
    """Return what becomes of all prompts in a mode, once the steps still under way then are taken in."""
    from vllm import SamplingParams

    llm.collective_rpc("nwor_set_mode", args=(mode,))
    prompts = ranks.prompts(PROMPTS)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=5)
    outputs: list[Any] = llm.generate(prompts, params, use_tqdm=False)
    while _core(llm).batch_queue or _core(llm).scheduler.has_requests():
        llm.llm_engine.step()
    return outputs


def _counted_by_vllm(llm: Any) -> int:
    metrics = llm.get_metrics()
    return sum(m.value for m in metrics if m.name == "vllm:spec_decode_num_accepted_tokens")


def _measure(llm: Any, mode: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run in a mode and return what the ranks, NWOR's scheduler and vLLM counted meanwhile."""
    scheduler = _core(llm).scheduler
    arrived = {"windows": 0, "accepted": 0, "in_time": 0}
    original = scheduler._nwor_take

    def watched(record: Any) -> None:
        for request, (_, _, _, accepted) in record.windows.items():
            arrived["windows"] += 1
            arrived["accepted"] += accepted
            if request in scheduler.requests:  # it had not ended before its step's results
                arrived["in_time"] += accepted
        original(record)

    patch.setattr(scheduler, "_nwor_take", watched)
    before, counted_before = llm.collective_rpc("nwor_report"), _counted_by_vllm(llm)
    llm.collective_rpc("count_start")
    try:
        outputs = _run(llm, mode)
    finally:
        counts = llm.collective_rpc("count_stop")
    return {
        "outputs": outputs,
        "before": before,
        "reports": llm.collective_rpc("nwor_report"),
        "counts": counts,
        "arrived": arrived,
        "vllm": _counted_by_vllm(llm) - counted_before,
    }


def test_every_rank_is_an_nwor_worker(engine: Any) -> None:
    ranks = engine.collective_rpc("probe_rank")
    assert [rank["tensor_parallel_rank"] for rank in ranks] == list(range(RANKS))
    assert len({rank["device"] for rank in ranks}) == RANKS
    assert {rank["runner"] for rank in ranks} == {"NworGPUModelRunnerV2"}
    assert all(rank["plugin"] for rank in ranks)


def test_ranks_count_alike_and_as_vllm(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rates, outputs = {}, {}
    for mode in ("off", "stage", "cow"):
        seen = _measure(engine, mode, monkeypatch)
        monkeypatch.undo()
        counts, reports, before = seen["counts"], seen["reports"], seen["before"]
        print(mode, counts, seen["arrived"], "vLLM", seen["vllm"])
        assert [report["rank"] for report in reports] == list(range(RANKS))
        for report in reports:
            assert (report["mode"], report["fault"], report["unsupported"]) == (mode, None, None)
            assert report["ranks"] == RANKS
            assert report["token_bytes"] == reports[0]["token_bytes"] > 0
        steps = [report["steps"] - old["steps"] for report, old in zip(reports, before, strict=True)]
        assert len(set(steps)) == 1
        assert steps[0] > 10

        assert counts == [counts[0]] * RANKS
        for name, value in counts[0].items():
            assert value == reports[0]["counts"][name] - before[0]["counts"][name], name
        assert reports[0]["counts"]["direct_windows"] == before[0]["counts"]["direct_windows"]
        assert seen["arrived"]["windows"] == counts[0]["windows"] > 1000
        assert seen["arrived"]["accepted"] == counts[0]["accepted_tokens"]
        assert seen["arrived"]["in_time"] == seen["vllm"] > 0
        assert not _core(engine).scheduler._nwor_logged

        rates[mode] = counts[0]["accepted_tokens"] / counts[0]["draft_tokens"]
        noise = 3 * (0.25 / counts[0]["draft_tokens"]) ** 0.5 + 0.005
        assert abs(rates[mode] - rates["off"]) < noise, rates

        outputs[mode] = seen["outputs"]
        assert all(len(output.outputs[0].token_ids) == NEW_TOKENS for output in outputs[mode])
        near_ties.check(mode, outputs[mode], outputs["off"])


@pytest.mark.parametrize("mode", ["stage", "cow"])
def test_no_slot_of_a_rejected_token_changes_on_any_rank(engine: Any, mode: str) -> None:
    engine.collective_rpc("probe_start")
    try:
        _run(engine, mode)
    finally:
        seen = engine.collective_rpc("probe_stop")
    print(mode, seen)
    assert seen == [seen[0]] * RANKS
    assert seen[0]["stray"] == 0
    assert seen[0]["unwritten"] == 0
    assert seen[0]["wrong"] == 0
    assert seen[0]["rejected"] > 100
    assert seen[0]["accepted"] > 100
    for report in engine.collective_rpc("nwor_report"):
        assert report["fault"] is None
