"""The scheduler's part of requests that fail alone: it ends them, counts them and says why.

It also looks after constraints that no worker can answer for: a token that a request has excluded itself
means that its masks left nothing to sample. And it keeps an exception in a grammar from ending the engine.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from nwor.engine.request_isolation.common import (
    FailureLog,
    StepFailures,
    attach_failures,
    describe,
    failures_of,
)
from nwor.engine.request_isolation.grammars import NothingLeftError, guard
from nwor.engine.vllm_features import end_with_errors

logger = logging.getLogger("vllm.nwor.isolation")

#: How the reason of a request's end begins that the front end answers with an error of its own.
MARK = "nwor-error"

_NOTHING_LEFT = (
    "Nothing was left to sample: allowed_token_ids, bad_words, min_tokens, stop tokens and the grammar of "
    "this request exclude every token. Relax one of them."
)


def reason(status: int, message: str) -> str:
    """Return what a request's end tells the front end: the HTTP status and the sentence to answer with."""
    return f"{MARK} {status} {message}"


def read_reason(text: object) -> tuple[int, str] | None:
    """Return the status and the sentence of :func:`reason`; None for any other reason to stop."""
    if not isinstance(text, str) or not text.startswith(MARK + " "):
        return None
    _, status, message = text.split(" ", 2)
    return int(status), message


@dataclass(frozen=True)
class Exclusions:
    """Tokens that a request must not get.

    Attributes:
        allowed: the only tokens it may get; None for all.
        bad_words: sequences that its output must not hold.
        stops: tokens that end it; what comes after one is thrown away.

    """

    allowed: frozenset[int] | None
    bad_words: tuple[tuple[int, ...], ...]
    stops: frozenset[int]

    def are_broken(self, output: Sequence[int], tokens: Sequence[int]) -> bool:
        """Return whether new tokens of a request break them.

        Args:
            output: what it had before.
            tokens: the new ones.

        """
        longest = max((len(word) for word in self.bad_words), default=1)
        tail = list(output[-longest:])
        for token in tokens:
            if self.allowed is not None and token not in self.allowed:
                return True
            tail.append(token)
            if any(tuple(tail[-len(word) :]) == word for word in self.bad_words):
                return True
            if token in self.stops:
                return False
        return False


def exclusions_of(params: Any) -> Exclusions | None:
    """Return what a request's sampling parameters exclude; None for nothing."""
    if params is None or not (params.allowed_token_ids or params.bad_words_token_ids):
        return None
    allowed = frozenset(params.allowed_token_ids) if params.allowed_token_ids else None
    words = tuple(tuple(word) for word in params.bad_words_token_ids or ())
    return Exclusions(allowed, words, frozenset(params.all_stop_token_ids))


