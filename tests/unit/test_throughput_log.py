"""Where several processes serve, one writes vLLM's lines about throughput, from the figures of all."""

from __future__ import annotations

import argparse
import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

pytest.importorskip("vllm")

from vllm.v1.metrics import loggers
from vllm.v1.spec_decode import metrics as speculation

from server.api_servers import api_process, throughput_log
from server.api_servers.throughput_log import ThroughputLog

SOURCES = "".join(Path(module.__file__ or "").read_text("utf-8") for module in (loggers, speculation))
LABELS = {
    "prompt_tokens_by_source": ["source"],
    "num_requests_waiting_by_reason": ["reason"],
    "spec_decode_num_accepted_tokens_per_pos": ["position"],
}
GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "num_requests_waiting_by_reason",
    "kv_cache_usage_perc",
)


class Figures:
    """The figures of an engine or two, as vLLM names them."""

    def __init__(self, *engines: str) -> None:
        self.registry = CollectorRegistry()
        self.now = 100.0
        names = sorted(name.removeprefix("vllm:").removesuffix("_total") for name in throughput_log.READ)
        kinds = {name: Gauge if name in GAUGES else Counter for name in names}
        self.metrics: dict[str, Any] = {
            name: kind(f"vllm:{name}", name, ["engine", *LABELS.get(name, [])], registry=self.registry)
            for name, kind in kinds.items()
        }
        for engine in engines or ["0"]:
            self.metrics["generation_tokens"].labels(engine)
        self.log = ThroughputLog(lambda: self.registry, "GPU", lambda: self.now)
        assert self.log.lines() == []

    def add(self, engine: str = "0", /, **counts: float | dict[str, float]) -> None:
        for name, count in counts.items():
            for label, number in count.items() if isinstance(count, dict) else [(None, count)]:
                child = self.metrics[name].labels(engine, *([] if label is None else [label]))
                (child.set if name in GAUGES else child.inc)(number)

    def lines(self, seconds: float) -> list[str]:
        self.now += seconds
        return self.log.lines()


def test_the_names_are_vllms() -> None:
    for name in throughput_log.READ:
        assert f'"{name.removesuffix("_total")}"' in SOURCES
    for words in ("Avg prompt throughput: ", "Waiting: ", "Deferred: ", "Preemptions: ", "KV cache usage: ",
                  "External prefix cache hit rate: ", "MM cache hit rate: ", "SpecDecoding metrics: ",
                  "Per-position acceptance rate: ", "Avg Draft acceptance rate: ", "Engines Aggregated: ",
                  throughput_log.WITHOUT):  # fmt: skip
        assert words in SOURCES


def test_the_lines_say_what_has_happened_since_the_last() -> None:
    figures = Figures()
    figures.add(prompt_tokens_by_source={"local_compute": 300, "local_cache_hit": 900}, generation_tokens=50)
    figures.add(prefix_cache_queries=100, prefix_cache_hits=100)
    figures.lines(10.0)
    # Of a span alone: what went before does not show.
    figures.add(prompt_tokens_by_source={"local_compute": 100, "local_cache_hit": 7}, generation_tokens=700)
    figures.add(prefix_cache_queries=200, prefix_cache_hits=50, mm_cache_queries=10, mm_cache_hits=9)
    figures.add(num_preemptions=3, num_requests_running=7, num_requests_waiting=4, kv_cache_usage_perc=0.125)
    figures.add(num_requests_waiting_by_reason={"capacity": 3, "deferred": 1})
    figures.add(
        spec_decode_num_drafts=40, spec_decode_num_draft_tokens=80, spec_decode_num_accepted_tokens=50
    )
    figures.add(spec_decode_num_accepted_tokens_per_pos={"0": 30, "1": 20})
    assert figures.lines(5.0) == [
        "Engine 000: Avg prompt throughput: 20.0 tokens/s, Avg generation throughput: 140.0 tokens/s, "
        "Running: 7 reqs, Waiting: 4 reqs, Deferred: 1 reqs, Preemptions: 3, GPU KV cache usage: 12.5%, "
        "Prefix cache hit rate: 25.0%, MM cache hit rate: 90.0%",
        "SpecDecoding metrics: Mean acceptance length: 2.25, Accepted throughput: 10.00 tokens/s, "
        "Drafted throughput: 16.00 tokens/s, Accepted: 50 tokens, Drafted: 80 tokens, "
        "Per-position acceptance rate: 0.750, 0.500, Avg Draft acceptance rate: 62.5%",
    ]
    # A rate holds until there is another.
    figures.add(generation_tokens=10)
    [line] = figures.lines(5.0)
    assert "throughput: 2.0 tokens/s" in line
    assert "Prefix cache hit rate: 25.0%" in line


