"""Claim: in Triton's attention a step whose windows are staged has the rows and the cache of one in `off`.

Coverage: one layer with vLLM's own Triton kernels, which the interpreter runs, beside the CPU's
`verify_attention` and commit, in float32: three windows and two prompts in one step, drafts rejected; both
orders of heads and tokens in the cache; sliding window, soft cap, sinks.
Control: metadata cut as FlashAttention's is, which Triton's kernels do not take.
Tolerance: 1e-5 for the attention of windows, which sums in another order; none for the cache and other rows.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.engine.runner import V2

if not V2:
    pytest.skip("test_runner_v2.py runs it with Triton's interpreter", allow_module_level=True)

from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

from tests.triton_steps import FEATURES, WINDOW_ROWS, WINDOWS, Case, Step, check

CASES = [
    Case(feature=feature, heads_first=heads_first) for feature in FEATURES for heads_first in (True, False)
]


@pytest.fixture(autouse=True)
def _processor(monkeypatch: pytest.MonkeyPatch) -> None:
    # The writer chooses its tiles by it.
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_staged_step_is_that_of_off(case: Case) -> None:
    check(case, 1e-5)


def test_parts_as_flashattention_takes_them_reach_into_the_windows() -> None:
    """The day that this fails, rows need no longer be cut."""
    step = Step(Case())
    layer = step.layer(TritonAttentionImpl)
    whole = step.metadata
    step.metadata = replace(
        whole,
        query_start_loc=whole.query_start_loc[WINDOWS:],
        seq_lens=whole.seq_lens[WINDOWS:],
        block_table=whole.block_table[WINDOWS:],
    )
    assert not step.run(layer)[:WINDOW_ROWS].isnan().all()
