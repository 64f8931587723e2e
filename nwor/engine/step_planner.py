"""Deciding what a step does: once for each shape of a step, until what holds for all of them changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from nwor.counts.histogram import INT32
from nwor.counts.records import Treatment
from nwor.engine.eligibility import REASONS
from nwor.engine.step_plan import MOST_KNOWN, KnownStep, int32_bytes, leading_windows
from nwor.modes import Mode
from nwor.worker_state import WorkerState

#: A step of at most so many rows keeps its tensors whatever share of them its windows have. vLLM captures
#: graphs up to here by default, and their pool holds as many rows of every layer.
FEW_ROWS = 512
#: And so does a step with at most so many times the rows of its window batch. A copy pays where it lets go of
#: more than it takes; where windows are half of a step it does not.
FEW_TIMES = 2


#: What a step's shape is known by: whether a graph copies its windows aside, the longest window that the
#: graph is for, then rows and drafts of each request as int32, in bytes. Of a full step it is whether a graph
#: copies, and how many requests there are; of a trimmed one its rows, too.
_Key = tuple[object, ...]


class StepPlanner:
    """Knows the shapes of the steps so far.

    Args:
        state: the rank's state.
        longest_window: rows of the longest window.

    Attributes:
        largest_graph: rows of the largest batch that CUDA graphs may be captured for; 0 without graphs. Set
            before the first step.
        copy_always: whether no step's keys and values stay where they are; likewise.

    """

    def __init__(self, state: WorkerState, longest_window: int) -> None:
        self._state = state
        self._longest = longest_window
        self.largest_graph = 0
        self.copy_always = False
        self._known: dict[_Key, KnownStep] = {}
        self._latest_key: _Key | None = None
        self._latest: KnownStep | None = None
        self._mode: Mode | None = None
        self._refusal: str | None = None

    def known(
        self,
        query_lens: Sequence[int] | npt.NDArray[Any],
        draft_counts: Sequence[int] | npt.NDArray[Any],
        refusal: str | None,
        full: int = 0,
        graph_copies: bool | None = None,
        trimmed_tokens: int | None = None,
        longest: int | None = None,
    ) -> KnownStep:
        """Return what holds for all steps of this shape.

        Args:
            query_lens: rows of each request.
            draft_counts: draft tokens of each; its last rows.
            refusal: why nothing can be staged; None where it can.
            full: how many requests there are, where each has all its drafts and no rows beside its window; 0
                for any other step. The shape then follows, and the numbers are not looked at again.
            graph_copies: whether the step's mixed graph copies windows aside; None where it runs in none.
            trimmed_tokens: the step's rows, where the device leaves out some of the draft tokens above, and
                their rows; None where it leaves out none.
            longest: rows of the longest window that the step's graph is for; None for any of the engine's.

        """
        key: _Key = (
            (graph_copies, full)
            if full
            else (graph_copies, longest, int32_bytes(query_lens), int32_bytes(draft_counts))
        )
        if trimmed_tokens is not None:
            key = (*key, trimmed_tokens)
        if self._mode is not self._state.mode or self._refusal != refusal:
            self._known.clear()
            self._mode, self._refusal = self._state.mode, refusal
        elif key == self._latest_key:  # comparing costs less than hashing
            assert self._latest is not None
            return self._latest
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = self._work_out(
                int32_bytes(query_lens), int32_bytes(draft_counts), graph_copies, trimmed_tokens, longest
            )
        self._latest_key, self._latest = key, known
        return known

    def failed(self, draft_counts: Sequence[int] | npt.NDArray[Any], error: Exception) -> KnownStep:
        """Turn NWOR off after an error in :meth:`known`, and return a step that is written directly.

        Args:
            draft_counts: draft tokens of each request of the step.
            error: the error.

        """
        mode = self._state.mode
        self._state.fail("plan", error)
        reason = "" if mode is Mode.OFF else "fault"  # in `off` the windows are direct anyway
        return KnownStep(Treatment(mode.value, int32_bytes(draft_counts), 0, 0, outside=reason), [])

    def _work_out(
        self,
        query_bytes: bytes,
        drafts: bytes,
        graph_copies: bool | None,
        trimmed_tokens: int | None,
        longest: int | None,
    ) -> KnownStep:
        state = self._state
        query_lens: list[int] = np.frombuffer(query_bytes, INT32).tolist()
        rows = sum(query_lens) if trimmed_tokens is None else trimmed_tokens
        draft_counts = np.frombuffer(drafts, INT32)
        requests = tokens = 0
        reason = inside = ""
        mode = state.graphs_mode
        if mode is not state.mode:
            inside = "fault"  # of windows that the graphs leave, and that are then written as a whole
        if mode is not Mode.OFF:
            reason = self._refusal or ""
            if not reason:
                requests, tokens = leading_windows(query_lens, longest or self._longest)
                if draft_counts[requests:].any():
                    reason = "batch_order"
                    state.log_once(reason, REASONS[reason].text)
                if trimmed_tokens is not None:
                    # Requests behind the windows have no drafts that could be left out. Where one has, nobody
                    # knows where the windows end.
                    requests, tokens = (0, 0) if reason else (requests, rows - sum(query_lens[requests:]))
        held = copied = 0
        if requests and mode is Mode.STAGE:
            held = tokens * state.engine_source_bytes
            # The memory of steps that a graph may serve is the graph's, and let go of by nobody.
            large = rows > max(FEW_TIMES * tokens, FEW_ROWS, self.largest_graph)
            if (large or self.copy_always) if graph_copies is None else graph_copies:
                copied = state.engine_source_bytes
        elif requests:
            held = (tokens - requests) * state.engine_token_bytes
        treatment = Treatment(
            mode.value,
            drafts,
            requests,
            tokens,
            inside=inside,
            outside=reason,
            held_bytes=held,
            copied_bytes=copied,
        )
        return KnownStep(treatment, query_lens[:requests], copy=copied > 0 and graph_copies is None)
