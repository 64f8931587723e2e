"""The admin API: what NWOR does in the running engine, and switching it. See docs/admin.md."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import hmac
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.responses import JSONResponse
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema, field_validator
from vllm.v1.engine.exceptions import EngineDeadError

from nwor.config import NworConfig
from nwor.counts.formulas import WindowCounts
from nwor.engine.eligibility import REASONS
from nwor.engine.stats.metrics import NworStatLogger
from nwor.engine.stats.peers import Peers
from nwor.modes import Mode
from server.api.http_errors import error_response, shorten
from server.nwor_options import ADMIN_KEY_VARIABLE

logger = logging.getLogger("vllm.nwor.admin")

#: Seconds that the ranks have to answer: a call waits for the step that runs.
RPC_TIMEOUT = 60.0

Responses = dict[int | str, dict[str, Any]]

_BEARER = HTTPBearer(auto_error=False, scheme_name="AdminKey", description="The key of --admin-api-key.")

Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]


#: More than any mode's name with blanks around it.
_LONGEST_MODE = 40


class ModeChange(BaseModel):
    """Body of PUT /admin/nwor: an object with one field, the mode in any case."""

    model_config = ConfigDict(extra="forbid")

    #: Described in place: a reference would lead nowhere within the API's description.
    mode: Annotated[Mode, WithJsonSchema({"type": "string", "enum": [mode.value for mode in Mode]})] = Field(
        description="The mode to put in force.", examples=["stage"]
    )

    @field_validator("mode", mode="before")
    @classmethod
    def _in_any_case(cls, value: object) -> Mode:
        if not isinstance(value, str):
            raise ValueError(f"the mode must be a string, not {shorten(value)}")
        if len(value) > _LONGEST_MODE:
            raise ValueError(f"a mode has at most {_LONGEST_MODE} characters, not {len(value)}")
        return Mode.parse(value)


class Refusal(Exception):  # noqa: N818  an answer, not a fault
    """An answer other than 200."""

    def __init__(self, status: HTTPStatus, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        headers = {"WWW-Authenticate": "Bearer"} if status is HTTPStatus.UNAUTHORIZED else None
        self.response = error_response(status, message, kind, param=param, headers=headers)


class Admin:
    """The routes' owner: the key, the engine, and one lock around everything that changes it.

    The lock holds for all API server processes of the server: each of them serves these routes.

    Args:
        key: the admin key; None where none was set.

    """

    def __init__(self, key: str | None) -> None:
        self._digest = None if key is None else hashlib.sha256(key.encode()).digest()
        self._engine: Any = None
        self._config: NworConfig | None = None
        self._metrics: NworStatLogger | None = None
        self._peers = Peers()

    def connect(self, engine: Any, metrics: NworStatLogger | None) -> None:
        """Take the engine, before the first request comes.

        Args:
            engine: vLLM's engine client; its configuration says whether it has NWOR.
            metrics: what shows the mode on /metrics; None where vLLM's statistics are off.

        """
        self._engine = engine
        self._config = NworConfig.from_additional_config(engine.vllm_config.additional_config)
        self._metrics = metrics
        self._peers = Peers.of(engine)

    def authorize(self, token: str | None) -> str:
        """Return the id of the key that was sent.

        Raises:
            Refusal: 403 where no admin key was set, 401 for a missing or wrong one.

        """
        if self._digest is None:
            raise Refusal(
                HTTPStatus.FORBIDDEN,
                "The admin API is closed: start the server with --admin-api-key KEY, or with "
                f"{ADMIN_KEY_VARIABLE} set, and send that key as 'Authorization: Bearer KEY'.",
                "PermissionDeniedError",
            )
        sent = hashlib.sha256((token or "").encode()).digest()
        if token is None or not hmac.compare_digest(sent, self._digest):
            problem = "is missing" if token is None else "is not valid"
            raise Refusal(
                HTTPStatus.UNAUTHORIZED,
                f"The admin key {problem}: send it as 'Authorization: Bearer KEY'. A user's key is not one.",
                "AuthenticationError",
            )
        return self._digest.hex()[:8]

    async def read(self) -> dict[str, Any]:
        """Return mode, ranks, counters and reasons.

        Raises:
            Refusal: 503 where the engine is dead or does not answer.

        """
        if self._config is None:
            return {"enabled": False, "detail": _absent()}
        engines = [sorted(answers, key=_rank) for answers in await self._call("nwor_report")]
        total = WindowCounts()
        for answers in engines:
            total.add(WindowCounts.of_plain(_counting(answers)["counts"]))
        counts = total.plain()
        ranks = [
            {"engine": number, **rank}
            for number, answers in zip(self._numbers(len(engines)), engines, strict=True)
            for rank in answers
        ]
        changes = ranks[0]["changes"]
        for rank in ranks:
            del rank["counts"], rank["changes"]
        verdicts = {json.dumps([rank["mode"], rank["fault"], rank["unsupported"]]) for rank in ranks}
        return {
            "enabled": True,
            "mode": ranks[0]["mode"],
            "modes": [mode.value for mode in self._config.modes],
            "ranks_agree": len(verdicts) == 1,
            "counters": counts,
            "direct_reasons": {reason: REASONS[reason].text for reason in counts["direct_windows"]},
            "capture": {
                "seconds": max(rank["capture_seconds"] for rank in ranks),
                "bytes": sum(rank["capture_bytes"] for rank in ranks),
            },
            "ranks": ranks,
            "changes": changes,
        }

    async def switch(self, body: bytes, key_id: str) -> dict[str, Any]:
        """Put a mode in force on every rank; answers when all of them have it.

        Args:
            body: the request's body, :class:`ModeChange` as JSON.
            key_id: who asks.

        Raises:
            Refusal: 400 for a body or mode that is not valid, 409 for a mode that was not enabled when the
                server started, 503 where the engine is dead.

        """
        mode = _parse(body)
        if self._config is None:
            raise Refusal(HTTPStatus.CONFLICT, _absent(), "ConflictError")
        if mode not in self._config.modes:
            enabled = ", ".join(self._config.modes)
            raise Refusal(
                HTTPStatus.CONFLICT,
                f"Mode {mode.value!r} was not enabled at start-up (enabled: {enabled}): restart the server "
                "with it among --nwor-modes.",
                "ConflictError",
                param="mode",
            )
        async with self._peers.one_at_a_time():
            asked = _asked(key_id)
            engines = await self._call("nwor_set_mode", mode.value, asked)
            first = min(engines[0], key=_rank)
            change = {"old": first["old"], "new": first["new"], "step": first["step"]}
            if self._metrics is not None:
                self._metrics.switched([_counting(answers) for answers in engines])
            logger.info("Admin key %s %s (%s).", key_id, first["what"], asked["when"])
        return {**change, "ranks": sum(map(len, engines))}

    async def reset(self, key_id: str) -> dict[str, Any]:
        """Start the ranks' counters anew.

        Raises:
            Refusal: 409 where the engine has no NWOR, 503 where it is dead.

        """
        if self._config is None:
            raise Refusal(HTTPStatus.CONFLICT, _absent(), "ConflictError")
        async with self._peers.one_at_a_time():
            asked = _asked(key_id)
            engines = await self._call("nwor_reset_stats", asked)
            logger.info("Admin key %s reset the counters (%s).", key_id, asked["when"])
        return {"reset": True, "ranks": sum(map(len, engines))}

    def _numbers(self, engines: int) -> Sequence[int]:
        """Return the engines' numbers as metrics have them; with a server for each, not from 0."""
        numbers: Sequence[int] = getattr(self._engine.engine_core, "engine_ranks_managed", ())
        # An elastic number of engines is another one after a while; those start at 0.
        return numbers if len(numbers) == engines else range(engines)

    async def _call(self, method: str, *args: Any) -> list[list[Any]]:
        """Return the answers of each engine's ranks; data parallelism has several engines.

        The engine client's own ``collective_rpc`` asks them all, too, but hands on the first one's answers.
        """
        if self._engine.errored:
            raise _dead()
        call = self._engine.engine_core.call_utility_all_async("collective_rpc", method, None, args, None)
        try:
            engines = await asyncio.wait_for(call, RPC_TIMEOUT)
        except EngineDeadError as error:
            raise _dead() from error
        except TimeoutError as error:
            raise Refusal(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"The engine did not answer within {RPC_TIMEOUT:g} s; it may still carry the call out.",
                "ServiceUnavailableError",
            ) from error
        return list(engines)


