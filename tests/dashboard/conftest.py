"""A real browser and the stand-in server, for the tests of the live page."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import find_free_port
from tests.dashboard.browser import Visit
from tests.dashboard.stand_in import StandIn, serve

#: Commands that start Chromium, as distributions name it.
COMMANDS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")


def find_chromium() -> str | None:
    """Return the machine's own Chromium; playwright's downloaded one is not asked for."""
    return next((path for command in COMMANDS if (path := shutil.which(command))), None)


def flags() -> list[str]:
    """Chromium's sandbox does not start under root, which is what containers run tests as."""
    return ["--no-sandbox"] if os.geteuid() == 0 else []


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """A headless Chromium; it ends with the module, and so does the event loop that drives it."""
    executable = find_chromium()
    if executable is None:
        pytest.skip(f"needs Chromium: found none of {', '.join(COMMANDS)}")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=executable, args=flags())
        favour_the_browser()
        yield browser
        browser.close()


def favour_the_browser() -> None:
    """Give the browser's session more weight where that is allowed.

    It has a session of its own, and Linux shares a processor out among sessions first (sched_autogroup).
    Beside an engine, in a lane of one processor, it was seen to get 0.6 s of 118 that it could have run.
    """
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            if "chrom" in child.name():
                Path(f"/proc/{child.pid}/autogroup").write_text("-10")
                return  # all its processes are of one session


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with serve(find_free_port()) as server:
        yield server


@pytest.fixture
def visit(chromium: Any) -> Iterator[Any]:
    """``visit(url, **context options)``; a page that raised an error fails its test."""
    visits: list[Visit] = []

    def start(url: str, **options: Any) -> Visit:
        visits.append(Visit(chromium, url, **options))
        return visits[-1]

    yield start
    for one in visits:
        one.context.close()
        assert one.errors == []
