"""The admin API and its command against the real server: keys, modes, reports."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import httpx
import pytest

from tests.conftest import ADMIN_KEY, API_KEYS
from tests.server_process import DEMO_MODEL, ROOT, ServerProcess

pytestmark = pytest.mark.engine

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


def admin(server: ServerProcess, method: str, path: str = "", **kwargs: Any) -> httpx.Response:
    return httpx.request(method, f"{server.url}/admin/nwor{path}", timeout=90, **{"headers": ADMIN, **kwargs})


def command(server: ServerProcess, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "server", "mode", *words, "--url", server.url]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("key", API_KEYS)
def test_users_keys_open_nothing_here_and_the_admin_key_nothing_there(
    server: ServerProcess, key: str
) -> None:
    user = {"Authorization": f"Bearer {key}"}
    assert admin(server, "GET", headers=user).status_code == 401
    assert admin(server, "PUT", headers=user, json={"mode": "off"}).status_code == 401
    body = {"model": DEMO_MODEL, "prompt": "x", "max_tokens": 1}
    answer = httpx.post(f"{server.url}/v1/completions", headers=ADMIN, json=body, timeout=90)
    assert answer.status_code == 401


def test_report_of_the_running_engine(server: ServerProcess) -> None:
    report = admin(server, "GET").json()
    assert report["enabled"] is True
    assert report["modes"] == ["off", "stage", "cow"]
    assert report["ranks_agree"] is True
    (rank,) = report["ranks"]
    assert rank["unsupported"] is None
    assert rank["fault"] is None
    assert rank["token_bytes"] > 0
    body = {"model": DEMO_MODEL, "prompt": "x", "max_tokens": 1}
    with server.client() as http:
        assert http.post("/v1/completions", json=body).status_code == 200
    paths = admin(server, "GET").json()["ranks"][0]["fast_paths"]
    assert paths["fast_host"]["active"] == ["scheduler", "scheduler_steps"]
    assert paths["fast_sampling"]["active"] == []
    assert all("CUDA" in why for why in paths["fast_sampling"]["inactive"].values())


def test_draft_tokens_of_a_server_with_a_fixed_number(server: ServerProcess) -> None:
    lengths = admin(server, "GET").json()["draft_tokens"]
    assert (lengths["setting"], lengths["started_with"], lengths["can_change"]) == ("4", "4", False)
    answer = admin(server, "PUT", "/draft-tokens", json={"draft_tokens": "auto"})
    assert answer.status_code == 409
    assert "--num-speculative-tokens auto" in answer.json()["error"]["message"]
    user = {"Authorization": f"Bearer {API_KEYS[0]}"}
    assert admin(server, "PUT", "/draft-tokens", headers=user, json={"draft_tokens": 1}).status_code == 401


def test_switching_there_and_back(server: ServerProcess) -> None:
    old = admin(server, "GET").json()["mode"]
    for mode in ("off", "cow", "cow", old):
        answer = admin(server, "PUT", json={"mode": mode})
        assert answer.status_code == 200
        assert answer.json()["new"] == mode == admin(server, "GET").json()["mode"]
    changes = admin(server, "GET").json()["changes"]
    assert f"from cow to {old}" in changes[-1]["what"]
    assert f"Admin key {changes[-1]['key']} switched the mode" in server.log
    assert ADMIN_KEY not in server.log


def test_wrong_requests(server: ServerProcess) -> None:
    assert admin(server, "PUT", json={"mode": "warp"}).status_code == 400
    assert admin(server, "PUT", content=b"{").status_code == 400
    assert admin(server, "DELETE").status_code == 405
    assert admin(server, "GET", "/nothing").status_code == 404


def test_reset_starts_the_report_anew_and_leaves_the_metrics(server: ServerProcess) -> None:
    body = {"model": DEMO_MODEL, "prompt": "def f():", "max_tokens": 6, "ignore_eos": True}
    with server.client() as http:
        http.post("/v1/completions", json=body).raise_for_status()
    assert admin(server, "GET").json()["counters"]["windows"] > 0
    windows = server.total("nwor_windows_total")
    assert admin(server, "POST", "/reset-stats").json() == {"reset": True, "ranks": 1}
    assert admin(server, "GET").json()["counters"]["windows"] == 0
    assert server.total("nwor_windows_total") >= windows > 0
    assert server.total("nwor_accounting_mismatches_total") == 0


def test_the_command_shows_and_switches(server: ServerProcess) -> None:
    shown = command(server, "--admin-api-key", ADMIN_KEY)
    assert (shown.returncode, shown.stderr) == (0, "")
    old = shown.stdout.strip()
    assert old == admin(server, "GET").json()["mode"]
    switched = command(server, "off", "--admin-api-key", ADMIN_KEY)
    assert f"{old} -> off" in switched.stdout
    assert admin(server, "GET").json()["mode"] == "off"
    assert command(server, old, "--admin-api-key", ADMIN_KEY).returncode == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["warp", "--admin-api-key", ADMIN_KEY], "off, stage, cow"),
        (["off", "--admin-api-key", "nobody"], "not valid"),
        (["off", "--admin-api-key", ADMIN_KEY, "--url", "http://127.0.0.1:9"], "no answer"),
    ],
)
def test_the_command_says_what_went_wrong(server: ServerProcess, words: list[str], message: str) -> None:
    where = [] if "--url" in words else ["--url", server.url]
    line = [sys.executable, "-m", "server", "mode", *where, *words]
    ended = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 1
    assert message in ended.stderr
    assert ended.stdout == ""
