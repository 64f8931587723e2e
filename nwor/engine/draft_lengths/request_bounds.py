"""How many drafts a request's windows may have: as it asked, and none where they are hardly ever accepted.

The drafter drafts for every request of a step alike, so its cache stays right; what is cut is what the next
step verifies. Both bounds act on ``Request.spec_token_ids``, from which vLLM's scheduler takes the windows.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from nwor.config import NworConfig
from nwor.engine.stats.figures import RequestFigures
from nwor.engine.trees.requirements import needs_chain

logger = logging.getLogger("vllm.nwor.scheduler")

#: Name of the bound among a request's ``SamplingParams.extra_args``.
MAX_DRAFT_TOKENS = "nwor_max_draft_tokens"

#: Windows over which a request's accepted drafts are averaged, the latest counting most, and that it takes
#: to judge it.
AVERAGED = 32
#: A request with fewer accepted drafts a window than this stops drafting.
RARE = 0.1
#: Steps from one probing window, of one draft, to the next.
PROBE_EVERY = 32
#: Windows of one draft after an accepted probe, and how many accepted ones of them bring the request back.
TRIAL, TRIAL_ACCEPTED = 8, 2

#: Reasons for a bound, as answers name them.
ASKED, RARELY_ACCEPTED = "asked", "rarely accepted"

_KEEP = 1 - 1 / AVERAGED
#: Row of requests that are not watched.
_NONE = 0


@dataclass
class _Bound:
    """The bound of one request.

    Attributes:
        asked: most drafts of a window, as the request wants it; None where it wants nothing.
        chain: whether its windows have to be chains though others are trees.
        stopped: whether it drafts no longer, for want of accepted drafts.
        ever_stopped: whether it was at any time.
        waited: steps since its latest probing window.
        trial: windows left of those that follow an accepted probe.
        trial_accepted: accepted ones so far.
        skipped: steps in which it would have had drafts.

    """

    asked: int | None = None
    chain: bool = False
    stopped: bool = False
    ever_stopped: bool = False
    waited: int = 0
    trial: int = 0
    trial_accepted: int = 0
    skipped: int = 0

    @property
    def bounds(self) -> bool:
        """Whether anything is bounded now."""
        return self.stopped or self.asked is not None or self.chain

    @property
    def told(self) -> bool:
        """Whether answers tell of it: what no window of a chain can have is no bound."""
        return self.ever_stopped or self.asked is not None

    def cut(self, drafts: list[int], deep: int | None = None) -> list[int]:
        """Return those of a step's drafts that the next window takes; to be called once a step.

        Args:
            drafts: of the step.
            deep: passes of the drafter, where they are those of a tree: no chain is longer.

        """
        most = len(drafts) if self.asked is None else self.asked
        if self.chain and deep is not None:
            most = min(most, deep)
        if self.stopped:
            self.waited += 1
            probes = self.trial > 0 or self.waited >= PROBE_EVERY
            if probes:
                self.waited = 0
            most = min(most, int(probes))
        self.skipped += not most
        return drafts[:most]

    def probed(self, windows: int, accepted: int) -> None:
        """Take in windows of a request that drafts no longer, and bring it back where they were accepted."""
        if not self.trial:
            if accepted:
                self.trial, self.trial_accepted = TRIAL, 0
            return
        self.trial = max(0, self.trial - windows)
        self.trial_accepted += accepted
        if not self.trial:
            self.stopped = self.trial_accepted < TRIAL_ACCEPTED


class RequestBounds:
    """The bounds of all requests of one engine.

    Args:
        watch: whether requests whose drafts are hardly ever accepted stop drafting.

    Attributes:
        active: by id, the requests that have a bound now.

    """

    def __init__(self, watch: bool = False) -> None:
        self._watch = watch
        self.active: dict[str, _Bound] = {}
        # Those that have or had one.
        self._bounds: dict[str, _Bound] = {}
        self._rows: dict[str, int] = {}
        self._unused: list[int] = []
        # Of each row, weighted: accepted drafts and windows; and windows, not weighted.
        self._sums: npt.NDArray[np.float64] = np.zeros((3, 1))

    @property
    def watch(self) -> bool:
        """Whether requests whose drafts are hardly ever accepted stop drafting."""
        return self._watch

    @watch.setter
    def watch(self, watch: bool) -> None:
        if watch == self._watch:
            return
        self._watch = watch
        self._sums[:] = 0
        for request_id, bound in self._bounds.items():
            bound.stopped = False
            self._settle(request_id, bound)

    def add(self, request_id: str, asked: int | None, chain: bool = False) -> None:
        """Take in a request, or what it asks for from now on.

        Args:
            request_id: its id.
            asked: most drafts of its windows; None where it wants no bound.
            chain: whether they have to be chains though others are trees.

        """
        bound = self._bounds.get(request_id)
        if bound is None and (asked is not None or chain):
            bound = self._bounds[request_id] = _Bound()
        if bound is not None:
            bound.asked, bound.chain = asked, chain
            self._settle(request_id, bound)
        if asked != 0 and request_id not in self._rows:
            if not self._unused:
                rows = self._sums.shape[1]
                self._sums = np.pad(self._sums, ((0, 0), (0, rows)))
                self._unused = list(range(2 * rows - 1, rows - 1, -1))
            row = self._rows[request_id] = self._unused.pop()
            self._sums[:, row] = 0

    def end(self, request_id: str) -> None:
        """Let a request go."""
        self._bounds.pop(request_id, None)
        self.active.pop(request_id, None)
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._unused.append(row)

    def observe(self, request_ids: Sequence[str], accepted: npt.NDArray[np.int32]) -> None:
        """Take in windows of steps in a row that had the same requests.

        Args:
            request_ids: the request of each window of a step.
            accepted: int32 [steps, windows], accepted drafts.

        """
        if not self._watch:
            return
        rows = np.array([self._rows.get(request, _NONE) for request in request_ids], np.int64)
        steps = len(accepted)
        weights = _KEEP ** np.arange(steps - 1, -1, -1)
        sums = self._sums
        sums[:2, rows] *= _KEEP**steps
        sums[0, rows] += weights @ accepted
        sums[1, rows] += weights.sum()
        sums[2, rows] += steps
        rare = (sums[2, rows] >= AVERAGED) & (sums[0, rows] < RARE * sums[1, rows]) & (rows != _NONE)
        for place, request_id in enumerate(request_ids):
            bound = self.active.get(request_id)
            if bound is not None and bound.stopped:
                bound.probed(steps, int(accepted[:, place].sum()))
                if not bound.stopped:
                    sums[:, rows[place]] = 0
                    self._settle(request_id, bound)
            elif rare[place]:
                bound = self._bounds.setdefault(request_id, _Bound())
                bound.stopped = bound.ever_stopped = True
                bound.waited = bound.trial = 0
                self._settle(request_id, bound)

    def _settle(self, request_id: str, bound: _Bound) -> None:
        if bound.bounds:
            self.active[request_id] = bound
        else:
            self.active.pop(request_id, None)

    def enter(self, request_id: str, figures: RequestFigures) -> None:
        """Put a request's bound into its figures."""
        bound = self._bounds.get(request_id)
        if bound is None or not bound.told:
            return
        figures.nwor_max_draft_tokens = 0 if bound.stopped else bound.asked
        figures.nwor_steps_without_drafts = bound.skipped
        figures.nwor_why_bounded = RARELY_ACCEPTED if bound.ever_stopped else ASKED


