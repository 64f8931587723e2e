"""Tests side by side, in lanes of pytest-xdist: each on processors of its own, long files first.

Engines that share processors wait for each other's threads, and are several times as slow. So a lane takes
its share of the processors before anything counts them, and all that it starts inherits it.

What shares an engine or a server stays in one lane. Short files fill the end.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

#: Memory that a lane may need, with two servers in it.
LANE_BYTES = 6 * 2**30

#: What takes longest, in this order: of fixtures that many files share, and of files.
LONGEST = (
    "v2 faults",
    "server",
    "v2 features",
    "v2 modes",
    "test_runner_v1_ahead",
    "v2 processes",
    "test_random_requests",
    "test_lifecycle",
    "test_api_processes",
    "test_replicas_multi_node",
    "test_admin_plain_vllm",
    "test_admin_listener",
    "test_startup",
    "test_exactness_cpu",
    "test_faults_cpu",
    "test_switches_cpu",
    "test_features_cpu",
    "test_tensor_parallel_cpu",
)


def share(processors: list[int], lane: int, lanes: int) -> list[int]:
    """Return the processors of one lane: as many as there are for each, or one that others use too."""
    each = max(1, len(processors) // lanes)
    first = lane * each % len(processors)
    return processors[first : first + each]


def pytest_xdist_auto_num_workers() -> int:
    """Return how many lanes ``-n auto`` means."""
    by_memory = int(psutil.virtual_memory().available // LANE_BYTES)
    return max(1, min(len(os.sched_getaffinity(0)), by_memory))


def group_of(item: pytest.Item) -> str:
    """Return what names the tests that stay in one lane with this one."""
    mark = item.get_closest_marker("xdist_group")
    if mark is not None:
        return str(mark.args[0])
    if "server" in getattr(item, "fixturenames", ()):
        return "server"
    return Path(str(item.path)).stem


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Name the group of each test, and sort them by it where they run in lanes."""
    if not LANE:
        return
    groups = {item: group_of(item) for item in items}
    places = {name: place for place, name in enumerate(LONGEST)}
    for item, name in groups.items():
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(name))
    items.sort(key=lambda item: places.get(groups[item], len(places)))


#: The name of this process' lane, as pytest-xdist counts them; empty outside of it.
LANE = os.environ.get("PYTEST_XDIST_WORKER", "")
if LANE:
    # Processes that a test starts come here too, and have one lane's processors already.
    mine = sorted(os.sched_getaffinity(0))
    lanes = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    if len(mine) >= lanes:
        os.sched_setaffinity(0, share(mine, int(LANE.removeprefix("gw")), lanes))
