"""What is added to vLLM's application, whoever has built it: ``nwor-server``, or plain ``vllm serve``."""

from __future__ import annotations

import gc

from fastapi import FastAPI
from starlette.datastructures import State
from starlette.middleware import Middleware
from vllm.engine.protocol import EngineClient

from server.api import (
    acceptance,
    admission,
    beam_search,
    http_errors,
    mended_answers,
    model_route,
    openapi_document,
    output_processor,
)
from server.api.body_limit import BodyLimitMiddleware

#: Objects made since a collection of garbage that call for the next. Python's default of 700 is what a few
#: chunks make: with many clients a tenth of the front end's time would go into looking for cycles.
GARBAGE_OBJECTS = 20_000


def install(
    app: FastAPI, state: State, engine: EngineClient, max_body: int, max_grammar: int, pacing: bool = True
) -> None:
    """Add routes, checks, error answers, mended answers and figures.

    Args:
        app: vLLM's application, which serves nobody yet.
        state: its state, with vLLM's serving objects in place.
        engine: vLLM's engine client.
        max_body: bytes of a request body that are read.
        max_grammar: characters of a grammar that are compiled.
        pacing: whether pieces of streams are merged while the front end is behind the engine.

    """
    http_errors.install(app)
    model_route.install(app)
    # Innermost: behind the check of the API key, and inside the error handlers' reach.
    app.user_middleware.append(Middleware(BodyLimitMiddleware, limit=max_body))
    # vLLM has built the stack already, for SageMaker's sake; Starlette builds it anew, with these changes.
    app.middleware_stack = None
    output_processor.install(engine, pacing)
    admission.Admission(engine, max_grammar).install(engine, state)
    mended_answers.install(state)
    beam_search.install(state, engine)
    acceptance.install(state)
    youngest, *older = gc.get_threshold()
    if 0 < youngest < GARBAGE_OBJECTS:  # 0: somebody has turned it off
        gc.set_threshold(GARBAGE_OBJECTS, *older)
    # Made now and kept by the application: the first to ask would hold up all others for a second.
    openapi_document.complete(app.openapi())
