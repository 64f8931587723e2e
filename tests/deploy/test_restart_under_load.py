"""deploy/restart_under_load.py passes where clients see a mere pause, and finds what they should not see."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.deploy import fake_server
from tests.server_process import ROOT
from tests.waiting import is_healthy, wait_until

SCRIPT = ROOT / "deploy" / "restart_under_load.py"

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(tmp_path: Path, free_port: int) -> Iterator[Run]:
    """Run the script on a stand-in: ``run(faults before, faults after the restart)``."""
    pid_file = tmp_path / "pid"
    processes: list[subprocess.Popen[bytes]] = []

    def start(before: str = "", after: str = "") -> subprocess.CompletedProcess[str]:
        process = fake_server.spawn(free_port, before)
        processes.append(process)
        pid_file.write_text(str(process.pid))
        wait_until(lambda: is_healthy(f"http://127.0.0.1:{free_port}"), 30, "the stand-in answers")
        command = f"{sys.executable} {fake_server.__file__}"
        environment = {
            **os.environ,
            "FAKE_PID": str(pid_file),
            "FAKE_PORT": str(free_port),
            "FAKE_FAULTS": after,
            "NWOR_ADMIN_API_KEY": fake_server.ADMIN_KEY,
            "VLLM_API_KEY": fake_server.API_KEY,
        }
        flags = ["--compose", command, "--tokens", "8", "--answers-before", "18", "--answers-after", "12"]
        return subprocess.run(
            [sys.executable, str(SCRIPT), f"http://127.0.0.1:{free_port}", *flags],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=120,
        )

    yield start
    for process in processes:
        process.kill()
        process.wait()
    with contextlib.suppress(ProcessLookupError):
        os.kill(int(pid_file.read_text()), signal.SIGKILL)


def failed(result: subprocess.CompletedProcess[str]) -> list[str]:
    return [line.removeprefix("FAILED ") for line in result.stdout.splitlines() if line.startswith("FAILED")]


def test_a_server_that_drains_and_comes_back_passes(run: Run) -> None:
    result = run()
    assert result.returncode == 0, result.stdout
    assert failed(result) == []
    assert result.stdout.splitlines()[-1] == "nothing wrong"


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("drops requests", "", "none of them was dropped"),
        ("", "other text", "every text is as it was before"),
        ("", "old metrics", "metrics started from zero"),
        ("", "keeps mode", "the mode is the configured one"),
        ("", "mismatches", "accounting mismatches"),
        ("", "short", "no answer was broken"),
        ("", "cut streams", "no answer was broken"),
        ("", "aborts", "no answer was broken"),
    ],
)
def test_what_clients_should_not_see_is_found(run: Run, before: str, after: str, found: str) -> None:
    result = run(before, after)
    assert result.returncode == 1, result.stdout
    assert any(line.startswith(found) for line in failed(result)), result.stdout


def test_a_restart_that_does_not_happen_is_found(run: Run) -> None:
    result = run("", "no restart")
    assert result.returncode == 1
    assert "no restart" in result.stdout
