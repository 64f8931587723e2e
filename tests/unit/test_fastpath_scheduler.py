"""The fast scheduler beside vLLM's own: the same requests, and the same state after every step."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from benchmarks.engine.scheduler_rig import Drive, Setup, make_request, make_scheduler
from nwor.engine.fastpath.copies import standing_aside
from nwor.engine.fastpath.kv_cache_manager import FastKVCacheManager
from nwor.engine.fastpath.scheduler import FastScheduling
from nwor.engine.vllm_features import steps_skip_drafts

#: The short ways step aside beside a release whose code they have not been compared with.
fast_scheduler = pytest.mark.skipif("scheduler" in standing_aside(), reason="another vLLM's scheduler")


class FastScheduler(FastScheduling):
    """Vanilla, in lockstep."""


class FastAsyncScheduler(AsyncScheduler, FastScheduling):
    """Vanilla, steps scheduled ahead."""


PLENTY = Setup(requests=12, blocks=600, block_size=4, length=160, tokens=256, settings={})
SCARCE = replace(PLENTY, blocks=44, requests=4)
BY_REQUESTS = ((1, 2, 4), (3, 5, 1), (6, 8, 0), (9, 12, 3))
SETUPS = {
    "plenty": PLENTY,
    "plenty, lockstep": replace(PLENTY, ahead=False),
    "plenty, lockstep, runner V1": replace(PLENTY, ahead=False, runner_v2=False),
    "ahead, runner V1": replace(PLENTY, runner_v2=False),
    "scarce": SCARCE,
    "scarce, lockstep": replace(SCARCE, ahead=False, runner_v2=False),
    "scarce, no prefix cache": replace(SCARCE, caching=False),
    "no prefix cache, lockstep": replace(PLENTY, caching=False, ahead=False),
    "sliding window": replace(PLENTY, window=24),
    "sliding window, scarce": replace(SCARCE, window=16, blocks=60),
    "sliding window, scarce, lockstep": replace(SCARCE, window=16, blocks=60, ahead=False),
    "sliding window, no prefix cache": replace(PLENTY, window=20, caching=False),
    "sliding window, few blocks kept": replace(PLENTY, window=8, retention=32),
    "sliding window, fewest blocks kept": replace(PLENTY, window=8, retention=0),
    "no drafts": replace(PLENTY, drafts=0),
    "no drafts, lockstep, scarce": replace(SCARCE, drafts=0, ahead=False),
    "one draft": replace(PLENTY, drafts=1),
    "eight drafts": replace(PLENTY, drafts=8, block_size=4),
    "eight drafts, lockstep": replace(SCARCE, drafts=8, ahead=False),
    "drafts by requests": replace(PLENTY, by_requests=BY_REQUESTS),
    "drafts by requests, scarce": replace(SCARCE, by_requests=BY_REQUESTS),
    "drafts by requests, lockstep": replace(PLENTY, by_requests=BY_REQUESTS, ahead=False),
    "drafts by requests, runner V1": replace(PLENTY, by_requests=BY_REQUESTS, runner_v2=False),
    "blocks of 16": replace(PLENTY, block_size=16),
    "few tokens a step": replace(PLENTY, tokens=48),
    "few tokens a step, lockstep": replace(PLENTY, tokens=48, ahead=False),
    "few tokens scheduled": replace(PLENTY, scheduled=32),
    "few tokens of input": replace(PLENTY, tokens=32, scheduled=256),
    "short requests": replace(PLENTY, length=48),
    "short requests, lockstep": replace(PLENTY, length=48, ahead=False),
    "priorities, scarce": replace(SCARCE, policy="priority"),
    "priorities, lockstep": replace(PLENTY, policy="priority", ahead=False),
    "pipeline stages": replace(PLENTY, stages=2),
    "pipeline stages, scarce": replace(SCARCE, stages=3),
    "events": replace(PLENTY, events=True),
    "parts of steps": PLENTY,
    "parts of steps, lockstep, scarce": replace(SCARCE, ahead=False),
}
STEPS, SEEDS = 110, (1, 2)


def names(requests: Iterable[Any]) -> list[str]:
    return [request.request_id for request in requests]


def state_of_request(request: Any) -> dict[str, Any]:
    hidden = ("arrival_time", "events", "sampling_params", "_block_hasher", "block_hashes")
    state = {key: value for key, value in vars(request).items() if key not in hidden}
    state["output_token_ids"], state["all_token_ids"] = (
        list(request.output_token_ids),
        list(request.all_token_ids),
    )
    state["block_hashes"] = list(request.block_hashes)
    state["events"] = [event.type for event in request.events]
    return state


def state_of(scheduler: Scheduler) -> dict[str, Any]:
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    cached = {
        key: sorted(found) if isinstance(found, dict) else [found.block_id]
        for key, found in pool.cached_block_hash_to_block._cache.items()
    }
    return {
        "requests": {name: state_of_request(request) for name, request in scheduler.requests.items()},
        "running": names(scheduler.running),
        "waiting": names(scheduler.waiting),
        "kv_holding_waiting": names(scheduler.kv_holding_waiting),
        "deferred_waiting": sorted(names(scheduler.deferred_waiting)),
        "inflight_prefills": sorted(names(scheduler._inflight_prefills)),
        "finished": scheduler.finished_req_ids,
        "preempted": scheduler.reset_preempted_req_ids,
        "step": scheduler.current_step,
        "prompts": [getattr(scheduler, name, None) for name in ("num_executed_steps", "last_prefill_step")],
        "previous": scheduler.prev_step_scheduled_req_ids,
        "capacity": scheduler.prefill_capacity_bound,
        "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "blocks": [(block.ref_cnt, block.block_hash, block.block_hash_num_tokens) for block in pool.blocks],
        "prefix cache": cached,
        "groups": [
            (
                {name: [block.block_id for block in blocks] for name, blocks in group.req_to_blocks.items()},
                group.num_cached_block,
                group.new_block_ids,
                group._partial_hit_reqs,
            )
            for group in manager.coordinator.single_type_managers
        ],
        "prefix cache statistics": manager.prefix_cache_stats,
    }


def state_of_answers(answers: dict[int, Any]) -> dict[int, Any]:
    return {
        client: (
            [
                {
                    field: [event.type for event in output.events or ()] if field == "events" else value
                    for field in output.__struct_fields__
                    for value in [getattr(output, field)]
                }
                for output in answer.outputs
            ],
            answer.finished_requests,
            answer.scheduler_stats,
        )
        for client, answer in answers.items()
    }


class Logprobs:
    """Stands in for a step's log-probabilities."""

    def slice_request(self, row: int, tokens: int) -> tuple[int, int]:
        return row, tokens


