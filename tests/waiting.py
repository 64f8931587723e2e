"""Waiting for what another process is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import httpx

#: Seconds of the patience that one look at the condition may cost. When a machine stands still for a minute
#: (a virtual one that is saved or moved), so does the process that is waited for: no test may fail for that.
MOST_PER_LOOK = 5.0


def wait_until(
    condition: Callable[[], bool],
    seconds: float,
    what: str | Callable[[], str],
    *,
    every: float = 0.05,
) -> None:
    """Return once ``condition()`` holds; raise AssertionError with ``what`` after ``seconds`` s of looking.

    ``condition`` is called every ``every`` s; what it raises passes through. ``what`` says what did not
    happen, or returns it.
    """
    left = seconds
    while True:
        began = time.monotonic()
        if condition():
            return
        if left <= 0:
            raise AssertionError(f"not within {seconds:g} s: {what if isinstance(what, str) else what()}")
        time.sleep(every)
        left -= min(time.monotonic() - began, MOST_PER_LOOK)


def end_of(log: Path, characters: int = 4000) -> str:
    """Return the last ``characters`` of a log."""
    return log.read_text(encoding="utf-8", errors="replace")[-characters:]


def is_healthy(url: str) -> bool:
    """Return whether a server answers ``GET /health`` with 200."""
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False
