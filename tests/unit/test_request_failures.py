"""Requests that fail alone, in the scheduler: what they break, what is logged and what clients are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason

from nwor.engine.isolation import StepFailures, attach_failures, describe, is_isolable, send_failures
from nwor.engine.request_failures import Exclusions, RequestFailures, exclusions_of, read_reason, reason


@pytest.mark.parametrize(
    ("allowed", "words", "output", "tokens", "broken"),
    [
        ({1, 2}, (), [], [1, 2], False),
        ({1, 2}, (), [], [1, 3], True),
        (None, ((5,),), [], [4, 6], False),
        (None, ((5,),), [], [4, 5], True),
        # A word of several tokens, across steps.
        (None, ((5, 6),), [5], [6], True),
        (None, ((5, 6),), [5], [7, 6], False),
        (None, ((5, 6, 7),), [5, 6], [7], True),
        # What follows a token that ends the answer is thrown away.
        ({1, 9}, (), [], [9, 3], False),
    ],
)
def test_exclusions(allowed, words, output, tokens, broken):
    excluded = Exclusions(None if allowed is None else frozenset(allowed), words, frozenset({9}))
    assert excluded.are_broken(output, tokens) == broken


def test_most_requests_exclude_nothing():
    assert exclusions_of(SamplingParams()) is None
    assert exclusions_of(SamplingParams(allowed_token_ids=[3])) is not None


def test_what_is_logged_has_no_text_of_the_user():
    params = SamplingParams(
        temperature=0.5,
        stop=["secret"],
        bad_words=["secret"],
        structured_outputs=StructuredOutputsParams(json={"title": "secret"}),
        extra_args={"secret": 1},
        allowed_token_ids=[1, 2, 3],
    )
    said = describe(params)
    assert "secret" not in said
    for word in ("temperature=0.5", "stop: 1 entries", "json of", "allowed_token_ids: 3 entries"):
        assert word in said


def test_reasons_travel():
    assert read_reason(reason(400, "Relax one of them.")) == (400, "Relax one of them.")
    for other in (None, 5, "stop", "\n"):
        assert read_reason(other) is None


@pytest.mark.parametrize("late", [False, True])
def test_failures_take_what_a_request_sampled_out_of_the_output(late):
    result = SimpleNamespace(
        req_id_to_index={"a": 0, "b": 1},
        sampled_token_ids=[[1, 2], [3]],
        prompt_logprobs_dict={"a": 1, "b": 2},
        prompt_token_id_logprobs_dict={},
    )
    failures = StepFailures()
    assert send_failures(result, failures) is result
    failures.note("sampling")
    failures.requests["a"] = ("sampling", "RuntimeError: x")

    class Later:
        def get_output(self) -> Any:
            return result

    output = Later() if late else result
    sent = send_failures(output, failures)
    if late:
        assert result.sampled_token_ids[0] == [1, 2]
        sent = sent.get_output()
    assert sent.sampled_token_ids == [[], [3]]
    assert sent.prompt_logprobs_dict == {"b": 2}
    assert sent.nwor_failed is failures
    assert attach_failures(None, failures) is None


def test_faults_of_the_device_are_nobodys():
    assert not is_isolable(RuntimeError("CUDA error: device-side assert triggered"))
    assert not is_isolable(SystemExit())
    assert is_isolable(IndexError("list index out of range"))


def test_a_grammar_that_cannot_be_compiled(monkeypatch):
    """The scheduler's own end of such a request is a 500 without a word."""

    def update(self: Any, scheduled: Any, result: Any) -> dict[int, Any]:
        ended = [
            SimpleNamespace(request_id=name, finish_reason=FinishReason.ERROR, stop_reason=None)
            for name in self.grammar_compile_error_reqs
        ]
        self.grammar_compile_error_reqs.clear()
        return {0: SimpleNamespace(outputs=ended)}

    def init(self: Any) -> None:
        grammar = SimpleNamespace(grammar=RuntimeError("[21:26:28] /src/a.cc:4: items must be an object"))
        request = SimpleNamespace(structured_output_request=grammar, is_finished=lambda: False)
        self.requests, self.grammar_compile_error_reqs = {"a": request}, {"a"}
        self.structured_output_manager = None

    monkeypatch.setattr(Scheduler, "__init__", init)
    monkeypatch.setattr(Scheduler, "update_from_output", update)
    monkeypatch.setattr(RequestFailures, "__abstractmethods__", frozenset())
    answers = RequestFailures().update_from_output(None, SimpleNamespace())
    told = read_reason(answers[0].outputs[0].stop_reason)
    assert told is not None
    assert told[0] == 400
    assert "cannot be compiled: " in told[1]
    assert "items must be an object" in told[1]
    assert "a.cc" not in told[1]
