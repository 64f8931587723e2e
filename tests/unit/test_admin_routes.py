"""The admin routes: who may call them, and what they say to wrong requests. The engine is a stand-in here."""

from __future__ import annotations

import asyncio
import itertools
import logging
from array import array
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from pydantic import ValidationError
from vllm.v1.engine.exceptions import EngineDeadError

from nwor.config import NworConfig
from nwor.counts.records import Treatment
from nwor.modes import Mode
from nwor.worker_state import WorkerState
from server.admin_api import routes as admin_routes
from server.api import http_errors

KEY = "boss"
HEADERS = {"Authorization": f"Bearer {KEY}"}
SETTINGS = {"mode": "stage", "modes": ["off", "stage"]}


class Engine:
    """Ranks with real state, two of each engine, behind the one call that the routes make."""

    def __init__(self, settings: dict[str, Any] | None, engines: int = 1) -> None:
        additional = {} if settings is None else {"nwor": settings}
        self.vllm_config = SimpleNamespace(additional_config=additional)
        self.errored = False
        self.dies = False
        self.running = 0
        self.most_running = 0
        config = NworConfig.from_mapping(settings or {})
        #: Of the first engine, then of the next.
        self.ranks = [WorkerState(config, config.mode, last_stage=i % 2 == 1) for i in range(2 * engines)]
        self.engine_core = self

    async def call_utility_all_async(
        self, utility: str, method: str, timeout: float | None, args: tuple[Any, ...], kwargs: None
    ) -> list[list[Any]]:
        assert utility == "collective_rpc"
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        if self.dies:
            raise EngineDeadError
        answers: list[Any] = []
        for number, state in enumerate(self.ranks):
            number %= 2
            if method == "nwor_report":
                answers.append({"rank": number, **state.report()})
            elif method == "nwor_reset_stats":
                state.reset()
                state.note(args[0], "reset the counters")
                answers.append(number)
            elif method == "nwor_set_draft_tokens":
                before = state.set_draft_tokens(args[0])
                what = f"set draft tokens from {before} to {state.draft_tokens} at verify step 7"
                state.note(args[1], what)
                answers.append(
                    {"rank": number, "old": before, "new": state.draft_tokens, "step": 7, "what": what}
                )
            else:
                assert method == "nwor_set_mode"
                old = state.switch(Mode.parse(args[0]))
                what = f"switched the mode from {old.value} to {args[0]} at verify step 7"
                state.note(args[1], what)
                answers.append(
                    {"rank": number, "old": old.value, "new": args[0], "step": 7, "what": what}
                    | {"switches": state.switches, "last_stage": state.last_stage}
                )
        return [answers[i : i + 2][::-1] for i in range(0, len(answers), 2)]


def call(engine: Engine, method: str, path: str = "/admin/nwor", key: str | None = KEY, **kwargs: Any) -> Any:
    app = FastAPI()
    http_errors.install(app)
    admin_routes.install(app, engine, key, None)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.request(method, path, **{"headers": HEADERS, **kwargs})

    return asyncio.run(send())


ROUTES = [
    ("GET", "/admin/nwor"),
    ("PUT", "/admin/nwor"),
    ("POST", "/admin/nwor/reset-stats"),
    ("PUT", "/admin/nwor/draft-tokens"),
]
DRAFT_TOKENS = "/admin/nwor/draft-tokens"
BODIES = {"/admin/nwor": {"mode": "off"}, DRAFT_TOKENS: {"draft_tokens": "auto:2-4"}}
AUTO = {"mode": "stage", "draft_tokens": "auto:1-6"}


@pytest.mark.parametrize(("method", "path"), ROUTES)
def test_without_a_key_set_every_route_says_how_to_set_one(method: str, path: str) -> None:
    answer = call(Engine(SETTINGS), method, path, key=None)
    assert answer.status_code == 403
    assert "--admin-api-key" in answer.json()["error"]["message"]
    assert "NWOR_ADMIN_API_KEY" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("sent", [None, "Bearer nobody", "Bearer ", "Basic Ym9zcw==", "bossy", "Bearer bos"])
