"""Turns of two engines on one machine: one runs while the other waits.

What a machine gives changes while one waits for it: clocks, neighbours, caches. So stock vLLM and NWOR do not
run one after the other, but alternate, run by run. Each process asks for its turn before it does anything
that counts, over a pipe, and holds it until it asks for the next one. Messages are lines of JSON.
"""

from __future__ import annotations

import json
import os
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Message = dict[str, Any]


class Turns:
    """The side of a process that measures.

    Args:
        pipes: "read,write", the numbers of its ends of both pipes; empty where it runs alone.

    """

    def __init__(self, pipes: str = "") -> None:
        self._read = self._write = None
        if pipes:
            read, write = (int(part) for part in pipes.split(","))
            self._read, self._write = os.fdopen(read, "r"), os.fdopen(write, "w")

    def ask(self, at: str, **what: Any) -> Message:
        """Wait for the next turn and return what the other side says with it.

        Args:
            at: what the turn is for.
            what: what else it may want to know.

        Raises:
            EOFError: if the other side has gone.

        """
        if self._read is None or self._write is None:
            return {"go": True} | what
        self._write.write(json.dumps({"at": at} | what) + "\n")
        self._write.flush()
        line = self._read.readline()
        if not line:
            raise EOFError("the process that gives turns has gone")
        reply: Message = json.loads(line)
        return reply

    def end(self) -> None:
        """Ask for no more turns; what this process has started may hold the pipe open beyond its end."""
        if self._write is not None:
            self._write.write(json.dumps({"at": "end"}) + "\n")
            self._write.close()
            self._write = None


@dataclass
class Player:
    """One process as the giver of turns sees it.

    Attributes:
        name: for messages.
        read: number of the pipe's end that its messages come from.
        write: number of the one that it listens to.
        waiting: its message that has not been answered; None once it has ended.

    """

    name: str
    read: int
    write: int
    waiting: Message | None = None
    _rest: bytes = field(default=b"", repr=False)

    def listen(self, seconds: float) -> None:
        """Wait until the process asks for its next turn, or ends.

        Args:
            seconds: how long at most.

        Raises:
            TimeoutError: if it does neither.

        """
        ends = time.monotonic() + seconds
        while b"\n" not in self._rest:
            left = ends - time.monotonic()
            if left <= 0 or not select.select([self.read], [], [], left)[0]:
                raise TimeoutError(f"{self.name} did not end its turn within {seconds:.0f} s")
            part = os.read(self.read, 65536)
            if not part:
                self.waiting = None
                return
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        message: Message = json.loads(line)
        self.waiting = None if message["at"] == "end" else message

    def answer(self, reply: Mapping[str, Any]) -> None:
        """Give the process its turn; one that has ended in between is found when it is listened to."""
        try:
            os.write(self.write, (json.dumps(reply) + "\n").encode())
        except BrokenPipeError:
            self.waiting = None


def alternate(
    players: list[Player],
    decide: Callable[[Player, Message], Mapping[str, Any]],
    start_seconds: float,
    turn_seconds: float,
) -> None:
    """Give turns until all processes have ended.

    Args:
        players: the processes, in the order of their turns.
        decide: returns the answer to a message.
        start_seconds: how long a process may take before it first asks.
        turn_seconds: how long a turn may take.

    Raises:
        TimeoutError: if one takes longer.

    """
    for player in players:
        player.listen(start_seconds)
    while any(player.waiting is not None for player in players):
        for player in players:
            if player.waiting is not None:
                player.answer(decide(player, player.waiting))
            if player.waiting is not None:
                player.listen(turn_seconds)
