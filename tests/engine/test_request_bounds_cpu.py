"""Claim: a request that bounds its drafts gets the tokens of an engine without speculation, and so do others.

Coverage: the demo model in float32 on the CPU; bounds of 0, 1, 2, more than there are, and none, mixed in one
batch; greedy and seeded sampling; every mode. Model runner V1; with less work V1 and V2 with steps
scheduled ahead (see runner.py). And requests whose drafts are hardly ever accepted, which stop by themselves.
Tolerance: none. Seeded requests that draft are compared with an engine that drafts for all alike: rejection
sampling takes other random numbers than sampling token by token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from nwor.config import DraftBounds
from nwor.engine.draft_lengths.request_acceptance import AVERAGED
from nwor.engine.draft_lengths.request_bounds import MAX_DRAFT_TOKENS
from server.options import CPU_SAMPLING
from tests.engine import engines
from tests.engine.runner import AHEAD, V2, sized

pytestmark = pytest.mark.engine

DRAFTS = 4
REQUESTS = sized(12, 12, 6)
NEW_TOKENS = sized(24, 12, 12)
BOUNDS = (None, 0, 1, None, 2, 9)
#: Prefix hits change what the drafter sees, and so seeded requests' tokens. Stock vLLM on a CPU takes the
#: temperature of verify steps from memory that nobody has set.
COMMON = {
    "max_num_seqs": 5 if V2 else 8,
    "max_num_batched_tokens": 96,
    "num_gpu_blocks_override": 96,
    "enable_prefix_caching": False,
    "worker_extension_cls": CPU_SAMPLING,
    "per_request_spec_decode_metrics": "summary",
}


@pytest.fixture(scope="module")
def make() -> Iterator[Any]:
    with engines.one_at_a_time() as start:
        yield start


def _prompts() -> list[str]:
    bodies = ["return a + b", "for i in range(10):\n        total += i", "raise ValueError(message)", "x = {"]
    return [
        f"class Item{i % 9}:\n    def method_{i}(self, a, b):\n        " + bodies[i % 4] * (1 + i % 3)
        for i in range(REQUESTS)
    ]


def _bound(number: int) -> int | None:
    return BOUNDS[number % len(BOUNDS)]


def _run(llm: Any, *, seeded: bool, bounded: bool) -> list[Any]:
    from vllm import SamplingParams

    params = []
    for number in range(REQUESTS):
        bound = _bound(number) if bounded else None
        params.append(
            SamplingParams(
                temperature=0.8 if seeded else 0.0,
                seed=1000 + number,
                max_tokens=NEW_TOKENS,
                ignore_eos=True,
                extra_args=None if bound is None else {MAX_DRAFT_TOKENS: bound},
            )
        )
    return [output.outputs[0] for output in llm.generate(_prompts(), params, use_tqdm=False)]


def _tokens(outputs: list[Any]) -> list[tuple[int, ...]]:
    return [tuple(output.token_ids) for output in outputs]


@pytest.fixture(scope="module")
def expected(make: Any) -> dict[bool, list[tuple[int, ...]]]:
    """Tokens of an engine without speculation, by whether they were sampled."""
    # Every prompt takes one step: stock vLLM does not live through a seeded one that takes several.
    settings = {**COMMON, "per_request_spec_decode_metrics": "none", "max_num_batched_tokens": 2048}
    # With NWOR's attention backend, which vLLM looks up once a process; nothing can be staged.
    llm = make(**settings, speculative_config=None)
    return {seeded: _tokens(_run(llm, seeded=seeded, bounded=False)) for seeded in (False, True)}


@pytest.fixture(scope="module")
def seeded_by_number() -> dict[int, tuple[int, ...]]:
    """Sampled tokens of bounded requests, as the first mode gave them."""
    return {}


@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
@pytest.mark.parametrize("mode", ["off", "stage", "cow"])
def test_mixed_bounds_change_no_token(
    make: Any, expected: Any, seeded_by_number: dict[int, tuple[int, ...]], mode: str, seeded: bool
) -> None:
    llm = make(**COMMON, speculative_config=engines.eagle(DRAFTS))
    for answer in llm.collective_rpc("nwor_set_mode", args=(mode,)):
        assert answer["new"] == mode
    unbounded = _tokens(_run(llm, seeded=seeded, bounded=False)) if seeded else expected[seeded]
    llm.collective_rpc("nwor_reset_stats")
    outputs = _run(llm, seeded=seeded, bounded=True)
    tokens = _tokens(outputs)
    for number in range(REQUESTS):
        bound = _bound(number)
        if not seeded or bound == 0:
            assert tokens[number] == expected[seeded][number], (number, bound)
        elif bound is None or bound >= DRAFTS:
            assert tokens[number] == unbounded[number], (number, bound)
        else:  # other windows draw other random numbers, but the same ones in each mode
            assert tokens[number] == seeded_by_number.setdefault(number, tokens[number]), (number, bound)
    _check_figures(llm, outputs, mode)


def _check_figures(llm: Any, outputs: list[Any], mode: str) -> None:
    """Compare each request's windows with its bound and its tokens, and their sum with the workers' count."""
    windows = accepted = drafted = 0
    for number, output in enumerate(outputs):
        bound, figures = _bound(number), output.spec_decode_metrics
        most = DRAFTS if bound is None else min(bound, DRAFTS)
        assert {kind[0] for kind in figures.nwor} <= {mode}
        assert all(0 < drafts <= most for _, _, drafts, _ in figures.nwor)
        given = sum((1 + count) * times for (_, _, _, count), times in figures.nwor.items())
        # Its prompt gave the first token. What the last window gave beyond the limit is cut.
        single = figures.nwor_steps_without_drafts
        assert NEW_TOKENS <= 1 + single + given <= NEW_TOKENS + most + AHEAD
        if bound == 0:
            assert not figures.nwor
            # The step that is under way when it ends is one of them, where steps are scheduled ahead.
            assert single in (NEW_TOKENS - 1, NEW_TOKENS)
        elif bound is not None:
            assert single == 0
        assert figures.nwor_max_draft_tokens == bound
        assert figures.nwor_why_bounded == ("" if bound is None else "asked")
        windows += sum(figures.nwor.values())
        drafted += sum(kind[2] * times for kind, times in figures.nwor.items())
        accepted += sum(kind[3] * times for kind, times in figures.nwor.items())
    assert llm.llm_engine.engine_core.engine_core.scheduler._nwor_logged == set()
    counts = llm.collective_rpc("nwor_report")[0]["counts"]
    late = REQUESTS if AHEAD else 0  # windows of a step that was under way when their request ended
    for name, ours, most in (
        ("windows", windows, 1),
        ("draft_tokens", drafted, DRAFTS),
        ("accepted_tokens", accepted, DRAFTS),
    ):
        assert 0 <= counts[name] - ours <= late * most, name
    assert counts["direct_windows"] == {}


@pytest.mark.skipif(V2, reason="takes too many steps where kernels are interpreted")
def test_drafts_that_are_hardly_ever_accepted_stop_by_themselves(make: Any) -> None:
    """Hot sampling among rare tokens, unknown to the drafter, leaves its drafts without a chance."""
    from vllm import SamplingParams

    bounds = DraftBounds(0, DRAFTS)
    lengths = [list(entry) for entry in bounds.schedule]
    llm = make(
        **COMMON,
        speculative_config={**engines.eagle(DRAFTS), "num_speculative_tokens_per_batch_size": lengths},
        additional_config={"nwor": {"mode": "stage", "draft_tokens": str(bounds)}},
    )
    rare = list(range(2000, 4000))
    hot = SamplingParams(
        temperature=2.0, seed=1, allowed_token_ids=rare, max_tokens=sized(200, 120), ignore_eos=True
    )
    tame = SamplingParams(temperature=0.0, max_tokens=sized(100, 50), ignore_eos=True)
    prompts = _prompts()[:4]
    alone = _tokens([output.outputs[0] for output in llm.generate(prompts, tame, use_tqdm=False)])
    outputs = [
        output.outputs[0]
        for output in llm.generate(prompts + prompts[:2], [tame] * 4 + [hot] * 2, use_tqdm=False)
    ]
    assert _tokens(outputs[:4]) == alone
    for output in outputs[:4]:
        assert output.spec_decode_metrics.nwor_why_bounded == ""
        assert output.spec_decode_metrics.nwor_max_draft_tokens is None
    for output in outputs[4:]:
        figures = output.spec_decode_metrics
        windows = sum(figures.nwor.values())
        assert set(output.token_ids) <= set(rare)
        assert figures.nwor_why_bounded == "rarely accepted"
        assert figures.nwor_max_draft_tokens == 0
        assert figures.nwor_steps_without_drafts > 0
        assert windows >= AVERAGED
        probes = {kind: times for kind, times in figures.nwor.items() if kind[2] == 1}
        assert sum(probes.values()) >= 1, "no window of one draft probed"
    assert llm.llm_engine.engine_core.engine_core.scheduler._nwor_logged == set()
