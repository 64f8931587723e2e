"""Ends the processes below this one: those that it started, and those that they started."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time

import psutil

_PR_SET_CHILD_SUBREAPER = 36
_INTERVAL = 0.05
#: Seconds that killed processes have to be gone. One that waits for a device or a disk may not end at all.
KILL_SECONDS = 10.0


def end_descendants(seconds: float) -> None:
    """End every descendant: asked first, killed when its time is over.

    A process whose parent ends becomes this one's child (on Linux), so that none is lost that an engine has
    just started.

    Args:
        seconds: what they have to end by themselves. :data:`KILL_SECONDS` later those that are left are named
            on the standard error, and left.

    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    own, asked, deadline = psutil.Process(), set(), time.monotonic() + seconds
    while True:
        alive = [child for child in own.children(recursive=True) if _runs(child)]
        if not alive:
            return
        late = time.monotonic() >= deadline
        if time.monotonic() >= deadline + KILL_SECONDS:
            left = ", ".join(str(child.pid) for child in alive)
            print(
                f"nwor-server: these processes do not end though killed: {left}", file=sys.stderr, flush=True
            )
            return
        for child in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                if late:
                    child.kill()
                elif child.pid not in asked:
                    asked.add(child.pid)
                    child.terminate()
        time.sleep(_INTERVAL)


def _runs(process: psutil.Process) -> bool:
    """Return whether a process has not ended; one that only waits to be asked how has."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False