class RequestFailures(Scheduler):
    """Mixin before a scheduler class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._nwor_excluded: dict[str, Exclusions] = {}
        self._nwor_failure_log = FailureLog()
        self._nwor_grammars = guard(self.structured_output_manager)

    def add_request(self, request: Request) -> None:
        """Take in a request."""
        super().add_request(request)
        excluded = exclusions_of(request.sampling_params)
        if excluded is not None:
            self._nwor_excluded[request.request_id] = excluded

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._nwor_excluded.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)

    def failures_counted(self, failures: StepFailures, counted: bool) -> None:
        """Take note of what failed in a step, for the metrics; ``counted`` as below."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Take in one step's results; requests that failed in it end with an error."""
        reasons: dict[str, str] = {}
        failures, grammars = failures_of(model_runner_output), self._nwor_grammars
        if (
            failures is not None
            or self._nwor_excluded
            or self.grammar_compile_error_reqs
            or (grammars is not None and grammars.has_failed)
        ):
            reasons = self._nwor_end(scheduler_output, model_runner_output, failures or StepFailures())
        answers: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        if grammars is not None and grammars.has_failed:
            # A grammar could not take in its tokens, which has ended its request in the step itself.
            late = StepFailures()
            self._nwor_take_grammars(late)
            self._nwor_report(late, counted=True)
            reasons.update({request: _sentence(*why) for request, why in late.requests.items()})
        if reasons:
            for answer in answers.values():
                for output in answer.outputs:
                    if output.finish_reason is not None and output.request_id in reasons:
                        output.stop_reason = reasons[output.request_id]
        return answers

    def _nwor_end(self, scheduled: Any, result: Any, failures: StepFailures) -> dict[str, str]:
        """Have vLLM end the requests that failed in a step; return what their clients are told."""
        # A step that was under way when a request failed may have failed for it again.
        failures.requests = {name: why for name, why in failures.requests.items() if self._nwor_runs_on(name)}
        if self._nwor_excluded:
            self._nwor_check(scheduled, result, failures)
        self._nwor_take_grammars(failures)
        reasons = {request: _sentence(*why) for request, why in failures.requests.items()}
        for request_id in self.grammar_compile_error_reqs:
            reasons[request_id] = reason(400, self._nwor_compile_error(request_id))
        if failures:
            attach_failures(result, failures)
            end_with_errors(self, failures.requests.keys())
            self._nwor_report(failures)
        return reasons

    def _nwor_runs_on(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        return request is not None and not request.is_finished()

    def _nwor_report(self, failures: StepFailures, *, counted: bool = False) -> None:
        """Count failures, and log once of every request that ends what it had asked for.

        Args:
            failures: those of a step.
            counted: whether vLLM has taken in what the requests sampled.

        """
        self.failures_counted(failures, counted)
        for request_id, (place, words) in failures.requests.items():
            request = self.requests.get(request_id)
            logger.error(
                "Request %s ends with an error: its %s failed%s; it had %s",
                request_id,
                place,
                f" ({words.partition(':')[0]})" if words else "",
                describe(request.sampling_params if request is not None else None),
            )

    def _nwor_check(self, scheduled: Any, result: Any, failures: StepFailures) -> None:
        for request_id, excluded in self._nwor_excluded.items():
            request = self.requests.get(request_id)
            index = result.req_id_to_index.get(request_id)
            if (
                request is None
                or index is None
                or request_id not in scheduled.num_scheduled_tokens
                or request_id in failures.requests
                or request.is_finished()
                or request.num_stale_output_tokens
                or not result.sampled_token_ids
            ):
                continue
            if excluded.are_broken(request.output_token_ids, result.sampled_token_ids[index]):
                failures.note("constraints")
                failures.requests[request_id] = ("constraints", "")

    def _nwor_take_grammars(self, failures: StepFailures) -> None:
        """Take over what failed in grammars since the last step."""
        failed = self._nwor_grammars.take_failed() if self._nwor_grammars is not None else {}
        for request_id, error in failed.items():
            if isinstance(error, NothingLeftError):
                place, words = "constraints", ""
            else:
                place, words = "grammar", type(error).__name__
                self._nwor_failure_log.tell(place, error)
            failures.note(place)
            failures.requests.setdefault(request_id, (place, words))

    def _nwor_compile_error(self, request_id: str) -> str:
        request = self.requests.get(request_id)
        found = request.structured_output_request if request is not None else None
        error = found.grammar if found is not None else None
        # The text of a compiler may hold an address within its sources, which says nothing to a client.
        detail = f": {_without_place(str(error))}" if isinstance(error, Exception) else ""
        return f"The grammar of this request cannot be compiled{detail.rstrip('. ')}. Change its schema."


def _sentence(place: str, words: str) -> str:
    if place == "constraints":
        return reason(400, _NOTHING_LEFT)
    what = {"prompt_logprobs": "log-probabilities of the prompt", "grammar": "grammar"}.get(place, place)
    return reason(
        500,
        f"The {what} of this request failed in the engine ({words.partition(':')[0]}); other requests go on. "
        "Change its sampling parameters, or report this with the server's log.",
    )


def _without_place(words: str) -> str:
    """Return a compiler's words without the time and the line of its own sources that it begins with."""
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", words)
