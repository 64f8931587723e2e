"""Claim: rejection sampling the short way gives what vLLM's own kernels give for greedy batches.

Coverage: windows full, of any length and empty, placeholders, synthetic acceptance, a drafter with fewer
columns, rows of a padded vocabulary, ties; batches with one request that is not greedy. Triton's kernels,
vLLM's and the short way's, are interpreted; the same runs on GPUs in tests/gpu/test_greedy_sampling.py.
Tolerance: none, places that nobody writes included.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.engine.runner import V2

if not V2:
    pytest.skip("test_runner_v2.py runs it with Triton's interpreter", allow_module_level=True)

from nwor import ops
from tests.greedy_batches import CASES, Case, check_in_place, filled_memory, make, short, stock

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("turn", range(3))
def test_same_tokens(case: Case, turn: int) -> None:
    batch = make(replace(case, seed=case.seed + 100 * turn), CPU)
    with filled_memory():
        want = stock(batch, case.k)
        got = short(batch, case, ops.make_argmax_workspace(len(batch.logits), CPU))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    if case.agreement == 1.0:
        assert got[1].tolist() == batch.cu_num_logits.diff().tolist()


@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("greedy", [True, False])
def test_in_place_of_the_samplers_method(greedy: bool, block: bool) -> None:
    check_in_place(Case(lengths="mixed", seed=21), CPU, greedy=greedy, block=block)
