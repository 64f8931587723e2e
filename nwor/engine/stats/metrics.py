"""Prometheus metrics of NWOR, fed with each step's statistics as vLLM's own are; see docs/metrics.md.

Counters are incremented by what one engine reports once, to one front end. So they add up over several API
server processes as vLLM's do.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from nwor.config import NworConfig
from nwor.counts.formulas import WindowCounts
from nwor.counts.records import Tally
from nwor.engine.eligibility import REASONS
from nwor.engine.request_isolation.common import PLACES
from nwor.engine.stats.figures import MISMATCHES, EngineFigures
from nwor.engine.stats.peers import Peers
from nwor.engine.trees.requirements import CHAIN_REASONS
from nwor.modes import Mode

_LABELS = ("model_name", "engine")
#: How the request of a window ended; fields of EngineFigures are called so.
_ENDS = ("finished", "aborted", "late")


class CountedHistogram(Histogram):
    """A histogram that takes in a value many times at once: there are thousands of windows a second."""

    def observe_times(self, amount: float, times: int) -> None:
        """Do what ``times`` calls of :meth:`observe` do.

        Args:
            amount: the value.
            times: how often it was seen.

        """
        self._raise_if_not_observable()
        self._sum.inc(amount * times)
        for bound, bucket in zip(self._upper_bounds, self._buckets, strict=True):
            if amount <= bound:
                bucket.inc(times)
                break


class NworStatLogger(AggregateStatLoggerBase):
    """Called by vLLM with each step's statistics; idle where the engine did not ask for NWOR.

    Args:
        vllm_config: the engine's configuration.
        engine_indexes: the engines' numbers.
        peers: the other processes that show the same metrics; None where there are none.

    """

    def __init__(self, vllm_config: Any, engine_indexes: list[int], peers: Peers | None = None) -> None:
        self.peers = peers or Peers()
        config = NworConfig.from_additional_config(vllm_config.additional_config)
        self.enabled = config is not None
        self._switches = dict.fromkeys(engine_indexes, 0)
        self._modes: dict[int, str] = {}
        self._children: dict[tuple[Any, tuple[str, ...]], Any] = {}
        if config is None:
            return
        self._model = str(vllm_config.model_config.served_model_name)
        speculative = vllm_config.speculative_config
        _unregister()
        drafts = speculative.num_speculative_tokens if speculative is not None else 1
        self._create(drafts if config.tree is None else config.tree.depth)
        for engine in engine_indexes:
            # Another process may have served for a while already.
            # No step will ever say what becomes of the mode where none verifies.
            mode = config.mode if speculative is not None else Mode.OFF
            self._show_mode(mode.value, engine, 0)
            self._show_zeros((self._model, str(engine)))
            if config.draft_tokens is not None:
                for drafts in range(config.draft_tokens.most + 1):
                    self._draft_steps.labels(self._model, str(engine), str(drafts))
            if config.tree is not None and speculative is not None:
                self._tree_nodes.labels(self._model, str(engine)).set(config.tree.nodes)
                self._tree_depth.labels(self._model, str(engine)).set(config.tree.depth)
                for reason in CHAIN_REASONS:
                    self._chain_requests.labels(self._model, str(engine), reason)

    def _create(self, most_accepted: int) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"nwor_{name}", text, (*_LABELS, *labels))

        self._windows = counter("windows", "Verify windows, by what became of them.", "outcome")
        self._tokens = counter("tokens", "Tokens of verify windows.", "kind")
        self._bytes = counter("kv_write_bytes", "Bytes written for windows, on all ranks.", "path")
        self._baseline = counter("kv_write_bytes_baseline", "Bytes that direct writes would have cost.")
        self._direct = counter("direct_windows", "Windows written directly against the mode.", "reason")
        self._by_end = counter("request_windows", "Windows of requests that ended.", "end")
        self._commits = counter("commits", "Commits and restores whose duration was measured.")
        self._commit_seconds = counter("commit_seconds", "Duration of those commits and restores.")
        self._switch = counter("mode_switches", "Switches of the mode over the admin API.", "mode")
        self._mismatch = counter("accounting_mismatches", "Figures that did not agree.", "figure")
        self._failures = counter("step_failures", "Exceptions that were traced to requests.", "place")
        self._failed = counter("failed_requests", "Requests that ended for such an exception.", "place")
        self._accepted = CountedHistogram(
            "nwor_window_accepted_tokens",
            "Accepted draft tokens of a window.",
            _LABELS,
            buckets=[float(count) for count in range(most_accepted + 1)],
        )
        self._draft_steps = counter(
            "draft_steps", "Steps, by the draft tokens chosen for each request.", "draft_tokens"
        )
        self._chain_requests = counter(
            "chain_requests", "Requests whose windows had to be chains beside trees.", "reason"
        )
        # One front end hears of a step: the latest value counts, whoever has it. Which mode is the latest,
        # the processes settle among themselves.
        self._mode = Gauge(
            "nwor_mode", "1 for the mode in force.", (*_LABELS, "mode"), multiprocess_mode="mostrecent"
        )
        self._held = Gauge(
            "nwor_staging_held_bytes",
            "Bytes kept outside the paged cache by the latest verify step, on all ranks.",
            _LABELS,
            multiprocess_mode="mostrecent",
        )

        (
            self._chosen,
            self._estimate,
            self._without,
            self._auto,
            self._least_gain,
            self._tree_nodes,
            self._tree_depth,
        ) = (
            Gauge(f"nwor_{name}", text, (*_LABELS, *more), multiprocess_mode="mostrecent")
            for name, text, more in (
                ("draft_tokens_chosen", "Draft tokens for each request of a step, as chosen last.", ()),
                (
                    "draft_acceptance_estimate",
                    "Chance that the drafts up to a position are accepted.",
                    ("position",),
                ),
                ("seconds_without_drafts", "Seconds since a step last made drafts; 0 while steps do.", ()),
                ("draft_tokens_auto", "1 while the engine chooses the number of draft tokens.", ()),
                (
                    "draft_least_gain",
                    "What a draft has to add to its request's window, relatively; 0 while windows are alike.",
                    (),
                ),
                ("tree_nodes", "Draft tokens of a window that is a tree.", ()),
                ("tree_depth", "Most draft tokens of such a window that can be accepted.", ()),
            )
        )

    def _show_zeros(self, labels: tuple[str, str]) -> None:
        """Have what is known to come start at 0, so that rates count the first event too."""
        self._count(WindowCounts(), labels)
        for outcome in ("committed", "restored", "direct"):
            self._windows.labels(*labels, outcome)
        for end in _ENDS:
            self._by_end.labels(*labels, end)
        for figure in MISMATCHES:
            self._mismatch.labels(*labels, figure)
        for name, reason in REASONS.items():
            if reason.when == "step":
                self._direct.labels(*labels, name)
        for place in PLACES:
            self._failures.labels(*labels, place)
            self._failed.labels(*labels, place)
        for mode in Mode:
            self._switch.labels(*labels, mode.value)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Add what one step reported."""
        new: EngineFigures | None = getattr(scheduler_stats, "nwor", None)
        if not self.enabled or new is None:
            return
        labels = (self._model, str(engine_idx))
        if new.kinds:
            self._count(Tally(new.kinds, new.extra).counts(new.token_bytes), labels)
            self._child(self._held, *labels).set(new.held_bytes)
        for end in _ENDS:
            if windows := getattr(new, f"{end}_windows"):
                self._child(self._by_end, *labels, end).inc(windows)
        for figure, times in new.mismatches.items():
            self._mismatch.labels(*labels, figure).inc(times)
        for place, times in new.failures.items():
            self._failures.labels(*labels, place).inc(times)
        for place, times in new.failed_requests.items():
            self._failed.labels(*labels, place).inc(times)
        for drafts, steps in new.draft_steps.items():
            self._child(self._draft_steps, *labels, str(drafts)).inc(steps)
        for reason, requests in new.chain_requests.items():
            self._child(self._chain_requests, *labels, reason).inc(requests)
        if new.drafting is not None:
            self._show_drafting(new.drafting, engine_idx)
        self._child(self._commits, *labels).inc(new.commits)
        self._child(self._commit_seconds, *labels).inc(new.commit_seconds)
        # A step that began before a switch may report after it.
        if new.mode and new.switches >= self._switches.get(engine_idx, 0):
            self._switches[engine_idx] = new.switches
            if new.mode != self._modes.get(engine_idx):
                self._show_mode(new.mode, engine_idx, new.switches)

    def _show_drafting(self, drafting: dict[str, Any], engine: int) -> None:
        """Show what an engine chooses, and leave its explanation for the admin API of any process."""
        self.peers.tell(f"drafting-{engine}", (time.monotonic(), drafting))
        labels = (self._model, str(engine))
        self._child(self._chosen, *labels).set(drafting["chosen"])
        self._child(self._auto, *labels).set(drafting["auto"])
        self._child(self._without, *labels).set(drafting["seconds_without_drafts"])
        self._child(self._least_gain, *labels).set(drafting["least_gain"])
        for position, chance in enumerate(drafting["acceptance"]):
            self._child(self._estimate, *labels, str(position)).set(chance)

    def drafting(self) -> list[dict[str, Any]]:
        """Return each engine's latest explanation of its draft tokens, whichever process has heard it."""
        now = time.monotonic()  # the machine's: the same for all processes
        found = []
        for engine in sorted(self._switches):
            if heard := self.peers.told(f"drafting-{engine}"):
                when, drafting = heard
                found.append({"engine": engine, "seconds_ago": round(now - when, 1), **drafting})
        return found

    def _child(self, metric: Any, *labels: str) -> Any:
        """Return ``metric.labels(...)``, looked up once: this runs in every step."""
        key = (metric, labels)
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = metric.labels(*labels)
        return child

    def _count(self, counts: WindowCounts, labels: tuple[str, str]) -> None:
        for outcome, windows in counts.outcomes.items():
            self._child(self._windows, *labels, outcome).inc(windows)
        for reason, windows in counts.direct_windows.items():
            self._child(self._direct, *labels, reason).inc(windows)
        for kind in ("first", "draft", "accepted", "rejected", "committed", "staged"):
            self._child(self._tokens, *labels, kind).inc(getattr(counts, f"{kind}_tokens"))
        for path in ("direct", "commit", "stage", "log", "restore"):
            self._child(self._bytes, *labels, path).inc(getattr(counts, f"{path}_bytes"))
        self._child(self._baseline, *labels).inc(counts.baseline_bytes)
        accepted = self._child(self._accepted, *labels)
        for tokens, windows in enumerate(counts.accepted_windows):
            if windows:
                accepted.observe_times(tokens, windows)

    def switched(self, changes: Iterable[Mapping[str, Any]]) -> None:
        """Note a switch that every rank of every engine has confirmed.

        Args:
            changes: of each engine, in their order, what the rank says whose figures are read: ``old``, the
                mode before; ``new``, the mode from now on; ``switches``, its mode changes so far, this one
                included.

        """
        for engine, change in zip(self._switches, changes, strict=False):
            self._switches[engine] = max(self._switches[engine], change["switches"])
            if self.enabled:
                self._show_mode(change["new"], engine, change["switches"])
                if change["new"] != change["old"]:
                    self._switch.labels(self._model, str(engine), change["new"]).inc()

    def _show_mode(self, mode: str, engine: int, switches: int) -> None:
        """Show the mode in force of an engine, unless another process knows of a later switch.

        Args:
            mode: the mode.
            engine: the engine's number.
            switches: its mode changes so far, the one to this mode included.

        """
        self._modes[engine] = mode
        with self.peers.in_order(engine, switches) as latest:
            if latest:
                for known in Mode:
                    self._child(self._mode, self._model, str(engine), known.value).set(known.value == mode)

    def log_engine_initialized(self) -> None:
        """Nothing to say: vLLM calls this once an engine is ready."""


def attach_metrics(engine: Any) -> NworStatLogger | None:
    """Have an ``AsyncLLM`` feed the metrics.

    Args:
        engine: the front end's engine client.

    Returns:
        The logger; None where vLLM's statistics are turned off (``--disable-log-stats``).

    """
    manager = getattr(engine, "logger_manager", None)
    if manager is None:
        return None
    for logger in manager.stat_loggers:
        if isinstance(logger, NworStatLogger):
            return logger
    logger = NworStatLogger(engine.vllm_config, list(manager.engine_indexes), Peers.of(engine))
    manager.stat_loggers.append(logger)
    return logger


def _unregister() -> None:
    """Make room for a later engine's metrics in the same process, as vLLM does for its own."""
    for collector in list(REGISTRY._collector_to_names):
        if str(getattr(collector, "_name", "")).startswith("nwor_"):
            REGISTRY.unregister(collector)
