"""Admin API, live page, metrics and per-request figures for plain ``vllm serve``, as vLLM's endpoint plugin.

vLLM loads it where ``VLLM_PLUGINS`` names ``nwor``. The admin key comes from the environment: vLLM's command
line does not know our flags.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from fastapi import FastAPI

from nwor.engine.stats.metrics import attach_metrics
from server import dashboard
from server.admin_api.routes import Admin, make_router
from server.api import acceptance, admission, beam_search, mended_answers, output_processor
from server.nwor_options import ADMIN_KEY_VARIABLE

#: Attribute of the command line that only ``nwor-server`` sets; it has routes of its own.
_OURS = "admin_api_key"


class NworEndpoints:
    """What the entry point names; vLLM calls both methods once, in this order."""

    name = "nwor"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._admin = Admin(os.environ.get(ADMIN_KEY_VARIABLE) or None)

    def attach_router(self, app: FastAPI) -> None:
        """Add the admin routes and the live page."""
        if not hasattr(app.state.args, _OURS):
            app.include_router(make_router(self._admin))
            dashboard.install(app)

    async def init_state(self, engine_client: Any, state: Any, args: argparse.Namespace) -> None:
        """Connect the routes with the engine, and put the figures into /metrics and the answers.

        Args:
            engine_client: vLLM's engine client.
            state: the application's state, with the serving objects in place.
            args: vLLM's command line.

        """
        if hasattr(args, _OURS):
            return
        self._admin.connect(engine_client, attach_metrics(engine_client))
        output_processor.install(engine_client)
        admission.Admission(engine_client).install(engine_client, state)
        mended_answers.install(state)
        beam_search.install(state, engine_client)
        acceptance.install(state)
