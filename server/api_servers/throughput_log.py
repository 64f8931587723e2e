"""vLLM's line about throughput where several processes serve: made from the figures of all of them.

vLLM leaves it out there, since each process sees a part. One process writes it, in vLLM's words.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from prometheus_client import CollectorRegistry

logger = logging.getLogger("vllm.nwor.server")

_WITHOUT = "api_server_count more than 1"

_PROMPT = "vllm:prompt_tokens_by_source_total"
_GENERATION = "vllm:generation_tokens_total"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_CACHE = "vllm:kv_cache_usage_perc"
_QUERIES = "vllm:prefix_cache_queries_total"
_HITS = "vllm:prefix_cache_hits_total"
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_PREEMPTIONS = "vllm:num_preemptions_total"
_READ = (_PROMPT, _GENERATION, _RUNNING, _WAITING, _CACHE, _QUERIES, _HITS, _DRAFTS, _ACCEPTED, _PREEMPTIONS)


def drop_vllms_warning() -> None:
    """Keep vLLM from saying that there is no such line."""
    logging.getLogger("vllm.v1.metrics.loggers").addFilter(lambda record: _WITHOUT not in str(record.msg))


class ThroughputLog:
    """Writes a line now and then, while there is something to say.

    Args:
        registry: returns where the figures of all processes are.
        clock: returns seconds.

    """

    def __init__(
        self, registry: Callable[[], CollectorRegistry], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._registry = registry
        self._clock = clock
        self._before: Counter[str] = Counter()
        self._looked = clock()
        self._idle = True

    async def run(self, seconds: float) -> None:
        """Look every so many seconds, until it is cancelled; not in the event loop, since files are read."""
        while True:
            await asyncio.sleep(seconds)
            try:
                said = await asyncio.to_thread(self.line)
            except Exception:
                logger.exception("The throughput is not logged: the figures could not be read.")
                return
            if said is not None:
                logger.info("%s", said)

    def line(self) -> str | None:
        """Return what to say of the time since the last call; None while nothing has happened for two."""
        figures, engines = self._read()
        now = self._clock()
        passed, grown = max(now - self._looked, 1e-9), Counter(figures)
        grown.subtract(self._before)
        self._before, self._looked = figures, now
        idle = not (grown[_PROMPT] or grown[_GENERATION])
        was_idle, self._idle = self._idle, idle
        if idle and was_idle:
            return None
        parts = [
            f"Avg prompt throughput: {grown[_PROMPT] / passed:.1f} tokens/s",
            f"Avg generation throughput: {grown[_GENERATION] / passed:.1f} tokens/s",
            f"Running: {figures[_RUNNING]:.0f} reqs",
            f"Waiting: {figures[_WAITING]:.0f} reqs",
        ]
        if grown[_PREEMPTIONS]:
            parts.append(f"Preemptions: {grown[_PREEMPTIONS]:.0f}")
        parts.append(f"KV cache usage: {100 * figures[_CACHE] / max(engines, 1):.1f}%")
        if grown[_QUERIES]:
            parts.append(f"Prefix cache hit rate: {100 * grown[_HITS] / grown[_QUERIES]:.1f}%")
        if grown[_DRAFTS]:
            parts.append(f"Mean acceptance length: {1 + grown[_ACCEPTED] / grown[_DRAFTS]:.2f}")
        which = "Engine" if engines == 1 else f"All {engines} engines"
        return f"{which}, all API servers: {', '.join(parts)}"

    def _read(self) -> tuple[Counter[str], int]:
        """Return the sums over engines, and how many engines there are."""
        found: Counter[str] = Counter()
        engines = set()
        for metric in self._registry().collect():
            for sample in metric.samples:
                if sample.name not in _READ:
                    continue
                if sample.name == _PROMPT and sample.labels.get("source") != "local_compute":
                    continue  # from a cache: vLLM leaves those out of the throughput
                found[sample.name] += sample.value  # type: ignore[assignment]
                engines.add(sample.labels.get("engine"))
        return found, len(engines)