def asked_bound(request: Any) -> int | None:
    """Return the most drafts that a request wants in its windows; None where it asks for no bound.

    The server refuses what is no number from 0; an engine without it ignores that, and says so in the log.
    """
    extra: Mapping[str, Any] | None = getattr(request.sampling_params, "extra_args", None)
    asked = extra.get(MAX_DRAFT_TOKENS) if extra else None
    if asked is None or (isinstance(asked, int) and asked >= 0):
        return asked
    logger.warning("Request %s: %s must be a whole number, 0 or more", request.request_id, MAX_DRAFT_TOKENS)
    return None


class BoundedDrafts(Scheduler):
    """Mixin before a scheduler class: windows of single requests have no more drafts than their bounds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = NworConfig.from_additional_config(self.vllm_config.additional_config)
        self._nwor_watches = config is not None and config.draft_tokens is not None
        self._nwor_bounds = RequestBounds(self._nwor_watches)
        self._nwor_tree = None if config is None else config.tree
        self._nwor_processors = self._nwor_tree is not None and bool(
            self.vllm_config.model_config.logits_processors
        )

    def add_request(self, request: Request) -> None:
        """Take in a request."""
        super().add_request(request)
        chain = self._nwor_tree is not None and bool(
            needs_chain(request.sampling_params, self._nwor_processors)
        )
        self._nwor_bounds.add(request.request_id, asked_bound(request), chain)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._nwor_bounds.end(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        # Where steps are scheduled ahead, this gives each request placeholders of the drafts to come.
        super()._update_after_schedule(scheduler_output)
        if self._nwor_bounds.active:
            self._nwor_cut(scheduler_output.num_scheduled_tokens)

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Take in a step's drafts, where the next one is scheduled with them."""
        super().update_draft_token_ids(draft_token_ids)
        if self._nwor_bounds.active:
            self._nwor_cut(frozenset(draft_token_ids.req_ids))

    def _nwor_cut(self, drafted: Collection[str]) -> None:
        """Cut the drafts of bounded requests.

        Args:
            drafted: ids of the requests for which the step drafts.

        """
        for request_id, bound in self._nwor_bounds.active.items():
            request = self.requests.get(request_id)
            if request is not None and request.spec_token_ids and request_id in drafted:
                drafts, tree = request.spec_token_ids, self._nwor_tree
                deep = None
                if tree is not None and tree.is_tree(len(drafts)):
                    deep = tree.depth_of(len(drafts))
                request.spec_token_ids = bound.cut(drafts, deep)
