"""The engines that tests share: asked for by their settings, never by a name that others may have taken."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine import engines


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []

    def start(**settings: Any) -> Any:
        said.append(f"start {settings}")
        core = SimpleNamespace(shutdown=lambda: said.append(f"stop {settings}"))
        return SimpleNamespace(settings=settings, llm_engine=SimpleNamespace(engine_core=core))

    monkeypatch.setattr(engines, "start", start)
    return said


def test_an_engine_has_the_settings_that_were_asked_for(events: list[str]) -> None:
    eagle_1 = {"method": "eagle", "num_speculative_tokens": 3}
    with engines.one_at_a_time() as make:
        first = make(rows=64)
        assert make(rows=64) is first
        other = make(rows=64, speculative_config=eagle_1)
        assert other is not first
        assert other.settings["speculative_config"] == eagle_1
        assert make(speculative_config=dict(eagle_1), rows=64) is other
        eagle_1["num_speculative_tokens"] = 5
        assert make(rows=64, speculative_config=eagle_1) is not other
    # Each ends before the next one starts, and the last with the block.
    assert [event.split()[0] for event in events] == ["start", "stop"] * 3
