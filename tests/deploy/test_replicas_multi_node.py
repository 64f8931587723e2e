"""Tensor parallelism over two nodes, both on this machine: NWOR must work on both, and one call switch both.

``mp`` is how the multi-node overlay does it: the leader is ``nwor-server``, the worker vLLM without a server;
they share nothing but one file of flags and the network. ``ray`` runs where Ray can be imported; it is none
of this project's packages. vLLM's CPU platform names no resource of Ray's and so refuses it. A platform
plugin, vLLM's own way to add platforms, names one here, and Ray is told that there are two of it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from server import demo
from tests.conftest import ADMIN_KEY, find_free_port
from tests.deploy.manifests import KUBERNETES
from tests.server_process import DEMO_MODEL, ROOT, ServerProcess
from tests.waiting import end_of, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
PROMPT = "def fibonacci(n):"


def flags_of_the_overlay() -> dict[str, Any]:
    """Return the overlay's settings, with the demo model and what a CPU needs."""
    flags: dict[str, Any] = yaml.safe_load(
        (KUBERNETES / "overlays/multi-node/server.yaml").read_text("utf-8")
    )
    speculative = json.loads(flags["speculative-config"]) | {"model": str(demo.draft_path())}
    return flags | {
        "model": str(demo.model_path()),
        "served-model-name": DEMO_MODEL,
        "speculative-config": json.dumps(speculative),
        "tensor-parallel-size": 2,
        "max-model-len": 1024,
        "enforce-eager": True,
        "kv-cache-memory-bytes": 2**28,
        # nwor-server adds it by itself on CPUs, plain vLLM does not: every rank must have the same workers.
        "worker-extension-cls": "server.cpu_sampling.WorkerExtension",
    }


#: Both nodes are this machine: no thread of one may be bound to a core that the other spins on.
ENVIRONMENT = {
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}

PLATFORM = """
from vllm.platforms.cpu import CpuPlatform

class RayCpuPlatform(CpuPlatform):
    ray_device_key = "GPU"

def plugin():
    return "nwor_test_platform.RayCpuPlatform"
"""


@contextlib.contextmanager
def running(command: list[str], log: Path, patience: float = 0) -> Iterator[None]:
    """Keep a process of its own group running; it has ``patience`` seconds for an orderly end."""
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, cwd=ROOT, process_group=0)
    try:
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(30)


@contextlib.contextmanager
def ray_cluster(folder: Path, patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run Ray with two logical devices, and the platform that asks for them."""
    (folder / "nwor_test_platform.py").write_text(PLATFORM)
    package = folder / "nwor_test_platform-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: nwor-test-platform\nVersion: 1\n")
    (package / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nray_cpu = nwor_test_platform:plugin\n"
    )
    port = find_free_port()
    patch.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT), *sys.path]))
    patch.setenv("VLLM_PLUGINS", "ray_cpu,nwor")
    patch.setenv("RAY_ADDRESS", f"127.0.0.1:{port}")
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--port", str(port)]
    start += ["--node-ip-address", "127.0.0.1", "--num-cpus", "4", "--num-gpus", "2"]
    start += ["--include-dashboard", "false", "--disable-usage-stats", "--object-store-memory", "100000000"]
    log = folder / "ray.txt"
    with (
        # Paths of sockets have a limit that pytest's folders reach.
        tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as short,
        running([*start, "--temp-dir", short], log, patience=20),
    ):
        wait_until(lambda: "Ray runtime started" in log.read_text(), 90, lambda: end_of(log), every=0.5)
        yield


@pytest.fixture(scope="module", params=["mp", "ray"])
def leader(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder: Path = tmp_path_factory.mktemp("nodes")
    settings = folder / "server.yaml"
    settings.write_text(
        yaml.safe_dump(flags_of_the_overlay() | {"distributed-executor-backend": request.param})
    )
    flags = ["--config", str(settings)]
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        if request.param == "mp":
            flags += ["--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(find_free_port())]
            worker = [sys.executable, "-m", "tests.deploy.headless", *flags, "--node-rank", "1"]
            stack.enter_context(running(worker, folder / "worker.txt"))
            flags += ["--node-rank", "0"]
        else:
            pytest.importorskip("ray", reason="Ray is not installed")
            stack.enter_context(ray_cluster(folder, patch))
        flags += ["--admin-api-key", ADMIN_KEY, "--host", "127.0.0.1"]
        server = ServerProcess(flags, find_free_port(), folder / "leader.txt")
        stack.callback(server.kill)
        server.wait_until_ready()
        yield server


def complete(leader: ServerProcess) -> dict[str, Any]:
    body = {"model": DEMO_MODEL, "prompt": PROMPT, "max_tokens": 48, "temperature": 0}
    answer = httpx.post(f"{leader.url}/v1/completions", json=body, timeout=120)
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


def test_nwor_works_on_both_nodes_and_one_call_switches_both(leader: ServerProcess) -> None:
    staged = complete(leader)
    report = httpx.get(f"{leader.url}/admin/nwor", headers=ADMIN, timeout=90).json()
    assert report["ranks_agree"] is True
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    for rank in report["ranks"]:
        assert (rank["mode"], rank["fault"], rank["unsupported"]) == ("stage", None, None)
        assert rank["steps"] > 0
    figures = staged["metrics"]["nwor"]
    assert figures["modes"] == ["stage"]
    assert figures["direct_windows"] == {}
    assert figures["rejected_tokens"] > 0
    assert figures["kv_bytes_saved"] == figures["rejected_tokens"] * sum(
        rank["token_bytes"] for rank in report["ranks"]
    )

    answer = httpx.put(f"{leader.url}/admin/nwor", headers=ADMIN, json={"mode": "off"}, timeout=90)
    assert answer.json()["ranks"] == 2
    direct = complete(leader)
    assert direct["metrics"]["nwor"]["modes"] == ["off"]
    assert direct["choices"][0]["text"] == staged["choices"][0]["text"]
    assert direct["metrics"]["speculative_decoding"] == staged["metrics"]["speculative_decoding"]
    assert leader.total("nwor_accounting_mismatches_total") == 0
