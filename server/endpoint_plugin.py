"""What ``nwor-server`` adds to vLLM's application, for plain ``vllm serve``, as vLLM's endpoint plugin.

vLLM loads it where ``VLLM_PLUGINS`` names ``nwor``. The admin key comes from the environment: vLLM's command
line does not know our flags. The other flags have their defaults.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from fastapi import FastAPI

from nwor.engine.stats.metrics import attach_metrics
from server import additions, dashboard
from server.admin_api.routes import Admin, make_router
from server.nwor_options import ADMIN_KEY_VARIABLE
from server.options import DEFAULT_MAX_BODY_BYTES, DEFAULT_MAX_GRAMMAR

#: Set to 0, pieces of streams are never merged, as with ``--no-stream-pacing``.
PACING_VARIABLE = "NWOR_STREAM_PACING"

#: Attribute of the command line that only ``nwor-server`` sets; it has routes of its own.
_OURS = "admin_api_key"


_GROUP = "vllm.endpoint_plugins"
_NAME = "nwor"
_ALLOWED = "VLLM_PLUGINS"


@contextmanager
def named(environ: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Have vLLM load this plugin within the block, where it would warn that nobody has named it.

    In ``nwor-server`` it does nothing. For the block alone: elsewhere the name would keep vLLM from loading
    the plugins of others. Where the user names plugins, or others have endpoints too, vLLM decides as ever.

    Args:
        environ: the environment that vLLM reads.

    """
    found = {plugin.name for plugin in importlib.metadata.entry_points(group=_GROUP)}
    if _ALLOWED in environ or found != {_NAME}:
        yield
        return
    environ[_ALLOWED] = _NAME
    try:
        yield
    finally:
        del environ[_ALLOWED]


class NworEndpoints:
    """What the entry point names; vLLM calls both methods once, in this order."""

    name = _NAME
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._admin = Admin(os.environ.get(ADMIN_KEY_VARIABLE) or None)
        self._app: FastAPI | None = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the admin routes and the live page."""
        if not hasattr(app.state.args, _OURS):
            self._app = app
            app.include_router(make_router(self._admin))
            dashboard.install(app)

    async def init_state(self, engine_client: Any, state: Any, args: argparse.Namespace) -> None:
        """Connect the routes with the engine, and add what follows vLLM's own set-up.

        Args:
            engine_client: vLLM's engine client; None where vLLM renders prompts alone.
            state: the application's state, with the serving objects in place.
            args: vLLM's command line.

        """
        if self._app is None or engine_client is None:
            return
        self._admin.connect(engine_client, attach_metrics(engine_client))
        pacing = os.environ.get(PACING_VARIABLE, "1") != "0"
        additions.install(
            self._app, state, engine_client, DEFAULT_MAX_BODY_BYTES, DEFAULT_MAX_GRAMMAR, pacing=pacing
        )
