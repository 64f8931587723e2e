"""Refuses request bodies above a limit before they are held in memory."""

from __future__ import annotations

from fastapi import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: How much of a body that is too large is read and dropped, so that the client, still sending, can read the
#: answer; in multiples of the limit.
DISCARD_FACTOR = 4


class BodyLimitMiddleware:
    """ASGI middleware that answers 413 to a body above ``limit`` bytes.

    It belongs innermost: the refusal is raised out of ``receive``, inside the routing, so the application's
    own error handlers give it their form. Responses pass through untouched.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection, counting what its body brings."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        limit = self.limit
        size = 0
        done = False

        async def limited_receive() -> Message:
            nonlocal size, done
            message = await receive()
            if done or message["type"] != "http.request":
                return message
            size += len(message.get("body", b""))
            more = message.get("more_body", False)
            if size > limit or (more and _declared_size(scope) > limit):
                await _discard(receive, limit * DISCARD_FACTOR - size, more)
                raise HTTPException(
                    status_code=413,
                    detail=f"The request body is larger than the {limit} bytes that this server reads: "
                    "send less, or have the server started with a larger one (nwor-server --max-body-size).",
                    headers={"Connection": "close"},
                )
            done = not more
            return message

        await self.app(scope, limited_receive, send)


def _declared_size(scope: Scope) -> int:
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value) if value.isdigit() else 0
    return 0


async def _discard(receive: Receive, budget: int, more: bool) -> None:
    while more and budget > 0:
        message = await receive()
        if message["type"] != "http.request":
            return
        budget -= len(message.get("body", b""))
        more = message.get("more_body", False)
