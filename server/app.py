"""The FastAPI application: vLLM's OpenAI layer, plus what this server adds to it."""

from __future__ import annotations

import argparse

from fastapi import FastAPI
from starlette.middleware import Middleware
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app

from nwor.engine.stats.metrics import attach_metrics
from server import dashboard
from server.admin_api import routes as admin_routes
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
from server.nwor_options import admin_is_separate


async def create_app(engine: EngineClient, args: argparse.Namespace) -> FastAPI:
    """Build the application around a running engine.

    Args:
        engine: vLLM's engine client, normally an ``AsyncLLM``.
        args: the command line as :func:`server.cli.parse` returns it: vLLM's attributes and ours.

    Returns:
        The application with every route of vLLM's that the model supports. It does not own the engine.

    """
    supported_tasks = await engine.get_supported_tasks()
    app = build_app(args, supported_tasks, engine.model_config)
    http_errors.install(app)
    model_route.install(app)
    metrics = attach_metrics(engine)
    if not admin_is_separate(args):
        admin_routes.install(app, engine, args.admin_api_key, metrics)
        dashboard.install(app)
    # Innermost: behind the check of the API key, and inside the error handlers' reach.
    app.user_middleware.append(Middleware(BodyLimitMiddleware, limit=args.max_body_size))
    # vLLM has built the stack already, for SageMaker's sake; Starlette builds it anew, with these changes.
    app.middleware_stack = None
    await init_app_state(engine, app.state, args, supported_tasks)
    output_processor.install(engine)
    admission.Admission(engine, args.max_grammar_size).install(engine, app.state)
    mended_answers.install(app.state)
    beam_search.install(app.state, engine)
    acceptance.install(app.state)
    # Made now and kept by the application: the first to ask would hold up all others for a second.
    openapi_document.complete(app.openapi())
    return app
