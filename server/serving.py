"""From the engine's client to the last answer: what every process that serves HTTP does."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, MutableSequence
from typing import TYPE_CHECKING, Any

from server.errors import StartupError

if TYPE_CHECKING:
    from server.admin_api.listener import AdminListener
    from server.lifecycle import SignalSource


async def serve(
    args: argparse.Namespace,
    sock: Any,
    admin: AdminListener | None,
    *,
    ready: Callable[[], None],
    client_config: dict[str, Any] | None = None,
    peer_loads: tuple[MutableSequence[int], int] | None = None,
    orders: SignalSource | None = None,
) -> int:
    """Connect with the engine, build the application and serve it until told to stop.

    Args:
        args: the command line.
        sock: a bound socket, not yet listening.
        admin: the listener of the admin API; None where it has none, or another process serves it.
        ready: called once requests are accepted.
        client_config: what vLLM's engine client needs to be one of several; None where this process starts
            the engine itself.
        peer_loads: open connections of each API server process, and this one's index; None for the only one.
        orders: who says when to stop; None for this process' own signals.

    Returns:
        The exit code.

    Raises:
        StartupError: the engine did not start, or cannot be reached.

    """
    from vllm.entrypoints.launchers.api_server.entry import build_async_engine_client

    from server.admin_api.listener import create_admin_app
    from server.app import create_app
    from server.lifecycle import ENGINE_SECONDS, Lifecycle

    engine_context = build_async_engine_client(args, client_config=client_config)
    try:
        engine = await engine_context.__aenter__()
    except Exception as error:
        raise StartupError(f"the engine did not start: {cause_of(error)}") from error
    try:
        app = await create_app(engine, args)
        lifecycle = Lifecycle(app, engine, args.drain_timeout, orders)
        if admin is not None:
            lifecycle.add_admin(create_admin_app(engine, args), admin.sock)
        return await lifecycle.serve(sock, args, ready, peer_loads)
    finally:
        # vLLM's context would kill the engine at once, and leave its semaphores and shared memory behind.
        engine.shutdown(timeout=ENGINE_SECONDS)
        # vLLM froze what was there at the start. The interpreter would not collect it at its end, and Triton
        # would list all of its own objects as leaks.
        gc.unfreeze()
        await engine_context.__aexit__(None, None, None)


def cause_of(error: BaseException) -> str:
    """Return what vLLM says went wrong, without the validator's frame around it."""
    text = " ".join(str(error).split()) or type(error).__name__
    _, found, detail = text.partition("Value error, ")
    return detail.split(" [type=")[0] if found else text
