"""The admin API on a port or Unix socket of its own: there, and no longer on the public port."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import find_free_port
from tests.server_process import DEMO_MODEL, ROOT, ServerProcess

pytestmark = pytest.mark.engine

KEY = "admin-only"
HEADERS = {"Authorization": f"Bearer {KEY}"}
TIMEOUT = 90.0


@pytest.fixture(scope="module", params=["port", "uds"])
def pair(
    request: pytest.FixtureRequest,
    start_server: Callable[..., ServerProcess],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[ServerProcess, httpx.Client, list[str]]]:
    """A server, a client of its admin listener, and the flags that lead ``nwor-server mode`` there."""
    key = ("--admin-api-key", KEY)
    if request.param == "port":
        port = find_free_port()
        server = start_server("--demo", *key, "--admin-port", str(port))
        url = f"http://127.0.0.1:{port}"
        with httpx.Client(base_url=url, timeout=TIMEOUT) as http:
            yield server, http, ["--url", url]
    else:
        path = tmp_path_factory.mktemp("admin") / "socket"
        server = start_server("--demo", *key, "--admin-uds", str(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with httpx.Client(
            base_url="http://localhost", transport=httpx.HTTPTransport(uds=str(path)), timeout=TIMEOUT
        ) as http:
            yield server, http, ["--uds", str(path)]
    server.kill()


def test_both_listeners_answer_what_is_theirs(
    pair: tuple[ServerProcess, httpx.Client, list[str]],
) -> None:
    server, admin, _ = pair
    body = {"model": DEMO_MODEL, "prompt": "def f(", "max_tokens": 8}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=TIMEOUT).status_code == 200
    for path in ("/admin/nwor", "/dashboard"):
        assert httpx.get(f"{server.url}{path}", headers=HEADERS, timeout=TIMEOUT).status_code == 404
    refused = admin.post("/v1/completions", json=body, headers=HEADERS)
    assert refused.status_code == 404
    assert "error" in refused.json()
    assert admin.get("/admin/nwor").status_code == 401
    assert admin.get("/admin/nwor", headers=HEADERS).json()["mode"] == "stage"
    assert "<html" in admin.get("/dashboard").text
    assert admin.get("/health").status_code == 200
    metrics = admin.get("/metrics").text
    assert "nwor_windows_total{" in metrics
    assert "vllm:generation_tokens_total{" in metrics


def test_the_command_switches_over_it(pair: tuple[ServerProcess, httpx.Client, list[str]]) -> None:
    _, admin, flags = pair
    for mode in ("cow", "stage"):
        run = subprocess.run(
            [sys.executable, "-m", "server", "mode", mode, *flags, "--admin-api-key", KEY],
            cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT, check=False,
        )  # fmt: skip
        assert run.returncode == 0, run.stderr
        assert admin.get("/admin/nwor", headers=HEADERS).json()["mode"] == mode


def test_it_ends_with_the_server(pair: tuple[ServerProcess, httpx.Client, list[str]]) -> None:
    server, admin, flags = pair
    server.process.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0
    with pytest.raises(httpx.TransportError):
        admin.get("/health")
    if flags[0] == "--uds":
        assert not Path(flags[1]).exists()
