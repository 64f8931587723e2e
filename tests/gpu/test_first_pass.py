"""Claim: the drafter's first pass in two parts, in graphs or piece by piece, drafts what vLLM's own drafts.

Coverage: the demo model in bfloat16 on model runner V2, with a bfloat16 and an fp8 cache; steps in graphs of
mixed steps and steps above their rows; steps without drafts. Every step of many rows is drafted for twice: by
vLLM's pass without graphs, then as the engine does. Reference: that first pass, and the keys and values that
it has left of all rows but rejected ones; they are taken away before the engine's own.
Tolerance: one first draft in fifty may differ, since products of other rows add up in another order; keys and
values by a fiftieth of the largest, with an fp8 cache by an eighth, which is one of its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from nwor.config import DraftBounds
from nwor.engine.fastpath.first_pass import LEAST_ROWS
from tests.gpu import demo_engine

pytestmark = [pytest.mark.gpu, pytest.mark.engine]
if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
if demo_engine.BACKEND != "flash":
    pytest.skip("only FlashAttention attends for last rows alone", allow_module_level=True)

BOUNDS = DraftBounds(0, 4)
MOST_ROWS = 512


@pytest.fixture(scope="module", params=["graphs", "fp8"])
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    with demo_engine.start(
        request.param,
        {"mode": "stage", "mixed_graph_rows": MOST_ROWS, "draft_tokens": str(BOUNDS)},
        BOUNDS.most,
        schedule=BOUNDS.schedule,
        max_model_len=2048,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        num_gpu_blocks_override=2048,
    ) as llm:
        yield llm


def _values(rows: torch.Tensor) -> torch.Tensor:
    """Return a cache's rows in float32; vLLM keeps fp8 as bytes."""
    return (rows.view(torch.float8_e4m3fn) if rows.dtype == torch.uint8 else rows).float()


class Twice:
    """Stands before an engine's ``propose``."""

    def __init__(self, runner: Any) -> None:
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

        self.runner, self.speculator = runner, runner.speculator
        self.first_pass = runner._nwor_first_pass
        assert self.first_pass is not None
        self.manager = self.speculator.prefill_cudagraph_manager
        (name,) = self.speculator.draft_attn_layer_names
        self.cache = runner.vllm_config.compilation_config.static_forward_context[name].kv_cache
        groups = runner.kv_cache_config.kv_cache_groups
        (self.group,) = (number for number, group in enumerate(groups) if name in group.layer_names)
        self.own = self.speculator.propose
        self.steps: list[tuple[int, int, int, bool, int]] = []
        self.apart = 0.0
        self._eager = lambda requests, tokens, *_, **__: BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.NONE, num_tokens=tokens, num_reqs=requests
        )

    def _places(self, batch: Any, slots: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return block and offset of rows that are not rejected, once a pass has noted which those are."""
        rows = torch.arange(batch.num_tokens, device=slots.device)
        starts, ends = batch.query_start_loc, self.speculator.last_token_indices
        own = torch.zeros(batch.num_tokens, dtype=torch.bool, device=slots.device)
        for i in range(batch.num_reqs):
            own |= (rows >= starts[i]) & (rows <= ends[i])
        place = slots[: batch.num_tokens][own]
        size = self.cache.shape[2]
        return torch.div(place, size, rounding_mode="floor"), place % size

    def propose(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        drafts = kwargs.get("num_speculative_tokens")
        if batch.num_tokens < LEAST_ROWS and drafts != 0:
            return self.own(batch, *args, **kwargs)
        slots = self.runner.block_tables.slot_mappings
        before = slots.clone()
        self.manager.dispatch, self.speculator._prefill = self._eager, self.first_pass.stock
        try:
            expected = self.own(batch, *args, **kwargs).clone()
        finally:
            del self.manager.dispatch
            self.speculator._prefill = self.first_pass.run
        slots.copy_(before)  # later passes of the drafter have theirs there
        blocks, offsets = self._places(batch, before[self.group])
        stock = _values(self.cache[blocks, :, offsets])
        self.cache[blocks, :, offsets] = 0  # what is not written again is missed
        made = self.own(batch, *args, **kwargs)
        apart = (_values(self.cache[blocks, :, offsets]) - stock).abs()
        self.apart = max(self.apart, float(apart.max() / stock.abs().max()))
        same = int((made[:, 0] == expected[:, 0]).sum())
        graph = self.manager._chosen is not None
        self.steps.append((batch.num_reqs, batch.num_tokens, same, graph, drafts))
        return made


class Drawn:
    def __init__(self) -> None:
        self._numbers = [4, 4, 0, 4, 1, 2, 0, 0]
        self._made = 0

    def __getitem__(self, requests: int) -> int:
        self._made += 1
        return self._numbers[self._made % len(self._numbers)]


def _fp8(twice: Twice) -> bool:
    return bool(twice.cache.dtype.itemsize == 1)


def test_drafts_and_cache_are_as_those_of_one_pass(engine: Any) -> None:
    from vllm import SamplingParams

    core = engine.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    core.scheduler.dynamic_sd_lookup = Drawn()
    twice = Twice(runner)
    runner.speculator.propose = twice.propose
    report = engine.collective_rpc("nwor_report")[0]
    assert "first_pass" in report["fast_paths"]["fast_drafting"]["active"]
    try:
        texts = [
            f"class Item{i}:\n    def method_{i}(self, a, b):\n        return a + b\n" * (1, 5, 40, 12)[i % 4]
            for i in range(160)
        ]
        params = [
            SamplingParams(temperature=0.0, max_tokens=20 + i % 30, ignore_eos=True) for i in range(160)
        ]
        engine.generate(texts, params, use_tqdm=False)
    finally:
        runner.speculator.propose = twice.own
    steps = twice.steps
    drafted = [step for step in steps if step[4]]
    assert {step[3] for step in drafted} == {True, False}  # in graphs and piece by piece
    assert [
        step for step in steps if not step[4] and step[3] and step[1] == step[0]
    ]  # pure ones without drafts
    requests, same = sum(step[0] for step in drafted), sum(step[2] for step in drafted)
    print(f"{len(steps)} steps, first drafts {same} of {requests} alike, cache {twice.apart:.4f} apart")
    assert requests > 500
    assert same >= 0.98 * requests
    assert twice.apart < (0.13 if _fp8(twice) else 0.02)
