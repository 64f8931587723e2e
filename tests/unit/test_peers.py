"""What several API server processes agree on: one change at a time, and the latest mode of an engine."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from nwor.engine.stats.peers import FOLDER_VARIABLE, Peers


def latest(peers: Peers, engine: int, switches: int) -> bool:
    with peers.in_order(engine, switches) as is_latest:
        return is_latest


def test_a_process_alone_has_nobody_to_agree_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    for engine in (SimpleNamespace(), SimpleNamespace(_client_count=1)):
        peers = Peers.of(engine)
        assert latest(peers, 0, 2)
        assert latest(peers, 0, 1)
        asyncio.run(_enter(peers))
    assert list(tmp_path.iterdir()) == []


def test_several_share_what_they_know(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path))
    one, other = (Peers.of(SimpleNamespace(_client_count=2)) for _ in range(2))
    assert latest(one, 0, 0)
    assert latest(one, 0, 2)
    assert not latest(other, 0, 1)
    assert latest(other, 0, 2)
    assert latest(other, 0, 12)
    assert not latest(one, 0, 3)
    # Engines have switches of their own, and so has another server that uses the folder.
    assert latest(one, 1, 1)
    assert latest(Peers(tmp_path, family=os.getppid() + 1), 0, 1)


def test_notes_reach_the_others(tmp_path: Path) -> None:
    one, other = Peers(tmp_path, 1), Peers(tmp_path, 1)
    assert other.told("what-0") is None
    one.tell("what-0", [1.5, {"why": "é"}])
    assert one.told("what-0") == other.told("what-0") == [1.5, {"why": "é"}]
    other.tell("what-0", [2.5, {}])
    assert one.told("what-0") == [2.5, {}]
    assert one.told("what-1") is None
    assert Peers(tmp_path, 2).told("what-0") is None
    alone = Peers()
    alone.tell("what-0", 1)
    assert alone.told("what-0") == 1
    # Nothing is left of notes that were replaced.
    assert [path.name for path in tmp_path.iterdir()] == ["nwor-1-what-0"]


def test_a_note_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    peers = Peers(tmp_path / "gone", 1)
    for _ in range(3):
        peers.tell("what-0", 1)
    assert peers.told("what-0") == 1  # its own, at least
    # By identity: where another test has set vLLM's log up, a record comes twice.
    assert len({id(record) for record in caplog.records if "do not hear of what-0" in record.message}) == 1


async def _enter(peers: Peers) -> None:
    async with peers.one_at_a_time():
        pass


def test_changes_come_one_after_the_other(tmp_path: Path) -> None:
    # Two objects stand for two processes: each opens the lock's file for itself.
    both = [Peers(tmp_path, 1), Peers(tmp_path, 1)]
    inside, most = 0, 0

    async def change(peers: Peers) -> None:
        nonlocal inside, most
        async with peers.one_at_a_time():
            inside += 1
            most = max(most, inside)
            await asyncio.sleep(0.01)
            inside -= 1

    async def all_at_once() -> None:
        await asyncio.wait_for(asyncio.gather(*(change(peers) for peers in both * 4)), 30)

    asyncio.run(all_at_once())
    assert most == 1


def test_a_process_that_ends_lets_go(tmp_path: Path) -> None:
    code = (
        "import asyncio, os, pathlib, sys\n"
        "from nwor.engine.stats.peers import Peers\n"
        "async def hold():\n"
        "    async with Peers(pathlib.Path(sys.argv[1]), 1).one_at_a_time():\n"
        "        print('held', flush=True)\n"
        "        sys.stdin.read()\n"
        "        os._exit(1)\n"
        "asyncio.run(hold())"
    )
    words = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        peers = Peers(tmp_path, 1)

        async def tries(seconds: float) -> None:
            await asyncio.wait_for(_enter(peers), seconds)

        with pytest.raises(TimeoutError):
            asyncio.run(tries(0.2))
        holder.stdin.close()
        holder.wait(30)
        asyncio.run(tries(10))
