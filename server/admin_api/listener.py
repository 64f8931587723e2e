"""A listener of the admin API's own: another port, or a Unix socket, so that the public one lacks it."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
from dataclasses import dataclass

from fastapi import FastAPI
from prometheus_client import make_asgi_app
from starlette.routing import Mount
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.launcher import create_server_socket
from vllm.entrypoints.serve.instrumentator import health
from vllm.v1.metrics.prometheus import get_prometheus_registry

from nwor.engine.stats.metrics import attach_metrics
from nwor.version import __version__
from server import dashboard
from server.admin_api import routes as admin_routes
from server.api import http_errors
from server.api.body_limit import BodyLimitMiddleware
from server.nwor_options import DEFAULT_ADMIN_HOST

#: Whoever may open the socket's file still needs the key; others need not even get that far.
_SOCKET_MODE = 0o600


@dataclass(frozen=True)
class AdminListener:
    """A bound socket, not yet listening.

    Attributes:
        sock: the socket.
        address: where it is, for the reader.
        path: the file of a Unix socket, removed at the end; None for a port.

    """

    sock: socket.socket
    address: str
    path: str | None = None

    def close(self) -> None:
        """Close the socket and remove its file."""
        self.sock.close()
        if self.path is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)


def open_listener(args: argparse.Namespace) -> AdminListener | None:
    """Bind the socket that the flags ask for.

    Args:
        args: the parsed command line.

    Returns:
        None where the admin API is on the server's own port.

    Raises:
        OSError: the address cannot be bound.

    """
    if args.admin_uds is not None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.bind(args.admin_uds)
        os.chmod(args.admin_uds, _SOCKET_MODE)
        return AdminListener(sock, f"unix:{args.admin_uds}", args.admin_uds)
    if args.admin_port is not None:
        host = args.admin_host or DEFAULT_ADMIN_HOST
        sock = create_server_socket((host, args.admin_port), reuse_port=False)
        scheme = "https" if args.ssl_keyfile and args.ssl_certfile else "http"
        shown = f"[{host}]" if ":" in host else host
        return AdminListener(sock, f"{scheme}://{shown}:{sock.getsockname()[1]}")
    return None


def create_admin_app(engine: EngineClient, args: argparse.Namespace) -> FastAPI:
    """Build the application of that listener: /admin, /dashboard, /metrics and /health.

    Args:
        engine: vLLM's engine client.
        args: the parsed command line.

    Returns:
        The application. It does not own the engine.

    """
    app = FastAPI(title="NWOR admin", version=__version__)
    http_errors.install(app)
    app.state.engine_client = engine
    admin_routes.install(app, engine, args.admin_api_key, attach_metrics(engine))
    dashboard.install(app)
    app.include_router(health.router)
    app.add_middleware(BodyLimitMiddleware, limit=args.max_body_size)
    metrics = Mount("/metrics", make_asgi_app(registry=get_prometheus_registry()))
    # Without the slash too, as on the public port.
    metrics.path_regex = re.compile("^/metrics(?P<path>.*)$")
    app.router.routes.append(metrics)
    return app
