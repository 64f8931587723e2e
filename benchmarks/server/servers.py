"""Starts the two servers with the same engine flags."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import psutil

from benchmarks.server.load import MODEL
from benchmarks.serving.servers import stock_command
from server import demo

K = 4
#: What both get; nwor-server's own defaults for a CPU, spelt out for stock vLLM.
ENGINE_FLAGS = ["--served-model-name", MODEL, "--enforce-eager", "--kv-cache-memory-bytes", str(2**30)]
#: The engines' workers compute on the first core, the same for both. Nothing else is bound: bound to a single
#: other core, a front at times got no turn beside the engine core, which polls.
WORKER_CORE = 0
ENGINE_CORES = {"VLLM_CPU_OMP_THREADS_BIND": str(WORKER_CORE)}
READY_SECONDS = 300.0


@dataclass(frozen=True)
class Server:
    """Where a server listens, and the process of its front (the engine has processes of its own)."""

    url: str
    pid: int

    def cpu_seconds(self) -> float:
        """Return the processor time that the front has used so far."""
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


#: The stock engine is to be stock: no plugin of ours.
STOCK_ENGINE = {"NWOR_DISABLE": "1"}


def _ours(*flags: str, **environment: str) -> contextlib.AbstractContextManager[Server]:
    draft = ["--draft", str(demo.draft_path()), "--num-speculative-tokens", str(K)]
    return _serve([sys.executable, "-m", "server", str(demo.model_path()), *draft, *flags], environment)


def start_ours() -> contextlib.AbstractContextManager[Server]:
    """Run nwor-server on the stock engine."""
    return _ours(**STOCK_ENGINE)


def start_unobserved() -> contextlib.AbstractContextManager[Server]:
    """Run nwor-server on the stock engine, without figures for each request."""
    return _ours("--per-request-spec-decode-metrics", "none", **STOCK_ENGINE)


def start_observed() -> contextlib.AbstractContextManager[Server]:
    """Run nwor-server with all figures and the admin API, and the stock way to write the cache."""
    return _ours("--nwor-mode", "off", NWOR_ADMIN_API_KEY="benchmark")


def start_staging() -> contextlib.AbstractContextManager[Server]:
    """Run nwor-server as it comes: mode ``stage``, all figures, the admin API."""
    return _ours("--nwor-mode", "stage", NWOR_ADMIN_API_KEY="benchmark")


def start_stock() -> contextlib.AbstractContextManager[Server]:
    """Run stock ``vllm serve``."""
    speculation = {
        "method": demo.draft_method(),
        "model": str(demo.draft_path()),
        "num_speculative_tokens": K,
    }
    command = [*stock_command(), str(demo.model_path()), "--speculative-config", json.dumps(speculation)]
    return _serve(command, STOCK_ENGINE)


@contextlib.contextmanager
def _serve(command: list[str], extra: dict[str, str]) -> Iterator[Server]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = [*ENGINE_FLAGS, "--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", **ENGINE_CORES, **extra}
    with tempfile.TemporaryFile() as log:
        # No session of its own: Linux shares a CPU out among sessions first (sched_autogroup), and clients in
        # another one than an engine that decodes wait, now and then for seconds.
        process = subprocess.Popen(
            [*command, *flags], stdout=log, stderr=log, env=environment, process_group=0
        )
        try:
            _wait(process, f"http://127.0.0.1:{port}", log)
            yield Server(f"http://127.0.0.1:{port}", process.pid)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen, url: str, log) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(0.5)
    log.seek(0)
    raise RuntimeError(f"{process.args} did not start:\n{log.read().decode(errors='replace')[-3000:]}")
