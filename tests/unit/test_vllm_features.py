"""What differs between vLLM's versions is asked of the code, and copies stand for known sources alone."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType, SimpleNamespace

import pytest
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from nwor.engine import vllm_features
from nwor.engine.fastpath import stock

NEW, OLD = vllm_features._CLI_ARGS
FUNCTION = ("vllm.v1.core.sched.utils", "remove_all")


def test_the_flags_come_from_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert callable(vllm_features.cli_args().make_arg_parser)
    for there, gone in ((NEW, OLD), (OLD, NEW)):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, there, module := ModuleType(there))
            patch.setitem(sys.modules, gone, None)
            assert vllm_features.cli_args() is module


def test_a_package_that_the_flags_want_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> ModuleType:
        raise ModuleNotFoundError(f"{name} wants it", name="other")

    monkeypatch.setattr(vllm_features.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match="cli_args wants it"):
        vllm_features.cli_args()


def test_placeholders_and_queues_belong_to_one_method_each() -> None:
    """The scheduler of either kind takes placeholders back once, and enqueues a request once."""
    fields = {field.name for field in dataclasses.fields(SchedulerOutput)}
    assert vllm_features.steps_skip_drafts() is ("skip_drafts" in fields)
    taken_back = [
        "num_output_placeholders" in vars(owner)["_update_request_with_output"].__code__.co_names
        for owner in (Scheduler, AsyncScheduler)
        if "_update_request_with_output" in vars(owner)
    ]
    assert sum(taken_back) == 1
    assert vllm_features.base_takes_placeholders_back() is taken_back[0]
    enqueued = [
        "_enqueue_waiting_request" in getattr(Scheduler, name).__code__.co_names
        for name in ("_handle_stopped_request", "update_from_output")
    ]
    assert sum(enqueued) == 1
    assert vllm_features.results_enqueue_requests() is enqueued[1]


def test_a_scheduler_tells_its_counters() -> None:
    old = SimpleNamespace()
    new = SimpleNamespace(num_executed_steps=3, local_prefill_interval=1)
    assert not vllm_features.counts_executed_steps(old)
    assert vllm_features.counts_executed_steps(new)
    assert not vllm_features.prefill_cadence(old)
    assert not vllm_features.prefill_cadence(new)
    new.local_prefill_interval = 2
    assert vllm_features.prefill_cadence(new)


def test_rows_of_masks_follow_the_drafts_or_a_stride() -> None:
    grammar = SimpleNamespace(structured_output_request_ids=["a", "b", "c"])
    drafts = {"a": 2, "b": 0, "c": 1}.__getitem__
    assert [vllm_features.masks_of(grammar, name, drafts, None) for name in "abc"] == [
        slice(0, 3),
        slice(3, 4),
        slice(4, 6),
    ]
    assert vllm_features.masks_of(grammar, "b", drafts, 4) == slice(4, 8)


def test_requests_end_with_errors_in_a_set_or_by_their_words() -> None:
    scheduler = SimpleNamespace(grammar_compile_error_reqs={"a"})
    vllm_features.end_with_errors(scheduler, ["a", "b"])
    assert scheduler.grammar_compile_error_reqs == {"a", "b"}
    scheduler.grammar_compile_error_reqs = {"a": "words"}
    vllm_features.end_with_errors(scheduler, ["a", "b"])
    assert scheduler.grammar_compile_error_reqs == {"a": "words", "b": None}


def test_what_a_layer_or_a_sampler_says_of_itself() -> None:
    assert not vllm_features.writes_own_cache(SimpleNamespace())
    assert vllm_features.writes_own_cache(SimpleNamespace(kv_cache_update_bypass=True))
    assert not vllm_features.accepts_lossily(SimpleNamespace(fly_window_size=0))
    assert vllm_features.accepts_lossily(SimpleNamespace(fly_window_size=4))


def test_copies_stand_for_the_source_of_one_release() -> None:
    known = stock.found_digest(*FUNCTION)
    assert known
    other = (FUNCTION[0], "check_stop")
    both = {FUNCTION: (known,), other: (stock.found_digest(*other),)}
    assert stock.changed(both) is None
    # The second release has the first one's source, where it says nothing else.
    assert stock.changed({**both, FUNCTION: ("another", known)}) is None
    # A mixture of two releases is neither.
    mixed = {FUNCTION: (known, "another"), other: ("another", both[other][0])}
    assert stock.changed(mixed) in {f"{path} is not the known one" for _, path in both}
    assert stock.changed({FUNCTION: ("another",)}) == "remove_all is not the known one"


def test_what_a_class_does_not_have_is_known_as_well() -> None:
    place = ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler.make_stats")
    assert stock.found_digest(*place) is None
    assert stock.changed({place: (None,)}) is None
    assert stock.changed({place: ("another",)}) == "AsyncScheduler.make_stats is not the known one"
    assert stock.found_digest("vllm.v1.core.sched.utils", "nothing") is None
    assert stock.found_digest("vllm.v1.core.sched.utils", "nothing.of_it") == ""
    assert stock.found_digest("vllm.nothing", "nothing") == ""


def test_what_somebody_replaced_is_nobodys_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    place = ("vllm.v1.core.sched.scheduler", "Scheduler.make_stats")
    known = stock.found_digest(*place)
    monkeypatch.setattr(Scheduler, "make_stats", lambda self: None)
    assert stock.changed({place: (known,)}) == "Scheduler.make_stats is not the known one"
