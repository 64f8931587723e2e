"""A process that compiles grammars for an engine; its arguments are a pipe's descriptor and the parent's id.

A compiler of grammars has no limit of time, and a thread within it cannot be ended; a process can. It reads
jobs from a pipe and answers each with the compiled grammar or with what was wrong. It ends with its parent.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

#: Seconds between two looks at the parent.
_LOOK = 1.0


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK)
    os._exit(0)


def serve(pipe: Connection) -> None:
    """Compile until the pipe is closed.

    The first message is a ``TokenizerInfo`` as JSON, which is answered with None. Each further one is the
    name of a method of xgrammar's ``GrammarCompiler`` with its arguments; the answer is the compiled grammar
    as JSON, or the exception's words.

    Args:
        pipe: to the engine.

    """
    import xgrammar

    tokenizer = xgrammar.TokenizerInfo.deserialize_json(pipe.recv())
    compiler = xgrammar.GrammarCompiler(tokenizer, cache_enabled=False)
    pipe.send(None)
    while True:
        name, args, kwargs = pipe.recv()
        answer: tuple[str | None, str]
        try:
            answer = getattr(compiler, name)(*args, **kwargs).serialize_json(), ""
        except Exception as error:
            answer = None, str(error)
        pipe.send(answer)


def main(arguments: list[str]) -> None:
    """Serve on an inherited descriptor.

    Args:
        arguments: the descriptor's number, and the parent's process id.

    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the engine's to answer
    descriptor, parent = (int(word) for word in arguments)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    pipe: Any = Connection(descriptor)
    try:
        serve(pipe)
    except EOFError:
        return


if __name__ == "__main__":
    main(sys.argv[1:])
