"""Claim: the OpenAPI document tells of every status, and FastAPI's 422 is gone.

Coverage: a small application with routes of each kind. Tolerance: none.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel

from server.api import openapi_document


class Body(BaseModel):
    number: int


def document() -> dict[str, Any]:
    app = FastAPI()

    @app.post("/v1/things", responses={400: {"description": "own words"}})
    def make(body: Body) -> int:
        return body.number

    @app.get("/v1/things/{name}")
    def show(name: str) -> str:
        return name

    @app.get("/health")
    def health() -> None: ...

    @app.get("/version")
    def version() -> None: ...

    openapi_document.complete(app.openapi())
    # What the application keeps was completed.
    assert app.openapi() is app.openapi()
    return app.openapi()


def statuses(path: str, method: str) -> set[str]:
    return set(document()["paths"][path][method]["responses"])


def test_statuses_of_each_kind_of_route() -> None:
    assert statuses("/v1/things", "post") == {"200", "400", "401", "413", "500", "503"}
    assert statuses("/v1/things/{name}", "get") == {"200", "400", "401", "404", "500", "503"}
    assert statuses("/health", "get") == {"200", "503"}
    assert statuses("/version", "get") == {"200"}


def test_errors_have_one_form() -> None:
    whole = document()
    answers = whole["paths"]["/v1/things"]["post"]["responses"]
    assert answers["400"] == {"description": "own words"}
    form = answers["401"]["content"]["application/json"]["schema"]["$ref"]
    schema = whole["components"]["schemas"][form.rsplit("/", 1)[1]]
    assert set(schema["properties"]) == {"error"}
    detail = schema["properties"]["error"]["$ref"]
    assert set(whole["components"]["schemas"][detail.rsplit("/", 1)[1]]["properties"]) == {
        "message",
        "type",
        "param",
        "code",
    }
