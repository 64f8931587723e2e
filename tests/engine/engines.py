"""Engines for tests on the CPU: the demo model in float32 with its head, in mode ``off`` by default."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from server import demo
from tests.engine.runner import AHEAD, schedule_asynchronously

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # All requests of a run are in the queue before its first step, so that every run is scheduled alike.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

#: Of engines whose cache is compared after each step: the smaller a block, the less there is to compare.
PROBED: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 128,
    "block_size": 32,
    "num_gpu_blocks_override": 96,
    "worker_extension_cls": "tests.engine.cache_probe.CacheProbe",
}


def eagle(drafts: int) -> dict[str, Any]:
    """Return vLLM's setting for so many draft tokens a step by the demo model's head."""
    return {
        "model": str(demo.draft_path()),
        "method": demo.draft_method(),
        "num_speculative_tokens": drafts,
    }


def start(**settings: Any) -> Any:
    """Start an engine on the runner that :mod:`tests.engine.runner` says.

    Args:
        settings: arguments of ``LLM`` beside those that all tests have in common, or instead of them.

    """
    from vllm import LLM

    from nwor.engine.plugin import register

    # An engine that starts collects garbage seven times; vLLM's modules are none, the engine before is.
    gc.collect()
    gc.freeze()
    if AHEAD:
        schedule_asynchronously()
    register()  # what vLLM does by itself where the package is installed
    common = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 512,
        "speculative_config": eagle(4),
        "additional_config": {"nwor": {"mode": "off"}},
        "disable_log_stats": False,
    }
    return LLM(str(demo.model_path()), **{**common, **settings})


@contextmanager
def one_at_a_time(**environment: str) -> Iterator[Callable[..., Any]]:
    """Start engines: the one before ends when one with other settings is asked for, the last with the block.

    Settings of the same values are the same engine, whoever asks.

    Args:
        environment: variables beside :data:`ENVIRONMENT`; all are put back.

    """
    saved = dict(os.environ)
    os.environ.update(ENVIRONMENT | environment)
    running: list[tuple[dict[str, Any], Any]] = []

    def stop() -> None:
        while running:
            running.pop()[1].llm_engine.engine_core.shutdown()

    def make(**settings: Any) -> Any:
        if not running or running[0][0] != settings:
            stop()
            # A copy: who asked may change what it asked with.
            running.append((deepcopy(settings), start(**settings)))
        return running[0][1]

    try:
        yield make
    finally:
        stop()
        os.environ.clear()
        os.environ.update(saved)
