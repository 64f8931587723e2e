"""Claim: two measuring processes alternate, and both do what the first of them was told.

Coverage: the order of turns, a process that ends early, one that does not end its turn. The processes are
threads here; the pipes are real.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).resolve().parents[2] / "benchmarks" / "engine" / "turns.py"
spec = importlib.util.spec_from_file_location("benchmark_turns", PATH)
assert spec is not None
assert spec.loader is not None
turns = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = turns  # a dataclass looks its module up
spec.loader.exec_module(turns)


def _play(
    name: str,
    count: int,
    seen: list[tuple[str, int, Any]],
    wait: threading.Event | None = None,
    says_end: bool = True,
) -> Any:
    (theirs_read, ours_write), (ours_read, theirs_write) = os.pipe(), os.pipe()

    def run() -> None:
        mine = turns.Turns(f"{theirs_read},{theirs_write}")
        for turn in range(count):
            reply = mine.ask("run", cell=str(turn), steps=turn + 10 * (name == "second"))
            seen.append((name, turn, reply["steps"]))
            if wait is not None:
                wait.wait(20)
        if says_end:
            mine.end()
        else:
            mine._write.close()

    threading.Thread(target=run, daemon=True).start()
    return turns.Player(name, ours_read, ours_write)


def _close(players: list[Any]) -> None:
    for player in players:
        os.close(player.read)
        os.close(player.write)


def test_turns_alternate_and_the_first_decides_for_both():
    seen: list[tuple[str, int, Any]] = []
    players = [_play("first", 3, seen), _play("second", 5, seen, says_end=False)]
    steps: dict[str, int] = {}

    def decide(player: Any, message: dict[str, Any]) -> dict[str, int]:
        assert message["at"] == "run"
        return {"steps": steps.setdefault(message["cell"], message["steps"])}

    turns.alternate(players, decide, 10, 10)
    _close(players)
    both = [(name, turn, turn) for turn in range(3) for name in ("first", "second")]
    assert seen == [*both, ("second", 3, 13), ("second", 4, 14)]


def test_a_turn_without_end_is_an_error():
    wait = threading.Event()
    seen: list[tuple[str, int, Any]] = []
    players = [_play("slow", 1, seen, wait)]
    with pytest.raises(TimeoutError, match="slow"):
        turns.alternate(players, lambda player, message: {"steps": 0}, 10, 0.2)
    wait.set()
    _close(players)


def test_a_process_alone_has_every_turn():
    assert turns.Turns().ask("run", steps=7) == {"go": True, "steps": 7}
