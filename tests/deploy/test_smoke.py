"""deploy/smoke.sh passes on a real server, and finds each fault that it is there to find."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from tests import conftest
from tests.deploy import fake_server
from tests.server_process import ROOT, ServerProcess

SCRIPT = ROOT / "deploy" / "smoke.sh"

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="the script needs curl")

Fake = Callable[..., fake_server.FakeServer]


def smoke(
    url: str, admin_key: str | None = fake_server.ADMIN_KEY, api_key: str | None = fake_server.API_KEY
) -> subprocess.CompletedProcess[str]:
    """Run the script as an operator does."""
    keys = {"NWOR_ADMIN_API_KEY": admin_key, "VLLM_API_KEY": api_key}
    environment = {name: value for name, value in os.environ.items() if name not in keys}
    environment |= {name: value for name, value in keys.items() if value is not None}
    return subprocess.run(
        [str(SCRIPT), url],
        env={**environment, "SMOKE_TIMEOUT": "60"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.fixture
def fake() -> Iterator[Fake]:
    """Start stand-ins with the given faults."""
    started: list[fake_server.FakeServer] = []

    def start(*faults: str) -> fake_server.FakeServer:
        server = fake_server.FakeServer(faults=faults)
        started.append(server)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


@pytest.mark.engine
def test_passes_on_a_real_server_and_leaves_its_mode_alone(server: ServerProcess) -> None:
    before = server.metric("nwor_mode")
    result = smoke(server.url, conftest.ADMIN_KEY, conftest.API_KEYS[0])
    assert result.returncode == 0, result.stdout
    assert "FAILED" not in result.stdout
    for mode in ("off", "stage", "cow"):
        assert f"switches to '{mode}'" in result.stdout
    assert server.metric("nwor_mode") == before


def test_passes_on_the_stand_in(fake: Fake) -> None:
    server = fake()
    result = smoke(server.url)
    assert result.returncode == 0, result.stdout
    assert result.stdout.splitlines()[-1] == "all 15 steps passed"
    assert server.mode == "stage"


def test_needs_no_user_key_where_the_server_wants_none(fake: Fake) -> None:
    result = smoke(fake("open api").url, api_key=None)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("fault", "step", "wanted"),
    [
        ("sick", "GET /health", "status 200"),
        ("open api", "without the API key", "status 401"),
        ("short", "a prompt is completed", "24 completion tokens"),
        ("aborts", "a prompt is completed", "finish_reason 'length'"),
        ("cut streams", "a completion is streamed", "[DONE]"),
        ("any model", "an unknown model", "status 404"),
        ("no counting", "/metrics has counted", "rise by 48"),
        ("mismatches", "/metrics has counted", "no accounting mismatches"),
        ("no nwor", "/metrics has counted", "NWOR in the engine"),
        ("open admin", "without a key is refused", "status 401"),
        ("no admin key", "without a key is refused", "this server has no admin key"),
        ("any admin key", "without a key is refused", "status 401"),
        ("ranks differ", "with the key shows the mode", "ranks_agree"),
        ("stuck mode", "switches to 'off'", "nwor_mode"),
    ],
)
def test_ends_at_the_step_that_fails_and_says_what_was_wanted(
    fake: Fake, fault: str, step: str, wanted: str
) -> None:
    result = smoke(fake(fault).url)
    assert result.returncode == 1, result.stdout
    lines = result.stdout.splitlines()
    failed = [line for line in lines if line.endswith("FAILED")]
    assert len(failed) == 1
    assert step in failed[0]
    report = "\n".join(lines[lines.index(failed[0]) :])
    assert wanted in report
    assert "got:" in report


def test_an_admin_api_on_a_port_of_its_own(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    public, admin = fake("no admin"), fake()
    admin.switches = public
    monkeypatch.setenv("NWOR_ADMIN_URL", admin.url)
    result = smoke(public.url)
    assert result.returncode == 0, result.stdout
    assert "the public port has no admin API ... ok" in result.stdout
    public.faults = ()
    result = smoke(public.url)
    assert result.returncode == 1, result.stdout
    assert "the public port has no admin API ... FAILED" in result.stdout


def test_puts_the_mode_back_when_it_fails_halfway(fake: Fake) -> None:
    server = fake()
    server.faults = ("short after a switch",)
    put = fake_server.Handler.do_PUT

    class Breaks(fake_server.Handler):
        def do_PUT(self) -> None:  # noqa: N802  the base class' name
            put(self)
            if server.mode == "cow":
                server.faults = ("short",)

    server.RequestHandlerClass = Breaks
    result = smoke(server.url)
    assert result.returncode == 1, result.stdout
    assert "switches to 'cow'" in result.stdout
    assert server.mode == "stage"


def test_a_wrong_admin_key_is_found(fake: Fake) -> None:
    result = smoke(fake().url, admin_key="another")
    assert result.returncode == 1
    assert "status 401" in result.stdout


def test_nobody_listens(free_port: int) -> None:
    result = smoke(f"http://127.0.0.1:{free_port}")
    assert result.returncode == 1
    assert "curl ended with 7" in result.stdout


def test_without_an_admin_key_it_does_not_begin(fake: Fake) -> None:
    result = smoke(fake().url, admin_key=None)
    assert result.returncode == 2
    assert "NWOR_ADMIN_API_KEY" in result.stdout
