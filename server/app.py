"""The FastAPI application: vLLM's OpenAI layer, plus what this server adds to it."""

from __future__ import annotations

import argparse

from fastapi import FastAPI
from vllm.engine.protocol import EngineClient
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app

from nwor.engine.stats.metrics import attach_metrics
from server import additions, dashboard, endpoint_plugin
from server.admin_api import routes as admin_routes
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
    with endpoint_plugin.named():
        app = build_app(args, supported_tasks, engine.model_config)
    metrics = attach_metrics(engine)
    if not admin_is_separate(args):
        admin_routes.install(app, engine, args.admin_api_key, metrics)
        dashboard.install(app)
    await init_app_state(engine, app.state, args, supported_tasks)
    pacing = not args.no_stream_pacing
    additions.install(app, app.state, engine, args.max_body_size, args.max_grammar_size, pacing)
    return app
