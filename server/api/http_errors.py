"""Error answers: every one has OpenAI's body and a sentence that says what is wrong.

vLLM's own handlers answer what the engine raises; these take what they leave to FastAPI or answer with
a validator's raw output.
"""

from __future__ import annotations

from collections.abc import Awaitable
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi import HTTPException as FastAPIHTTPException
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.routing import Match
from starlette.types import Receive, Scope, Send
from vllm.entrypoints.serve.engine.protocol import ErrorInfo, ErrorResponse
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.entrypoints.serve.exception_handling.handlers.validation import clean_loc_for_param
from vllm.entrypoints.serve.exception_handling.utils import sanitize_message
from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX, AuthenticationMiddleware
from vllm.exceptions import VLLMValidationError

_MAX_REPORTED = 5
_MAX_VALUE_CHARS = 80
_MAX_DIGITS = 40


def error_response(
    status: int, message: str, kind: str, param: str | None = None, headers: dict[str, str] | None = None
) -> JSONResponse:
    """Return an answer with OpenAI's error body.

    Args:
        status: HTTP status, also the body's ``code``.
        message: what is wrong and what to do.
        kind: the body's ``type``, in vLLM's words ("BadRequestError", ...).
        param: the request's field at fault.
        headers: further response headers.

    """
    error = ErrorResponse(error=ErrorInfo(message=message, type=kind, code=status, param=param))
    return JSONResponse(error.model_dump(), status_code=status, headers=headers)


def install(app: FastAPI) -> None:
    """Register the handlers of this module on ``app``, over vLLM's for the same exceptions."""
    # FastAPI's subclass has a handler of vLLM's already, which would win over that for the base.
    app.exception_handler(HTTPException)(handle_http_exception)
    app.exception_handler(FastAPIHTTPException)(handle_http_exception)
    app.exception_handler(RequestValidationError)(handle_validation_error)
    app.exception_handler(TypeError)(handle_type_error)
    for entry in app.user_middleware:
        if entry.cls is AuthenticationMiddleware:
            entry.cls = OpenAIAuthentication  # type: ignore[assignment]


async def handle_http_exception(request: Request, exc: HTTPException) -> JSONResponse:
    """Answer what FastAPI and Starlette raise: unknown routes, wrong methods, bodies that cannot be read."""
    message, headers = sanitize_message(str(exc.detail)), dict(exc.headers or {})
    # What names the client's own path keeps it: vLLM's sanitizer takes it for one of the server's files.
    if isinstance(exc.__cause__, UnicodeDecodeError):
        cause = exc.__cause__
        message = (
            f"The request body is not valid UTF-8: byte 0x{cause.object[cause.start]:02x} "
            f"at position {cause.start}. Send the JSON encoded as UTF-8."
        )
    elif isinstance(exc.__cause__, RecursionError):
        message = "The request body cannot be read: its JSON is nested too deeply."
    elif exc.status_code == HTTPStatus.NOT_FOUND and exc.detail == "Not Found":
        message = f"There is no {request.url.path}: GET /docs lists what this server answers."
    elif exc.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        if allowed := _allowed(request):
            headers = {name: value for name, value in headers.items() if name.lower() != "allow"}
            headers["Allow"] = ", ".join(allowed)
        hint = f": use {' or '.join(allowed)}." if allowed else "."
        message = f"{request.url.path} does not take {request.method}{hint}"
    return error_response(exc.status_code, message, _error_type(exc.status_code), headers=headers or None)


def _allowed(request: Request) -> list[str]:
    """Return the methods of all routes of a request's path; Starlette names those of the first."""
    return sorted(
        {
            method
            for route in request.app.router.routes
            if route.matches(request.scope)[0] is Match.PARTIAL
            for method in getattr(route, "methods", None) or ()
        }
    )


def _error_type(status: int) -> str:
    """Name a status the way vLLM's handlers name theirs: ``NotFoundError`` for 404."""
    names = {400: "BadRequestError", 413: "RequestTooLargeError", 500: "InternalServerError"}
    return (
        names.get(status)
        or HTTPStatus(status).phrase.title().replace(" ", "").removesuffix("Error") + "Error"
    )


