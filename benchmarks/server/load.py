"""Sends streaming completions at a fixed concurrency and times them."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from dataclasses import dataclass

import httpx

MODEL = "demo"

_OPENINGS = (
    "def read_lines(path):\n    ",
    "class Queue:\n    def __init__(self):\n        ",
    "import os\n\n\ndef walk(folder):\n    for name in ",
    "    if not isinstance(value, int):\n        raise ",
)


@dataclass(frozen=True)
class Load:
    """So many requests, at most ``concurrency`` of them at once."""

    concurrency: int
    requests: int


async def measure(url: str, load: Load, max_tokens: int, first_prompt: int) -> dict[str, float]:
    """Load one server.

    Args:
        url: the server's base address.
        load: how much.
        max_tokens: output tokens of every request; the end-of-text token is ignored.
        first_prompt: number of the first prompt. Prompts of different numbers share no cached prefix.

    Returns:
        ``tokens_per_s`` (output tokens over the wall time of the whole load), ``ttft_ms`` (median time to the
        first token) and ``seconds``.

    """
    limits = httpx.Limits(max_connections=load.concurrency, max_keepalive_connections=load.concurrency)
    numbers = iter(range(first_prompt, first_prompt + load.requests))
    first_tokens: list[float] = []
    tokens = 0

    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=300) as http:

        async def work() -> None:
            nonlocal tokens
            for number in numbers:
                prompt = f"# {number}\n{_OPENINGS[number % len(_OPENINGS)]}"
                elapsed, count = await _complete(http, prompt, max_tokens)
                first_tokens.append(elapsed)
                tokens += count

        start = time.perf_counter()
        await asyncio.gather(*(work() for _ in range(load.concurrency)))
        seconds = time.perf_counter() - start
    if tokens != load.requests * max_tokens:
        raise RuntimeError(f"{url} gave {tokens} tokens instead of {load.requests * max_tokens}")
    return {
        "tokens_per_s": tokens / seconds,
        "ttft_ms": 1000 * statistics.median(first_tokens),
        "seconds": seconds,
    }


async def _complete(http: httpx.AsyncClient, prompt: str, max_tokens: int) -> tuple[float, int]:
    """Return seconds to the first token and the number of output tokens."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first = 0.0
    last = b""
    async with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        # The bytes as they come: parsing each chunk would load the machine more than the fronts do.
        async for part in answer.aiter_raw():
            first = first or time.perf_counter() - start
            last = (last + part)[-4096:]
    usage = [line for line in last.split(b"\n") if b'"usage"' in line][-1]
    return first, int(json.loads(usage.removeprefix(b"data: "))["usage"]["completion_tokens"])
