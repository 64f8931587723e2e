"""What several API server processes of one server agree on: one change at a time, and the latest mode.

Each of them can switch the mode of every engine, and each hears of some steps only. They have a folder in
common already, that of their metrics, and the process that started them.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

#: Where prometheus_client adds up what several processes count; vLLM sets it for them.
FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"

#: Seconds between two tries for the lock.
_RETRY = 0.01


class Peers:
    """The API server processes of one server; a process alone has nobody to agree with.

    Args:
        folder: a folder that all of them have in common; None for a process alone.
        family: what tells them from others that use the folder: the number of the process that started them.

    """

    def __init__(self, folder: Path | None = None, family: int = 0) -> None:
        self._folder = folder
        self._family = family
        self._lock = asyncio.Lock()

    @classmethod
    def of(cls, engine: Any) -> Peers:
        """Return those of this process.

        Args:
            engine: its engine client, which knows of how many it is one.

        """
        folder = os.environ.get(FOLDER_VARIABLE)
        if getattr(engine, "_client_count", 1) < 2 or not folder:
            return cls()
        return cls(Path(folder), os.getppid())

    @asynccontextmanager
    async def one_at_a_time(self) -> AsyncIterator[None]:
        """Wait until no other change is made, by this process or another; a process that ends lets go."""
        async with self._lock:
            if self._folder is None:
                yield
                return
            with self._path("change").open("a") as file:
                while True:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                        break
                    except BlockingIOError:
                        await asyncio.sleep(_RETRY)
                yield

    @contextmanager
    def in_order(self, engine: int, switches: int) -> Iterator[bool]:
        """Say whether nobody knows of a later switch of an engine; nobody else learns of one meanwhile.

        Args:
            engine: the engine's number.
            switches: the engine's mode changes so far, as this process knows them.

        """
        if self._folder is None:
            yield True
            return
        with self._path(f"switches-{engine}").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            latest = int(file.read() or 0)
            if switches > latest:
                file.truncate(0)
                file.write(str(switches))
                file.flush()
            yield switches >= latest

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"nwor-{self._family}-{name}"
