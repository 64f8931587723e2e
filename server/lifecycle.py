"""Serving from ready to exit: signals, draining, and what happens when the engine dies."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, MutableSequence
from types import SimpleNamespace
from typing import Any, Protocol

import uvicorn
from fastapi import FastAPI
from vllm import envs
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.launcher import NoSignalServer
from vllm.entrypoints.launchers.utils.constants import (
    H11_MAX_HEADER_COUNT_DEFAULT,
    H11_MAX_INCOMPLETE_EVENT_SIZE_DEFAULT,
)
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher

logger = logging.getLogger("vllm.nwor.server")

EXIT_OK = 0
EXIT_ENGINE_DEAD = 1

#: Seconds between two looks at the engine.
WATCH_INTERVAL = 0.5
#: Seconds for which /health answers 503 before the process ends, so that whoever watches can see it.
DEAD_GRACE = 3.0
#: Seconds that aborted requests have to hand their last answer to the client.
ABORT_GRACE = 5.0
#: Seconds that engines have to end by themselves. vLLM's workers have 5 of them, and 4 when asked again.
ENGINE_SECONDS = 15.0
# uvicorn looks at its exit flag ten times a second, and accepts requests until then.
_CLOSE_SECONDS = 0.3


class SignalSource(Protocol):
    """Who says when to stop, where it is not the process' own signals."""

    def listen(self, loop: asyncio.AbstractEventLoop, lifecycle: Lifecycle) -> None:
        """Call :meth:`Lifecycle.stop` and :meth:`Lifecycle.engine_died` from now on."""


