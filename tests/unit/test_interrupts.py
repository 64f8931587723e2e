"""SIGINT in the processes below a server: ignored there, and nowhere else."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from nwor.engine import interrupts, plugin


@pytest.fixture(autouse=True)
def _handler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(interrupts.VARIABLE, raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_without_a_server_handlers_stay() -> None:
    interrupts.leave_to_server()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_server_itself_keeps_its_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(interrupts.VARIABLE, "")
    interrupts.claim()
    assert os.environ[interrupts.VARIABLE] == str(os.getpid())
    interrupts.leave_to_server()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("disabled", ["", "1"])
def test_the_plugin_leaves_it_to_the_server_with_and_without_nwor(
    monkeypatch: pytest.MonkeyPatch, disabled: str
) -> None:
    monkeypatch.setenv(plugin.DISABLE_VARIABLE, disabled)
    monkeypatch.setenv(interrupts.VARIABLE, str(os.getppid()))
    before = signal.getsignal(signal.SIGTERM)
    plugin.register()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) is before


def test_another_thread_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(interrupts.VARIABLE, str(os.getppid()))
    errors: list[BaseException] = []

    def leave() -> None:
        try:
            interrupts.leave_to_server()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert errors == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_processes_that_start_while_it_is_held_back_never_get_it() -> None:
    code = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))"
    with interrupts.hold_back():
        below = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        # Python's own processes start others first, which may let it through.
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            blocked = pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, ()).result()
        signal.raise_signal(signal.SIGINT)  # comes when it is let through again
        with pytest.raises(KeyboardInterrupt):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    assert below.stdout.strip() == "True"
    assert signal.SIGINT in blocked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
