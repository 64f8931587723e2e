"""A lean HTTP client of one connection: sends a request, notes when each chunk of its answer comes.

No parser runs while an answer comes: events are counted in the bytes, and only the last one is read.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import cast

from benchmarks.serving.summary import Timeline

_EVENT = b"data: {"
#: The event behind the last token, which holds the usage only.
_USAGE_ONLY = b'"choices":[]'
_DONE = b"data: [DONE]"
_END = b"\r\n0\r\n\r\n"
_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
#: Bytes at the end of an answer that hold its usage.
_TAIL = 2048


class FailedError(RuntimeError):
    """A request that the server did not answer as it should."""


class Stream(asyncio.Protocol):
    """One connection to a server, kept for one request after another."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Timeline] | None = None
        self._timeline = Timeline(0.0)
        self._tail = b""
        self._headed = False

    @classmethod
    async def open(cls, host: str, port: int) -> Stream:
        """Connect to a server."""
        _, stream = await asyncio.get_running_loop().create_connection(cls, host, port)
        return stream

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def send(self, payload: bytes, timeline: Timeline) -> asyncio.Future[Timeline]:
        """Send a request; the timeline fills while its answer comes, and the future ends with it."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._timeline, self._tail, self._headed = timeline, b"", False
        timeline.sent = time.monotonic()
        self._transport.write(payload)
        return self._answer

    def data_received(self, data: bytes) -> None:
        """Note the chunks that came, and end the answer behind the last."""
        now = time.monotonic()
        seam = len(_EVENT) - 1
        joined = self._tail[-seam:] + data
        events = joined.count(_EVENT)
        if events and _USAGE_ONLY in data:
            events -= 1
        for _ in range(events):
            self._timeline.chunks.append(now)
        self._tail = (self._tail + data)[-_TAIL:]
        if not self._headed and b"\r\n" in self._tail:
            self._headed = True
            if not self._tail.startswith(b"HTTP/1.1 200"):
                self._fail(self._tail.decode(errors="replace")[:500])
                return
        if self._tail.endswith(_END) and _DONE in self._tail:
            self._end()

    def _end(self) -> None:
        answer, self._answer = self._answer, None
        if answer is None or answer.done():
            return
        found = _TOKENS.findall(self._tail)
        if not found or not self._timeline.chunks:
            answer.set_exception(FailedError(f"an answer without usage: {self._tail[-500:]!r}"))
            return
        self._timeline.tokens = int(found[-1])
        answer.set_result(self._timeline)

    def _fail(self, why: str) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(FailedError(why))
        self.close()

    def connection_lost(self, error: Exception | None) -> None:
        """Fail the request that waits, if one does."""
        self.closed = True
        self._fail(f"the server closed the connection: {error}")

    def close(self) -> None:
        """Close the connection; a server that still answers drops the request."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()


def payload(host: str, port: int, content: bytes) -> bytes:
    """Return the bytes of a POST of JSON to /v1/completions."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: keep-alive\r\n\r\n"
    )
    return head.encode() + content
