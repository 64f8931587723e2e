"""Claim: on a GPU the short ways of sampling give what vLLM's own give, and the host never waits.

Coverage: the batches of tests/engine/test_greedy_rejection_cpu.py and larger ones, with Triton's launches and
with the short ones; drafts inside and outside of CUDA graphs; NaNs stay within the vocabulary; an engine
with and without the setting. Tolerance: none, places that nobody writes included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)


from nwor import ops
from nwor.engine.fastpath import greedy_sampling, triton_launch
from tests.drafting import PADDING, Speculator, draft
from tests.gpu import demo_engine
from tests.greedy_batches import (
    CASES,
    LENGTHS,
    Case,
    check_in_place,
    filled_memory,
    make,
    make_sampler,
    short,
    stock,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
LARGE = [
    Case(requests=requests, vocab=vocab, dtype=dtype, lengths=lengths, synthetic=synthetic, placeholders=0.05)
    for requests, vocab in ((1, 128256), (16, 32000), (64, 32003), (128, 128256))
    for dtype in (torch.bfloat16, torch.float32)
    for lengths in LENGTHS[:2]
    for synthetic in (False, True)
]


@pytest.fixture(params=["triton", "fast"])
def launches(request: pytest.FixtureRequest) -> Iterator[str]:
    """The way to Triton's kernels."""
    if request.param == "fast":
        assert triton_launch.apply() > 0
    yield request.param
    for kernel in triton_launch._kernels():
        if isinstance(kernel.run, triton_launch.FastLaunch):
            kernel.run = kernel.run._stock


@pytest.mark.parametrize("case", CASES + LARGE, ids=str)
def test_same_tokens(case: Case, launches: str) -> None:
    workspace = ops.make_argmax_workspace(case.requests * (case.k + 1), DEVICE)
    for turn in range(3):
        batch = make(replace(case, seed=case.seed + 100 * turn), DEVICE)
        with filled_memory():
            want, got = stock(batch, case.k), short(batch, case, workspace)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)
    assert not workspace.any()


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("greedy", [True, False])
def test_in_place_of_the_samplers_method(greedy: bool, block: bool) -> None:
    check_in_place(
        Case(requests=30, vocab=32000, lengths="mixed", seed=21), DEVICE, greedy=greedy, block=block
    )


def test_tokens_of_rows_with_nans_are_within_the_vocabulary() -> None:
    case = Case(requests=8)
    batch = make(case, DEVICE)
    batch.logits[::3, 100] = float("nan")
    batch.logits[4] = float("nan")
    sampled, num_sampled = short(batch, case, ops.make_argmax_workspace(len(batch.logits), DEVICE))
    for row, count in zip(sampled.tolist(), num_sampled.tolist(), strict=True):
        assert all(0 <= token < case.vocab for token in row[:count])


def test_the_host_never_waits() -> None:
    case = Case(requests=16, vocab=32000)
    batch = make(case, DEVICE)
    indices = batch.first  # copies the mapping, which the model runner has on the host
    sampler, speculator = make_sampler(batch, case.k), Speculator(DEVICE)
    greedy_sampling.apply(speculator, sampler, case.requests, DEVICE)
    sampler.sampler.apply_sampling_params = lambda logits, *others: logits
    hidden = torch.randn(4, 5000, device=DEVICE)

    def step() -> None:
        sampler._verify(*indices, None, batch.draft_sampled)
        draft(speculator, hidden)

    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sampler._verify.short == 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_drafts_in_graphs(dtype: torch.dtype) -> None:
    """Graphs of several sizes share the speculator's workspace, with eager calls between their replays."""
    speculator = Speculator(DEVICE, max_num_reqs=64)
    assert greedy_sampling.apply(speculator, None, 64, DEVICE)["drafting"] is None
    hidden = torch.zeros(64, 32000 + PADDING, dtype=dtype, device=DEVICE)
    draft(speculator, hidden)
    graphs, drafts = {}, {}
    for rows in (64, 16, 1):
        graphs[rows] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[rows]):
            drafts[rows] = draft(speculator, hidden[:rows])
    for turn in range(10):
        hidden.normal_().sub_(turn)
        want = hidden[:, :-PADDING].argmax(dim=-1)
        for rows, graph in graphs.items():
            graph.replay()
            assert torch.equal(drafts[rows], want[:rows])
        assert torch.equal(draft(speculator, hidden[:7]), want[:7])
    short_way: Any = speculator.sample_draft
    assert short_way.short == 1 + len(graphs) + 10


def _tokens(fast: bool) -> list[tuple[int, ...]]:
    settings = {"mode": "off", "modes": ["off"], "fast_sampling": fast}
    with demo_engine.start("graphs", settings, max_model_len=512, max_num_seqs=8) as llm:
        return _sample(llm, fast)


def _sample(llm: Any, fast: bool) -> list[tuple[int, ...]]:
    from vllm import SamplingParams

    runner = demo_engine.runner(llm)
    ways = vars(runner.speculator).get("sample_draft"), vars(runner.rejection_sampler).get("_verify")
    assert [way is not None for way in ways] == [fast, fast]
    params = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    prompts = [f"def item_{i}(a, b):\n    return" for i in range(8)]
    # One at a time, so that both engines run the same batches.
    outputs = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0] for prompt in prompts]
    random = SamplingParams(temperature=0.8, seed=3, max_tokens=16, ignore_eos=True)
    outputs.append(llm.generate(prompts[:1], random, use_tqdm=False)[0].outputs[0])
    if fast:
        assert ways[0].short > 0
        assert ways[1].short > 0
    return [tuple(output.token_ids) for output in outputs]


@pytest.mark.engine
def test_an_engine_gives_the_same_tokens() -> None:
    assert _tokens(True) == _tokens(False)
