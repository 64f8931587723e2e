"""vLLM's lines about throughput where several processes serve: made from the figures of all of them.

vLLM leaves them out there, since each process sees a part. One process writes them, in vLLM's words.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable

from prometheus_client import CollectorRegistry

logger = logging.getLogger("vllm.nwor.server")

#: What vLLM's warning says that these lines make untrue.
WITHOUT = "api_server_count more than 1"

_PROMPT = "vllm:prompt_tokens_by_source_total"
_GENERATION = "vllm:generation_tokens_total"
_RUNNING = "vllm:num_requests_running"
_WAITING = "vllm:num_requests_waiting"
_DEFERRED = "vllm:num_requests_waiting_by_reason"
_CACHE = "vllm:kv_cache_usage_perc"
_PREEMPTIONS = "vllm:num_preemptions_total"
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
#: Caches, by vLLM's name: look-ups and hits.
_CACHES = {
    "Prefix cache": ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"),
    "External prefix cache": (
        "vllm:external_prefix_cache_queries_total",
        "vllm:external_prefix_cache_hits_total",
    ),
    "MM cache": ("vllm:mm_cache_queries_total", "vllm:mm_cache_hits_total"),
}
#: Every metric that is read.
READ = frozenset(
    {_PROMPT, _GENERATION, _RUNNING, _WAITING, _DEFERRED, _CACHE, _PREEMPTIONS, _DRAFTS, _DRAFTED, _ACCEPTED}
    | {_BY_POSITION, *(name for names in _CACHES.values() for name in names)}
)
#: Of metrics by some label, the samples that count; vLLM leaves tokens from caches out of the throughput.
_LABELS = {_PROMPT: ("source", "local_compute"), _DEFERRED: ("reason", "deferred")}


def drop_vllms_warning() -> None:
    """Keep vLLM from saying that there are no such lines."""
    logging.getLogger("vllm.v1.metrics.loggers").addFilter(lambda record: WITHOUT not in str(record.msg))


class ThroughputLog:
    """Writes lines now and then, while there is something to say.

    Args:
        registry: returns where the figures of all processes are.
        device: what vLLM calls the device whose memory the KV cache is in.
        clock: returns seconds.

    """

    def __init__(
        self,
        registry: Callable[[], CollectorRegistry],
        device: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._device = device
        self._clock = clock
        #: Sums over engines, of metrics by position one for each.
        self._before: Counter[str] = Counter()
        self._looked: float | None = None
        self._hit_rates: dict[str, float] = {}
        self._idle = True

    async def run(self, seconds: float) -> None:
        """Look every so many seconds, until it is cancelled; not in the event loop, since files are read."""
        failed = False
        while True:
            try:
                lines = await asyncio.to_thread(self.lines) if logger.isEnabledFor(logging.INFO) else []
                failed = False
            except Exception:
                lines = []
                if not failed:
                    logger.exception("The throughput is not logged: the figures could not be read.")
                failed = True
            for line in lines:
                logger.info("%s", line)
            await asyncio.sleep(seconds)

    def lines(self) -> list[str]:
        """Return what to say of the time since the last call; nothing at the first, and while all is idle."""
        figures, engines = self._read()
        now = self._clock()
        looked, grown = self._looked, Counter(figures)
        grown.subtract(self._before)
        self._before, self._looked = figures, now
        if looked is None:  # what was counted before is nobody's throughput
            return []
        idle = not (grown[_PROMPT] or grown[_GENERATION])
        was_idle, self._idle = self._idle, idle
        if idle and was_idle:
            return []
        passed = now - looked
        parts = [
            f"Avg prompt throughput: {grown[_PROMPT] / passed:.1f} tokens/s",
            f"Avg generation throughput: {grown[_GENERATION] / passed:.1f} tokens/s",
            f"Running: {figures[_RUNNING]:.0f} reqs",
            f"Waiting: {figures[_WAITING]:.0f} reqs",
        ]
        if figures[_DEFERRED]:
            parts.append(f"Deferred: {figures[_DEFERRED]:.0f} reqs")
        if grown[_PREEMPTIONS]:
            parts.append(f"Preemptions: {grown[_PREEMPTIONS]:.0f}")
        parts.append(f"{self._device} KV cache usage: {100 * figures[_CACHE] / len(engines):.1f}%")
        for cache, (queries, hits) in _CACHES.items():
            if grown[queries]:
                self._hit_rates[cache] = 100 * grown[hits] / grown[queries]
            if cache in self._hit_rates:
                parts.append(f"{cache} hit rate: {self._hit_rates[cache]:.1f}%")
        first, *more = engines
        which = f"{len(engines)} Engines Aggregated" if more else f"Engine {int(first):03d}"
        lines = [f"{which}: {', '.join(parts)}"]
        return [*lines, _speculation(grown, passed)] if grown[_DRAFTS] else lines

    def _read(self) -> tuple[Counter[str], set[str]]:
        """Return the sums over engines, and the engines' numbers."""
        found: Counter[str] = Counter()
        engines = set()
        for metric in self._registry().collect():
            for sample in metric.samples:
                label, wanted = _LABELS.get(sample.name, ("", None))
                if sample.name not in READ or sample.labels.get(label) != wanted:
                    continue
                position = sample.labels.get("position", "")
                found[sample.name + position] += sample.value  # type: ignore[assignment]
                engines.add(sample.labels["engine"])
        return found, engines


def _speculation(grown: Counter[str], passed: float) -> str:
    drafts, drafted, accepted = grown[_DRAFTS], grown[_DRAFTED], grown[_ACCEPTED]
    places = sorted(int(name.removeprefix(_BY_POSITION)) for name in grown if name.startswith(_BY_POSITION))
    rates = ", ".join(f"{grown[f'{_BY_POSITION}{place}'] / drafts:.3f}" for place in places)
    return (
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, "
        f"Accepted throughput: {accepted / passed:.2f} tokens/s, "
        f"Drafted throughput: {drafted / passed:.2f} tokens/s, "
        f"Accepted: {accepted:.0f} tokens, Drafted: {drafted:.0f} tokens, "
        f"Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {100 * accepted / drafted if drafted else float('nan'):.1f}%"
    )
