"""NWOR in plain ``vllm serve``: worker, figures, metrics and admin API through entry points alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from server import demo
from tests.conftest import find_free_port
from tests.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.engine

KEY = "boss"


class PlainServer(ServerProcess):
    """``vllm serve`` with this project's entry points, whether or not the package is installed."""

    def __init__(self, folder: Path) -> None:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        metadata = folder / "site" / "nwor-0.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: nwor\nVersion: 0\n", encoding="utf-8"
        )
        groups = project["entry-points"].items()
        lines = [
            f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in entries.items()) for group, entries in groups
        ]
        (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        port = find_free_port()
        self.port, self.url, self.api_key = port, f"http://127.0.0.1:{port}", None
        self._log = folder / "log.txt"
        speculation = {
            "method": demo.draft_method(),
            "model": str(demo.draft_path()),
            "num_speculative_tokens": 4,
        }
        flags = {
            "--host": "127.0.0.1",
            "--port": str(port),
            "--served-model-name": "plain",
            "--max-num-seqs": "4",
            "--speculative-config": json.dumps(speculation),
            "--additional-config": json.dumps({"nwor": {"mode": "stage", "modes": ["off", "stage"]}}),
            "--per-request-spec-decode-metrics": "summary",
        }
        environment = {
            "PYTHONPATH": f"{metadata.parent}{os.pathsep}{ROOT}",
            "VLLM_PLUGINS": "nwor",
            "NWOR_ADMIN_API_KEY": KEY,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        # What ``vllm serve`` runs; that command asks for a distribution named vllm, the CPU's is vllm-cpu.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        words = [word for pair in flags.items() for word in pair]
        with self._log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*command, "--model", str(demo.model_path()), "--enforce-eager", *words],
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, **environment},
                start_new_session=True,
            )


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServer]:
    server = PlainServer(tmp_path_factory.mktemp("plain"))
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


def test_figures_metrics_and_admin_api(plain: PlainServer) -> None:
    body = {"model": "plain", "prompt": "def f(a, b):\n    return ", "max_tokens": 16, "ignore_eos": True}
    answer = httpx.post(f"{plain.url}/v1/completions", json=body, timeout=120).json()
    figures = answer["metrics"]["nwor"]
    assert figures["modes"] == ["stage"]
    assert figures["windows"] == figures["first_tokens"] > 0
    assert figures["direct_windows"] == {}
    assert plain.total("nwor_windows_total") == figures["windows"]
    assert plain.total("nwor_kv_write_bytes_total") == figures["kv_bytes_written"]
    assert plain.total("nwor_accounting_mismatches_total") == 0
    url, admin = f"{plain.url}/admin/nwor", {"Authorization": f"Bearer {KEY}"}
    assert httpx.get(url, timeout=60).status_code == 401
    assert httpx.put(url, headers=admin, json={"mode": "cow"}, timeout=60).status_code == 409
    assert httpx.put(url, headers=admin, json={"mode": "off"}, timeout=60).json()["old"] == "stage"
    answer = httpx.post(f"{plain.url}/v1/completions", json={**body, "stream": True}, timeout=120).text
    assert answer.count('"nwor":{"modes":["off"]') == 1
    assert httpx.get(url, headers=admin, timeout=60).json()["mode"] == "off"
