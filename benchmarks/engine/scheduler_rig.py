"""A scheduler of vLLM without an engine: made-up results come back for the steps that it makes.

What a step samples follows from a seed, the step's number and the request, so two schedulers that are driven
alike get the same results as long as they decide alike.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    KVEventsConfig,
    ModelConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from benchmarks.engine import shapes
from nwor.engine.vllm_features import steps_skip_drafts

#: The token that ends a request.
EOS = 1


@dataclass(frozen=True)
class Setup:
    """What a scheduler is made for.

    Attributes:
        drafts: draft tokens a step; 0 is without speculation.
        by_requests: vLLM's draft tokens by the number of requests; None is always the same number.
        ahead: whether steps are scheduled ahead.
        runner_v2: whether model runner V2 is what it schedules for.
        blocks: blocks of the KV cache, the null block included.
        block_size: tokens a block.
        requests: most requests that run at once.
        tokens: most tokens of a step.
        length: most tokens of a request.
        caching: whether there is a prefix cache.
        window: tokens of a sliding window of a second group of layers; 0 is one group of full attention.
        retention: tokens between the places at which the second group's blocks stay in the prefix cache; None
            keeps all that can serve.
        scheduled: most tokens of a step, where it is another number than that of the model's input.
        policy: "fcfs" or "priority".
        stages: pipeline stages, of which the scheduler only sees how far apart a request's steps have to be.
        events: whether changes of the prefix cache are told.
        settings: NWOR's settings; None is an engine that did not ask for it.

    """

    drafts: int = 4
    by_requests: tuple[tuple[int, int, int], ...] | None = None
    ahead: bool = True
    runner_v2: bool = True
    blocks: int = 4096
    block_size: int = 16
    requests: int = 64
    tokens: int = 8192
    length: int = 4096
    caching: bool = True
    window: int = 0
    retention: int | None = None
    scheduled: int | None = None
    policy: str = "fcfs"
    stages: int = 1
    events: bool = False
    settings: dict[str, Any] | None = None


class Grammar:
    """Stands in for the manager of structured outputs.

    Attributes:
        forbidden: a token that ends any request.

    """

    forbidden: int | None = None

    def accept_tokens(self, request: Request, new_token_ids: list[int]) -> bool:
        return self.forbidden not in new_token_ids

    def validate_tokens(self, request: Request, token_ids: list[int]) -> list[int]:
        return token_ids


def make_scheduler(folder: Path, setup: Setup, create: Callable[..., Scheduler]) -> Scheduler:
    """Build a scheduler.

    Args:
        folder: where the configuration of a model is written.
        setup: what it is made for.
        create: its class, or what is called like it.

    """
    target, draft = shapes.write(folder, "1b", setup.length)
    model = ModelConfig(
        model=str(target), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=setup.length
    )
    parallel = ParallelConfig()
    speculation = None
    if setup.drafts:
        speculation = SpeculativeConfig(
            method="eagle",
            model=str(draft),
            num_speculative_tokens=setup.drafts,
            num_speculative_tokens_per_batch_size=setup.by_requests and list(setup.by_requests),
            target_model_config=model,
            target_parallel_config=parallel,
        )
    config = VllmConfig(
        model_config=model,
        cache_config=CacheConfig(block_size=setup.block_size, enable_prefix_caching=setup.caching),
        parallel_config=parallel,
        speculative_config=speculation,
        scheduler_config=SchedulerConfig(
            max_num_seqs=setup.requests,
            max_num_batched_tokens=setup.tokens,
            max_model_len=setup.length,
            is_encoder_decoder=False,
            policy=setup.policy,
        ),
        kv_events_config=KVEventsConfig(enable_kv_cache_events=setup.events, publisher="null"),
        observability_config=ObservabilityConfig(
            per_request_spec_decode_metrics="summary" if setup.drafts else "none"
        ),
    )
    # After the platform had its say: on CPUs it knows neither of the two.
    config.scheduler_config.async_scheduling = setup.ahead
    config.additional_config = {} if setup.settings is None else {"nwor": setup.settings}
    config.cache_config.num_gpu_blocks = setup.blocks
    shape = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32, "block_size": setup.block_size}
    groups = [KVCacheGroupSpec(["full"], FullAttentionSpec(**shape))]
    if setup.window:
        groups.append(KVCacheGroupSpec(["sliding"], SlidingWindowSpec(sliding_window=setup.window, **shape)))
    init_none_hash(sha256)
    scheduler = create(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            setup.blocks, [], groups, prefix_cache_retention_interval=setup.retention
        ),
        structured_output_manager=Grammar(),
        block_size=setup.block_size,
        include_finished_set=True,
        log_stats=True,
    )
    scheduler.use_v2_model_runner = setup.runner_v2
    if steps_skip_drafts():
        scheduler.can_skip_drafts = setup.runner_v2 and scheduler.num_lookahead_tokens > 0
    if setup.scheduled is not None:
        scheduler.max_num_scheduled_tokens = setup.scheduled
    if setup.stages > 1:
        scheduler.use_pp = True
        scheduler.pp_size = scheduler.decode_stagger = setup.stages
    return scheduler


@cache
def _hasher(block_size: int, ahead: int) -> Callable[[Request], Any]:
    """An engine has one for all of its requests. Hashes look ahead with some releases of vLLM alone."""
    return get_request_block_hasher(block_size, sha256, *([ahead] if ahead else []))


def make_request(
    scheduler: Scheduler,
    name: str,
    prompt: list[int],
    sampling: SamplingParams,
    **more: Any,
) -> Request:
    """Build a request for a scheduler; a prefix cache decides whether its blocks are hashed.

    Args:
        scheduler: whose request it will be.
        name: its id.
        prompt: token ids.
        sampling: how it is sampled; :data:`EOS` ends it.
        more: what else a request may have.

    """
    sampling.update_from_generation_config({}, EOS)
    hasher = None
    if scheduler.cache_config.enable_prefix_caching:
        hasher = _hasher(scheduler.hash_block_size, getattr(scheduler, "num_hash_lookahead_tokens", 0))
    return Request(name, list(prompt), sampling, None, arrival_time=0.0, block_hasher=hasher, **more)


@dataclass
class Drive:
    """Steps a scheduler, and answers its steps.

    Attributes:
        scheduler: the scheduler.
        seed: what the results follow from.
        acceptance: how likely a draft token is accepted, given that those before it were.
        vocabulary: sampled tokens lie below, and not below 2; :data:`EOS` comes with ``eos``.
        eos: how likely a sampled token is :data:`EOS`.
        steps: steps made so far.

    """

    scheduler: Scheduler
    seed: int = 0
    acceptance: float = 0.6
    vocabulary: int = 1000
    eos: float = 0.0
    steps: int = 0
    _under_way: deque[tuple[Any, ModelRunnerOutput]] = field(default_factory=deque)

    def make(self, *args: Any) -> Any:
        """Schedule a step and return it; :meth:`take` will bring its result."""
        self.steps += 1
        output = self.scheduler.schedule(*args)
        self._under_way.append((output, self.answer(output)))
        return output

    @property
    def latest(self) -> tuple[Any, ModelRunnerOutput]:
        """The step made last and its result, which has not been brought."""
        return self._under_way[-1]

    def take(self) -> Any:
        """Bring the result of the oldest step under way and return the scheduler's outputs."""
        output, result = self._under_way.popleft()
        answers = self.scheduler.update_from_output(output, result)
        if not self.ahead_of_results:
            self._draft(output)
        return answers

    @property
    def ahead_of_results(self) -> bool:
        """Whether the scheduler never sees draft tokens, as where steps are scheduled ahead."""
        return bool(self.scheduler.scheduler_config.async_scheduling)

    @property
    def under_way(self) -> int:
        """Steps whose results have not been brought."""
        return len(self._under_way)

    def answer(self, output: Any) -> ModelRunnerOutput:
        """Return what a step samples. To be called before a further step is made."""
        names = list(output.num_scheduled_tokens)
        sampled = []
        for name in names:
            request = self.scheduler.requests[name]
            if request.is_prefill_chunk:
                sampled.append([])
                continue
            chance = random.Random(f"{self.seed}/{self.steps}/{name}")
            accepted = 0
            for _ in output.scheduled_spec_decode_tokens.get(name, ()):
                if chance.random() >= self.acceptance:
                    break
                accepted += 1
            sampled.append([self._token(chance) for _ in range(accepted + 1)])
        return ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, sampled)

    def _token(self, chance: random.Random) -> int:
        return EOS if chance.random() < self.eos else chance.randrange(2, self.vocabulary)

    def _draft(self, output: Any) -> None:
        """Give the scheduler the draft tokens of the next step, for some requests fewer than others."""
        most = output.num_spec_tokens_to_schedule
        if not most:
            return
        names = list(output.num_scheduled_tokens)
        drafts = []
        for name in names:
            chance = random.Random(f"drafts/{self.seed}/{self.steps}/{name}")
            count = most if chance.random() < 0.7 else chance.randrange(most + 1)
            drafts.append([self._token(chance) for _ in range(count)])
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))
