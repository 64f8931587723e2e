"""The endpoint plugin under ``nwor-server``: vLLM loads it without a warning, and nobody else's by that."""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import logging
import os
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from fastapi import FastAPI
from vllm.plugins import load_endpoint_plugins
from vllm.v1.engine.output_processor import OutputProcessor

from server import endpoint_plugin
from server.api import output_processor

GROUP = "vllm.endpoint_plugins"
OURS = EntryPoint("nwor", "server.endpoint_plugin:NworEndpoints", GROUP)
THEIRS = EntryPoint("theirs", "server.endpoint_plugin:NworEndpoints", GROUP)


def loaded(monkeypatch: pytest.MonkeyPatch, *found: EntryPoint) -> list[str]:
    """Return the names of what vLLM loads as an application is built."""
    monkeypatch.setattr(
        importlib.metadata, "entry_points", lambda group: [one for one in found if one.group == group]
    )
    before = os.environ.get("VLLM_PLUGINS")
    with endpoint_plugin.named():
        plugins = load_endpoint_plugins(("generate",))
    assert os.environ.get("VLLM_PLUGINS") == before
    return [plugin.name for plugin in plugins]


def test_it_is_loaded_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    assert loaded(monkeypatch, OURS) == ["nwor"]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_vllm_warns_of_others(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    assert loaded(monkeypatch, OURS, THEIRS) == []
    assert "must be explicitly allowlisted" in caplog.text


@pytest.mark.parametrize(("given", "names"), [("", []), ("nwor", ["nwor"])])
def test_what_the_user_names_holds(monkeypatch: pytest.MonkeyPatch, given: str, names: list[str]) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", given)
    assert loaded(monkeypatch, OURS) == names


def test_without_an_installed_package_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    assert loaded(monkeypatch) == []


@pytest.mark.parametrize(("value", "pacing"), [(None, True), ("1", True), ("0", False)])
def test_pacing_is_turned_off_by_a_variable(
    monkeypatch: pytest.MonkeyPatch, value: str | None, pacing: bool
) -> None:
    engine = SimpleNamespace(output_processor=OutputProcessor(tokenizer=None, log_stats=False))
    for name in ("attach_metrics", "dashboard"):
        monkeypatch.setattr(endpoint_plugin, name, MagicMock())
    # Of what is added, the output processor alone: the rest wants a whole application.
    monkeypatch.setattr(
        endpoint_plugin.additions,
        "install",
        lambda app, state, engine, *limits, pacing: output_processor.install(engine, pacing),
    )
    if value is None:
        monkeypatch.delenv(endpoint_plugin.PACING_VARIABLE, raising=False)
    else:
        monkeypatch.setenv(endpoint_plugin.PACING_VARIABLE, value)
    plugin, app = endpoint_plugin.NworEndpoints(), FastAPI()
    app.state.args = argparse.Namespace()
    plugin._admin = MagicMock()
    plugin._app = app
    asyncio.run(plugin.init_state(engine, app.state, app.state.args))
    assert (engine.output_processor._nwor_pacer is not None) == pacing