class Publisher:
    """Keeps what is told of the prefix cache."""

    def __init__(self, published: list[Any]) -> None:
        self.published = published

    def publish(self, batch: Any) -> None:
        self.published.append(batch.events)


class Pair:
    """A stock scheduler and a fast one that are driven alike, and compared whenever they did something."""

    def __init__(self, folder: Path, setup: Setup, seed: int) -> None:
        stock, fast = (AsyncScheduler, FastAsyncScheduler) if setup.ahead else (Scheduler, FastScheduler)
        self.setup, self.chance = setup, random.Random(seed)
        self.drives = [
            Drive(make_scheduler(folder, setup, kind), seed, vocabulary=60, eos=0.01)
            for kind in (stock, fast)
        ]
        self.published: list[list[Any]] = [[], []]
        for drive, published in zip(self.drives, self.published, strict=True):
            drive.scheduler.structured_output_manager.forbidden = 59 if seed % 2 else None
            drive.scheduler.kv_event_publisher = Publisher(published)
        self.planned = self.steps = self.finished = self.preempted = self.undrafted = 0
        self.names: list[str] = []
        self.reasons: set[Any] = set()

    @property
    def stock(self) -> Scheduler:
        return self.drives[0].scheduler

    @property
    def fast(self) -> Any:
        return self.drives[1].scheduler

    def compare(self, what: str) -> None:
        stock, fast = state_of(self.stock), state_of(self.fast)
        for part, value in stock.items():
            assert fast[part] == value, f"{part} after {what}, step {self.steps}"

    def add(self, name: str | None = None) -> None:
        chance, length = self.chance, self.setup.length
        goes_on = name is not None or chance.random() < 0.05
        if name is None:
            name = f"r{len(self.names)}"
            self.names.append(name)
        shared = [2 + position % 11 for position in range(chance.choice((0, 9, 16, 33)))]
        prompt = shared + [chance.randrange(2, 60) for _ in range(chance.randrange(1, 24))]
        prompt = prompt[: length - 2]
        sampling: dict[str, Any] = {
            "max_tokens": chance.choice((1, 2, 7, 30, 90, 200)),
            "stop_token_ids": chance.choice((None, [7], [8, 9])),
            "logprobs": chance.choice((None, None, 2)),
        }
        if chance.random() < 0.1:
            sampling["repetition_detection"] = RepetitionDetectionParams(
                max_pattern_size=2, min_pattern_size=1, min_count=2
            )
        more = {"client_index": chance.randrange(2), "priority": chance.randrange(3), "resumable": goes_on}
        for drive in self.drives:
            request = make_request(drive.scheduler, name, prompt, SamplingParams(**sampling), **more)
            drive.scheduler.add_request(request)
        self.compare("adding a request")

    def go_on(self) -> None:
        """Give a request that comes in parts its next part."""
        parts = [name for name, request in self.stock.requests.items() if request.resumable]
        if parts:
            self.add(self.chance.choice(parts))

    def pause(self) -> None:
        state = self.chance.choice(list(PauseState))
        for drive in self.drives:
            drive.scheduler.set_pause_state(state)

    def abort(self) -> None:
        alive = list(self.stock.requests)
        if alive:
            name = self.chance.choice(alive)
            for drive in self.drives:
                drive.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            self.compare("an abort")

    def reset(self) -> None:
        """Preempt everything, which vLLM refuses while a request waits for its next part."""
        if self.stock.kv_holding_waiting or self.stock.num_waiting_for_streaming_input:
            return
        results = [drive.scheduler.reset_prefix_cache(True) for drive in self.drives]
        assert results[0] == results[1]
        self.compare("a reset")

    def make(self) -> None:
        self.steps += 1
        throttle = self.chance.random() < 0.05
        planned = self.fast._fast_steps and not throttle and self.fast._fast_plan() is not None
        self.compare("planning")
        by_resets = len(self.stock.reset_preempted_req_ids)
        stock, fast = (drive.make(throttle) for drive in self.drives)
        self.planned += planned
        self.undrafted += planned and getattr(fast, "skip_drafts", False)
        self.preempted += len(stock.preempted_req_ids) - by_resets
        assert fast == stock, f"step {self.steps}"
        self.compare("scheduling")
        self.embellish(stock)

    def embellish(self, step: Any) -> None:
        """Let some results have more to them than tokens."""
        chance, scheduled = self.chance, list(step.num_scheduled_tokens)
        drafting = list(step.scheduled_spec_decode_tokens)
        invalid = {chance.choice(drafting): 1} if drafting and chance.random() < 0.1 else None
        logprobs = Logprobs() if chance.random() < 0.5 else None
        broken = {chance.choice(scheduled): 3} if scheduled and chance.random() < 0.03 else None
        for drive in self.drives:
            output, result = drive.latest
            output.num_invalid_spec_tokens = invalid
            result.logprobs, result.num_nans_in_logits = logprobs, broken

    def take(self) -> None:
        stock, fast = (drive.take() for drive in self.drives)
        assert state_of_answers(fast) == state_of_answers(stock), f"results of step {self.steps}"
        assert self.published[1] == self.published[0]
        for answer in stock.values():
            ended = [output for output in answer.outputs if output.finish_reason is not None]
            self.finished += len(ended)
            self.reasons.update((output.finish_reason.name, output.stop_reason) for output in ended)
        self.compare("taking results in")

    def run(self, steps: int) -> None:
        chance = self.chance
        for _ in range(steps):
            if chance.random() < 0.35 and len(self.stock.requests) < self.setup.requests + 4:
                self.add()
            if chance.random() < 0.02:
                self.abort()
            if chance.random() < 0.05:
                self.go_on()
            if chance.random() < (0.3 if self.fast._pause_state else 0.02):
                self.pause()
            if chance.random() < 0.004:
                self.reset()
            self.make()
            # Aborts may come between a step and its results.
            if chance.random() < 0.02:
                self.abort()
            most = chance.randrange(1 + self.setup.stages) if self.setup.ahead else 0
            while self.drives[0].under_way > most:
                self.take()
        while self.drives[0].under_way:
            self.take()


