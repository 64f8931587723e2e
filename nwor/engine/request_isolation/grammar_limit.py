"""Grammars compiled in processes of their own, each for a limited time.

A grammar of two hundred characters can keep xgrammar's compiler busy for minutes. It then ends with an error
for its request, its process is killed, and whoever waited for the compiler goes on.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

logger = logging.getLogger("vllm.nwor.grammars")

#: Seconds that a process has to start, on a busy machine.
START_SECONDS = 120.0


class GrammarError(Exception):
    """What a client is told about a grammar that was not compiled."""


class _Process:
    """One compiling process; started when it is first needed, and again after it was killed."""

    def __init__(self, tokenizer: str) -> None:
        self._tokenizer = tokenizer
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None

    def compile(
        self, job: tuple[str, tuple[Any, ...], dict[str, Any]], seconds: float
    ) -> tuple[str | None, str]:
        """Return the compiled grammar as JSON, or None and what was wrong.

        Raises:
            GrammarError: it took longer, or the process died.

        """
        pipe = self._pipe or self._start()
        try:
            pipe.send(job)
            if pipe.poll(seconds):
                answer: tuple[str | None, str] = pipe.recv()
                return answer
        except (EOFError, OSError):
            self.end()
            raise GrammarError(
                "its compiler ended, for want of memory perhaps: make the grammar smaller"
            ) from None
        self.end()
        raise GrammarError(
            f"it takes longer than {seconds:g} s: make it smaller, with fewer optional parts beside each "
            "other, or have the server started with a larger --max-grammar-seconds"
        )

    def _start(self) -> Connection:
        pipe, theirs = multiprocessing.Pipe()
        command = [
            sys.executable,
            "-m",
            "nwor.engine.request_isolation.grammar_compiler",
            str(theirs.fileno()),
        ]
        # What this process imports from, that one finds as well.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env=environment,
            )
        self._pipe = pipe
        try:
            pipe.send(self._tokenizer)
            started = pipe.poll(START_SECONDS)
            if started:
                pipe.recv()
        except (EOFError, OSError):
            started = False
        if not started:
            self.end()
            raise GrammarError("its compiler did not start: the server's log has more")
        return pipe

    @property
    def runs(self) -> bool:
        """Whether it has been started."""
        return self._pipe is not None

    def start(self) -> None:
        """Start the process, unless it runs.

        Raises:
            GrammarError: it did not start.

        """
        if self._pipe is None:
            self._start()

    def kill(self) -> None:
        """Kill the process, from any thread; who waits for its answer hears that it ended."""
        process = self._process
        if process is not None:
            process.kill()
            process.wait()

    def end(self) -> None:
        """Kill the process and forget it."""
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._pipe = self._process = None


class LimitedCompiler:
    """Stands in for xgrammar's ``GrammarCompiler`` within vLLM's backend, whose threads call it.

    Args:
        tokenizer: xgrammar's ``TokenizerInfo``.
        seconds: what one grammar may take.
        processes: how many compile at the same time.
        cache_bytes: what compiled grammars may take that are kept.

    """

    def __init__(self, tokenizer: Any, seconds: float, processes: int, cache_bytes: int) -> None:
        self._tokenizer, self._seconds, self._room = tokenizer, seconds, cache_bytes
        text = tokenizer.serialize_json()
        self._all = [_Process(text) for _ in range(processes)]
        self._free = list(self._all)
        self._turn = threading.Semaphore(processes)
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._size = 0

    def __getattr__(self, name: str) -> Any:
        """Return a method of the compiler's."""
        if not name.startswith("compile_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: self._compile(name, args, kwargs)

    def _compile(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = repr((name, args, sorted(kwargs.items())))
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        with self._process() as process:
            compiled, wrong = process.compile((name, args, kwargs), self._seconds)
        if compiled is None:
            raise GrammarError(wrong)
        grammar = _deserialize(compiled, self._tokenizer)
        self._keep(key, grammar)
        return grammar

    def prepare(self) -> None:
        """Have a process that runs; vLLM gives a regex a limit of its own, which its start must not use up.

        Raises:
            GrammarError: it did not start.

        """
        with self._process() as process:
            process.start()

    @contextmanager
    def _process(self) -> Iterator[_Process]:
        """Hold a process, one that runs where there is one."""
        with self._turn:
            with self._lock:
                process = next((each for each in self._free if each.runs), self._free[0])
                self._free.remove(process)
            try:
                yield process
            finally:
                with self._lock:
                    self._free.append(process)

    def _keep(self, key: str, grammar: Any) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = grammar
                self._size += grammar.memory_size_bytes
            while self._size > self._room:
                self._size -= self._kept.popitem(last=False)[1].memory_size_bytes

    def close(self) -> None:
        """Kill all processes; what they compile ends with an error."""
        for process in self._all:
            process.kill()


def limit(backend: Any, seconds: float, processes: int) -> None:
    """Have a backend of vLLM's compile with a limit; one that is not xgrammar's stays as it is."""
    from vllm import envs
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend

    if type(backend) is not XgrammarBackend or isinstance(backend.compiler, LimitedCompiler):
        return
    # The compiler does not give its tokenizer away, a compiled grammar does.
    tokenizer = backend.compiler.compile_grammar('root ::= "a"').tokenizer_info
    room = envs.VLLM_XGRAMMAR_CACHE_MB * 1024 * 1024
    backend.compiler = LimitedCompiler(tokenizer, seconds, processes, room)


def _deserialize(compiled: str, tokenizer: Any) -> Any:
    import xgrammar

    return xgrammar.CompiledGrammar.deserialize_json(compiled, tokenizer)
