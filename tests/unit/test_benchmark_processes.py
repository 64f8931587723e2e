"""Claim: the serving benchmark tells what a server's processes took, by kind, and of no other's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.serving import processes

TICK = os.sysconf("SC_CLK_TCK")


def _process(
    proc: Path, number: int, name: str, group: int, faults: int, user: int, system: int, waited: list[int]
) -> None:
    folder = proc / str(number)
    folder.mkdir()
    # After the name: state, parent, group, session, terminal, its group, flags, minor faults, those of
    # children, major faults, those of children, user, system.
    fields = ["S", "1", str(group), "1", "0", "-1", "0", str(faults), "7", "7", "7", str(user), str(system)]
    (folder / "stat").write_text(f"{number} ({name}) {' '.join(fields)} 20 0\n")
    for index, nanoseconds in enumerate(waited):
        thread = folder / "task" / str(number + index)
        thread.mkdir(parents=True)
        (thread / "schedstat").write_text(f"99 {nanoseconds} 5\n")


def test_processes_of_a_group_by_kind(tmp_path: Path) -> None:
    _process(tmp_path, 50, "python3", 50, 10, 3 * TICK, TICK, [10**9, 5 * 10**8])
    _process(tmp_path, 51, "VLLM::EngineCor", 50, 20, 2 * TICK, 0, [])
    _process(tmp_path, 52, "VLLM::EngineCor", 50, 1, TICK, TICK, [10**9])
    _process(tmp_path, 53, "a (strange) name", 50, 0, 0, TICK, [])
    _process(tmp_path, 54, "VLLM::APIServer", 50, 5, TICK, 0, [])
    _process(tmp_path, 60, "python3", 60, 99, 99 * TICK, 0, [10**12])
    (tmp_path / "70").mkdir()  # ends while it is looked at
    assert processes.usage(50, tmp_path) == {
        "front": {"seconds": 5.0, "system": 1.0, "waited": 1.5, "faults": 15.0},
        "engine": {"seconds": 4.0, "system": 1.0, "waited": 1.0, "faults": 21.0},
        "other": {"seconds": 1.0, "system": 1.0, "waited": 0.0, "faults": 0.0},
    }


def test_rates_are_by_the_second() -> None:
    before = {"front": {"seconds": 1.0, "faults": 100.0}}
    after = {"front": {"seconds": 3.0, "faults": 300.0}, "worker": {"seconds": 1.0, "faults": 2.0}}
    assert processes.rates(before, after, 4.0) == {
        "front": {"seconds": 0.5, "faults": 50.0},
        "worker": {"seconds": 0.25, "faults": 0.5},
    }


@pytest.mark.skipif(not Path("/proc/self/stat").is_file(), reason="needs Linux's /proc")
def test_a_process_that_works() -> None:
    code = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ninput()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0
    ) as process:
        try:
            while (used := processes.usage(process.pid).get("front", {})).get("seconds", 0.0) < 0.25:
                assert process.poll() is None, "it ended before it had worked"
            assert used["faults"] > 0
        finally:
            process.kill()
