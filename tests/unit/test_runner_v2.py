"""Model runner V2: which steps are planned as full ones, and what a step with other numbers is planned as."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nwor.engine.model_runner.v2 import NworRunnerV2
from nwor.modes import Mode
from tests.unit.toy_layers import ToyLayers

#: Rows of the longest window.
LONGEST = 4


class StockRunner:
    """As much of vLLM's runner as is called here."""

    def prepare_attn(self, batch: Any) -> Any:
        """Return block tables and slots."""
        return (), torch.arange(batch.num_tokens)[None]


class Runner(NworRunnerV2, StockRunner):  # type: ignore[misc]
    """NWOR's runner on the stand-in."""


@pytest.fixture
def runner() -> Any:
    made = object.__new__(Runner)
    made.nwor = ToyLayers(longest=LONGEST).window_manager
    return made


def _plan(runner: Any, lengths: list[int], drafts: list[int] | None) -> Any:
    batch = SimpleNamespace(
        req_ids=[f"r{number}" for number in range(len(lengths))],
        num_reqs=len(lengths),
        num_tokens=sum(lengths),
        num_draft_tokens=sum(drafts or []),
        num_scheduled_tokens=np.array(lengths, np.int32),
        num_draft_tokens_per_req=None if drafts is None else np.array(drafts, np.int32),
        query_start_loc=torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32),
    )
    runner.prepare_attn(batch)
    plan = runner.nwor.plan
    runner.nwor.drop()
    return plan


@pytest.mark.parametrize(
    ("lengths", "drafts", "full"),
    [
        ([4, 4], [3, 3], True),
        ([4], [3], True),
        ([4, 3], [3, 2], False),
        ([4, 4], [3, 2], False),  # a row that is no draft
        ([4, 4, 9], [3, 3, 0], False),
        ([4, 2, 6], [3, 1, 3], False),  # as many rows as three full windows
    ],
)
def test_two_sums_tell_a_full_step(
    runner: Any, lengths: list[int], drafts: list[int], full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    known = runner.nwor._planner.known
    monkeypatch.setattr(runner.nwor._planner, "known", lambda *args: seen.append(args[3]) or known(*args))
    plan = _plan(runner, lengths, drafts)
    assert seen == [len(lengths) if full else 0]
    assert plan.draft_counts == drafts


def test_full_steps_and_others_in_turns(runner: Any) -> None:
    for lengths, drafts in (([4, 4], [3, 3]), ([4, 3], [3, 2]), ([4] * 3, [3] * 3), ([4, 4], [3, 3])):
        plan = _plan(runner, lengths, drafts)
        assert (plan.draft_counts, plan.num_tokens) == (drafts, sum(lengths))
    assert _plan(runner, [7, 1], None) is None
    runner.nwor.state.switch(Mode.OFF)
    plan = _plan(runner, [4, 4], [3, 3])
    assert (plan.mode, plan.draft_counts, plan.num_requests) == (Mode.OFF, [3, 3], 0)
