"""Claim: descendants are asked to end, killed when their time is over, and given up where even that fails.

The processes are real, but for the one that nothing ends. Tolerance: none.
"""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from server.api_servers import descendants

DEAF = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(1, flush=True)
time.sleep(600)
"""


def run(code: str) -> str:
    """Run a Python program in a process of its own, so that it has no other descendants."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout


def test_one_that_does_not_listen_is_killed() -> None:
    code = f"""
import subprocess, sys
from server.api_servers.descendants import end_descendants
child = subprocess.Popen([sys.executable, "-c", {DEAF!r}], stdout=subprocess.PIPE)
child.stdout.readline()
end_descendants(0.2)
print(child.wait())
"""
    assert run(code) == "-9\n"


def test_one_that_nothing_ends_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed: list[int] = []
    child: Any = SimpleNamespace(
        pid=4711,
        status=lambda: psutil.STATUS_DISK_SLEEP,
        kill=lambda: killed.append(4711),
        terminate=lambda: None,
    )
    own = SimpleNamespace(pid=os.getpid(), children=lambda recursive: [child])
    monkeypatch.setattr(descendants.psutil, "Process", lambda: own)
    monkeypatch.setattr(descendants.ctypes, "CDLL", lambda _: SimpleNamespace(prctl=lambda *_: 0))
    monkeypatch.setattr(descendants, "KILL_SECONDS", 0.2)
    descendants.end_descendants(0.1)
    assert killed
    assert "4711" in capsys.readouterr().err
