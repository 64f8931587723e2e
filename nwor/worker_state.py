"""What one rank knows of itself: the mode in force, what it may switch to, and what its windows did."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nwor.config import NworConfig
from nwor.counts.formulas import WindowCounts
from nwor.counts.histogram import count_kinds
from nwor.counts.records import EarlierStages, Tally, Treatment, WorkerFacts, add_bytes
from nwor.draft_costs import StepCosts, settle
from nwor.errors import ConfigError
from nwor.fast_paths import FastPaths
from nwor.modes import Mode

logger = logging.getLogger(__name__)

#: Steps whose windows may wait to be counted by kind.
_MOST_WAITING = 128

#: Changes that are remembered.
_KEPT_CHANGES = 20


@dataclass
class WorkerState:
    """State and counters of one rank.

    Attributes:
        config: the settings that the engine was started with.
        mode: the mode that was asked for; :attr:`mode_in_force` is what comes of it.
        token_bytes: bytes that one token takes in all staged layers of this rank.
        source_token_bytes: bytes of the same token's keys and values as the forward pass makes them.
        ranks: ranks of a pipeline stage; each of them holds a share of every token and sees every request.
        other_token_bytes: as ``token_bytes``, on one rank of each of the other pipeline stages together.
        other_source_bytes: as ``source_token_bytes``, likewise.
        stages_copy: whether pipeline stages before the last copy windows aside until they learn the counts.
        shared_graphs: whether all ranks of tensor parallelism have to replay the same full CUDA graphs: an
            all-reduce in one reads its peers' memory where it lay when they captured that graph.
        last_stage: whether this rank samples, and so counts; those of earlier pipeline stages count nothing.
        switches: mode changes so far.
        steps: verify steps so far.
        unsupported: reason why nothing can be staged in this engine, and its detail; None where it can.
        fault: what turned NWOR off while it ran; None where nothing did.
        self_checks: steps whose cache was checked.
        capture_seconds: time that graphs of their own for ``stage`` took at start-up.
        capture_bytes: device memory that those graphs took.
        mixed_graph_rows: rows of the largest mixed step that runs in one CUDA graph; 0 where none does.
        mixed_graph_steps: steps that did.
        mixed_graphs_why_not: why mixed steps do not run in one graph; None where they do.
        windows: windows since the start.
        fast_paths: what is shortened of vLLM's own code here, in every mode.
        draft_tokens: draft tokens as they were asked for while the engine ran, a number or bounds; empty
            where the settings hold.
        draft_vocabulary: how many ``tokens`` are drafted ``of`` those that the model has; None where all are.
        draft_costs: what steps cost by their draft tokens, as measured at the start; None where that was not.
        draft_costs_why_not: why it was not; None where it was, or where the number of draft tokens is fixed.
        changes: the latest changes that somebody asked for, oldest first: when, by which key, what.
        serving: whether the engine has warmed up; requests before that are not anybody's.
        chain_requests: where windows are trees, requests whose windows had to be chains, by reason. Who
            counts calls :meth:`forget_facts`.

    """

    config: NworConfig
    mode: Mode
    token_bytes: int = 0
    source_token_bytes: int = 0
    ranks: int = 1
    other_token_bytes: int = 0
    other_source_bytes: int = 0
    stages_copy: bool = False
    shared_graphs: bool = False
    last_stage: bool = True
    switches: int = 0
    steps: int = 0
    unsupported: tuple[str, str] | None = None
    fault: str | None = None
    self_checks: int = 0
    capture_seconds: float = 0.0
    capture_bytes: int = 0
    mixed_graph_rows: int = 0
    mixed_graph_steps: int = 0
    mixed_graphs_why_not: str | None = "not captured"
    windows: int = 0
    draft_tokens: str = ""
    draft_vocabulary: dict[str, int] | None = None
    draft_costs: StepCosts | None = None
    draft_costs_why_not: str | None = None
    changes: list[dict[str, str]] = field(default_factory=list)
    serving: bool = False
    chain_requests: dict[str, int] = field(default_factory=dict)
    _logged: set[str] = field(default_factory=set)
    _tally: Tally = field(default_factory=Tally)
    _waiting: deque[tuple[Treatment, bytes]] = field(default_factory=deque)
    _folding: threading.Lock = field(default_factory=threading.Lock)
    _facts: WorkerFacts | None = None
    fast_paths: FastPaths = field(init=False)
    _stage_graphs: bool = False

    def __post_init__(self) -> None:
        """Start with the fast paths as the settings have them."""
        self.fast_paths = FastPaths(self.config)

    @property
    def mode_in_force(self) -> Mode:
        """The mode that steps run in: ``off`` where nothing can be staged, whatever was asked for."""
        return Mode.OFF if self.unsupported is not None else self.mode

    @property
    def graphs_mode(self) -> Mode:
        """The mode whose CUDA graphs this rank replays.

        That is the mode in force, unless a fault turned ``stage`` off on this rank while those with which it
        shares graphs may go on: then it replays those of ``stage`` until all ranks are given a mode again.
        """
        return Mode.STAGE if self._stage_graphs else self.mode

    def switch(self, mode: Mode) -> Mode:
        """Put ``mode`` in force from the next step on and return the one before.

        Raises:
            ConfigError: if the mode is not among those enabled at start-up.

        """
        if mode not in self.config.modes:
            enabled = ", ".join(self.config.modes)
            raise ConfigError(
                f"NWOR mode {mode.value!r} was not enabled at start-up (enabled: {enabled}); "
                f"restart with it among the setting 'modes'"
            )
        old, self.mode = self.mode, mode
        self._stage_graphs = False
        self.switches += old is not mode
        self.forget_facts()
        if mode is not Mode.OFF:
            self.fault = None
        return old

    def set_draft_tokens(self, wanted: str) -> str:
        """Have the engine choose within other bounds, or keep to a number, and return what held before.

        Args:
            wanted: ``auto`` for the bounds of the start, bounds within those, or a number.

        Raises:
            ConfigError: if it is none of these.

        """
        started = self.config.draft_tokens
        wanted = settle(started, wanted)
        old, self.draft_tokens = self.draft_tokens or str(started), wanted
        self.forget_facts()
        return old

    def note(self, asked: Mapping[str, str], what: str) -> None:
        """Remember a change.

        It is kept here, where every API server process finds it.

        Args:
            asked: who asked for it and when (``key``, ``when``); empty where nobody is known.
            what: what changed.

        """
        if asked:
            self.changes = [*self.changes, {**asked, "what": what}][-_KEPT_CHANGES:]

    def fail(self, where: str, error: BaseException) -> None:
        """Turn NWOR off after an error in ``where``; the engine goes on with direct writes."""
        self.fault = f"{where}: {type(error).__name__}: {error}"
        if self.shared_graphs and self.mode is Mode.STAGE:
            self._stage_graphs = True
        self.switches += self.mode is not Mode.OFF
        self.mode = Mode.OFF
        self.forget_facts()
        logger.error("NWOR is off after an error (%s); the engine goes on with direct writes", self.fault)

    def log_once(self, reason: str, detail: str) -> None:
        """Log a fall-back the first time that its reason comes up."""
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("NWOR writes windows directly, reason %s: %s", reason, detail)

    @property
    def counts(self) -> WindowCounts:
        """What the windows since the start or the last reset did, on all ranks together."""
        self._fold()
        with self._folding:
            return self._tally.counts(self.engine_token_bytes)

    @property
    def engine_token_bytes(self) -> int:
        """Bytes that one token takes in the staged layers of all ranks.

        Heads are spread evenly: every rank of a stage holds as much of a token as any other.
        """
        return (self.token_bytes + self.other_token_bytes) * self.ranks

    @property
    def engine_source_bytes(self) -> int:
        """Bytes of the same token's keys and values as the forward pass makes them, on all ranks."""
        return (self.source_token_bytes + self.other_source_bytes) * self.ranks

    @property
    def earlier(self) -> EarlierStages | None:
        """The pipeline stages before this rank's, which is the last; None without pipeline stages."""
        if not self.other_token_bytes:
            return None
        copied = self.other_source_bytes * self.ranks if self.stages_copy else 0
        return EarlierStages(self.other_token_bytes * self.ranks, copied)

    @property
    def facts(self) -> WorkerFacts:
        """What rides home with each step; a new object where something has changed."""
        if self._facts is None:
            self._facts = WorkerFacts(
                self.mode_in_force.value,
                self.switches,
                self.engine_token_bytes,
                self.earlier,
                self.draft_tokens,
                tuple(self.chain_requests.items()),
            )
        return self._facts

    def forget_facts(self) -> None:
        """Have :attr:`facts` made anew: what they say has changed."""
        self._facts = None

    def count(self, treatment: Treatment, sampled: bytes, windows: int) -> None:
        """Count the windows of a step.

        Args:
            treatment: how they were treated.
            sampled: int32 [requests]: tokens that the step gave each request.
            windows: how many windows the step had.

        """
        self.windows += windows
        self._waiting.append((treatment, sampled))
        if len(self._waiting) >= _MOST_WAITING:
            self._fold()

    @property
    def tally(self) -> Tally:
        """All windows since the start or the last reset."""
        self._fold()
        return self._tally

    def _fold(self) -> None:
        # Steps are counted by one thread and asked for by another.
        with self._folding:
            steps: dict[Treatment, list[bytes]] = {}
            while self._waiting:
                treatment, sampled = self._waiting.popleft()
                steps.setdefault(treatment, []).append(sampled)
            for treatment, parts in steps.items():
                for kind, times in count_kinds(treatment, parts).items():
                    self._tally.add(kind, times)

    def add_bytes(self, more: Mapping[str, int]) -> None:
        """Count bytes by path that the figures of the windows' kinds do not say."""
        with self._folding:
            add_bytes(self._tally.extra, more)

    def reset(self) -> None:
        """Start counting anew."""
        self._fold()
        with self._folding:
            self._tally = Tally()
        self.self_checks = 0

    def report(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        return {
            "mode": self.mode_in_force.value,
            "mode_asked": self.mode.value,
            "modes": [mode.value for mode in self.config.modes],
            "token_bytes": self.token_bytes,
            "ranks": self.ranks,
            "last_stage": self.last_stage,
            "switches": self.switches,
            "steps": self.steps,
            "unsupported": None
            if self.unsupported is None
            else {"reason": self.unsupported[0], "detail": self.unsupported[1]},
            "fault": self.fault,
            "fast_paths": self.fast_paths.report(),
            "self_checks": self.self_checks,
            "capture_seconds": self.capture_seconds,
            "capture_bytes": self.capture_bytes,
            "mixed_graphs": {
                "rows": self.mixed_graph_rows,
                "steps": self.mixed_graph_steps,
                "why_not": self.mixed_graphs_why_not,
            },
            "draft_costs": None if self.draft_costs is None else self.draft_costs.plain(),
            "draft_costs_why_not": self.draft_costs_why_not,
            "draft_vocabulary": self.draft_vocabulary,
            "draft_tokens": self.draft_tokens or str(self.config.draft_tokens or ""),
            "tree": None
            if self.config.tree is None
            else {**self.config.tree.to_mapping(), "chain_requests": dict(self.chain_requests)},
            "changes": self.changes,
            "counts": self.counts.plain(),
        }
