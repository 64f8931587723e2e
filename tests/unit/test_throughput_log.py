"""Where several processes serve, one writes vLLM's line about throughput, from the figures of all."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

pytest.importorskip("vllm")

from server.api_servers import throughput_log
from server.api_servers.throughput_log import ThroughputLog


class Figures:
    """The figures of an engine or two, as vLLM names them."""

    def __init__(self, engines: int = 1) -> None:
        self.registry = CollectorRegistry()
        self.now = 100.0
        self.engines = [str(engine) for engine in range(engines)]
        self.counters = {
            name: Counter(f"vllm:{name}", name, labels, registry=self.registry)
            for name, labels in {
                "prompt_tokens_by_source": ["engine", "source"],
                "prompt_tokens": ["engine"],
                "generation_tokens": ["engine"],
                "prefix_cache_queries": ["engine"],
                "prefix_cache_hits": ["engine"],
                "spec_decode_num_drafts": ["engine"],
                "spec_decode_num_accepted_tokens": ["engine"],
                "num_preemptions": ["engine"],
            }.items()
        }
        self.gauges = {
            name: Gauge(f"vllm:{name}", name, ["engine"], registry=self.registry)
            for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        }
        for engine in self.engines:
            self.counters["generation_tokens"].labels(engine)
        self.log = ThroughputLog(lambda: self.registry, lambda: self.now)

    def line(self, seconds: float) -> str | None:
        self.now += seconds
        return self.log.line()


def test_the_line_says_what_has_happened_since_the_last() -> None:
    figures = Figures()
    count = {name: counter for name, counter in figures.counters.items() if name != "prompt_tokens_by_source"}
    prompts = figures.counters["prompt_tokens_by_source"]
    prompts.labels("0", "local_compute").inc(300)
    prompts.labels("0", "local_cache_hit").inc(900)
    count["prompt_tokens"].labels("0").inc(1200)
    count["generation_tokens"].labels("0").inc(50)
    figures.line(10.0)
    # Of a span alone: what went before does not show.
    prompts.labels("0", "local_compute").inc(100)
    count["generation_tokens"].labels("0").inc(700)
    count["prefix_cache_queries"].labels("0").inc(200)
    count["prefix_cache_hits"].labels("0").inc(50)
    count["spec_decode_num_drafts"].labels("0").inc(40)
    count["spec_decode_num_accepted_tokens"].labels("0").inc(50)
    count["num_preemptions"].labels("0").inc(3)
    figures.gauges["num_requests_running"].labels("0").set(7)
    figures.gauges["num_requests_waiting"].labels("0").set(2)
    figures.gauges["kv_cache_usage_perc"].labels("0").set(0.125)
    assert figures.line(5.0) == (
        "Engine, all API servers: Avg prompt throughput: 20.0 tokens/s, "
        "Avg generation throughput: 140.0 tokens/s, Running: 7 reqs, Waiting: 2 reqs, Preemptions: 3, "
        "KV cache usage: 12.5%, Prefix cache hit rate: 25.0%, Mean acceptance length: 2.25"
    )


def test_several_engines_add_up_and_their_caches_are_a_mean() -> None:
    figures = Figures(engines=2)
    for engine, tokens in (("0", 30), ("1", 50)):
        figures.counters["generation_tokens"].labels(engine).inc(tokens)
        figures.gauges["num_requests_running"].labels(engine).set(tokens / 10)
    figures.gauges["kv_cache_usage_perc"].labels("0").set(0.5)
    assert figures.line(4.0) == (
        "All 2 engines, all API servers: Avg prompt throughput: 0.0 tokens/s, "
        "Avg generation throughput: 20.0 tokens/s, Running: 8 reqs, Waiting: 0 reqs, KV cache usage: 25.0%"
    )


def test_a_server_that_rests_says_so_once() -> None:
    figures = Figures()
    assert figures.line(10.0) is None
    figures.counters["generation_tokens"].labels("0").inc()
    assert figures.line(10.0)
    # The end of the work shows: nothing runs any more.
    assert "throughput: 0.0 tokens/s, Running: 0 reqs" in (figures.line(10.0) or "")
    assert figures.line(10.0) is None


def test_figures_that_cannot_be_read_are_said_once_and_break_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken() -> CollectorRegistry:
        raise OSError("the folder is gone")

    asyncio.run(ThroughputLog(broken).run(0.0))
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "the folder is gone" in caplog.text


def test_vllm_does_not_say_that_there_is_no_line(caplog: pytest.LogCaptureFixture) -> None:
    # vLLM's own words, so that a change of them shows.
    from vllm.v1.metrics import loggers

    words = "api_server_count more than 1"
    assert words in Path(loggers.__file__).read_text(encoding="utf-8")
    own = logging.getLogger(loggers.__name__)
    filters = list(own.filters)
    try:
        throughput_log.drop_vllms_warning()
        own.warning(f"AsyncLLM created with {words}; disabling stats logging")
        own.warning("something else")
    finally:
        own.filters[:] = filters
    said = [record.getMessage() for record in caplog.records if record.name == loggers.__name__]
    assert said == ["something else"]
