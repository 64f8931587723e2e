"""The way back of a step: vLLM's scheduler, taking in the results of requests that go on in few lines each.

What ends a request, a token that stops it or its last one, is left to the stock methods, and so is whatever a
step may bring beside tokens.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from types import FunctionType, MappingProxyType
from typing import Any

from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.sched.utils import remove_all
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from nwor.engine.fastpath.stock import Sources, is_of
from nwor.engine.vllm_features import base_takes_placeholders_back, results_enqueue_requests

logger = logging.getLogger("vllm.nwor.scheduler")

_SCHEDULER = "vllm.v1.core.sched.scheduler"

#: What the short ways for one request's tokens stand for.
TOKENS: Sources = {
    (_SCHEDULER, "Scheduler._update_request_with_output"): ("ff6e3f664c996a8f", "093836bff0607708"),
    ("vllm.v1.core.sched.async_scheduler", "AsyncScheduler._update_request_with_output"): (
        "c4c4ccac872af040",
        None,
    ),
    (_SCHEDULER, "Scheduler.make_spec_decoding_stats"): ("7065c195b8fdde52",),
    (_SCHEDULER, "Scheduler.make_stats"): ("8963d2ab6518f994",),
    ("vllm.v1.core.sched.utils", "check_stop"): ("5149b60c92d21064",),
    ("vllm.v1.request", "Request.append_output_token_ids"): ("8ff2924a5d8749d6",),
    ("vllm.v1.request", "Request.update_block_hashes"): ("fbb2f6a93ec8525b",),
    ("vllm.v1.core.kv_cache_utils", "get_request_block_hasher"): ("68c195e3879cc4c2", "6e4728966af6ef0c"),
    ("vllm.v1.spec_decode.metrics", "SpecDecodingStats.observe_draft"): ("7e518ef741a2248f",),
}
#: What the short way for a whole step's results stands for besides.
RESULTS: Sources = {
    (_SCHEDULER, "Scheduler.update_from_output"): ("85b29db96051135c", "8067d98a98b620cb"),
    (_SCHEDULER, "Scheduler._handle_stopped_request"): ("9a77c9522634358e", "cdda5f7df97892ec"),
    ("vllm.v1.engine", "EngineCoreOutput"): ("d5b3ee3647b9cd80", "520a7fd5f66f4fef"),
    ("vllm.v1.engine", "EngineCoreOutputs"): ("e10869537db31015",),
    ("vllm.v1.outputs", "ModelRunnerOutput"): ("b936f7c6940fc6ea",),
}


class FastResults(Scheduler):
    """Mixin right before vLLM's ``Scheduler``; ``fastpath.scheduler.FastScheduling`` has it."""

    running: list[Request]
    #: Whether the short ways for a request are taken, and those for whole steps.
    _fast = _fast_steps = False
    _fast_hasher: Callable[[Request], Any] | None = None
    #: For the workers' reports: the fast paths of the scheduler, and why each is not in place.
    fast_paths: Mapping[str, str | None] = MappingProxyType({})

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Verify steps of requests in the step that is taken in: draft tokens and accepted ones.
        self._fast_drafts: dict[tuple[int, int], int] = {}
        # Which of its methods vLLM has for these two, which differs between its versions.
        self._fast_base_takes_back = base_takes_placeholders_back()
        self._fast_enqueues = results_enqueue_requests()

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        """Take in one step's results and return the outputs for each front end."""
        result = model_runner_output
        if (
            not self._fast_steps
            or not result.sampled_token_ids
            or result.prompt_logprobs_dict
            or result.prompt_token_id_logprobs_dict
            or result.pooler_output
            or result.num_nans_in_logits
            or result.kv_connector_output is not None
            or result.ec_connector_output is not None
            or self.grammar_compile_error_reqs
            or self.encoder_cache_mismatch_reqs
        ):
            answers: dict[int, EngineCoreOutputs] = super().update_from_output(scheduler_output, result)
            return answers
        outputs, drafts = self._fast_outputs(scheduler_output, result)
        events = self.kv_cache_manager.take_events()
        if events:
            self.kv_event_publisher.publish(KVEventBatch(ts=time.time(), events=events))
        answers = {client: EngineCoreOutputs(outputs=outs) for client, outs in outputs.items()}
        finished = self.finished_req_ids_dict
        if finished:
            for client, requests in finished.items():
                if client in answers:
                    answers[client].finished_requests = requests
                else:
                    answers[client] = EngineCoreOutputs(finished_requests=requests)
            finished.clear()
        stats = self.make_stats(drafts, None, result.cudagraph_stats, None, ec_connector_stats=None)
        if stats is not None:
            if not answers:
                answers[0] = EngineCoreOutputs()
            next(iter(answers.values())).scheduler_stats = stats
        return answers

    def _fast_outputs(
        self, step: SchedulerOutput, result: ModelRunnerOutput
    ) -> tuple[dict[int, list[EngineCoreOutput]], SpecDecodingStats | None]:
        """Give each request its tokens; return the outputs for each front end, and what was drafted."""
        outputs: dict[int, list[EngineCoreOutput]] = defaultdict(list)
        rows, sampled = result.req_id_to_index, result.sampled_token_ids
        drafts_of, invalid = step.scheduled_spec_decode_tokens, step.num_invalid_spec_tokens
        detailed = self.spec_decode_metrics_level == "detailed"
        stats: SpecDecodingStats | None = None
        stopped_running: set[Request] = set()
        stopped_preempted: set[Request] = set()
        going_on: list[Request] = []
        # What a scheduler does with a request's tokens, where its class is known to do no more than that.
        update = type(self)._update_request_with_output
        base_takes_back = self._fast_base_takes_back
        ahead = not base_takes_back and update is AsyncScheduler._update_request_with_output
        inline = ahead or update is FastResults._update_request_with_output
        cache_blocks = self.kv_cache_manager.cache_blocks
        for request_id, scheduled in step.num_scheduled_tokens.items():
            request = self.requests.get(request_id)
            if request is None:
                continue
            request.num_in_flight_tokens -= scheduled
            stale = request.num_stale_output_tokens > 0
            if stale:
                request.num_stale_output_tokens -= scheduled
                assert request.num_stale_output_tokens >= 0
            if request.status > RequestStatus.PREEMPTED or (stale and request.drop_stale_output):
                continue  # it has ended, or what it sampled was sampled again
            tokens = sampled[rows[request_id]]
            drafts = drafts_of.get(request_id)
            if drafts and tokens:
                drafted, accepted = len(drafts), len(tokens) - 1
                if not stale:
                    if request.num_computed_tokens > 0:
                        request.num_computed_tokens -= drafted - accepted
                    if request.num_output_placeholders > 0:
                        request.num_output_placeholders -= drafted - accepted
                stats = self.make_spec_decoding_stats(stats, drafted, accepted, invalid, request_id)
                if request.spec_decode_metrics is not None:
                    if invalid:
                        drafted -= invalid.get(request_id, 0)
                    request.spec_decode_metrics.observe(drafted, accepted, detailed)
            if request.mm_features:
                self._free_encoder_inputs(request)
            if not tokens:
                continue
            status = request.status
            ahead_of_output = request.num_output_placeholders > 0
            if inline and self._fast_goes_on(request, tokens):
                stopped = False
                self._fast_append(request, tokens)
                if base_takes_back:
                    if not stale and ahead_of_output:
                        request.num_output_placeholders -= len(tokens)
                        assert request.num_output_placeholders >= 0
                elif ahead:
                    if not stale:
                        request.num_output_placeholders -= len(tokens)
                        assert request.num_output_placeholders >= 0
                    if status == RequestStatus.RUNNING:
                        cache_blocks(request, request.num_computed_tokens - request.num_output_placeholders)
            else:
                tokens, stopped = self._update_request_with_output(request, tokens, is_stale=stale)
            if (
                base_takes_back
                and not stale
                and status == RequestStatus.RUNNING
                and (ahead_of_output or self.num_spec_tokens > 0)
            ):
                cache_blocks(request, request.num_computed_tokens - request.num_in_flight_tokens)
            if not self.structured_output_manager.accept_tokens(request, tokens):
                logger.error("The grammar of request %s rejects tokens %s, which end it", request_id, tokens)
                request.status = RequestStatus.FINISHED_ERROR
                request.resumable = False
                stopped = True
            output = EngineCoreOutput(request_id, tokens, trace_headers=request.trace_headers)
            if request.prefill_stats is not None:
                output.prefill_stats = request.take_prefill_stats()
                output.prefill_stats.finalize(self.kv_cache_manager.estimate_cached_tokens(request))
            if (
                result.logprobs
                and request.sampling_params is not None
                and request.sampling_params.num_logprobs is not None
            ):
                output.new_logprobs = result.logprobs.slice_request(rows[request_id], len(tokens))
            if stopped:
                if not self._fast_stop(request, output) and self._fast_enqueues:
                    going_on.append(request)
                (stopped_running if status == RequestStatus.RUNNING else stopped_preempted).add(request)
            output.stop_reason = request.stop_reason
            if request.events:
                output.events = request.take_events()
            output.num_nans_in_logits = request.num_nans_in_logits
            outputs[request.client_index].append(output)
        if stopped_running:
            self.running = remove_all(self.running, stopped_running)
        if stopped_preempted:
            self.waiting.remove_requests(stopped_preempted)
            self.kv_holding_waiting.remove_requests(stopped_preempted)
            self.deferred_waiting.difference_update(stopped_preempted)
        for request in going_on:
            self._enqueue_waiting_request(request)
        return outputs, stats

    def _fast_stop(self, request: Request, output: EngineCoreOutput) -> bool:
        """Let go a request that a token has stopped, and say so in its output.

        Returns:
            Whether it has ended; else it goes on with the next part of its prompt.

        """
        # Before it goes on with the next part of its prompt, if it is one that has several.
        output.finish_reason = request.get_finished_reason()
        ended: bool = self._handle_stopped_request(request)
        if ended:
            output.kv_transfer_params, output.ec_transfer_params = self._free_request(request)
        if output.finish_reason is not None:
            output.spec_decode_metrics = request.spec_decode_metrics
        return ended

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Append a step's tokens, at once where none of them can end the request."""
        if not self._fast or not self._fast_goes_on(request, new_token_ids):
            result: tuple[list[int], bool] = super()._update_request_with_output(
                request, new_token_ids, is_stale
            )
            return result
        self._fast_append(request, new_token_ids)
        if self._fast_base_takes_back and not is_stale and request.num_output_placeholders > 0:
            request.num_output_placeholders -= len(new_token_ids)
            assert request.num_output_placeholders >= 0
        return new_token_ids, False

    def _fast_append(self, request: Request, new_token_ids: list[int]) -> None:
        """Append tokens that do not end a request."""
        tokens = request._all_token_ids
        tokens.extend(new_token_ids)
        request._output_token_ids.extend(new_token_ids)
        if (
            request._block_hasher is not None
            and len(tokens) >= (len(request.block_hashes) + 1) * self.hash_block_size
        ):
            request.update_block_hashes()

    def _fast_goes_on(self, request: Request, new_token_ids: list[int]) -> bool:
        """Return whether a request surely goes on after these tokens, and may have all of them at once."""
        sampling = request.sampling_params
        if sampling is None or request.pooling_params or sampling.repetition_detection is not None:
            return False
        new = len(new_token_ids)
        if (
            len(request._all_token_ids) + new >= self.max_model_len
            or len(request._output_token_ids) + new >= request.max_tokens
            or sampling.eos_token_id in new_token_ids
        ):
            return False
        stops = sampling.stop_token_ids
        if stops and any(token in stops for token in new_token_ids):
            return False
        # Hashes of several blocks at once start from the same image, but not those with images in them.
        if request.mm_features:
            return False
        hasher = request._block_hasher
        return hasher is None or hasher is self._fast_hasher or self._fast_knows(hasher)

    def _fast_knows(self, hasher: Any) -> bool:
        """Return whether a hasher is vLLM's, for blocks of the size that this scheduler has."""
        if not isinstance(hasher, FunctionType) or not is_of(hasher, "vllm.v1.core.kv_cache_utils"):
            return False
        cells = dict(zip(hasher.__code__.co_freevars, hasher.__closure__ or (), strict=True))
        if "hash_block_size" not in cells or cells["hash_block_size"].cell_contents != self.hash_block_size:
            return False
        self._fast_hasher = hasher
        return True

    def make_spec_decoding_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None,
        num_draft_tokens: int,
        num_accepted_tokens: int,
        num_invalid_spec_tokens: dict[str, int] | None,
        request_id: str,
    ) -> SpecDecodingStats | None:
        """Count a request's verify step; :meth:`make_stats` enters it position by position."""
        if not self._fast or not self.log_stats or not num_draft_tokens:
            return super().make_spec_decoding_stats(
                spec_decoding_stats,
                num_draft_tokens,
                num_accepted_tokens,
                num_invalid_spec_tokens,
                request_id,
            )
        if spec_decoding_stats is None:
            self._fast_drafts = {}
            spec_decoding_stats = SpecDecodingStats.new(self.num_spec_tokens)
        if num_invalid_spec_tokens:
            num_draft_tokens -= num_invalid_spec_tokens.get(request_id, 0)
        drafts, kind = self._fast_drafts, (num_draft_tokens, num_accepted_tokens)
        drafts[kind] = drafts.get(kind, 0) + 1
        return spec_decoding_stats

    def make_stats(
        self, spec_decoding_stats: SpecDecodingStats | None = None, *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        """Return the step's statistics."""
        if spec_decoding_stats is not None and self._fast_drafts:
            enter_drafts(spec_decoding_stats, self._fast_drafts)
            self._fast_drafts = {}
        stats: SchedulerStats | None = super().make_stats(spec_decoding_stats, *args, **kwargs)
        return stats


def enter_drafts(stats: SpecDecodingStats, drafts: dict[tuple[int, int], int]) -> None:
    """Do what ``observe_draft`` does, for requests that drafted and accepted equally many tokens together.

    Args:
        stats: where they are entered.
        drafts: by draft tokens and accepted ones, how many requests had them.

    """
    for (drafted, accepted), requests in drafts.items():
        assert accepted <= stats.num_spec_tokens
        stats.num_drafts += requests
        stats.num_draft_tokens += requests * drafted
        stats.num_accepted_tokens += requests * accepted
        for position in range(accepted):
            stats.num_accepted_tokens_per_pos[position] += requests
        for position in range(drafted):
            stats.num_draft_tokens_per_pos[position] += requests
