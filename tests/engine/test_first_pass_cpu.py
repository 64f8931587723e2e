"""Claim: a first pass of the drafter in two parts drafts what vLLM's drafts, and leaves the cache as it does.

Coverage: model runner V2 on the CPU, in Triton's interpreter; the demo model in float32, with its EAGLE-3
head and with one of EAGLE's first kind; prompts beside verification, chunks of a long one, prefix hits, steps
without drafts; what the drafter's layer attends for. Reference: vLLM's own pass, in an engine started with
``fast_drafting`` off.
Tolerance: drafts and outputs exact; keys and values to 1e-5, since products of fewer rows add up in another
order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nwor.config import DraftBounds
from tests.engine.runner import V2

pytestmark = [pytest.mark.engine, pytest.mark.skipif(not V2, reason="V1's drafters have no such pass")]

import torch  # noqa: E402

from nwor.engine.attention.cpu import layer_cache_views  # noqa: E402
from nwor.engine.fastpath import first_pass  # noqa: E402
from tests import eagle_heads  # noqa: E402
from tests.engine import engines  # noqa: E402

PROMPTS = [
    "def add(a, b):\n    return",
    "import os\n" * 30,
    "x",
    "class A:\n    pass\n" * 4,
    "import os\n" * 30,
]
BOUNDS = DraftBounds(0, 4)
#: Draft tokens of the steps, in turn.
NUMBERS = ([4], [0, 0, 4, 1, 0, 3])
NEW_TOKENS = (8, 3, 12, 5, 4)


@pytest.fixture(scope="module")
def make() -> Iterator[Callable[..., Any]]:
    with engines.one_at_a_time() as make:
        yield make


def _runner(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


class Turns:
    """Stands in for the choice of draft tokens: these numbers in turn."""

    def __init__(self, numbers: list[int]) -> None:
        self._numbers = itertools.cycle(numbers)

    def __getitem__(self, requests: int) -> int:
        return next(self._numbers)


class Watched:
    """What an engine's drafter does in each step: requests, rows, rows that its layer attends for, drafts."""

    def __init__(self, llm: Any) -> None:
        self.runner = _runner(llm)
        self.llm = llm
        self.steps: list[dict[str, Any]] = []
        #: Keys and values of each step's rows, as its passes leave them.
        self.rows: list[list[torch.Tensor]] = []
        self._speculator: Any = self.runner.speculator
        (self.layer,) = (
            layer
            for name, layer in self.runner.vllm_config.compilation_config.static_forward_context.items()
            if name in self._speculator.draft_attn_layer_names
        )

    def run(self) -> list[Any]:
        from vllm import SamplingParams
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

        propose, forward = self._speculator.propose, CPUAttentionBackendImpl.forward

        def proposed(input_batch: Any, *args: Any, **kwargs: Any) -> Any:
            step: dict[str, Any] = {"requests": input_batch.num_reqs, "rows": input_batch.num_tokens}
            step["attended"] = []
            self.steps.append(step)
            (slots,) = self.runner.block_tables.slot_mappings[:, : input_batch.num_tokens].clone()
            drafts = propose(input_batch, *args, **kwargs)
            step["drafts"] = drafts.tolist()
            ends = self._speculator.last_token_indices.tolist()
            starts = input_batch.query_start_loc.tolist()
            own = [row for i in range(input_batch.num_reqs) for row in range(starts[i], ends[i] + 1)]
            # Of rejected rows each pass may leave what it likes.
            self.rows.append([view.flatten(0, 1)[slots[own]] for view in layer_cache_views(self.layer)])
            return drafts

        def attended(impl: Any, layer: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
            if impl is self.layer.impl:
                self.steps[-1]["attended"].append(args[3].num_actual_tokens)
            return forward(impl, layer, query, *args, **kwargs)

        self._speculator.propose = proposed
        CPUAttentionBackendImpl.forward = attended
        try:
            params = [
                SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True) for count in NEW_TOKENS
            ]
            outputs = self.llm.generate(PROMPTS, params, use_tqdm=False)
        finally:
            self._speculator.propose, CPUAttentionBackendImpl.forward = propose, forward
        return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(params=["eagle3", "eagle"])
def head(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if request.param == "eagle3":
        return engines.eagle(4)
    folder = eagle_heads.write(tmp_path_factory.mktemp("head") / "eagle")
    return {"model": str(folder), "method": "eagle", "num_speculative_tokens": 4}


def _run(make: Any, head: dict[str, Any], fast: bool) -> list[tuple[Watched, list[Any]]]:
    llm = make(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        block_size=32,
        num_gpu_blocks_override=96,
        speculative_config=head | {"num_speculative_tokens_per_batch_size": BOUNDS.schedule},
        additional_config={"nwor": {"mode": "stage", "fast_drafting": fast, "draft_tokens": str(BOUNDS)}},
    )
    runs = []
    for numbers in NUMBERS:
        llm.llm_engine.engine_core.engine_core.scheduler.dynamic_sd_lookup = Turns(numbers)
        assert llm.reset_prefix_cache()
        watched = Watched(llm)
        runs.append((watched, watched.run()))
    return runs


def test_drafts_and_cache_are_as_those_of_one_pass(
    make: Any, head: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_pass, "LEAST_ROWS", 8)
    runs = zip(_run(make, head, True), _run(make, head, False), strict=True)
    for (parts, outputs), (whole, expected) in runs:
        assert outputs == expected
        for made, stock in zip(parts.steps, whole.steps, strict=True):
            assert {**made, "attended": None} == {**stock, "attended": None}
            assert not stock["attended"] or stock["attended"][0] == stock["rows"]
            if {draft for drafts in made["drafts"] for draft in drafts} == {-1}:
                assert made["attended"] == []
            elif made["rows"] < 8:
                assert made["attended"] == stock["attended"]
            else:
                assert made["attended"][0] == made["requests"]
        assert any(step["rows"] > step["requests"] * 5 for step in parts.steps)
        for own, stock_rows in zip(parts.rows, whole.rows, strict=True):
            torch.testing.assert_close(own, stock_rows, atol=1e-5, rtol=1e-5)
            assert all(view.any(dim=-1).all() for view in own)
