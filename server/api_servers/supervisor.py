"""Several API server processes before one or several engines: started, watched, stopped and ended together.

vLLM's ``run_multi_api_server`` does the same for its own application, and this uses its parts. It differs in
the end: here requests drain, and a dead engine shows on ``/health`` first.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import connection
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.utils import bind_engine_zmq_listeners, launch_core_engines
from vllm.v1.executor import Executor
from vllm.v1.metrics.prometheus import setup_multiprocess_prometheus
from vllm.v1.utils import APIServerProcessManager

from nwor.engine import interrupts
from nwor.engine.vllm_features import cli_args
from server.admin_api.listener import AdminListener
from server.api_servers import api_process
from server.errors import StartupError
from server.lifecycle import ABORT_GRACE, ENGINE_SECONDS, EXIT_ENGINE_DEAD, EXIT_OK
from server.serving import cause_of

logger = logging.getLogger("vllm.nwor.server")

#: Seconds beyond the drain and the abort that a process has to end.
_END_SECONDS = 10.0
#: Seconds between two looks at the clock.
_LOOK_SECONDS = 1.0


class ApiProcesses:
    """The API server processes of one server, and its engines.

    Args:
        args: the command line, its ``api_server_count`` above 1.
        address: where the server listens, for the reader.
        sock: the bound socket that all processes accept from; closed here once they have it.
        admin: the listener of the admin API, which the first process serves; None where it has none.

    """

    _coordinator: Any = None

    def __init__(
        self, args: argparse.Namespace, address: str, sock: Any, admin: AdminListener | None
    ) -> None:
        self._args = args
        self._address = address
        self._sock = sock
        self._admin = admin
        self._count: int = args.api_server_count
        self._stopping = False
        self._ending = False
        self._engine_died = False
        pairs = [multiprocessing.Pipe() for _ in range(self._count)]
        self._pipes = [own for own, _ in pairs]
        self._theirs = [other for _, other in pairs]

    def serve(self, ready: Callable[[], None]) -> int:
        """Start engines and processes, and serve until told to stop.

        Args:
            ready: called once every process accepts requests.

        Returns:
            The exit code.

        Raises:
            StartupError: an engine or a process did not start.

        """
        # Before the processes that count: what they count adds up in files of this folder.
        setup_multiprocess_prometheus()
        with contextlib.ExitStack() as owned:
            try:
                processes = self._start(owned)
            except Exception as error:
                raise StartupError(f"the engine did not start: {cause_of(error)}") from error
            self._wait_until_ready(processes)
            self._take_signals()
            ready()
            return self._watch(processes)

    def _start(self, owned: contextlib.ExitStack) -> list[Any]:
        """Start all processes; ``owned`` ends them, the API servers first."""
        engine_args = AsyncEngineArgs.from_cli_args(self._args)
        cli_args().propagate_flash_late_interaction(self._args, engine_args)
        engine_args._api_process_count = self._count
        engine_args._api_process_rank = -1
        config: Any = engine_args.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER)
        log_stats = not engine_args.disable_log_stats
        listeners = bind_engine_zmq_listeners(config, self._count)
        # Kept: where the last reference goes, vLLM removes the sockets' files, and an engine that has not
        # connected by then never does.
        owned.callback(listeners.cleanup)
        with contextlib.ExitStack() as starting:
            # Whoever coordinates engines has no handlers of its own.
            with interrupts.hold_back():
                launch = starting.enter_context(
                    launch_core_engines(config, Executor.get_class(config), log_stats, listeners.addresses)
                )
            if launch.coordinator is not None:
                owned.callback(launch.coordinator.shutdown)
                self._coordinator = launch.coordinator.proc
            if launch.engine_manager is not None:
                owned.callback(launch.engine_manager.shutdown, ENGINE_SECONDS)
            manager = APIServerProcessManager(
                target_server_fn=partial(api_process.run, self._theirs, self._admin),
                listen_address=self._address,
                sock=self._sock,
                args=self._args,
                num_servers=self._count,
                input_listeners=listeners.inputs,
                output_listeners=listeners.outputs,
                stats_update_address=(
                    launch.coordinator.get_stats_publish_address() if launch.coordinator else None
                ),
                tensor_queue=launch.tensor_queue,
            )
            owned.callback(manager.shutdown)
            # Theirs now. Here an open end would keep the port listening when they have closed it, and a pipe
            # open whose other end is gone.
            self._sock.close()
            if self._admin is not None:
                self._admin.sock.close()
            for pipe in self._theirs:
                pipe.close()
            launch.watched_frontend_processes = manager.processes
        if launch.engine_manager is not None:
            thread = threading.Thread(target=self._watch_engines, args=(launch.engine_manager,), daemon=True)
            thread.start()
            owned.callback(self._end)
        return list(manager.processes)

    def _end(self) -> None:
        self._ending = True

    def _watch_engines(self, manager: Any) -> None:
        """Tell the processes when an engine dies; vLLM ends the other engines then."""
        manager.monitor_engine_liveness()
        if not self._ending:
            self._engine_died = True
            self._tell(api_process.ENGINE_DIED)

    def _tell(self, order: str) -> None:
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # it has ended
                pipe.send(order)

    def _wait_until_ready(self, processes: list[Any]) -> None:
        for process, pipe in zip(processes, self._pipes, strict=True):
            try:
                said = pipe.recv()
            except (EOFError, OSError):
                said = None
            if said != api_process.READY:
                raise StartupError(f"{process.name} ended before it was ready; its own error stands above")

    def _take_signals(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, *_: object) -> None:
        self._stopping = True
        self._tell(api_process.STOP)

    def _watch(self, processes: list[Any]) -> int:
        """Return the exit code once every process has ended."""
        running = {process.sentinel: process for process in processes}
        if self._coordinator is not None:
            running[self._coordinator.sentinel] = self._coordinator
        code, deadline = EXIT_OK, None
        while any(process is not self._coordinator for process in running.values()):
            if deadline is None and (self._stopping or code != EXIT_OK):
                deadline = time.monotonic() + self._args.drain_timeout + ABORT_GRACE + _END_SECONDS
            if deadline is not None and time.monotonic() >= deadline:
                logger.error("API server processes that were told to stop still run; they are ended.")
                return EXIT_ENGINE_DEAD
            # Signals are taken while this waits, but do not end it.
            for sentinel in connection.wait(list(running), _LOOK_SECONDS):
                process = running.pop(sentinel)  # type: ignore[arg-type]
                # Its files are closed a moment before its exit code is there.
                process.join(_LOOK_SECONDS)
                if process is self._coordinator:
                    self._lose(f"{process.name} ended with {process.exitcode}")
                    self._engine_died = True
                    self._tell(api_process.ENGINE_DIED)
                    code = EXIT_ENGINE_DEAD
                elif process.exitcode != EXIT_OK:
                    if not self._engine_died:
                        told = self._stopping
                        self._lose(f"{process.name} ended with {process.exitcode}")
                        if not told:
                            self._tell(api_process.STOP)
                    code = EXIT_ENGINE_DEAD
        return code

    def _lose(self, what: str) -> None:
        logger.critical("%s; the server ends.", what)
        self._stopping = True
