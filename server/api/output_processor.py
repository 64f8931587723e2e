"""The front end's way from the engine's outputs to answers and statistics, four faults of it mended.

Where it is late, streams are paced: :mod:`server.api.stream_pacing`.

- Tokens that a step brought past a stop string: vLLM trims them from the answer, and counts them.
- A client that leaves is counted as an abort: vLLM forgets the request without a word to the statistics.
- A request that failed alone is answered with the engine's own sentence:
  :mod:`nwor.engine.request_isolation.request_failures`.
- A request that is aborted before its prompt is through has too few log-probabilities of the prompt: vLLM's
  echo looks for the others, and fails. They become null.
"""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics.stats import IterationStats

from nwor.engine.request_isolation.request_failures import read_reason
from server.api.refusals import RefusalError
from server.api.stream_pacing import StreamPacer, pace


class MendedOutputProcessor(OutputProcessor):
    """What an engine client's own becomes."""

    #: The client's ``StatLoggerManager``; None where statistics are off.
    _nwor_loggers: Any = None
    _nwor_iteration: IterationStats | None = None
    _nwor_aborting = False
    #: None where streams are not paced.
    _nwor_pacer: StreamPacer | None = None

    def add_request(
        self,
        request: Any,
        prompt: str | None,
        parent_req: Any = None,
        request_index: int = 0,
        queue: Any = None,
    ) -> None:
        """Take in a request, whose outputs will go into ``queue``."""
        if self._nwor_pacer is not None:
            pace(queue, self._nwor_pacer)
        super().add_request(request, prompt, parent_req, request_index, queue)

    def process_outputs(
        self,
        engine_core_outputs: list[Any],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
        **kwargs: Any,
    ) -> Any:
        """Take in a step's outputs; those that failed end with an error that says why."""
        if self._nwor_pacer is not None:
            self._nwor_pacer.note(engine_core_timestamp)
        failed = []
        for output in engine_core_outputs:
            if output.finish_reason is None:
                continue
            if output.finish_reason == FinishReason.ABORT:
                _fill_prompt_logprobs(self.request_states.get(output.request_id))
            why = read_reason(output.stop_reason) if output.finish_reason == FinishReason.ERROR else None
            state = self.request_states.get(output.request_id) if why is not None else None
            if state is not None and why is not None:
                failed.append((state, _error(*why)))
        self._nwor_iteration = iteration_stats
        try:
            done = super().process_outputs(
                engine_core_outputs, engine_core_timestamp, iteration_stats, **kwargs
            )
        finally:
            self._nwor_iteration = None
        for state, error in failed:
            if state.queue is not None:
                state.queue.put(error)
            if state.parent_req is not None and state.parent_req.child_requests:
                # Nobody waits for the other sequences of the request any more.
                others = self.abort_requests(list(state.parent_req.child_requests), internal=True)
                done.reqs_to_abort.extend(others)
        return done

    def _trim_surplus_tokens(self, req_state: Any, output: Any, num_prev_tokens: int) -> None:  # type: ignore[override]
        before = len(output.new_token_ids)
        OutputProcessor._trim_surplus_tokens(req_state, output, num_prev_tokens)
        surplus = before - len(output.new_token_ids)
        if surplus and self._nwor_iteration is not None:
            self._nwor_iteration.num_generation_tokens -= surplus
            req_state.stats.num_generation_tokens -= surplus

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """Forget requests, and count them as aborted."""
        request_ids = list(request_ids)
        for request in request_ids:
            for name in (request,) if internal else self.external_req_ids.get(request, ()):
                _fill_prompt_logprobs(self.request_states.get(name))
        if self._nwor_loggers is None or self._nwor_aborting:
            return super().abort_requests(request_ids, internal)
        before = dict(self.request_states)
        # vLLM calls this again for the sequences of a request with several.
        self._nwor_aborting = True
        try:
            aborted: list[str] = super().abort_requests(request_ids, internal)
        finally:
            self._nwor_aborting = False
        self._nwor_count_aborts([before[request] for request in aborted if request in before])
        return aborted

    def _nwor_count_aborts(self, states: list[Any]) -> None:
        stats = IterationStats()
        for state in states:
            if state.stats is None:
                continue
            stats.update_from_finished_request(
                finish_reason=FinishReason.ABORT,
                request_id=state.external_req_id,
                num_prompt_tokens=state.prompt_len,
                max_tokens_param=state.max_tokens_param,
                req_stats=state.stats,
                num_cached_tokens=state.num_cached_tokens,
            )
            # What never came has no time, and counts as none.
            finished = stats.finished_requests[-1]
            for name in ("queued_time", "prefill_time", "inference_time", "decode_time"):
                setattr(finished, name, max(getattr(finished, name), 0.0))
        if stats.finished_requests:
            engine = self._nwor_loggers.engine_indexes[0]
            self._nwor_loggers.record(scheduler_stats=None, iteration_stats=stats, engine_idx=engine)


def _fill_prompt_logprobs(state: Any) -> None:
    """Give prompt tokens that were not computed a log-probability of None, where any is asked for."""
    found = None if state is None else getattr(state.logprobs_processor, "prompt_logprobs", None)
    # The first token never has one. An empty list was handed to the client before.
    if found:
        found.extend([None] * (state.prompt_len - len(found)))


def _error(status: int, message: str) -> Exception:
    if status == HTTPStatus.BAD_REQUEST:
        return RefusalError(message)
    return GracefulHTTPError(message, HTTPStatus(status))


def install(engine: Any, pacing: bool = True) -> None:
    """Mend the output processor of an ``AsyncLLM``.

    Args:
        engine: vLLM's engine client.
        pacing: whether streams are paced while the front end is late.

    """
    processor: Any = getattr(engine, "output_processor", None)
    if type(processor) is OutputProcessor:
        processor.__class__ = MendedOutputProcessor
        processor._nwor_loggers = getattr(engine, "logger_manager", None)
        processor._nwor_pacer = StreamPacer() if pacing else None
