"""The endpoint plugin under ``nwor-server``: vLLM loads it without a warning, and nobody else's by that."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from importlib.metadata import EntryPoint

import pytest
from vllm.plugins import load_endpoint_plugins

from server import endpoint_plugin

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