async def handle_validation_error(_: Request, exc: RequestValidationError) -> JSONResponse:
    """Answer a body or query that does not have the right form, in sentences."""
    errors = list(exc.errors())
    sentences = [_describe(error) for error in errors[:_MAX_REPORTED]]
    # A union reports each of its branches; identical sentences say nothing more.
    sentences = list(dict.fromkeys(sentences))
    if len(errors) > _MAX_REPORTED:
        sentences.append(f"There are {len(errors) - _MAX_REPORTED} further errors.")
    message = " ".join(sentences) or "The request does not have the right form."
    return error_response(
        HTTPStatus.BAD_REQUEST, sanitize_message(message), "BadRequestError", param=_parameter(errors)
    )


async def handle_type_error(request: Request, exc: TypeError) -> JSONResponse:
    """Answer text that the tokenizer cannot take: it says so in the words of its own types."""
    if "TextEncodeInput" in str(exc):
        message = "The text holds half of a surrogate pair, which is no character: send whole characters."
        return error_response(HTTPStatus.BAD_REQUEST, message, "BadRequestError")
    answer: JSONResponse = await exception_handler(request, exc)
    return answer


def _parameter(errors: list[Any]) -> str | None:
    for error in errors:
        raised = error.get("ctx", {}).get("error") if isinstance(error, dict) else None
        if isinstance(raised, VLLMValidationError) and raised.parameter:
            return str(raised.parameter)
    return _field(errors[0]) if errors and isinstance(errors[0], dict) else None


def _field(error: dict[str, Any]) -> str | None:
    """Return the dotted path of the field at fault, without the ``body`` that every path starts with."""
    if error.get("type") == "json_invalid":
        return None
    path = clean_loc_for_param(tuple(error.get("loc") or ()))
    path = path.removeprefix("body").lstrip(".")
    return path or None


def _describe(error: Any) -> str:
    if not isinstance(error, dict):
        return _sentence(str(error))
    if error.get("type") == "json_invalid":
        where = error.get("loc", ("body", "?"))[-1]
        reason = error.get("ctx", {}).get("error", "not JSON")
        return f"The request body is not valid JSON: {reason} at position {where}."
    message = str(error.get("msg", "not valid")).removeprefix("Value error, ")
    field = _field(error)
    if field is None:
        if error.get("type") == "missing":
            return "The request has no body: send a JSON object."
        return _sentence(message)
    if error.get("type") == "missing":
        return f"{field}: this field is missing."
    value = error.get("input")
    shown = f" (got {shorten(value)})" if isinstance(value, str | int | float | bool | None) else ""
    return _sentence(f"{field}: {message}{shown}")


def shorten(value: object) -> str:
    """Return a client's value as Python writes it, cut where it is long."""
    # Python does not write out integers of any length.
    long = isinstance(value, int) and abs(value) >= 10**_MAX_DIGITS
    text = f"an integer of more than {_MAX_DIGITS} digits" if long else repr(value)
    return text if len(text) <= _MAX_VALUE_CHARS else text[:_MAX_VALUE_CHARS] + "..."


def _sentence(text: str) -> str:
    text = text.strip()
    return text if text.endswith((".", "!", "?")) else text + "."


class OpenAIAuthentication(AuthenticationMiddleware):
    """vLLM's check of the API key (same keys, same guarded paths), with OpenAI's body for the refusal."""

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Serve one connection; a request without a valid key is answered here."""
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            return super().__call__(scope, receive, send)
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        headers = Headers(scope=scope)
        if not path.startswith(GUARDED_PREFIX) or self.verify_token(headers):
            return self.app(scope, receive, send)
        problem = "is not valid" if headers.get("Authorization") else "is missing"
        message = f"The API key {problem}: send one of the server's keys as 'Authorization: Bearer KEY'."
        response = error_response(
            HTTPStatus.UNAUTHORIZED, message, "AuthenticationError", headers={"WWW-Authenticate": "Bearer"}
        )
        return response(scope, receive, send)
