"""How figures travel from the engine's scheduler to the front end.

Two of vLLM's own records go there with every step: a request's acceptance (``RequestSpecDecodeMetrics``) and
the scheduler's statistics (``SchedulerStats``). Both get one more field here, in a subclass; the front end's
decoder is told to build the subclasses.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats

from nwor.counts.records import Tally, WindowKind

#: What is compared: a step's accepted tokens with vLLM's count of that step, a finished request's with vLLM's
#: count of that request, and the windows that arrived with those that the rank counted.
MISMATCHES = ("accepted_tokens", "request", "windows")


@dataclass
class RequestFigures(RequestSpecDecodeMetrics):
    """vLLM's acceptance figures of one sequence, and what became of its windows.

    Attributes:
        nwor: windows by kind.
        nwor_token_bytes: bytes of one token over the staged layers of all ranks.
        nwor_extra: bytes by path that were written beyond the figures of the kinds.
        nwor_max_draft_tokens: the bound of its windows' draft tokens in force; None where there is none.
        nwor_steps_without_drafts: steps in which the bound left no drafts.
        nwor_why_bounded: why it has or had a bound; empty where it never had one.

    """

    nwor: dict[WindowKind, int] = field(default_factory=dict)
    nwor_token_bytes: int = 0
    nwor_extra: dict[str, int] = field(default_factory=dict)
    nwor_max_draft_tokens: int | None = None
    nwor_steps_without_drafts: int = 0
    nwor_why_bounded: str = ""

    @property
    def tally(self) -> Tally:
        """The windows as they are counted elsewhere."""
        return Tally(self.nwor, self.nwor_extra)


@dataclass
class EngineFigures:
    """What happened in one engine since its figures were last sent.

    Attributes:
        kinds: windows by kind.
        extra: bytes by path that were written beyond the figures of the kinds.
        token_bytes: bytes of one token over the staged layers of all ranks.
        mode: the mode in force.
        switches: mode changes since the engine started.
        commits: commits and restores whose duration is known.
        commit_seconds: their duration.
        held_bytes: bytes kept outside the paged cache by the latest verify step.
        finished_windows: windows of requests that finished.
        aborted_windows: windows of requests that were aborted.
        late_windows: windows whose request had ended when the step's result came.
        mismatches: figures that do not agree with each other, by what was compared.
        failures: exceptions that were traced to requests, by the place where they came up.
        failed_requests: requests that ended for them, by place.
        draft_steps: steps by the draft tokens that they made for each request, where those are chosen.
        chain_requests: where windows are trees, requests whose windows had to be chains, by reason.
        drafting: what is chosen at present, and why, as plain JSON values; None where nothing is.

    """

    kinds: dict[WindowKind, int] = field(default_factory=dict)
    extra: dict[str, int] = field(default_factory=dict)
    token_bytes: int = 0
    mode: str = ""
    switches: int = 0
    commits: int = 0
    commit_seconds: float = 0.0
    held_bytes: int = 0
    finished_windows: int = 0
    aborted_windows: int = 0
    late_windows: int = 0
    mismatches: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    failed_requests: dict[str, int] = field(default_factory=dict)
    draft_steps: dict[int, int] = field(default_factory=dict)
    chain_requests: dict[str, int] = field(default_factory=dict)
    drafting: dict[str, Any] | None = None


@dataclass
class EngineStats(SchedulerStats):
    """vLLM's statistics of one step, and the figures since they were last sent; None where there are none."""

    nwor: EngineFigures | None = None


def snapshot(figures: RequestSpecDecodeMetrics) -> RequestSpecDecodeMetrics:
    """Return a copy that later steps do not touch; another thread may be encoding it."""
    changes: dict[str, object] = {
        "histogram": list(figures.histogram),
        "per_step_accepted": list(figures.per_step_accepted),
        "per_step_drafted": list(figures.per_step_drafted),
    }
    if isinstance(figures, RequestFigures):
        changes["nwor"] = dict(figures.nwor)
        changes["nwor_extra"] = dict(figures.nwor_extra)
    return replace(figures, **changes)


def apply_decoder_patch() -> None:
    """Have the outputs of engines decoded into the classes above; has to run before a client is made."""
    EngineCoreOutput.__annotations__["spec_decode_metrics"] = RequestFigures | None
    EngineCoreOutputs.__annotations__["scheduler_stats"] = EngineStats | None