def test_wrong_keys_are_refused(method: str, path: str, sent: str | None) -> None:
    engine = Engine(SETTINGS)
    headers = {} if sent is None else {"Authorization": sent}
    answer = call(engine, method, path, headers=headers, content=b'{"mode": "off"}')
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert engine.most_running == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no JSON object"),
        (b"[]", "no JSON object"),
        (b"\xff", "no JSON object"),
        (b"[" * 100_000, "no JSON object"),
        (b"{}", "no field 'mode'"),
        (b'{"mode": "off", "when": 1}', "unknown field 'when'"),
        (b'{"mode": "warp"}', "off, stage, cow"),
        (b'{"mode": 3}', "must be a string"),
        (b'{"mode": null}', "must be a string, not None"),
        (b'{"mode": ["stage"]}', "must be a string, not ['stage']"),
        (b'{"mod": "off"}', "unknown field 'mod'"),
        (b'{"mode": ""}', "off, stage, cow"),
        (b'{"mode": "' + b"x" * 5000 + b'"}', "at most 40 characters, not 5000"),
        (b'{"mode": {"' + b"x" * 5000 + b'": 1}}', "must be a string, not {'xxx"),
        (b'{"' + b"x" * 5000 + b'": 1}', "unknown field 'xxx"),
    ],
)
def test_bad_bodies_are_400_and_say_what_to_send(body: bytes, words: str) -> None:
    answer = call(Engine(SETTINGS), "PUT", content=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] in ("mode", None)
    assert len(answer.text) < 400
    if words != "no JSON object":
        # The model says no by itself, wherever it is used.
        with pytest.raises(ValidationError):
            admin_routes.ModeChange.model_validate_json(body)


@pytest.mark.parametrize("text", ["off", "STAGE", " cow\n"])
def test_a_mode_may_be_written_in_any_case(text: str) -> None:
    assert admin_routes.ModeChange.model_validate({"mode": text}).mode is Mode.parse(text)


def test_a_mode_that_was_not_enabled_is_409() -> None:
    answer = call(Engine(SETTINGS), "PUT", json={"mode": "cow"})
    assert answer.status_code == 409
    assert "--nwor-modes" in answer.json()["error"]["message"]


def test_an_engine_without_nwor_says_so() -> None:
    engine = Engine(None)
    assert call(engine, "GET").json()["enabled"] is False
    for method, path in ROUTES[1:]:
        answer = call(engine, method, path, json=BODIES.get(path))
        assert answer.status_code == 409
        assert "--draft" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize("errored", [True, False])
def test_a_dead_engine_is_503(method: str, path: str, errored: bool) -> None:
    engine = Engine(AUTO)
    engine.errored, engine.dies = errored, not errored
    answer = call(engine, method, path, json=BODIES.get(path))
    assert answer.status_code == 503
    assert "dead" in answer.json()["error"]["message"]


