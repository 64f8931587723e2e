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
from pydantic import BaseModel
from vllm.v1.engine.exceptions import EngineDeadError

from nwor.config import NworConfig
from nwor.counts.formulas import WindowCounts
from nwor.draft_costs import settle
from nwor.engine.eligibility import REASONS
from nwor.engine.stats.metrics import NworStatLogger
from nwor.engine.stats.peers import Peers
from nwor.errors import ConfigError
from nwor.modes import Mode
from server.admin_api.bodies import DraftTokensChange, ModeChange, Refusal, parse, sentence
from server.nwor_options import ADMIN_KEY_VARIABLE

logger = logging.getLogger("vllm.nwor.admin")

#: Seconds that the ranks have to answer: a call waits for the step that runs.
RPC_TIMEOUT = 60.0

Responses = dict[int | str, dict[str, Any]]

_BEARER = HTTPBearer(auto_error=False, scheme_name="AdminKey", description="The key of --admin-api-key.")

Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)]


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
        lengths = self._draft_tokens(ranks[0])
        tree = _counting(engines[0])["tree"]
        for rank in ranks:
            rank["draft_tokens"] = rank["draft_tokens"] or self._fixed_draft_tokens()
            for name in ("counts", "changes", "draft_costs", "draft_costs_why_not", "tree"):
                rank.pop(name, None)
        agree = ("mode", "fault", "unsupported", "draft_tokens")
        verdicts = {json.dumps([rank[name] for name in agree]) for rank in ranks}
        return {
            "enabled": True,
            "mode": ranks[0]["mode"],
            "mode_asked": ranks[0]["mode_asked"],
            "unsupported": ranks[0]["unsupported"],
            "modes": [mode.value for mode in self._config.modes],
            "ranks_agree": len(verdicts) == 1,
            "draft_tokens": lengths,
            "tree": tree,
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
                server started and for any but ``off`` where nothing can be staged, 503 where the engine is
                dead.

        """
        mode = parse(ModeChange, body).mode
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
            if mode is not Mode.OFF:
                self._require_staging(await self._call("nwor_report"))
            engines = await self._tell("nwor_set_mode", mode.value, key_id)
            if self._metrics is not None:
                self._metrics.switched([_counting(answers) for answers in engines])
        return _change(engines)

    @staticmethod
    def _require_staging(engines: list[list[Any]]) -> None:
        found = next(
            (rank["unsupported"] for ranks in engines for rank in ranks if rank["unsupported"]), None
        )
        if found is not None:
            raise Refusal(
                HTTPStatus.CONFLICT,
                f"Nothing can be staged in this engine, reason {found['reason']}: {found['detail']}.",
                "ConflictError",
                param="mode",
            )

    async def _tell(self, method: str, value: str, key_id: str) -> list[list[Any]]:
        """Have every rank of every engine change something, and log who asked."""
        asked = _asked(key_id)
        engines = await self._call(method, value, asked)
        what = min(engines[0], key=_rank)["what"]
        logger.info("Admin key %s %s (%s).", key_id, what, asked["when"])
        return engines

    def _draft_tokens(self, rank: Mapping[str, Any]) -> dict[str, Any]:
        """Return how many tokens are drafted and why, from what a rank says and the engines' explanations."""
        assert self._config is not None
        bounds = self._config.draft_tokens
        fixed = self._fixed_draft_tokens()
        return {
            "setting": rank["draft_tokens"] or fixed,
            "started_with": fixed if bounds is None else str(bounds),
            "can_change": bounds is not None,
            "engines": [] if self._metrics is None else self._metrics.drafting(),
            "costs": rank.get("draft_costs"),
            "costs_why_not": rank.get("draft_costs_why_not"),
        }

    def _fixed_draft_tokens(self) -> str:
        """Return the number of draft tokens that vLLM was started with, the most of bounds."""
        speculative = getattr(self._engine.vllm_config, "speculative_config", None)
        return str(getattr(speculative, "num_speculative_tokens", ""))

    async def set_draft_tokens(self, body: bytes, key_id: str) -> dict[str, Any]:
        """Have every engine choose its draft tokens within other bounds, or keep to a number.

        Args:
            body: the request's body, :class:`DraftTokensChange` as JSON.
            key_id: who asks.

        Raises:
            Refusal: 400 for a body that is not valid, 409 for what the engine was not started for, 503
                where it is dead.

        """
        wanted = parse(DraftTokensChange, body).draft_tokens
        if self._config is None:
            raise Refusal(HTTPStatus.CONFLICT, _absent(), "ConflictError")
        if self._config.draft_tokens is None and wanted == self._fixed_draft_tokens():
            return _unchanged(await self._call("nwor_report"), wanted)
        try:
            wanted = settle(self._config.draft_tokens, wanted)
        except ConfigError as error:
            raise Refusal(
                HTTPStatus.CONFLICT, sentence(str(error)), "ConflictError", "draft_tokens"
            ) from error
        async with self._peers.one_at_a_time():
            return _change(await self._tell("nwor_set_draft_tokens", wanted, key_id))

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


def _change(engines: list[list[Any]]) -> dict[str, Any]:
    """Return what a change came to, from all ranks' answers of all engines."""
    first = min(engines[0], key=_rank)
    return {**{name: first[name] for name in ("old", "new", "step")}, "ranks": sum(map(len, engines))}


def _unchanged(engines: list[list[Any]], value: str) -> dict[str, Any]:
    """Return what putting ``value`` in force comes to that holds already, from all ranks' reports."""
    first = min(engines[0], key=_rank)
    return {"old": value, "new": value, "step": first["steps"], "ranks": sum(map(len, engines))}


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


def make_router(admin: Admin) -> APIRouter:
    """Return the routes around an :class:`Admin`."""
    errors: Responses = {
        401: {"description": "The admin key is missing or wrong."},
        403: {"description": "No admin key was set when the server started."},
        503: {"description": "The engine is dead or does not answer."},
    }
    conflict: Responses = {
        409: {"description": "NWOR, that mode or such draft tokens were not enabled at the start."}
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

    async def set_draft_tokens(request: Request, credentials: Credentials) -> JSONResponse:
        async def work(key_id: str) -> dict[str, Any]:
            return await admin.set_draft_tokens(await request.body(), key_id)

        return await answer(credentials, work)

    async def reset(credentials: Credentials) -> JSONResponse:
        return await answer(credentials, admin.reset)

    bad: Responses = {400: {"description": "The body or its value is not valid."}}
    router.add_api_route("", read, methods=["GET"], summary="Mode, ranks, counters and reasons")
    router.add_api_route(
        "",
        switch,
        methods=["PUT"],
        summary="Put a mode in force on every rank",
        responses={**bad, **conflict},
        openapi_extra=_body(ModeChange),
    )
    router.add_api_route(
        "/draft-tokens",
        set_draft_tokens,
        methods=["PUT"],
        summary="Have the engine choose its draft tokens within bounds, or keep to a number",
        responses={**bad, **conflict},
        openapi_extra=_body(DraftTokensChange),
    )
    router.add_api_route(
        "/reset-stats",
        reset,
        methods=["POST"],
        summary="Start the counters anew",
        responses=conflict,
    )
    return router


def _body(model: type[BaseModel]) -> dict[str, Any]:
    """Return a body's description for OpenAPI."""
    content = {"application/json": {"schema": model.model_json_schema()}}
    return {"requestBody": {"required": True, "content": content}}


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
