"""Tests side by side, in lanes of pytest-xdist: each on processors of its own, long files first.

Engines that share processors wait for each other's threads, and are several times as slow. So a lane takes
its share of the processors before anything counts them, and all that it starts inherits it.

What shares an engine or a server stays in one lane. Short files fill the end.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
#: Memory that a lane may need, with two servers in it.
LANE_BYTES = 6 * 2**30
#: The group of all files whose tests share one server.
SERVER = "server"
#: Each test of it runs files in a process of its own, and so shares nothing.
AGAIN = "test_runner_v2"

#: The groups that take longest, in this order: of files, of the shared server, of runs on another runner.
LONGEST = (
    SERVER,
    f"{AGAIN}[processes]",
    f"{AGAIN}[trees]",
    f"{AGAIN}[features]",
    f"{AGAIN}[modes]",
    f"{AGAIN}[faults]",
    "test_runner_v1_ahead",
    "test_random_requests",
    "test_exactness_cpu",
    "test_api_processes",
    "test_admin_plain_vllm",
    "test_replicas_multi_node",
    "test_admin_listener",
    "test_page",
    "test_features_cpu",
    "test_startup",
    "test_tensor_parallel_cpu",
    "test_compiled_cpu",
    "test_demo_acceptance",
    "test_faults_cpu",
    "test_switches_cpu",
    "test_verify_attention",
)


def share(processors: list[int], lane: int, lanes: int) -> list[int]:
    """Return the processors of one lane: as many as there are for each, or one that others use too."""
    each = max(1, len(processors) // lanes)
    first = lane * each % len(processors)
    return processors[first : first + each]


@functools.cache
def shares_the_server(path: str) -> bool:
    """Return whether a file's tests or fixtures take the fixture ``server`` of ``conftest.py``."""
    return re.search(r"\bserver: ServerProcess\b", (ROOT / path).read_text(encoding="utf-8")) is not None


def group_of(nodeid: str) -> str:
    """Return the name of what stays in one lane with a test."""
    path, _, test = nodeid.partition("::")
    name = Path(path).stem
    if shares_the_server(path):
        return SERVER
    return name + test[test.find("[") :] if name == AGAIN and "[" in test else name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many lanes ``-n auto`` means."""
    by_memory = int(psutil.virtual_memory().available // LANE_BYTES)
    return max(1, min(len(os.sched_getaffinity(0)), by_memory))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal groups out, in the order of :func:`pytest_collection_modifyitems`."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Put what takes longest first where tests run in lanes."""
    if LANE:
        places = {name: place for place, name in enumerate(LONGEST)}
        items.sort(key=lambda item: places.get(group_of(item.nodeid), len(places)))
    return (yield)


#: The name of this process' lane, as pytest-xdist counts them; empty outside of it.
LANE = os.environ.get("PYTEST_XDIST_WORKER", "")
if LANE:
    # Processes that a test starts come here too, and have one lane's processors already.
    mine = sorted(os.sched_getaffinity(0))
    lanes = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    if len(mine) >= lanes:
        os.sched_setaffinity(0, share(mine, int(LANE.removeprefix("gw")), lanes))