def test_several_engines_add_up_and_their_caches_are_a_mean() -> None:
    figures = Figures("0", "1")
    figures.add("0", generation_tokens=30, num_requests_running=3, kv_cache_usage_perc=0.5)
    figures.add("1", generation_tokens=50, num_requests_running=5)
    assert figures.lines(4.0) == [
        "2 Engines Aggregated: Avg prompt throughput: 0.0 tokens/s, "
        "Avg generation throughput: 20.0 tokens/s, Running: 8 reqs, Waiting: 0 reqs, "
        "GPU KV cache usage: 25.0%"
    ]


def test_a_server_that_rests_says_so_once() -> None:
    figures = Figures("3")
    assert figures.lines(10.0) == []
    figures.add("3", generation_tokens=1)
    [line] = figures.lines(10.0)
    assert line.startswith("Engine 003: ")
    # The end of the work shows: nothing runs any more.
    [line] = figures.lines(10.0)
    assert "throughput: 0.0 tokens/s, Running: 0 reqs" in line
    assert figures.lines(10.0) == []


class Broken:
    """Figures that cannot be read at some looks."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> CollectorRegistry:
        self.looks += 1
        if self.looks in (2, 3, 5):
            raise OSError("too many open files")
        return CollectorRegistry()


def run_for(log: ThroughputLog, seconds: float, enough: Callable[[], bool] = lambda: False) -> None:
    async def main() -> None:
        task = asyncio.create_task(log.run(0.001))
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not enough():
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(main())


def test_figures_that_cannot_be_read_are_said_once_and_are_read_again(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.nwor.server")
    broken = Broken()
    run_for(ThroughputLog(broken, "GPU"), 20.0, lambda: broken.looks >= 6)
    assert broken.looks >= 6
    # By identity: where another test has set vLLM's log up, a record comes twice.
    said = {id(record): record.levelname for record in caplog.records if "not logged" in record.message}
    assert list(said.values()) == ["ERROR"] * 2


def test_nothing_is_read_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "vllm.nwor.server")
    broken = Broken()
    run_for(ThroughputLog(broken, "GPU"), 0.02)
    assert broken.looks == 0


@pytest.mark.parametrize(
    ("index", "disabled", "logs"), [(0, False, True), (0, True, False), (1, False, False)]
)
def test_one_process_logs_until_it_ends_and_none_where_nobody_wants_it(
    monkeypatch: pytest.MonkeyPatch, index: int, disabled: bool, logs: bool
) -> None:
    running: list[bool] = []

    async def run(self: ThroughputLog, seconds: float) -> None:
        running.append(True)
        try:
            await asyncio.sleep(60)
        finally:
            running.append(False)

    async def serve(*args: Any, **kwargs: Any) -> int:
        await asyncio.sleep(0.01)
        assert running == ([True] if logs else [])
        return 0

    async def main() -> None:
        given = {"api_server_loads": [], "client_index": index}
        args = argparse.Namespace(disable_log_stats=disabled)
        pipe: Any = None
        assert await api_process._serve(pipe, None, None, args, given) == 0
        await asyncio.sleep(0.01)
        assert running == ([True, False] if logs else [])

    monkeypatch.setattr(ThroughputLog, "run", run)
    monkeypatch.setattr("server.serving.serve", serve)
    asyncio.run(main())


def test_vllm_does_not_say_that_there_is_no_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    own = logging.getLogger(loggers.__name__)
    filters = list(own.filters)
    try:
        throughput_log.drop_vllms_warning()
        own.warning(f"AsyncLLM created with {throughput_log.WITHOUT}; disabling stats logging")
        own.warning("something else")
    finally:
        own.filters[:] = filters
    said = [record.getMessage() for record in caplog.records if record.name == loggers.__name__]
    assert set(said) == {"something else"}
