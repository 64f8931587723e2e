"""vLLM's scheduler, with short ways for the usual decode step.

With a small model the host sets the pace of a verify step, and a good part of its time goes into arriving,
for each request, at "nothing to do". The short ways here do what stock code does for requests that decode and
go on decoding; whatever else may happen is left to the stock methods. Every decision stays vLLM's.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.sched import scheduler as stock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from nwor.config import NworConfig
from nwor.engine.fastpath import kv_cache_manager
from nwor.engine.fastpath.kv_cache_manager import BLOCKS
from nwor.engine.fastpath.results import RESULTS, TOKENS, FastResults
from nwor.engine.fastpath.stock import Sources, changed, is_of, replaced_in
from nwor.engine.vllm_features import counts_executed_steps, prefill_cadence, steps_skip_drafts

logger = logging.getLogger("vllm.nwor.scheduler")

_SCHEDULER = "vllm.v1.core.sched.scheduler"
_OUTPUT = "vllm.v1.core.sched.output"

#: What a whole step made the short way stands for, beside what its parts do.
STEPS: Sources = {
    (_SCHEDULER, "Scheduler.schedule"): ("da4f2cf2fc39c39e", "fa34c8a13c0a8936"),
    (_SCHEDULER, "Scheduler._make_cached_request_data"): ("8aeb1dc3ba937dd2",),
    (_SCHEDULER, "Scheduler._reserve_prefill_lookahead"): ("c214e49d7610a63a",),
    (_SCHEDULER, "Scheduler._drafts_unused"): (None, "b3219dbf2519479e"),
    (_SCHEDULER, "Scheduler._get_encoder_input_updates"): (None, "06f1610896a403e8"),
    (_OUTPUT, "SchedulerOutput"): ("97fb4463a2eda132", "684c2884d3841610"),
    (_OUTPUT, "CachedRequestData"): ("b0a215b040121b1a",),
}

#: Functions that the short ways stand for, beside methods of the classes below, and where they come from.
_FUNCTIONS = {
    (stock, "check_stop"): "vllm.v1.core.sched.utils",
    (SpecDecodingStats, "observe_draft"): "vllm.v1.spec_decode.metrics",
}


def why_not(scheduler: Scheduler) -> str | None:
    """Return why the short ways do not fit a scheduler; None if they do."""
    for (owner, name), module in _FUNCTIONS.items():
        if not is_of(getattr(owner, name), module):
            return f"{name} is not vLLM's own"
    for owner in (Scheduler, AsyncScheduler, Request):
        replaced = replaced_in(owner)
        if replaced is not None:
            return f"{replaced} is not vLLM's own"
    for name in ("_reserve_prefill_lookahead", "_make_cached_request_data"):
        if getattr(type(scheduler), name) is not getattr(Scheduler, name):
            return f"{type(scheduler).__name__} has a {name} of its own"
    return kv_cache_manager.why_not(scheduler.kv_cache_manager) or changed(TOKENS, BLOCKS)


def _why_no_steps(scheduler: Any) -> str | None:
    """Return why no whole step may be made the short way; None if one may.

    But for the last of them these are no faults: vLLM then does more in a step than the short way does.
    """
    config = scheduler.scheduler_config
    for found, what in (
        (scheduler.connector is not None, "a KV connector"),
        (scheduler.ec_connector is not None, "an encoder connector"),
        (scheduler.aux_output_connector is not None, "further outputs of layers"),
        (scheduler.lora_config is not None, "LoRA adapters"),
        (scheduler.is_encoder_decoder or scheduler.is_mm_encoder_only, "an encoder"),
        (scheduler.perf_metrics is not None, "an estimate of the hardware's use"),
        (scheduler.return_sampling_mask, "a mask of what could be sampled"),
        (scheduler.num_sampled_tokens_per_step != 1, "no token sampled after a prompt"),
        (config.long_prefill_token_threshold > 0, "a bound for chunks of prompts"),
        (scheduler.use_pp and not config.async_scheduling, "pipeline stages in lockstep"),
        (prefill_cadence(scheduler), "an interval between prompts"),
        (scheduler.observability_config.enable_logging_iteration_details, "details of steps in the log"),
    ):
        if found:
            return f"this engine has {what}"
    return changed(TOKENS, BLOCKS, RESULTS, STEPS)


class FastScheduling(FastResults):
    """Mixin right before vLLM's ``Scheduler``, so that ``AsyncScheduler`` builds on it unchanged."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # What vLLM's versions do differently in each step.
        self._fast_counts_steps = counts_executed_steps(self)
        self._fast_skips_drafts = steps_skip_drafts()
        config = NworConfig.from_additional_config(self.vllm_config.additional_config)
        if config is None or not config.fast_host:
            return
        reason = why_not(self)
        self.fast_paths = found = {"scheduler": reason, "scheduler_steps": reason}
        if reason is None:
            self._fast = True
            kv_cache_manager.make_fast(self.kv_cache_manager)
            reason = _why_no_steps(self)
            self._fast_steps = reason is None
            if reason is not None:
                found["scheduler_steps"] = reason
                logger.info("NWOR shortens parts of the scheduler's steps, not whole ones: %s", reason)
        else:
            logger.warning("NWOR leaves the scheduler's work on the host as vLLM does it: %s", reason)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Make the next step."""
        if self._fast_steps and not throttle_prefills:
            plan = self._fast_plan()
            if plan is not None:
                return self._fast_schedule(plan)
        return super().schedule(throttle_prefills)

    def _fast_plan(self) -> list[tuple[Request, int, int | None]] | None:
        """Return a step in which running requests go on and nothing else happens, changing nothing.

        Returns:
            Each scheduled request with its tokens and what it lacks of blocks, as ``lacking`` says; None
            where vLLM might start, preempt or clip a request, or schedules none.

        """
        if self._pause_state != PauseState.UNPAUSED:
            return None
        if (self.waiting or self.kv_holding_waiting) and (
            len(self.running) + self.num_waiting_for_streaming_input < self.max_num_active_reqs
        ):
            return None
        step = self.current_step + 1
        lookahead, longest = self.num_lookahead_tokens, self.max_model_len - self.num_sampled_tokens_per_step
        lacking_of = self.kv_cache_manager.lacking
        plan: list[tuple[Request, int, int | None]] = []
        tokens = blocks = 0
        for request in self.running:
            computed, placeholders = request.num_computed_tokens, request.num_output_placeholders
            if (
                placeholders > 0
                and computed + 2 - placeholders >= request.num_prompt_tokens + request.max_tokens
            ) or step < request.next_decode_eligible_step:
                continue  # the steps under way may end it, or its turn among pipeline stages is later
            new = len(request._all_token_ids) + len(request.spec_token_ids) + placeholders - computed
            if new <= 0 or computed + new > longest or request.mm_features:
                return None
            lacking = lacking_of(request, new, lookahead)
            if lacking is not None:
                blocks += lacking
            tokens += new
            plan.append((request, new, lacking))
        speculation = self.vllm_config.speculative_config
        slots = speculation.max_num_new_slots_for_drafting if speculation is not None else 0
        if (
            not plan
            or blocks > self.kv_cache_manager.block_pool.get_num_free_blocks()
            or tokens > self.max_num_scheduled_tokens
            or tokens + len(plan) * slots > self.scheduler_config.max_num_batched_tokens
        ):
            return None
        return plan

    def _fast_schedule(self, plan: list[tuple[Request, int, int | None]]) -> SchedulerOutput:
        """Make a planned step, as the stock method would."""
        self.current_step += 1
        manager, lookahead = self.kv_cache_manager, self.num_lookahead_tokens
        num_scheduled_tokens: dict[str, int] = {}
        drafts: dict[str, list[int]] = {}
        new_block_ids: list[tuple[list[int], ...] | None] = []
        num_computed_tokens: list[int] = []
        num_output_tokens: list[int] = []
        skips = self._fast_skips_drafts and self.can_skip_drafts
        drafts_needed = not skips
        for request, new, lacking in plan:
            request_id = request.request_id
            num_scheduled_tokens[request_id] = new
            if lacking is None:
                new_block_ids.append(None)
            else:
                new_block_ids.append(manager.take(request, new, lookahead).get_block_ids(allow_none=True))
            drafts_needed = drafts_needed or not self._drafts_unused(
                request, request.num_computed_tokens, new
            )
            if request.spec_token_ids:
                drafts[request_id] = request.spec_token_ids
                request.spec_token_ids = []
            num_computed_tokens.append(request.num_computed_tokens)
            num_output_tokens.append(len(request._output_token_ids) + request.num_output_placeholders)
        self.prefill_capacity_bound = self.get_request_counts()[1] > len(self.deferred_waiting)
        all_token_ids: dict[str, list[int]] = {}
        if not self.use_v2_model_runner:
            before = self.prev_step_scheduled_req_ids
            for request, _, _ in plan:
                if request.request_id not in before:
                    all_token_ids[request.request_id] = request.all_token_ids.copy()
            before.clear()
            before.update(num_scheduled_tokens)
        if self._fast_counts_steps:
            self.num_executed_steps += 1
        output = SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=CachedRequestData(
                req_ids=list(num_scheduled_tokens),
                resumed_req_ids=set(),
                new_token_ids=[],
                all_token_ids=all_token_ids,
                new_block_ids=new_block_ids,
                num_computed_tokens=num_computed_tokens,
                num_output_tokens=num_output_tokens,
            ),
            num_scheduled_tokens=num_scheduled_tokens,
            total_num_scheduled_tokens=sum(num_scheduled_tokens.values()),
            scheduled_spec_decode_tokens=drafts,
            scheduled_encoder_inputs={},
            preempted_req_ids=self.reset_preempted_req_ids,
            finished_req_ids=self.finished_req_ids,
            free_encoder_mm_hashes=self.encoder_cache_manager.get_freed_mm_hashes(),
            new_block_ids_to_zero=self._get_new_block_ids_to_zero(),
            num_spec_tokens_to_schedule=self.num_spec_tokens
            if self.dynamic_sd_lookup is None
            else self.dynamic_sd_lookup[len(plan)],
            ec_manager_metadata=self.encoder_cache_manager.get_manager_metadata(),
        )
        if skips:
            output.skip_drafts = not drafts_needed
        self._update_after_schedule(output)
        return output
