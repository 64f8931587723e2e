"""One of several API server processes: the whole application on a socket that all of them share.

The process that started it tells it over a pipe what to do, and learns when it serves. It looks after signals
for all, so that one that reaches a whole process group counts once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from server.admin_api.listener import AdminListener
from server.api_servers import throughput_log
from server.errors import StartupError

#: What a process says once it serves.
READY = "ready"
#: What it is told: to let its requests finish and end; said again, not to wait for them.
STOP = "stop"
#: What it is told when an engine has died, which only who started the engine can see.
ENGINE_DIED = "engine died"


def run(
    pipes: Sequence[Connection],
    admin: AdminListener | None,
    address: str,
    sock: Any,
    args: argparse.Namespace,
    client_config: dict[str, Any],
) -> None:
    """Serve until told to stop; the entry point that vLLM starts in a fresh process.

    Args:
        pipes: one for each process; this one's is at its index.
        admin: the listener of the admin API, which the first process serves; None where it has none.
        address: where the server listens, for the reader.
        sock: the bound socket that all processes accept from.
        args: the command line.
        client_config: what vLLM's engine client needs to be one of several.

    """
    import uvloop
    from vllm.logger import configure_logging
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager
    from vllm.utils.system_utils import decorate_logs, set_process_title

    from nwor.engine import plugin

    # The parent passes signals on; before there is a loop to listen to it, SIGTERM ends the process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    index: int = client_config["client_index"]
    for number, pipe in enumerate(pipes):
        if number != index:
            pipe.close()
    if admin is not None and index != 0:
        admin.sock.close()
        admin = None
    if logging_config := getattr(args, "logging_config", None):
        configure_logging(logging_config)
    set_process_title("APIServer", str(index))
    decorate_logs()
    throughput_log.drop_vllms_warning()
    if not args.no_nwor:
        plugin.register()
    # What vLLM does in the process that binds the socket, and in each of its own that serve.
    if args.tool_parser_plugin and len(args.tool_parser_plugin) > 3:
        ToolParserManager.import_tool_parser(args.tool_parser_plugin)
    if args.reasoning_parser_plugin and len(args.reasoning_parser_plugin) > 3:
        ReasoningParserManager.import_reasoning_parser(args.reasoning_parser_plugin)
    try:
        code = uvloop.run(_serve(pipes[index], admin, sock, args, client_config))
    except StartupError as error:
        print(f"API server {index}: {error}", file=sys.stderr, flush=True)
        code = 1
    sys.exit(code)


async def _serve(
    pipe: Connection,
    admin: AdminListener | None,
    sock: Any,
    args: argparse.Namespace,
    client_config: dict[str, Any],
) -> int:
    from server.serving import serve

    index: int = client_config["client_index"]
    loads = (client_config.pop("api_server_loads"), index)
    log = _log_throughput(args) if index == 0 else None
    try:
        return await serve(
            args,
            sock,
            admin,
            ready=lambda: pipe.send(READY),
            client_config=client_config,
            peer_loads=loads,
            orders=Orders(pipe),
        )
    finally:
        if log is not None:
            log.cancel()


def _log_throughput(args: argparse.Namespace) -> asyncio.Task[None] | None:
    """Write the throughput of all processes to the log, where vLLM would with one."""
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    if args.disable_log_stats:
        return None
    # As vLLM's own logger names it.
    device_type = current_platform.device_type
    device = "GPU" if device_type == "cuda" else device_type.upper()
    log = throughput_log.ThroughputLog(get_prometheus_registry, device)
    return asyncio.create_task(log.run(envs.VLLM_LOG_STATS_INTERVAL))


class Orders:
    """What the process that started this one says.

    Args:
        pipe: its end of the pipe.

    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def listen(self, loop: Any, lifecycle: Any) -> None:
        """Carry orders out from now on.

        Args:
            loop: the event loop that runs.
            lifecycle: the :class:`server.lifecycle.Lifecycle` that they concern.

        """
        # They reach the parent as well, which says what to do.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: None)
        loop.add_reader(self._pipe.fileno(), self._on_order, loop, lifecycle)

    def _on_order(self, loop: Any, lifecycle: Any) -> None:
        try:
            order = self._pipe.recv()
        except (EOFError, OSError):
            # Nobody is left to look after this process, nor after the engine.
            os._exit(1)
        if order == STOP:
            lifecycle.stop("The server stops")
        elif order == ENGINE_DIED:
            lifecycle.engine_died()