@fast_scheduler
@pytest.mark.parametrize("name", SETUPS)
def test_every_step_is_the_one_that_vllm_makes(tmp_path, name):
    pairs = []
    for seed in SEEDS:
        pair = Pair(tmp_path, SETUPS[name], seed)
        assert pair.fast._fast_steps
        assert isinstance(pair.fast.kv_cache_manager, FastKVCacheManager)
        pair.fast._fast_steps = not name.startswith("parts")
        pair.run(STEPS)
        pairs.append(pair)
        assert bool(pair.published[1]) == SETUPS[name].events
    # The short way and the long one were both taken, and requests came to their ends.
    steps = sum(pair.steps for pair in pairs)
    if name.startswith("parts"):
        assert not any(pair.planned for pair in pairs)
    else:
        assert 5 < sum(pair.planned for pair in pairs) < steps
    # Steps that say that nobody can use the drafts after them; scheduled ahead they are rare.
    if steps_skip_drafts() and pairs[0].fast.can_skip_drafts:
        assert SETUPS[name].ahead or name.startswith("parts") or sum(pair.undrafted for pair in pairs) > 0
    else:
        assert not any(pair.undrafted for pair in pairs)
    assert sum(pair.finished for pair in pairs) > 10
    ends = {reason for pair in pairs for reason, _ in pair.reasons}
    assert {"STOP", "LENGTH"} <= ends
    if "scarce" in name:
        assert sum(pair.preempted for pair in pairs) > 0