def test_a_switch_is_confirmed_logged_and_harmless_when_repeated(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(SETTINGS)
    logger = logging.getLogger("vllm.nwor.admin")
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    try:
        first = call(engine, "PUT", json={"mode": "off"})
        again = call(engine, "PUT", json={"mode": " OFF "})
    finally:
        logger.removeHandler(caplog.handler)
    assert first.json() == {"old": "stage", "new": "off", "step": 7, "ranks": 2}
    assert again.json()["old"] == again.json()["new"].strip().lower() == "off"
    assert [state.switches for state in engine.ranks] == [1, 1]
    assert "from stage to off" in caplog.text
    assert KEY not in caplog.text


def test_parallel_switches_are_taken_one_after_the_other() -> None:
    engine = Engine(SETTINGS)
    owner = admin_routes.Admin(KEY)
    owner.connect(engine, None)

    async def all_at_once() -> list[dict[str, Any]]:
        bodies = [b'{"mode": "off"}', b'{"mode": "stage"}'] * 5
        return list(await asyncio.gather(*(owner.switch(body, "id") for body in bodies)))

    answers = asyncio.run(all_at_once())
    assert engine.most_running == 1
    for before, after in itertools.pairwise(answers):
        assert before["new"] == after["old"]


def test_report_shows_ranks_that_disagree() -> None:
    engine = Engine(SETTINGS)
    assert call(engine, "GET").json()["ranks_agree"] is True
    engine.ranks[1].fail("commit", RuntimeError("no memory"))
    report = call(engine, "GET").json()
    assert report["ranks_agree"] is False
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert "no memory" in report["ranks"][1]["fault"]


def test_report_tells_of_trees_and_of_requests_without() -> None:
    assert call(Engine(SETTINGS), "GET").json()["tree"] is None
    engine = Engine({**SETTINGS, "tree": {"nodes": 16, "depth": 5, "width": 4}})
    counting = next(state for state in engine.ranks if state.last_stage)
    before = counting.facts
    counting.chain_requests["penalties"] = 2
    counting.forget_facts()
    assert (before.chain_requests, counting.facts.chain_requests) == ((), (("penalties", 2),))
    report = call(engine, "GET").json()
    assert report["tree"] == {
        **{"nodes": 16, "depth": 5, "width": 4, "kind": "grown"},
        "chain_requests": {"penalties": 2},
    }
    assert not any("tree" in rank for rank in report["ranks"])


def test_reset_starts_the_counters_anew() -> None:
    engine = Engine(SETTINGS)
    for state in engine.ranks:
        drafts, sampled = (array("i", [number]).tobytes() for number in (4, 3))
        state.count(Treatment("stage", drafts, 1, 5), sampled, windows=1)
    assert call(engine, "GET").json()["counters"]["windows"] == 1
    assert call(engine, "POST", "/admin/nwor/reset-stats").json() == {"reset": True, "ranks": 2}
    assert call(engine, "GET").json()["counters"]["windows"] == 0
    assert engine.ranks[0].windows == 1


def test_every_engine_of_data_parallelism_is_in_the_answers() -> None:
    engine = Engine(SETTINGS, engines=2)
    for state, drafts in zip(engine.ranks, (1, 2, 1, 4), strict=True):
        numbers = (array("i", [number]).tobytes() for number in (drafts, drafts + 1))
        drafted, sampled = numbers
        state.count(Treatment("stage", drafted, 1, drafts + 1), sampled, windows=1)
    report = call(engine, "GET").json()
    assert [(rank["engine"], rank["rank"]) for rank in report["ranks"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    # The last stages' windows, of two and of four drafts.
    assert report["counters"]["windows"] == 2
    assert report["counters"]["accepted_tokens"] == 6
    assert report["counters"]["outcomes"] == {"committed": 2}
    assert report["counters"]["accepted_windows"] == [0, 0, 1, 0, 1]
    engine.ranks[3].fail("commit", RuntimeError("no memory"))
    assert call(engine, "GET").json()["ranks_agree"] is False
    assert call(engine, "PUT", json={"mode": "off"}).json()["ranks"] == 4
    assert {state.mode for state in engine.ranks} == {Mode.OFF}
    assert call(engine, "POST", "/admin/nwor/reset-stats").json()["ranks"] == 4
    assert call(engine, "GET").json()["counters"]["windows"] == 0


@pytest.mark.parametrize(
    ("sent", "new"),
    [("auto:2-4", "auto:2-4"), (" AUTO ", "auto:1-6"), (3, "3"), ("0", "0"), (6, "6")],
)
def test_draft_tokens_are_set_on_every_rank(sent: Any, new: str) -> None:
    engine = Engine(AUTO, engines=2)
    first = call(engine, "PUT", DRAFT_TOKENS, json={"draft_tokens": sent})
    assert first.json() == {"old": "auto:1-6", "new": new, "step": 7, "ranks": 4}
    assert {state.draft_tokens for state in engine.ranks} == {new}
    report = call(engine, "GET").json()
    lengths = report["draft_tokens"]
    assert (lengths["setting"], lengths["started_with"], lengths["can_change"]) == (new, "auto:1-6", True)
    assert report["changes"][-1]["what"] == f"set draft tokens from auto:1-6 to {new} at verify step 7"
    assert report["ranks_agree"] is True
    engine.ranks[1].draft_tokens = "5"
    assert call(engine, "GET").json()["ranks_agree"] is False


@pytest.mark.parametrize("sent", ["auto:0-6", "auto:1-7", 7, "63", 64])
def test_draft_tokens_beyond_those_of_the_start_are_409(sent: Any) -> None:
    engine = Engine(AUTO)
    answer = call(engine, "PUT", DRAFT_TOKENS, json={"draft_tokens": sent})
    assert answer.status_code == 409
    assert "lie outside of auto:1-6" in answer.json()["error"]["message"]
    assert engine.most_running == 0


def test_a_number_that_was_not_prepared_is_409_and_the_others_are_named() -> None:
    answer = call(Engine(AUTO), "PUT", DRAFT_TOKENS, json={"draft_tokens": 5})
    assert answer.status_code == 409
    message = answer.json()["error"]["message"]
    assert message == "Draft tokens 5 were not prepared at the start: the engine has 0, 1, 2, 3, 4, 6."


@pytest.mark.parametrize(
    ("path", "allowed"),
    [("", ["GET", "PUT"]), ("/draft-tokens", ["PUT"]), ("/reset-stats", ["POST"])],
)
def test_a_wrong_method_is_405_with_all_that_the_path_takes(path: str, allowed: list[str]) -> None:
    answer = call(Engine(SETTINGS), "DELETE", f"/admin/nwor{path}")
    assert answer.status_code == 405
    assert answer.headers.get_list("allow") == [", ".join(allowed)]
    message = answer.json()["error"]["message"]
    assert message == f"/admin/nwor{path} does not take DELETE: use {' or '.join(allowed)}."


def test_an_unknown_path_is_named_as_it_was_sent() -> None:
    answer = call(Engine(SETTINGS), "GET", "/dashboard/tmp/app.js")
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith("There is no /dashboard/tmp/app.js: ")


def test_draft_tokens_of_a_fixed_number_stay() -> None:
    engine = Engine(SETTINGS)
    engine.vllm_config.speculative_config = SimpleNamespace(num_speculative_tokens=4)
    for sent in (5, "auto"):
        answer = call(engine, "PUT", DRAFT_TOKENS, json={"draft_tokens": sent})
        assert answer.status_code == 409
        assert "--num-speculative-tokens auto" in answer.json()["error"]["message"]
    answer = call(engine, "PUT", DRAFT_TOKENS, json={"draft_tokens": 4})
    assert answer.status_code == 200
    assert answer.json() == {"old": "4", "new": "4", "step": 0, "ranks": 2}
    report = call(engine, "GET").json()
    assert report["changes"] == []
    assert [rank["draft_tokens"] for rank in report["ranks"]] == ["4", "4"]
    lengths = report["draft_tokens"]
    assert (lengths["setting"], lengths["started_with"], lengths["can_change"]) == ("4", "4", False)
    assert lengths["engines"] == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no JSON object"),
        (b"{}", 'no field \'draft_tokens\': send a JSON object such as {"draft_tokens": "auto:1-6"}'),
        (b'{"draft_tokens": 3, "mode": "off"}', "unknown field 'mode'"),
        (b'{"draft_tokens": null}', "must be auto, auto:LEAST-MOST or a number, not None"),
        (b'{"draft_tokens": true}', "draft_tokens must be auto, auto:LEAST-MOST or a number, not True"),
        (b'{"draft_tokens": 2.5}', "must be auto, auto:LEAST-MOST or a number, not 2.5"),
        (b'{"draft_tokens": -1}', "use auto, bounds as auto:1-8, or a number"),
        (b'{"draft_tokens": "many"}', "use auto, bounds as auto:1-8, or a number"),
        (b'{"draft_tokens": "auto:5-2"}', "are no bounds"),
        (b'{"draft_tokens": "' + b"9" * 5000 + b'"}', "at most 40 characters, not 5000"),
    ],
)
def test_bodies_that_are_no_draft_tokens_are_400(body: bytes, words: str) -> None:
    answer = call(Engine(AUTO), "PUT", DRAFT_TOKENS, content=body)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] in ("draft_tokens", None)
    assert len(answer.text) < 400


