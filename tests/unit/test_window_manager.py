"""How a step is planned and counted: from the scheduler's record, never from query lengths alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from nwor.config import NworConfig
from nwor.engine.step_plan import leading_windows
from nwor.engine.window_manager import WindowManager
from nwor.modes import Mode


def _window_manager(mode: str = "stage", drafts: int = 4) -> WindowManager:
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=drafts))
    window_manager = WindowManager(config, NworConfig.from_mapping({"mode": mode}), torch.device("cpu"))
    window_manager.window = SimpleNamespace(batch=None)  # planning looks only at whether there is one
    window_manager.state.token_bytes = 10
    return window_manager


@pytest.mark.parametrize(
    ("query_lens", "longest", "expected"),
    [
        ([], 5, (0, 0)),
        ([5, 5, 3, 200], 5, (3, 13)),
        ([200, 5], 5, (0, 0)),
        ([1, 6, 1], 5, (1, 1)),
    ],
)
def test_leading_windows(query_lens, longest, expected):
    assert leading_windows(query_lens, longest) == expected


def test_a_step_without_drafts_is_no_verify_step():
    window_manager = _window_manager()
    assert window_manager.plan_step(["a", "b"], [1, 5], [0, 0]) is None
    assert window_manager.state.steps == 0


def test_mixed_batch_stages_the_leading_part_only():
    plan = _window_manager().plan_step(["a", "b", "p"], [5, 3, 200], [4, 2, 0])
    assert plan is not None
    assert (plan.num_requests, plan.num_tokens, plan.direct_reason) == (2, 8, None)


def test_windows_end_where_the_graph_of_a_step_takes_no_longer_ones():
    """A short prompt stands among the windows, unless its graph is for shorter ones: it is then written."""
    window_manager = _window_manager()
    for longest, requests, tokens in ((None, 3, 10), (3, 2, 5), (None, 3, 10), (4, 2, 5), (5, 3, 10)):
        plan = window_manager.plan_step(["a", "b", "p"], [3, 2, 5], [2, 1, 0], longest=longest)
        assert (plan.num_requests, plan.num_tokens) == (requests, tokens)


def test_windows_behind_a_prompt_are_counted_as_direct():
    window_manager = _window_manager()
    plan = window_manager.plan_step(["a", "p", "b"], [5, 200, 5], [4, 0, 4])
    assert plan is not None
    assert plan.direct_reason == "batch_order"
    record = window_manager.account(plan, [2, 0, 3])
    assert record is not None
    assert record.windows == {"a": ("stage", "", 4, 2), "b": ("stage", "batch_order", 4, 3)}
    assert record.all_windows == 2
    counts = window_manager.state.counts
    assert counts.commit_bytes == 30
    assert counts.direct_bytes == 50
    assert counts.saved_bytes == 20
    assert counts.direct_windows == {"batch_order": 1}
    assert counts.accepted_tokens == 5


def test_mode_off_stages_nothing_and_saves_nothing():
    window_manager = _window_manager("off")
    plan = window_manager.plan_step(["a"], [5], [4])
    assert plan is not None
    assert plan.num_requests == 0
    assert window_manager.account(plan, [4]) is not None
    assert window_manager.state.counts.saved_bytes == 0
    assert window_manager.state.counts.outcomes == {"direct": 1}


def test_engine_that_cannot_stage_says_why_for_each_window():
    window_manager = _window_manager()
    window_manager.refuse("mla")
    plan = window_manager.plan_step(["a"], [5], [4])
    assert plan is not None
    record = window_manager.account(plan, [1])
    assert record is not None
    assert record.windows == {"a": ("stage", "mla", 4, 1)}
    assert window_manager.state.counts.direct_windows == {"mla": 1}
    report = window_manager.state.report()
    assert report["unsupported"]["reason"] == "mla"
    # Whoever reads the mode alone is told what steps do.
    assert (report["mode"], report["mode_asked"]) == ("off", "stage")
    assert record.facts.mode == "off"


def test_a_refusal_while_the_engine_runs_changes_the_mode_that_rides_with_steps():
    window_manager = _window_manager()
    assert window_manager.state.facts.mode == "stage"
    window_manager.refuse("cache_format")
    assert window_manager.state.facts.mode == "off"
    # Asking again changes what is asked for alone.
    window_manager.state.switch(Mode.COW)
    report = window_manager.state.report()
    assert (report["mode"], report["mode_asked"]) == ("off", "cow")


@pytest.mark.parametrize("mode", ["off", "stage"])
def test_an_error_in_planning_makes_a_direct_step(monkeypatch, mode):
    window_manager = _window_manager(mode)

    def broken(*args):
        raise RuntimeError("no plan")

    monkeypatch.setattr(window_manager._planner, "_work_out", broken)
    plan = window_manager.plan_step(["a", "p", "b"], [5, 200, 3], [4, 0, 2])
    monkeypatch.undo()
    assert plan is not None
    window_manager.begin(plan, torch.empty(0), {})  # opens nothing
    assert window_manager.finish(torch.zeros(3, dtype=torch.int32)) is plan
    record = window_manager.account(plan, [2, 0, 1])
    assert record is not None
    reason = "" if mode == "off" else "fault"
    assert record.windows == {"a": (mode, reason, 4, 2), "b": (mode, reason, 2, 1)}
    assert window_manager.state.counts.direct_windows == ({} if mode == "off" else {"fault": 2})
    assert window_manager.state.mode is Mode.OFF
    assert window_manager.state.fault == "plan: RuntimeError: no plan"
    # The next step of the same shape is planned anew.
    after = window_manager.plan_step(["a", "p", "b"], [5, 200, 3], [4, 0, 2])
    assert after is not None
    assert (after.mode, after.direct_reason) == (Mode.OFF, None)


def test_switch_refuses_a_mode_that_was_not_enabled():
    config = SimpleNamespace(speculative_config=SimpleNamespace(num_speculative_tokens=4))
    window_manager = WindowManager(
        config, NworConfig.from_mapping({"mode": "off", "modes": ["off"]}), torch.device("cpu")
    )
    with pytest.raises(ValueError, match="not enabled"):
        window_manager.state.switch(Mode.STAGE)
    assert window_manager.state.mode is Mode.OFF


def test_an_error_of_the_warm_up_is_no_fault_beside_that_of_the_capture():
    window_manager = _window_manager()
    state = window_manager.state
    state.fail("stage", RuntimeError("broken"))
    assert (state.mode, state.switches) == (Mode.OFF, 1)
    window_manager.stage_nothing("capture", "stage: broken")
    assert (state.fault, state.mode, state.switches) == (None, Mode.STAGE, 0)
    report = state.report()
    assert (report["mode"], report["mode_asked"]) == ("off", "stage")
    assert report["unsupported"] == {"reason": "capture", "detail": "stage: broken"}