class Lifecycle:
    """Runs one application on one socket until a signal or the engine's death ends it.

    Args:
        app: the application.
        engine: vLLM's engine client.
        drain_timeout: seconds that running requests have to finish.
        orders: who says when to stop; None for this process' signals.

    """

    def __init__(
        self, app: FastAPI, engine: EngineClient, drain_timeout: float, orders: SignalSource | None = None
    ) -> None:
        self._app = app
        self._engine = engine
        self._drain_timeout = drain_timeout
        self._orders = orders
        self._stopping = asyncio.Event()
        self._hurry = asyncio.Event()
        self._admin: list[tuple[FastAPI, socket.socket]] = []

    def add_admin(self, app: FastAPI, sock: socket.socket) -> None:
        """Serve the admin API on a socket of its own, from ready until everything else has ended.

        Args:
            app: its application.
            sock: a bound socket, not yet listening.

        """
        self._admin.append((app, sock))

    async def serve(
        self,
        sock: socket.socket,
        args: argparse.Namespace,
        ready: Callable[[], None],
        peer_loads: tuple[MutableSequence[int], int] | None = None,
    ) -> int:
        """Serve until told to stop.

        Args:
            sock: a bound socket, not yet listening.
            args: the command line; uvicorn's settings are vLLM's flags.
            ready: called once the socket accepts requests.
            peer_loads: open connections of each process that accepts from the socket, and this one's index;
                None where no other does.

        Returns:
            The process' exit code.

        """
        config = uvicorn.Config(self._app, **uvicorn_settings(args))
        # Cancels what is left after the drain, the abort and the abort's grace.
        config.timeout_graceful_shutdown = max(1, round(self._drain_timeout + ABORT_GRACE))
        config.h11_max_incomplete_event_size = (
            args.h11_max_incomplete_event_size or H11_MAX_INCOMPLETE_EVENT_SIZE_DEFAULT
        )
        config.h11_max_header_count = args.h11_max_header_count or H11_MAX_HEADER_COUNT_DEFAULT  # type: ignore[attr-defined]
        config.load()
        # vLLM's server, without signal handlers: ours drain first.
        server = NoSignalServer(config, peer_loads)
        # vLLM's error handlers ask here for an end at once when the engine is dead; _watch ends the server,
        # after the time in which /health tells of it.
        self._app.state.server = SimpleNamespace(should_exit=False)
        admins = [(_admin_server(app, own, args), own) for app, own in self._admin]
        servers = [server, *(admin for admin, _ in admins)]
        configs = [each.config for each in servers if each.config.is_ssl]
        refreshers = [_refresh_certificates(config) for config in configs if args.enable_ssl_refresh]

        loop = asyncio.get_running_loop()
        if self._orders is not None:
            self._orders.listen(loop, self)
        else:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, self.stop, number.name)
        tasks = [
            loop.create_task(self._announce(servers, ready)),
            loop.create_task(self._watch(server)),
            loop.create_task(self._drain(server)),
        ]
        admin_tasks = [loop.create_task(admin.serve(sockets=[own])) for admin, own in admins]
        try:
            await server.serve(sockets=[sock])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for admin, _ in admins:
                admin.should_exit = True
            await asyncio.gather(*admin_tasks)
            for refresher in refreshers:
                refresher.stop()
        if self._engine.errored and not self._stopping.is_set():
            logger.critical("The engine died; the server ends. The engine's own error stands above.")
            return EXIT_ENGINE_DEAD
        logger.info("Stopped.")
        return EXIT_OK

    def stop(self, why: str) -> None:
        """Let running requests finish, and end then; called again, abort them.

        Args:
            why: for the log.

        """
        if self._stopping.is_set():
            logger.info("%s again: aborting what still runs.", why)
            self._hurry.set()
            return
        logger.info("%s: no new requests; running ones have %g s to finish.", why, self._drain_timeout)
        self._stopping.set()

    def engine_died(self) -> None:
        """Take in that an engine has died, which its client sees by itself only where it started it."""
        client: Any = self._engine
        client.engine_core.shutdown()

    async def _announce(self, servers: list[NoSignalServer], ready: Callable[[], None]) -> None:
        while not all(server.started for server in servers):
            await asyncio.sleep(0.02)
        ready()

    async def _drain(self, server: uvicorn.Server) -> None:
        """After a signal: let uvicorn stop listening and wait, and abort what outlives the drain."""
        await self._stopping.wait()
        server.should_exit = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._hurry.wait(), max(self._drain_timeout, _CLOSE_SECONDS))
        if self._engine.errored:
            return
        logger.info("Aborting the requests that still run.")
        # Each ends with finish_reason "abort", which its client gets as the last word.
        await self._engine.pause_generation(mode="abort", clear_cache=False)

    async def _watch(self, server: uvicorn.Server) -> None:
        """End the server when the engine is dead, after a while in which /health says so."""
        while not self._engine.errored:
            await asyncio.sleep(WATCH_INTERVAL)
        if envs.VLLM_KEEP_ALIVE_ON_ENGINE_DEATH and not self._stopping.is_set():
            return
        if not self._stopping.is_set():
            await asyncio.sleep(DEAD_GRACE)
        server.should_exit = True


def uvicorn_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return uvicorn's settings as vLLM derives them from its flags."""
    settings: dict[str, Any] = {
        "host": args.host,
        "port": args.port,
        "log_level": args.uvicorn_log_level,
        "access_log": not args.disable_uvicorn_access_log,
        "timeout_keep_alive": envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE,
        "ssl_keyfile": args.ssl_keyfile,
        "ssl_certfile": args.ssl_certfile,
        "ssl_ca_certs": args.ssl_ca_certs,
        "ssl_cert_reqs": args.ssl_cert_reqs,
        "ssl_ciphers": args.ssl_ciphers,
    }
    log_config = get_uvicorn_log_config(args)
    if log_config is not None:
        settings["log_config"] = log_config
    return settings


def _admin_server(app: FastAPI, sock: socket.socket, args: argparse.Namespace) -> NoSignalServer:
    settings = uvicorn_settings(args)
    if sock.family == socket.AF_UNIX:
        # The file's permissions stand in for TLS.
        settings = {name: value for name, value in settings.items() if not name.startswith("ssl_")}
    config = uvicorn.Config(app, **settings)
    config.timeout_graceful_shutdown = round(ABORT_GRACE)
    config.load()
    return NoSignalServer(config)


def _refresh_certificates(config: uvicorn.Config) -> SSLCertRefresher:
    return SSLCertRefresher(
        ssl_context=config.ssl,
        key_path=config.ssl_keyfile,
        cert_path=config.ssl_certfile,
        ca_path=config.ssl_ca_certs,
    )
