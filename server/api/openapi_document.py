"""The OpenAPI document tells of every status that this server answers with, and of no other.

vLLM's routes name some of them, and FastAPI adds 422 to each with a body, where this server answers 400.
"""

from __future__ import annotations

from typing import Any

from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX

_NAME = "ErrorResponse"
_WRONG = "The request has a wrong form, or asks for what cannot be served. The message says what to do."
_KEY = "The API key is missing or is none of the server's."
_NOTHING = "There is no such thing. The message names what there is."
_LARGE = "The body is larger than `--max-body-size`."
_FAILED = "The server is at fault. Its log has more."
_DEAD = "The engine is dead."
_BUSY = "The engine takes no requests now."
_MEDIA = "A file that the request refers to, such as an image, cannot be processed."
#: These answer 503, without a body, once the engine is dead.
_HEALTH = ("/health", "/ping")
#: These may be sent files, where the model takes any.
_WITH_FILES = ("/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages")


def complete(document: dict[str, Any]) -> None:
    """Add the statuses that are missing from a document, in place, and take out FastAPI's 422.

    Args:
        document: as FastAPI makes it.

    """
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    if _NAME not in schemas:
        own = ErrorResponse.model_json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(own.pop("$defs", {}))
        schemas[_NAME] = own
    for path, operations in document.get("paths", {}).items():
        for operation in operations.values():
            answers = operation.setdefault("responses", {})
            takes_input = "422" in answers or "requestBody" in operation
            if "HTTPValidationError" in str(answers.get("422")):
                del answers["422"]
            if path in _HEALTH:
                answers["503"] = {"description": _DEAD}
            for status, sentence in _statuses(path, operation, takes_input).items():
                answers.setdefault(status, _answer(sentence))


def _statuses(path: str, operation: dict[str, Any], takes_input: bool) -> dict[str, str]:
    """Return the statuses that an operation may answer with beside its own."""
    found: dict[str, str] = {}
    if takes_input:
        found["400"] = _WRONG
    if path.startswith(GUARDED_PREFIX):
        found["401"] = _KEY
    if any(part.get("in") == "path" for part in operation.get("parameters", ())):
        found["404"] = _NOTHING
    if "requestBody" in operation:
        found["413"] = _LARGE
    if path.startswith(GUARDED_PREFIX) or takes_input:
        found["500"] = _FAILED
        found["503"] = _BUSY
    if path in _WITH_FILES and "requestBody" in operation:
        found["422"] = _MEDIA
    return found


def _answer(sentence: str) -> dict[str, Any]:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{_NAME}"}}}
    return {"description": sentence, "content": content}
