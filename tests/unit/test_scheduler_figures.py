"""The scheduler's figures: complete in a request's last output, compared with vLLM's step by step, sent in
time.

vLLM's own methods are stand-ins that count as vLLM does; the order in which they call ours is vLLM's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.request import RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from nwor.counts.records import EarlierStages, StepRecord, Treatment, WorkerFacts
from nwor.engine import scheduler as module
from nwor.engine.request_isolation.common import StepFailures
from nwor.engine.scheduler import EVERY, MOST_WAITING, NworScheduling
from nwor.engine.stats.figures import RequestFigures
from server.scheduler import _NworReporting

DRAFTS, B = 4, 10
FACTS = WorkerFacts("stage", 0, B)


class Request(SimpleNamespace):
    """What of a request the scheduler looks at."""

    def is_finished(self) -> bool:
        return self.status > RequestStatus.PREEMPTED


class Engine:
    """A scheduler whose steps are given; what it sends is gathered."""

    def __init__(self, cls: type = NworScheduling, **changes: Any) -> None:
        self.now, self.windows, self.sent, self.facts = 0.0, 0, [], FACTS
        self.stages, self.copied_bytes = 1, 0
        self.failed: dict[str, Any] = {}
        vars(self).update(changes)
        self.ending: dict[str, int] = {}
        self.miscounted = 0
        self.scheduler = cls(engine=self)

    def add(self, *names: str, stop: Any = None) -> None:
        for name in names:
            self.scheduler.add_request(
                Request(
                    request_id=name,
                    spec_decode_metrics=RequestSpecDecodeMetrics.new(DRAFTS),
                    sampling_params=SimpleNamespace(
                        stop=stop, allowed_token_ids=None, bad_words_token_ids=None, extra_args=None
                    ),
                    num_stale_output_tokens=0,
                    drop_stale_output=False,
                    num_preemptions=0,
                    resumable=False,
                    status=RequestStatus.RUNNING,
                )
            )

    def step(self, accepted: dict[str, int], ends: Sequence[str] = (), seconds: float = 0.001) -> Any:
        """Run a step in which these requests verify, and some end with it; return the outputs by name."""
        self.now += seconds
        self.windows += len(accepted)
        drafts = np.full(len(accepted), DRAFTS, np.int32).tobytes()
        treatment = Treatment(
            self.facts.mode, drafts, len(accepted), 5 * len(accepted), copied_bytes=self.copied_bytes
        )
        sampled = np.array([1 + count for count in accepted.values()], np.int32).tobytes()
        record = StepRecord(list(accepted), treatment, sampled, self.facts, self.windows, 1, 0.5)
        self.ends, self.accepted = ends, accepted
        result = SimpleNamespace(nwor=record if accepted else None, **self.failed)
        answers = self.scheduler.update_from_output(None, result)
        figures = getattr(answers[0].scheduler_stats, "nwor", None)
        if figures is not None:
            self.sent.append(figures)
        return {output.request_id: output for output in answers[0].outputs}

    def total(self, name: str) -> int:
        return sum(getattr(figures, name) for figures in self.sent)

    def kinds(self) -> dict[int, int]:
        """Return the windows sent so far by accepted tokens."""
        total: dict[int, int] = {}
        for figures in self.sent:
            for (_, _, _, accepted), times in figures.kinds.items():
                total[accepted] = total.get(accepted, 0) + times
        return total

    def mismatches(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for figures in self.sent:
            for name, times in figures.mismatches.items():
                total[name] = total.get(name, 0) + times
        return total


@pytest.fixture(autouse=True)
def _stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(self: Any, engine: Engine) -> None:
        self.engine, self.requests, self.running, self.log_stats = engine, {}, [], True
        self.structured_output_manager, self.grammar_compile_error_reqs = None, set()
        parallel = SimpleNamespace(pipeline_parallel_size=engine.stages)
        self.vllm_config = SimpleNamespace(parallel_config=parallel, additional_config={"nwor": {}})
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: engine.now))

    def add_request(self: Any, request: Request) -> None:
        self.requests[request.request_id] = request
        self.running.append(request)

    def free(self: Any, request: Request, delay_free_blocks: bool = False) -> None:
        if not delay_free_blocks:
            del self.requests[request.request_id]

    def update(self: Any, scheduled: Any, output: Any) -> dict[int, Any]:
        stats, outputs = SpecDecodingStats.new(DRAFTS), []
        for name, count in self.engine.accepted.items():
            request = self.requests.get(name)
            if request is None or request.is_finished():
                continue
            if name in self.grammar_compile_error_reqs:
                request.status = RequestStatus.FINISHED_ERROR
                self._free_request(request)
                self.running.remove(request)
                continue
            if request.num_stale_output_tokens > 0:
                request.num_stale_output_tokens -= 1
                if request.drop_stale_output:
                    continue
            stats.observe_draft(DRAFTS, count)
            request.spec_decode_metrics.observe(DRAFTS, count)
            ended = name in self.engine.ends
            if ended:
                request.status = RequestStatus.FINISHED_STOPPED
                if self._handle_stopped_request(request):
                    self._free_request(request)
                    self.running.remove(request)
            outputs.append(
                SimpleNamespace(
                    request_id=name,
                    finish_reason=None,
                    spec_decode_metrics=request.spec_decode_metrics if ended else None,
                )
            )
        stats.num_accepted_tokens += self.engine.miscounted
        found = self.make_stats(stats)
        return {0: SimpleNamespace(outputs=outputs, scheduler_stats=found)}

    def stopped(self: Any, request: Request) -> bool:
        if request.resumable:
            request.status = RequestStatus.WAITING_FOR_STREAMING_REQ
            request.drop_stale_output, request.num_stale_output_tokens = True, 1
        return not request.resumable

    def finish(self: Any, name: str) -> None:
        request = self.requests[name]
        request.status = RequestStatus.FINISHED_ABORTED
        self.running.remove(request)
        self._free_request(request)

    def preempt(self: Any, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        request.drop_stale_output, request.num_stale_output_tokens = drop_stale_output, 1
        request.num_preemptions += 1

    stand_ins: dict[str, Callable[..., Any]] = {
        "__init__": init,
        "add_request": add_request,
        "_free_request": free,
        "update_from_output": update,
        "make_stats": lambda self, stats: (
            SchedulerStats(spec_decoding_stats=stats) if self.log_stats else None
        ),
        "_handle_stopped_request": stopped,
        "finish_requests": finish,
        "_preempt_request": preempt,
    }
    for name, function in stand_ins.items():
        monkeypatch.setattr(Scheduler, name, function)


def kinds(*accepted: int) -> dict[Any, int]:
    found: dict[Any, int] = {}
    for count in accepted:
        found["stage", "", DRAFTS, count] = found.get(("stage", "", DRAFTS, count), 0) + 1
    return found


def test_what_a_request_sampled_in_the_step_that_it_failed_in_is_compared_with_nothing() -> None:
    """vLLM gets none of its tokens, while the worker has accepted drafts."""
    engine = Engine()
    engine.add("a", "b")
    engine.step({"a": 2, "b": 1})
    failures = StepFailures({"b": ("constraints", "")}, {"constraints": 1})
    engine.failed = {
        "nwor_failed": failures,
        "req_id_to_index": {"a": 0, "b": 1},
        "sampled_token_ids": [[1, 2], [3, 4, 5, 6]],
        "prompt_logprobs_dict": {},
        "prompt_token_id_logprobs_dict": {},
    }
    engine.step({"a": 1, "b": 3})
    engine.failed = {}
    engine.step({"a": 4}, ends=["a"])
    engine.step({}, seconds=1)
    assert engine.mismatches() == {}
    assert engine.total("finished_windows") == 5
    assert engine.kinds() == {2: 1, 1: 2, 3: 1, 4: 1}
    assert [figures.failed_requests for figures in engine.sent if figures.failures] == [{"constraints": 1}]


def test_the_last_output_has_all_of_a_requests_figures() -> None:
    engine = Engine()
    engine.add("a", "b")
    engine.step({"a": 3, "b": 0})
    engine.step({"b": 1, "a": 4})
    last = engine.step({"b": 2, "a": 3}, ends=["a"])["a"].spec_decode_metrics
    assert isinstance(last, RequestFigures)
    assert last.nwor == kinds(3, 4, 3)
    assert last.nwor_token_bytes == B
    later = engine.step({"b": 4}, ends=["b"])["b"].spec_decode_metrics
    assert later.nwor == kinds(0, 1, 2, 4)
    assert last.nwor == kinds(3, 4, 3)
    assert engine.total("finished_windows") == 7
    assert engine.kinds() == {0: 1, 1: 1, 2: 1, 3: 2, 4: 2}
    assert engine.mismatches() == {}


def test_a_request_may_end_with_its_first_window() -> None:
    engine = Engine()
    engine.add("a")
    last = engine.step({"a": 2}, ends=["a"])["a"].spec_decode_metrics
    assert last.nwor == kinds(2)
    assert (engine.total("late_windows"), engine.mismatches()) == (0, {})


def test_windows_of_a_step_under_way_when_the_request_ended_are_late() -> None:
    engine = Engine()
    engine.add("a", "b")
    engine.step({"a": 1, "b": 1}, ends=["a"])
    engine.step({"a": 4, "b": 2})
    engine.step({"b": 3}, ends=["b"])
    engine.step({"b": 4})
    assert (engine.total("late_windows"), engine.total("finished_windows")) == (2, 4)
    assert engine.kinds() == {1: 2, 2: 1, 3: 1, 4: 2}
    assert engine.mismatches() == {}


def test_aborted_between_two_steps() -> None:
    engine = Engine()
    engine.add("a", "b")
    engine.step({"a": 1, "b": 1})
    engine.scheduler.finish_requests("a")
    engine.step({"a": 4, "b": 2})
    engine.step({"b": 3}, ends=["b"])
    assert (engine.total("aborted_windows"), engine.total("late_windows")) == (1, 1)
    assert engine.mismatches() == {}


def test_a_request_that_begins_anew_under_the_same_name_has_its_own_figures() -> None:
    engine = Engine()
    engine.add("a", "b")
    engine.step({"a": 1, "b": 1}, ends=["a"])
    engine.step({"a": 2, "b": 1}, seconds=EVERY)
    engine.add("a")
    last = engine.step({"a": 3, "b": 1}, ends=["a"])["a"].spec_decode_metrics
    assert last.nwor == kinds(3)


def test_figures_are_sent_now_and_then_and_when_nothing_runs() -> None:
    engine = Engine()
    engine.add("a")
    for _ in range(100):
        engine.step({"a": 1}, seconds=EVERY / 10)
    assert 10 <= len(engine.sent) <= 12
    engine.step({"a": 2}, ends=["a"])
    assert sum(engine.kinds().values()) == 101 == engine.total("commits")
    assert engine.total("commit_seconds") == 101 / 2
    assert engine.sent[-1].token_bytes == B


def test_a_switch_is_told_at_once() -> None:
    engine = Engine()
    engine.add("a")
    engine.step({"a": 1})
    sent = len(engine.sent)
    engine.step({"a": 1})
    assert len(engine.sent) == sent
    engine.facts = WorkerFacts("off", 1, B)
    engine.step({"a": 1})
    assert len(engine.sent) == sent + 1
    assert (engine.sent[-1].mode, engine.sent[-1].switches) == ("off", 1)
    engine.facts = WorkerFacts("off", 1, B)  # from another process: equal, not the same
    engine.step({"a": 1})
    assert len(engine.sent) == sent + 1


def test_each_step_that_disagrees_with_vllm_is_counted() -> None:
    engine = Engine()
    engine.add("a", "b")
    for miscounted in (0, 1, -1, 0, 2):  # two of them cancel out
        engine.miscounted = miscounted
        engine.step({"a": 2, "b": 0})
    engine.miscounted = 0
    engine.step({"a": 2, "b": 1}, ends=["a", "b"])
    assert engine.mismatches() == {"accepted_tokens": 3}
    assert engine.scheduler._nwor_logged == {"accepted_tokens"}


def test_tokens_that_vllm_counts_without_a_record_are_a_mismatch() -> None:
    engine = Engine()
    engine.add("a")
    engine.step({"a": 1})
    engine.miscounted = 3
    engine.step({})
    engine.miscounted = 0
    engine.step({})
    assert engine.mismatches() == {"accepted_tokens": 1}


def test_windows_that_never_arrive_are_a_mismatch() -> None:
    engine = Engine()
    engine.add("a")
    engine.step({"a": 1})
    engine.windows += 1
    engine.step({"a": 1})
    engine.step({"a": 1}, ends=["a"])
    assert engine.mismatches() == {"windows": 1}


def test_a_request_whose_figures_differ_from_vllms_is_a_mismatch() -> None:
    engine = Engine()
    engine.add("a")
    engine.step({"a": 1})
    engine.scheduler.requests["a"].spec_decode_metrics.histogram[2] += 1
    engine.step({"a": 1}, ends=["a"])
    assert engine.mismatches() == {"request": 1}


@pytest.mark.parametrize("drop", [False, True])
def test_a_preempted_requests_step_under_way(drop: bool) -> None:
    engine = Engine()
    engine.add("a", "b")
    engine.step({"a": 1, "b": 1})
    engine.scheduler._preempt_request(engine.scheduler.requests["a"], 0.0, drop_stale_output=drop)
    engine.step({"a": 4, "b": 2})
    engine.step({"a": 3, "b": 2})
    engine.step({"a": 0, "b": 2}, ends=["a", "b"])
    assert engine.mismatches() == {}
    assert engine.total("finished_windows") == 8


def test_a_session_that_goes_on_reports_each_turn() -> None:
    engine = Engine()
    engine.add("a", "b")
    engine.scheduler.requests["a"].resumable = True
    engine.step({"a": 1, "b": 0})
    turn = engine.step({"a": 2, "b": 0}, ends=["a"])["a"].spec_decode_metrics
    assert turn.nwor == kinds(1, 2)
    engine.step({"a": 4, "b": 0})  # was under way, and is thrown away
    engine.scheduler.requests["a"].resumable = False
    engine.step({"a": 3, "b": 0}, ends=["a", "b"])
    assert engine.mismatches() == {}
    assert engine.total("finished_windows") == 8


def test_without_statistics_records_do_not_pile_up() -> None:
    engine = Engine()
    engine.scheduler.log_stats = False
    engine.add("a")
    for _ in range(MOST_WAITING + 3):
        engine.step({"a": 1})
    assert len(engine.scheduler._nwor_waiting) == 3
    last = engine.step({"a": 0}, ends=["a"])["a"].spec_decode_metrics
    assert last.nwor == {**kinds(0), ("stage", "", DRAFTS, 1): MOST_WAITING + 3}
    assert engine.scheduler._nwor_ours == engine.scheduler._nwor_theirs == []


def test_what_earlier_stages_do_differently() -> None:
    engine = Engine(stages=2, facts=WorkerFacts("stage", 0, B, EarlierStages(30, 5)))
    engine.add("a", "b")
    scheduler = engine.scheduler
    engine.step({"a": 1, "b": 1})
    scheduler._nwor_freed.note(3, 1, {"a"})  # a step after the next one frees it
    last = engine.step({"a": 2, "b": 1}, ends=["a", "b"])["a"].spec_decode_metrics
    assert last.nwor_extra == {"stage": 2 * 5 * 5, "commit": -2 * 30}
    total = {path: sum(figures.extra.get(path, 0) for figures in engine.sent) for path in ("stage", "commit")}
    assert total == {"stage": 4 * 5 * 5, "commit": -2 * 30}


@pytest.mark.parametrize("stages", [1, 2])
def test_windows_copied_aside_in_some_steps(stages: int) -> None:
    earlier = EarlierStages(30, 5) if stages == 2 else None
    engine = Engine(stages=stages, facts=WorkerFacts("stage", 0, B, earlier))
    engine.add("a", "b")
    engine.step({"a": 1, "b": 4})
    engine.copied_bytes = 12
    engine.step({"a": 1, "b": 4})
    last = engine.step({"a": 0, "b": 2}, ends=["b"])["b"].spec_decode_metrics
    # A stage that copies in every step does not copy twice in these.
    always = 5 * 5 if stages == 2 else 0
    assert last.nwor_extra == {"stage": always + 2 * 5 * 12}
    counts = last.tally.counts(last.nwor_token_bytes)
    assert counts.written_bytes == (5 + 5 + 3) * B + counts.stage_bytes
    engine.step({"a": 3, "b": 0}, ends=["a"])  # b has ended: no request's, but written all the same
    assert sum(sent.extra.get("stage", 0) for sent in engine.sent) == 2 * always + 6 * 5 * 12
    assert engine.total("late_windows") == 1
    assert engine.mismatches() == {}


def test_requests_with_stop_strings_report_in_each_step() -> None:
    engine = Engine(_NworReporting)
    engine.add("a")
    engine.add("b", stop=["\n"])
    engine.step({"a": 1, "b": 1})
    outputs = engine.step({"a": 1, "b": 2})
    assert outputs["a"].spec_decode_metrics is None
    assert outputs["b"].spec_decode_metrics.nwor == kinds(1, 2)
    engine.scheduler.finish_requests("b")
    assert outputs["b"].spec_decode_metrics.histogram == [0, 1, 1, 0, 0]
    engine.step({"a": 1, "b": 3}, ends=["a"])
    assert (engine.total("aborted_windows"), engine.total("late_windows")) == (2, 1)


def test_requests_with_chains_beside_trees_are_counted_once() -> None:
    """Each record says how many there were so far."""
    engine = Engine()
    engine.add("a")
    for so_far in ((), (("penalties", 1),), (("penalties", 1),), (("penalties", 3), ("bad_words", 1))):
        engine.facts = FACTS._replace(chain_requests=so_far)
        engine.step({"a": 1})
    engine.step({"a": 1}, seconds=2 * EVERY)
    total: dict[str, int] = {}
    for sent in engine.sent:
        for reason, requests in sent.chain_requests.items():
            total[reason] = total.get(reason, 0) + requests
    assert total == {"penalties": 3, "bad_words": 1}
