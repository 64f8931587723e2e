"""The limit on request bodies, against an application that reads its body as FastAPI does."""

from __future__ import annotations

from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st

from server.api.body_limit import DISCARD_FACTOR, BodyLimitMiddleware

LIMIT = 64


def make_client() -> TestClient:
    app = FastAPI()
    app.add_middleware(BodyLimitMiddleware, limit=LIMIT)

    @app.post("/size")
    async def size(request: Request) -> int:
        return len(await request.body())

    @app.post("/first")
    async def first(body: dict[str, Any]) -> int:
        return len(body)

    return TestClient(app)


@given(st.lists(st.binary(max_size=40), max_size=8))
def test_chunks_pass_up_to_the_limit(chunks: list[bytes]) -> None:
    total = sum(map(len, chunks))
    answer = make_client().post("/size", content=iter(chunks))
    if total <= LIMIT:
        assert (answer.status_code, answer.json()) == (200, total)
    else:
        assert answer.status_code == 413
        assert str(LIMIT) in answer.json()["detail"]


@pytest.mark.parametrize(("size", "status"), [(LIMIT, 200), (LIMIT + 1, 413), (LIMIT * 100, 413)])
def test_declared_lengths(size: int, status: int) -> None:
    assert make_client().post("/size", content=b"a" * size).status_code == status


def test_a_parsed_body_is_refused_with_413_too() -> None:
    answer = make_client().post("/first", content=b'{"a": "' + b"a" * LIMIT + b'"}')
    assert answer.status_code == 413


async def test_a_body_without_end_is_not_read_without_end() -> None:
    read = 0

    async def receive() -> dict[str, Any]:
        nonlocal read
        read += LIMIT
        return {"type": "http.request", "body": b"a" * LIMIT, "more_body": True}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass

    with pytest.raises(Exception, match="larger than"):
        await BodyLimitMiddleware(app, LIMIT)({"type": "http", "headers": []}, receive, None)  # type: ignore[arg-type]
    assert read <= LIMIT * (DISCARD_FACTOR + 1)


async def test_other_connections_pass_untouched() -> None:
    seen: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    await BodyLimitMiddleware(app, LIMIT)({"type": "websocket"}, "receive", "send")  # type: ignore[arg-type]
    assert seen == [({"type": "websocket"}, "receive", "send")]
