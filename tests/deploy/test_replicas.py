"""Two real servers: one command switches both, and a router keeps requests with one prefix on one of them.

The router is not among this project's packages. NWOR_TEST_ROUTER names the command that starts one of vLLM's
production stack, for example ``/path/to/python -m vllm_router.app``; without it those tests are skipped.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.conftest import ADMIN_KEY, API_KEYS, find_free_port
from tests.server_process import DEMO_MODEL, ROOT, ServerProcess
from tests.waiting import end_of, is_healthy, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

ROUTER_VARIABLE = "NWOR_TEST_ROUTER"
#: Groups of requests that share a prefix, and requests in each.
GROUPS = 8
REQUESTS = 4
MAX_GROUPS = 40

Replicas = tuple[ServerProcess, ServerProcess]


@pytest.fixture(scope="module")
def replicas(server: ServerProcess, start_server: Callable[..., ServerProcess]) -> Iterator[Replicas]:
    other = start_server("--demo", "--api-key", *API_KEYS, "--admin-api-key", ADMIN_KEY)
    other.api_key = API_KEYS[0]
    yield server, other
    other.kill()


def mode_command(replicas: Replicas, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "server", "mode", *words]
    for replica in replicas:
        line += ["--url", replica.url]
    return subprocess.run(
        line,
        cwd=ROOT,
        env={**os.environ, "NWOR_ADMIN_API_KEY": ADMIN_KEY},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def mode_of(replica: ServerProcess) -> str:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}"}
    return str(httpx.get(f"{replica.url}/admin/nwor", headers=headers, timeout=90).json()["mode"])


def test_one_command_switches_both(replicas: Replicas) -> None:
    before = mode_of(replicas[0])
    try:
        ended = mode_command(replicas, "cow")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert [mode_of(replica) for replica in replicas] == ["cow", "cow"]
        assert mode_command(replicas[:1] + replicas[:1], "off").returncode == 0
        shown = mode_command(replicas)
        assert shown.returncode == 1
        assert "1 cow, 1 off" in shown.stderr
    finally:
        assert mode_command(replicas, before).returncode == 0


@pytest.fixture(scope="module")
def router(replicas: Replicas, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    command = os.environ.get(ROUTER_VARIABLE)
    if not command:
        pytest.skip(f"{ROUTER_VARIABLE} names no router of vLLM's production stack")
    port = find_free_port()
    url = f"http://127.0.0.1:{port}"
    log: Path = tmp_path_factory.mktemp("router") / "log.txt"
    flags = ["--host", "127.0.0.1", "--port", str(port), "--service-discovery", "static"]
    flags += ["--static-backends", ",".join(replica.url for replica in replicas)]
    flags += ["--static-models", ",".join([DEMO_MODEL] * 2), "--routing-logic", "prefixaware"]
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*shlex.split(command), *flags],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "VLLM_API_KEY": API_KEYS[0]},
        )
    try:
        wait_until(lambda: process.poll() is not None or is_healthy(url), 60, lambda: end_of(log), every=0.2)
        assert process.poll() is None, end_of(log)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def complete(url: str, prompt: str) -> str:
    body = {"model": DEMO_MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0}
    headers = {"Authorization": f"Bearer {API_KEYS[0]}"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)
    answer.raise_for_status()
    return str(answer.json()["choices"][0]["text"])


def served(replicas: Replicas) -> list[float]:
    return [replica.total("vllm:request_success_total") for replica in replicas]


def test_a_prefix_stays_on_one_replica(router: str, replicas: Replicas) -> None:
    hits = [replica.total("vllm:prefix_cache_hits_total") for replica in replicas]
    homes: list[int] = []
    while len(homes) < GROUPS or (len(set(homes)) == 1 and len(homes) < MAX_GROUPS):
        # Several of the pieces that router and cache compare; no two groups begin alike.
        prefix = f"# module {len(homes)}: " + f"value_{len(homes)} = compute({len(homes)})\n" * 60
        used = set()
        for number in range(REQUESTS):
            before = served(replicas)
            complete(router, prefix + f"def f{number}(x):\n")
            rises = [now - then for now, then in zip(served(replicas), before, strict=True)]
            assert sorted(rises) == [0.0, 1.0]
            used.add(rises.index(1.0))
        assert len(used) == 1, f"group {len(homes)} was served by both"
        homes += used
    assert set(homes) == {0, 1}, "every group went to the same replica"
    for replica, home, then in zip(replicas, (0, 1), hits, strict=True):
        assert replica.total("vllm:prefix_cache_hits_total") - then > 0, (
            f"no prefix was found again on {home}"
        )


def test_what_the_router_lets_through(router: str, replicas: Replicas) -> None:
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    assert httpx.get(f"{router}/admin/nwor", headers=admin, timeout=60).status_code == 404
    assert (
        httpx.put(f"{router}/admin/nwor", headers=admin, json={"mode": "off"}, timeout=60).status_code == 404
    )
    assert "nwor_windows_total" not in httpx.get(f"{router}/metrics", timeout=60).text
    models = httpx.get(f"{router}/v1/models", timeout=60).json()
    assert {model["id"] for model in models["data"]} == {DEMO_MODEL}
    refused = httpx.post(
        f"{router}/v1/completions", json={"model": DEMO_MODEL, "prompt": "x", "max_tokens": 1}, timeout=60
    )
    assert refused.status_code == 401, "the replicas' check of the key holds behind the router"