def test_report_shows_costs_and_what_each_engine_chooses() -> None:
    engine = Engine(AUTO)
    drafting = [{"engine": 0, "seconds_ago": 0.1, "chosen": 4}]
    app = FastAPI()
    admin_routes.install(app, engine, KEY, SimpleNamespace(drafting=lambda: drafting))  # type: ignore[arg-type]
    report = engine.ranks[0].report

    def with_costs() -> dict[str, Any]:
        return {**report(), "draft_costs": {"seconds": {"4": 0.01}}, "draft_costs_why_not": None}

    engine.ranks[0].report = with_costs  # type: ignore[method-assign]

    async def send() -> Any:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return (await client.get("/admin/nwor", headers=HEADERS)).json()

    answer = asyncio.run(send())
    assert answer["draft_tokens"]["engines"] == drafting
    assert answer["draft_tokens"]["costs"] == {"seconds": {"4": 0.01}}
    assert "draft_costs" not in answer["ranks"][0]


def test_routes_and_their_key_are_in_openapi() -> None:
    schema = call(Engine(SETTINGS), "GET", "/openapi.json").json()
    paths = schema["paths"]
    assert set(paths["/admin/nwor"]) == {"get", "put"}
    assert set(paths["/admin/nwor/reset-stats"]) == {"post"}
    assert set(paths[DRAFT_TOKENS]) == {"put"}
    lengths = paths[DRAFT_TOKENS]["put"]["requestBody"]["content"]["application/json"]["schema"]
    assert lengths["properties"]["draft_tokens"]["type"] == ["string", "integer"]
    assert {"400", "401", "403", "409", "503"} <= set(paths["/admin/nwor"]["put"]["responses"])
    body = paths["/admin/nwor"]["put"]["requestBody"]["content"]["application/json"]["schema"]
    assert body["properties"]["mode"]["enum"] == ["off", "stage", "cow"]
    assert body["additionalProperties"] is False
    assert "$ref" not in str(body)
    assert paths["/admin/nwor"]["put"]["security"] == [{"AdminKey": []}]
    assert schema["components"]["securitySchemes"]["AdminKey"]["scheme"] == "bearer"


def test_an_engine_that_stages_nothing_says_so_beside_the_mode_and_refuses_others() -> None:
    engine = Engine(SETTINGS)
    for state in engine.ranks:
        state.unsupported = ("mla", "another kind of cache")
    body = call(engine, "GET").json()
    assert (body["mode"], body["mode_asked"]) == ("off", "stage")
    assert body["unsupported"] == {"reason": "mla", "detail": "another kind of cache"}
    assert body["ranks_agree"]
    answer = call(engine, "PUT", content=b'{"mode": "stage"}')
    assert answer.status_code == 409
    assert "reason mla: another kind of cache" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "mode"
    assert [state.changes for state in engine.ranks] == [[]] * 2
    assert call(engine, "PUT", content=b'{"mode": "off"}').status_code == 200


def test_one_rank_that_stages_nothing_is_enough_to_refuse() -> None:
    engine = Engine(SETTINGS, engines=2)
    engine.ranks[3].unsupported = ("capture", "out of registers")
    answer = call(engine, "PUT", content=b'{"mode": "stage"}')
    assert answer.status_code == 409
    assert "out of registers" in answer.json()["error"]["message"]
