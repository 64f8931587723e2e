"""A server in a process of its own, as users start it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.waiting import is_healthy, wait_until

ROOT = Path(__file__).resolve().parent.parent

#: Generous: a loaded machine with two cores starts an engine in a minute and a half.
READY_SECONDS = 300.0

DEMO_MODEL = "nwor-demo"


def find_free_port() -> int:
    """Return a port that nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class ServerProcess:
    """``python -m server`` with its log; its whole process group ends with it."""

    def __init__(self, flags: list[str], port: int, log: Path) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.api_key: str | None = None
        self._log = log
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "server", *flags, "--port", str(port)],
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment,
                # A group to end it by, but no session of its own: Linux shares a CPU out among sessions first
                # (sched_autogroup), and a client in another one than an engine that decodes was seen to wait
                # for seconds.
                process_group=0,
            )

    @property
    def log(self) -> str:
        """Everything that the server and its engine have printed."""
        return self._log.read_text(encoding="utf-8", errors="replace")

    def wait_until_ready(self) -> None:
        """Return once /health answers 200; fail with the log when the process ends first."""
        wait_until(
            lambda: self.process.poll() is not None or is_healthy(self.url),
            READY_SECONDS,
            lambda: f"the server is ready:\n{self.log[-4000:]}",
            every=0.2,
        )
        code = self.process.poll()
        assert code is None, f"the server ended with {code}:\n{self.log[-4000:]}"

    def client(self, timeout: float = 300.0) -> httpx.Client:
        """Return an HTTP client of this server that sends its API key."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(base_url=self.url, headers=headers, timeout=timeout)

    def metric(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the samples of one metric on /metrics, by their labels without engine and model."""
        text = httpx.get(f"{self.url}/metrics", timeout=30).text
        return {
            tuple(
                sorted((k, v) for k, v in sample.labels.items() if k not in ("engine", "model_name"))
            ): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    def total(self, name: str) -> float:
        """Return the sum of one metric's samples."""
        return sum(self.metric(name).values())

    def engine_pid(self) -> int:
        """Return the process id of the engine's core, from the prefix of its log lines."""
        found = re.search(r"\(EngineCore[^)]* pid=(\d+)\)", self.log)
        assert found is not None, self.log[-2000:]
        return int(found.group(1))

    def wait(self, timeout: float) -> int:
        """Return the exit code once the process has ended."""
        return self.process.wait(timeout)

    def kill(self) -> None:
        """End the whole process group at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)
