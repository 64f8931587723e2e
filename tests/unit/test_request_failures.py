"""Requests that fail alone, in the scheduler: what they break, what is logged and what clients are told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import LogprobsTensors

from nwor.engine.request_isolation import grammars
from nwor.engine.request_isolation.common import (
    StepFailures,
    attach_failures,
    describe,
    is_isolable,
    join_logprobs,
    send_failures,
)
from nwor.engine.request_isolation.request_failures import (
    Exclusions,
    RequestFailures,
    exclusions_of,
    read_reason,
    reason,
)


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
    assert not is_isolable(KeyboardInterrupt())
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


def test_control_tokens_leave_the_masks_of_grammars_alone():
    """Each bit by itself; a mask that allows everything is no grammar's."""
    masks = np.random.default_rng(1).integers(-(2**31), 2**31, (3, 5), dtype=np.int64).astype(np.int32)
    masks[1] = -1
    control = frozenset({0, 31, 32, 63, 64, 127, 159, *range(96, 128)})

    def allowed(row: np.ndarray) -> set[int]:
        return {token for token in range(160) if int(row[token // 32]) >> (token % 32) & 1}

    expected = [allowed(masks[0]) - control, set(range(160)), allowed(masks[2]) - control]
    assert allowed(masks[0]) & control
    grammars._take_out(masks, control)
    assert [allowed(row) for row in masks] == expected


def test_log_probabilities_stand_where_their_rows_are():
    def part(rows: int, columns: int, number: int) -> LogprobsTensors:
        ids = torch.full((rows, columns), number)
        return LogprobsTensors(ids, ids / 10, torch.full((rows,), number))

    device = torch.device("cpu")
    joined = join_logprobs([part(2, 1, 4), None, part(1, 3, 7)], [0, 2, 4], 6, torch.int32, device)
    assert joined is not None
    assert joined.logprob_token_ids.dtype == torch.int32
    assert joined.logprob_token_ids.tolist() == [
        [4, 0, 0],
        [4, 0, 0],
        [0, 0, 0],
        [0, 0, 0],
        [7, 7, 7],
        [0, 0, 0],
    ]
    assert torch.isinf(joined.logprobs).tolist() == (joined.logprob_token_ids == 0).tolist()
    assert joined.selected_token_ranks.tolist() == [4, 4, 0, 0, 7, 0]
    assert join_logprobs([None, None], [0, 1], 2, torch.int32, device) is None
