"""What several API server processes of one server share: one change at a time, the latest mode, and notes.

Each of them can switch the mode of every engine, and each hears of some steps only. They have a folder in
common already, that of their metrics, and the process that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

logger = logging.getLogger("vllm.nwor")

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
        self._notes: dict[str, Any] = {}
        self._failed = False

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

    def tell(self, name: str, value: Any) -> None:
        """Leave a note for the others; it replaces the one before, whoever has left that.

        Where it cannot be written, that is logged once: whoever calls has more to do.

        Args:
            name: of the note, the same in every process.
            value: anything that JSON has.

        """
        self._notes[name] = value
        if self._folder is None:
            return
        # Whoever reads meanwhile finds the old note or the new one.
        draft = self._path(f"{name}-{os.getpid()}")
        try:
            draft.write_text(json.dumps(value), "utf-8")
            draft.replace(self._path(name))
        except OSError as error:
            if not self._failed:
                logger.warning("Other API servers do not hear of %s: %s", name, error)
            self._failed = True

    def told(self, name: str) -> Any:
        """Return the latest note of that name; None where nobody has left one."""
        if self._folder is not None:
            with contextlib.suppress(OSError):  # nobody has left one, or none could be written
                return json.loads(self._path(name).read_text("utf-8"))
        return self._notes.get(name)

    def _path(self, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"nwor-{self._family}-{name}"
