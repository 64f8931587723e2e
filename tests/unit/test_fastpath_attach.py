"""Where the fast scheduler is put in place, and where vLLM's own stays as it is."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_coordinator as coordinator_module
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched import scheduler as stock_module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from benchmarks.engine.scheduler_rig import Drive, Setup, make_request, make_scheduler
from nwor.engine.fastpath.copies import standing_aside
from nwor.engine.fastpath.results import FastResults, enter_drafts
from nwor.engine.fastpath.scheduler import FastScheduling
from nwor.engine.scheduler import create_scheduler
from nwor.engine.vllm_features import base_takes_placeholders_back
from server.scheduler import create_scheduler as create_server_scheduler

PLENTY = Setup(requests=12, blocks=600, block_size=4, length=160, tokens=256, settings={})
#: The short ways step aside beside a release whose code they have not been compared with.
fast_scheduler = pytest.mark.skipif("scheduler" in standing_aside(), reason="another vLLM's scheduler")


class FastAsyncScheduler(AsyncScheduler, FastScheduling):
    """Vanilla, steps scheduled ahead."""


def test_drafts_are_counted_as_vllm_counts_them():
    chance = random.Random(3)
    theirs, ours, kinds = SpecDecodingStats.new(5), SpecDecodingStats.new(5), {}
    for _ in range(50):
        drafted = chance.randrange(1, 6)
        kind = drafted, chance.randrange(drafted + 1)
        theirs.observe_draft(*kind)
        kinds[kind] = kinds.get(kind, 0) + 1
    enter_drafts(ours, kinds)
    assert ours == theirs


def fast_of(folder: Path, setup: Setup) -> Any:
    return make_scheduler(folder, setup, create_scheduler)


@fast_scheduler
@pytest.mark.parametrize("create", [create_scheduler, create_server_scheduler])
@pytest.mark.parametrize("ahead", [True, False])
def test_the_scheduler_of_an_engine_with_nwor_is_lean_unless_told_otherwise(tmp_path, create, ahead):
    setup = replace(PLENTY, ahead=ahead)
    fast = make_scheduler(tmp_path, setup, create)
    assert fast._fast_steps
    # What AsyncScheduler adds stays above the short ways.
    assert isinstance(fast, AsyncScheduler) == ahead
    above = ahead and not base_takes_placeholders_back()
    update = AsyncScheduler if above else FastResults
    assert type(fast)._update_request_with_output is update._update_request_with_output
    plain = make_scheduler(tmp_path, replace(setup, settings={"fast_host": False}), create)
    assert not plain._fast
    assert not plain._fast_steps
    assert type(plain.kv_cache_manager) is KVCacheManager


def test_an_engine_without_nwor_is_left_alone(tmp_path):
    plain = make_scheduler(tmp_path, replace(PLENTY, settings=None), FastAsyncScheduler)
    assert not plain._fast
    assert type(plain.kv_cache_manager) is KVCacheManager


def _wrapped(original):
    @wraps(original)
    def replacement(*args, **kwargs):
        return original(*args, **kwargs)

    return replacement


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (stock_module, "check_stop"),
        (SpecDecodingStats, "observe_draft"),
        (Scheduler, "update_from_output"),
        (AsyncScheduler, "_update_after_schedule"),
        (KVCacheManager, "allocate_slots"),
        (FullAttentionManager, "cache_blocks"),
        (Request, "append_output_token_ids"),
    ],
)
def test_a_function_that_somebody_replaced_goes_on_being_called(tmp_path, monkeypatch, caplog, owner, name):
    monkeypatch.setattr(owner, name, _wrapped(getattr(owner, name)))
    with caplog.at_level(logging.WARNING, "vllm.nwor.scheduler"):
        plain = fast_of(tmp_path, PLENTY)
    assert not plain._fast
    assert type(plain.kv_cache_manager) is KVCacheManager
    told = [record.getMessage() for record in caplog.records if record.name == "vllm.nwor.scheduler"]
    assert len(told) == 1
    assert name in told[0]


class _Eager(FastAsyncScheduler):
    def _reserve_prefill_lookahead(self, *args: Any) -> int:
        return super()._reserve_prefill_lookahead(*args)


def test_a_scheduler_that_decides_for_itself_is_left_alone(tmp_path):
    assert not make_scheduler(tmp_path, PLENTY, _Eager)._fast


class _OtherPool(BlockPool):
    pass


def test_a_block_pool_of_another_kind_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator_module, "BlockPool", _OtherPool)
    assert not fast_of(tmp_path, PLENTY)._fast


def test_a_way_to_hash_blocks_that_is_not_vllms_is_called_for_every_token(tmp_path):
    scheduler = fast_of(tmp_path, PLENTY)
    drive = Drive(scheduler, acceptance=1.0)
    request = make_request(scheduler, "r", [3] * 9, SamplingParams(max_tokens=40))
    stock_hasher, calls = request._block_hasher, []

    def hasher(request: Request) -> Any:
        calls.append(request.num_tokens)
        return stock_hasher(request)

    request._block_hasher = hasher
    scheduler.add_request(request)
    for _ in range(4):
        drive.make()
        drive.take()
    assert request.num_output_tokens > 4
    assert calls == list(range(10, 10 + request.num_output_tokens))