def _rank(answer: Mapping[str, Any]) -> int:
    rank: int = answer["rank"]
    return rank


def _counting(answers: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the answer of the rank whose figures are the engine's.

    With pipeline stages only the last one learns every window's outcome on the host; vLLM hears of a step
    from its first rank.
    """
    return min((answer for answer in answers if answer["last_stage"]), key=_rank)


def _asked(key_id: str) -> dict[str, str]:
    """Return who asks and when, as the ranks remember it."""
    now = datetime.datetime.now(datetime.UTC)
    return {"when": now.isoformat(timespec="seconds"), "key": key_id}


def _dead() -> Refusal:
    return Refusal(
        HTTPStatus.SERVICE_UNAVAILABLE,
        "The engine is dead; its own error stands in the server's log. Restart the server.",
        "ServiceUnavailableError",
    )


def _absent() -> str:
    return (
        "This engine has no NWOR: it was started with --no-nwor, or without speculative decoding. Restart it "
        "with a draft (--draft) and without --no-nwor."
    )


def _parse(body: bytes) -> Mode:
    """Return the mode that a body asks for.

    Raises:
        Refusal: 400 for a body that is no :class:`ModeChange`.

    """
    wanted = 'send a JSON object such as {"mode": "stage"}'
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise Refusal(
            HTTPStatus.BAD_REQUEST, f"The request body is no JSON object: {wanted}.", "BadRequestError"
        )
    try:
        return ModeChange.model_validate(values).mode
    except ValidationError as invalid:
        # What is too much comes first: a misspelled field is missing, too.
        error = min(invalid.errors(), key=lambda found: found["type"] != "extra_forbidden")
        if error["type"] == "extra_forbidden":
            message = f"The request body has an unknown field {shorten(error['loc'][0])}: {wanted}."
        elif error["type"] == "missing":
            message = f"The request body has no field 'mode': {wanted}."
        else:
            text = str(error["ctx"]["error"])
            message = f"{text[0].upper()}{text[1:]}."
        raise Refusal(HTTPStatus.BAD_REQUEST, message, "BadRequestError", "mode") from invalid


def make_router(admin: Admin) -> APIRouter:
    """Return the routes around an :class:`Admin`."""
    errors: Responses = {
        401: {"description": "The admin key is missing or wrong."},
        403: {"description": "No admin key was set when the server started."},
        503: {"description": "The engine is dead or does not answer."},
    }
    conflict: Responses = {
        409: {"description": "NWOR, or that mode, was not enabled when the server started."}
    }
    router = APIRouter(prefix="/admin/nwor", tags=["admin"], responses=errors)

    async def answer(
        credentials: HTTPAuthorizationCredentials | None, work: Callable[[str], Awaitable[dict[str, Any]]]
    ) -> JSONResponse:
        try:
            key_id = admin.authorize(None if credentials is None else credentials.credentials)
            return JSONResponse(await work(key_id))
        except Refusal as refusal:
            return refusal.response

    async def read(credentials: Credentials) -> JSONResponse:
        async def work(_: str) -> dict[str, Any]:
            return await admin.read()

        return await answer(credentials, work)

    async def switch(request: Request, credentials: Credentials) -> JSONResponse:
        async def work(key_id: str) -> dict[str, Any]:
            return await admin.switch(await request.body(), key_id)

        return await answer(credentials, work)

    async def reset(credentials: Credentials) -> JSONResponse:
        return await answer(credentials, admin.reset)

    body = {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": ModeChange.model_json_schema()}},
        }
    }
    bad: Responses = {400: {"description": "The body or the mode is not valid."}}
    router.add_api_route("", read, methods=["GET"], summary="Mode, ranks, counters and reasons")
    router.add_api_route(
        "",
        switch,
        methods=["PUT"],
        summary="Put a mode in force on every rank",
        responses={**bad, **conflict},
        openapi_extra=body,
    )
    router.add_api_route(
        "/reset-stats",
        reset,
        methods=["POST"],
        summary="Start the counters anew",
        responses=conflict,
    )
    return router


def install(app: FastAPI, engine: Any, key: str | None, metrics: NworStatLogger | None) -> None:
    """Add the admin API to an application.

    Args:
        app: the application.
        engine: vLLM's engine client; its configuration says whether it has NWOR.
        key: the admin key; None where none was set.
        metrics: what shows the mode on /metrics.

    """
    admin = Admin(key)
    admin.connect(engine, metrics)
    app.include_router(make_router(admin))
