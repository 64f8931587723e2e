"""Claim: whatever a client sends, the answer is one that the OpenAPI document tells of, and none is a 5xx.

Coverage: every operation of the document, with valid and with wrong input; and each field of each body by
itself, valid and wrong, in a request that is otherwise valid. Schemathesis makes the input from the document;
the examples are the same in each run. Tolerance: none, but for the 501 that the document tells of.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.conftest import ADMIN_KEY
from tests.server_process import DEMO_MODEL, ServerProcess

pytestmark = pytest.mark.engine

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
MODES = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
#: Examples of each operation and mode, and of each field.
OPERATION_EXAMPLES, FIELD_EXAMPLES = 4, 4
_CHAT = {"model": DEMO_MODEL, "messages": [{"role": "user", "content": "hi"}]}
#: Valid requests, which get one field more.
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": DEMO_MODEL, "prompt": "x = ", "max_tokens": 2},
    "/v1/chat/completions": {**_CHAT, "max_tokens": 2},
    "/v1/responses": {"model": DEMO_MODEL, "input": "hi", "max_output_tokens": 2},
    "/v1/messages": {**_CHAT, "max_tokens": 2},
    "/v1/messages/count_tokens": _CHAT,
    "/tokenize": {"model": DEMO_MODEL, "prompt": "x = "},
    "/detokenize": {"model": DEMO_MODEL, "tokens": [5]},
}
#: What bounds an answer's length: no example may ask for more.
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")


@pytest.fixture(scope="module")
def document(server: ServerProcess) -> dict[str, Any]:
    return httpx.get(f"{server.url}/openapi.json", timeout=30).json()


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client(timeout=60) as client:
        yield client


def bounded(examples: int) -> settings:
    """Return settings for so many examples, the same ones in each run."""
    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


def cut(body: dict[str, Any]) -> dict[str, Any]:
    """Return a body that asks for no long answer."""
    return {
        name: min(value, 2) if name in LIMITS and isinstance(value, int) else value
        for name, value in body.items()
    }


def test_operations(server: ServerProcess, document: dict[str, Any]) -> None:
    schema = schemathesis.openapi.from_dict(document)
    schema.config.update(base_url=server.url)
    wrong: list[str] = []
    admin = {"Authorization": f"Bearer {ADMIN_KEY}"}
    before = httpx.get(f"{server.url}/admin/nwor", headers=admin, timeout=30).json()["mode"]
    try:
        for operation in (found.ok() for found in schema.get_all_operations()):
            headers = (
                admin
                if operation.path.startswith("/admin")
                else {"Authorization": f"Bearer {server.api_key}"}
            )
            sent = [try_operation(operation, mode, headers, wrong) for mode in MODES]
            assert sent[0], operation.label
    finally:
        # Examples of the admin API switch the mode, and other tests share the server.
        body = {"mode": before}
        httpx.put(f"{server.url}/admin/nwor", json=body, headers=admin, timeout=30).raise_for_status()
    assert not wrong, f"{len(wrong)} of:\n" + "\n\n".join(wrong[:8])


def try_operation(operation: Any, mode: GenerationMode, headers: dict[str, str], wrong: list[str]) -> int:
    """Send examples of an operation, take down what is wrong, and return how many were sent."""
    sent = 0

    def try_one(case: schemathesis.Case) -> None:
        nonlocal sent
        if isinstance(case.body, dict):
            case.body = cut(case.body)
        response = case.call(headers=headers, timeout=60)
        sent += 1
        try:
            if response.status_code >= 500 and response.status_code != 501:
                raise AssertionError(f"{response.status_code} {response.text[:300]}")
            case.validate_response(response, checks=CHECKS)
        except (AssertionError, ExceptionGroup) as problem:
            wrong.append(f"{operation.label} {case.body!r:.300}: {problem!r:.600}")

    cases = operation.as_strategy(generation_mode=mode)
    # Where an operation takes no input, none can be wrong.
    with contextlib.suppress(Unsatisfiable):
        seed(1)(bounded(OPERATION_EXAMPLES)(given(case=cases)(try_one)))()
    return sent


@pytest.mark.parametrize("path", VALID)
def test_fields_one_by_one(http: httpx.Client, document: dict[str, Any], path: str) -> None:
    told = document["paths"][path]["post"]["responses"]
    wrong: list[str] = []
    answered: set[int] = set()

    def try_one(body: Any) -> None:
        request = cut({**VALID[path], **body}) if isinstance(body, dict) else body
        content = request if isinstance(request, bytes) else json.dumps(request).encode()
        response = http.post(path, content=content, headers={"Content-Type": "application/json"})
        answered.add(response.status_code)
        if response.status_code >= 500 or str(response.status_code) not in told:
            wrong.append(f"{request!r:.400}: {response.status_code} {response.text[:400]}")
        elif response.status_code >= 400:
            assert response.json()["error"]["message"]

    fields = fields_of(document, path)
    assert set(VALID[path]) <= set(fields)
    for name, schema in fields.items():
        cases = field_cases(document, name, schema)
        seed(1)(bounded(FIELD_EXAMPLES)(given(case=cases)(lambda case: try_one(case.body))))()
    assert not wrong, f"{len(wrong)} of:\n" + "\n\n".join(wrong[:8])
    assert {200, 400} <= answered
    assert http.get("/health").status_code == 200


def fields_of(document: dict[str, Any], path: str) -> dict[str, Any]:
    """Return the fields of a body, of all its forms, and their schemas."""
    body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    fields: dict[str, Any] = {}
    for form in (body, *body.get("anyOf", ())):
        if "$ref" in form:
            fields |= document["components"]["schemas"][form["$ref"].rsplit("/", 1)[1]]["properties"]
    return fields


def field_cases(document: dict[str, Any], name: str, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return bodies of one field alone, valid and wrong."""
    body = {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}
    post = {
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": ""}},
    }
    alone = {**document, "paths": {"/field": {"post": post}}}
    [operation] = [found.ok() for found in schemathesis.openapi.from_dict(alone).get_all_operations()]
    return st.one_of([operation.as_strategy(generation_mode=mode) for mode in MODES])


def test_every_operation_tells_of_its_errors(document: dict[str, Any]) -> None:
    """The statuses that hold for a kind of routes, by hand."""
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            answers = set(operation["responses"])
            if path.startswith("/v1"):
                assert "401" in answers, (method, path)
            if "requestBody" in operation:
                assert {"400", "413"} <= answers, (method, path)
            assert "HTTPValidationError" not in str(operation["responses"]), (method, path)
    assert "404" in document["paths"]["/v1/responses/{response_id}"]["get"]["responses"]
    assert "404" in document["paths"]["/v1/models/{model_id}"]["get"]["responses"]
