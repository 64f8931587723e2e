"""Leaves SIGINT to the server, in the processes that it has started.

Ctrl-C in a terminal reaches every process in the foreground. The server drains then, and ends the others
itself. vLLM's engine and workers would end at once, and the running requests with them.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from multiprocessing import resource_tracker

#: Process id of the server that looks after SIGINT for all processes below it; not for users to set.
VARIABLE = "NWOR_INTERRUPTS_GO_TO"


def claim(environ: MutableMapping[str, str] = os.environ) -> None:
    """Have every process that is started from now on leave SIGINT to this one.

    Args:
        environ: the environment that they inherit.

    """
    environ[VARIABLE] = str(os.getpid())


def leave_to_server() -> None:
    """Ignore SIGINT, where a server above this process looks after it; safe to call any number of times.

    vLLM's handlers have to be in place, as they would undo it. Without a server nothing changes, so engines
    under ``vllm serve`` keep vLLM's handlers. Other threads than the main one cannot, and change nothing.
    """
    server = os.environ.get(VARIABLE)
    if server in (None, "", str(os.getpid())) or threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextmanager
def hold_back() -> Iterator[None]:
    """Start processes that never get SIGINT, within this block; here it comes when the block ends.

    For processes without plugins, such as the coordinator of data parallelism. They and those below them
    inherit what this thread blocks.
    """
    # Python starts this process with the first other one, and lets the signal through again.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
