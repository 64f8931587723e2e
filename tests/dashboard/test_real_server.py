"""The live page on the real server, in real Chromium: real requests move it, and its switch switches."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest

from tests.conftest import ADMIN_KEY, API_KEYS
from tests.dashboard.browser import SOON, Seen, drawn, drawn_bars, text, unlock, wait
from tests.server_process import DEMO_MODEL, ServerProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}


class Load:
    """Requests, four at a time, until it is stopped."""

    def __init__(self, server: ServerProcess) -> None:
        self.server = server
        self.stopped = threading.Event()
        self.codes: list[int] = []
        self.threads = [threading.Thread(target=self._send) for _ in range(4)]
        for thread in self.threads:
            thread.start()

    def _send(self) -> None:
        body = {"model": DEMO_MODEL, "prompt": "def add(a, b):", "max_tokens": 96, "ignore_eos": True}
        with self.server.client() as http:
            while not self.stopped.is_set():
                self.codes.append(http.post("/v1/completions", json=body).status_code)

    def stop(self) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join(120)
        assert set(self.codes) == {200}


@pytest.fixture
def load(server: ServerProcess) -> Iterator[Load]:
    running = Load(server)
    yield running
    running.stop()


@pytest.fixture
def mode(server: ServerProcess) -> Iterator[str]:
    """The mode in force; it is put back."""
    old = httpx.get(f"{server.url}/admin/nwor", headers=ADMIN, timeout=90).json()["mode"]
    yield old
    httpx.put(f"{server.url}/admin/nwor", headers=ADMIN, json={"mode": old}, timeout=90).raise_for_status()


def test_the_server_serves_the_page_without_a_key(server: ServerProcess) -> None:
    answer = httpx.get(f"{server.url}/dashboard", timeout=30)
    assert answer.status_code == 200
    assert answer.headers["content-security-policy"].startswith("default-src 'self';")
    assert httpx.get(f"{server.url}/dashboard/main.js", timeout=30).status_code == 200
    assert httpx.get(f"{server.url}/dashboard/nothing.js", timeout=30).status_code == 404


def test_real_requests_move_the_charts(server: ServerProcess, visit: Seen, mode: str, load: Load) -> None:
    httpx.put(
        f"{server.url}/admin/nwor", headers=ADMIN, json={"mode": "stage"}, timeout=90
    ).raise_for_status()
    seen = visit(server.url)
    page = seen.open()
    assert text(page, "#model") == DEMO_MODEL
    wait(page, "#requests", "4")
    wait(page, "#saved", "%")
    # Two values are not yet a line that one could call moving.
    for name in ("tokens", "acceptance", "bytes", "output", "requests"):
        wait_until(
            lambda name=name: len(drawn(page, f"chart-{name}")) >= 4, SOON / 1000, f"{name} becomes a line"
        )
    saved = float(text(page, "#saved").removesuffix(" %"))
    assert 0 < saved < 80
    accepted = float(text(page, "#acceptance").removesuffix(" %"))
    assert 0 < accepted < 100
    # stage writes (F + A) b of (F + D) b, with four draft tokens in nearly every window.
    assert saved == pytest.approx(100 * 4 * (1 - accepted / 100) / 5, abs=3)
    # With four draft tokens in nearly every window.
    assert float(text(page, "#tokens")) == pytest.approx(1 + 4 * accepted / 100, abs=0.2)
    assert not page.is_visible("#tree")
    assert float(text(page, "#output").replace(",", "").split(" ")[0]) > 0
    assert text(page, "#accounting") == "Agrees"
    assert drawn_bars(page) == 4
    assert {urlsplit(url).netloc for url in seen.requests} == {urlsplit(server.url).netloc}


def test_the_switch_switches_the_engine(server: ServerProcess, visit: Seen, mode: str, load: Load) -> None:
    page = visit(server.url).open()
    unlock(page, API_KEYS[0])
    wait(page, "#admin-error", "The admin key is not valid")
    unlock(page, ADMIN_KEY)
    wait(page, "#admin-answer", "Unlocked.")
    for new in ("cow", "off", "stage"):
        page.click(f"#modes button[data-mode={new}]")
        wait(page, "#admin-answer", f"→ {new} at verify step " if new != mode else new)
        assert httpx.get(f"{server.url}/admin/nwor", headers=ADMIN, timeout=90).json()["mode"] == new
        page.wait_for_selector(f"#modes button[data-mode={new}][aria-pressed=true]")
    assert ADMIN_KEY not in server.log
