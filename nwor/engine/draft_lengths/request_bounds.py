"""How many drafts a request's windows may have.

These are as many as it asked for, as are worth their rows, and none where they are hardly ever accepted.

The drafter drafts for every request of a step alike, so its cache stays right; what is cut is what the next
step verifies. Both bounds act on ``Request.spec_token_ids``, from which vLLM's scheduler takes the windows.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, expm1
from typing import Any

import numpy as np
import numpy.typing as npt
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from nwor.config import NworConfig
from nwor.engine.draft_lengths.fitting import gains, lengths
from nwor.engine.draft_lengths.request_acceptance import Floats, RequestAcceptance
from nwor.engine.stats.figures import RequestFigures
from nwor.engine.trees.requirements import needs_chain

logger = logging.getLogger("vllm.nwor.scheduler")

#: Name of the bound among a request's ``SamplingParams.extra_args``.
MAX_DRAFT_TOKENS = "nwor_max_draft_tokens"

#: A request with fewer accepted drafts a window than this stops drafting.
RARE = 0.1
#: Steps from one probing window, of one draft, to the next.
PROBE_EVERY = 32
#: Windows of one draft after an accepted probe, and how many accepted ones of them bring the request back.
TRIAL, TRIAL_ACCEPTED = 8, 2

#: Reasons for a bound, as answers name them.
ASKED, RARELY_ACCEPTED, FITTED = "asked", "rarely accepted", "fitted"


@dataclass
class _Bound:
    """The bound of one request.

    Attributes:
        asked: most drafts of a window, as the request wants it; None where it wants nothing.
        chain: whether its windows have to be chains though others are trees.
        stopped: whether it drafts no longer, for want of accepted drafts.
        ever_stopped: whether it was at any time, or had none that were worth their rows.
        waited: steps since its latest probing window.
        trial: windows left of those that follow an accepted probe.
        trial_accepted: accepted ones so far.
        skipped: steps in which it would have had drafts.
        fitted: most drafts that are worth their rows; None where all are.
        ever_fitted: whether that was a bound at any time.

    """

    asked: int | None = None
    chain: bool = False
    stopped: bool = False
    ever_stopped: bool = False
    waited: int = 0
    trial: int = 0
    trial_accepted: int = 0
    skipped: int = 0
    fitted: int | None = None
    ever_fitted: bool = False

    @property
    def idle(self) -> bool:
        """Whether its windows have no drafts, but for those that probe."""
        return self.stopped or self.fitted == 0

    @property
    def bounds(self) -> bool:
        """Whether anything is bounded now."""
        return self.stopped or self.asked is not None or self.chain or self.fitted is not None

    @property
    def told(self) -> bool:
        """Whether answers tell of it: what no window of a chain can have is no bound."""
        return self.ever_stopped or self.ever_fitted or self.asked is not None

    @property
    def now(self) -> int | None:
        """Most drafts of a window, as answers tell; None where there is no bound."""
        if self.idle:
            return 0
        return min((most for most in (self.asked, self.fitted) if most is not None), default=None)

    @property
    def why(self) -> str:
        """Why it is or was bounded, as answers tell."""
        if self.ever_stopped:
            return RARELY_ACCEPTED
        return ASKED if self.asked is not None else FITTED

    def cut(self, drafts: list[int], deep: int | None = None) -> list[int]:
        """Return those of a step's drafts that the next window takes; to be called once a step.

        Args:
            drafts: of the step.
            deep: passes of the drafter, where they are those of a tree: no chain is longer.

        """
        most = len(drafts) if self.asked is None else self.asked
        if self.chain and deep is not None:
            most = min(most, deep)
        if self.stopped or (self.fitted == 0 and deep is None):  # trees are not fitted
            self.waited += 1
            probes = self.trial > 0 or self.waited >= PROBE_EVERY
            if probes:
                self.waited = 0
            most = min(most, int(probes))
        elif self.fitted is not None and deep is None:
            most = min(most, self.fitted)
        self.skipped += not most
        return drafts[:most]

    def stop(self) -> None:
        """Begin to probe, where it drafted until now."""
        self.ever_stopped = True
        self.waited = self.trial = 0

    def probed(self, windows: int, accepted: int, least: float) -> None:
        """Take in windows of a request that drafts no longer, and bring it back where they were accepted.

        Args:
            windows: how many.
            accepted: drafts of theirs.
            least: gain that a draft needs to be worth its row.

        """
        if not self.trial:
            if accepted:
                self.trial, self.trial_accepted = TRIAL, 0
            return
        self.trial = max(0, self.trial - windows)
        self.trial_accepted += accepted
        if not self.trial and self.trial_accepted >= max(TRIAL_ACCEPTED, ceil(expm1(least) * TRIAL)):
            self.stopped, self.fitted = False, None


class RequestBounds:
    """The bounds of all requests of one engine.

    Args:
        watch: whether requests may be bounded by what is accepted of theirs.
        longest: most draft tokens of a chain.
        running: returns the ids of the requests that run.

    Attributes:
        active: by id, the requests that have a bound now.
        acceptance: what is known of each request.

    """

    def __init__(
        self, watch: bool = False, longest: int = 0, running: Callable[[], list[str]] = lambda: []
    ) -> None:
        self._watch = watch
        self.active: dict[str, _Bound] = {}
        # Those that have or had one.
        self._bounds: dict[str, _Bound] = {}
        self.acceptance = RequestAcceptance(longest)
        self._running = running
        self._idle: set[str] = set()
        # What windows are fitted by: the running requests, and what their drafts' chances were at the latest
        # look; the gain that a draft needs.
        self._looked: tuple[list[str], Floats] | None = None
        self._least = 0.0

    @property
    def watch(self) -> bool:
        """Whether requests whose drafts are hardly ever accepted stop drafting."""
        return self._watch

    @watch.setter
    def watch(self, watch: bool) -> None:
        if watch == self._watch:
            return
        self._watch = watch
        self.acceptance.clear()
        self._looked, self._least = None, 0.0
        for request_id, bound in self._bounds.items():
            bound.stopped, bound.fitted = False, None
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
        if asked != 0:
            self.acceptance.add(request_id)

    def end(self, request_id: str) -> None:
        """Let a request go."""
        self._bounds.pop(request_id, None)
        self.active.pop(request_id, None)
        self._idle.discard(request_id)
        self.acceptance.end(request_id)

    def observe(
        self, request_ids: Sequence[str], drafts: npt.NDArray[np.integer], accepted: npt.NDArray[np.int32]
    ) -> None:
        """Take in windows of steps in a row that had the same requests and draft tokens.

        Args:
            request_ids: the request of each window of a step.
            drafts: [windows], draft tokens of each.
            accepted: int32 [steps, windows], accepted ones.

        """
        if not self._watch:
            return
        rare = set(self.acceptance.observe(request_ids, drafts, accepted, RARE).tolist())
        if not rare and not self._idle:
            return
        for place, request_id in enumerate(request_ids):
            if request_id in self._idle:
                if drafts[place] > 1:
                    continue  # made before it was left without drafts
                bound = self._bounds[request_id]
                bound.probed(len(accepted), int(accepted[:, place].sum()), self._least)
                if not bound.idle:
                    self.acceptance.forget(request_id)
                    self._settle(request_id, bound)
            elif place in rare:
                bound = self._bounds.setdefault(request_id, _Bound())
                bound.stopped = True
                bound.stop()
                self._settle(request_id, bound)

    def survival(self) -> Floats | None:
        """Return the chances of the running requests' drafts, as :class:`policy.Requests` says."""
        self._looked = None
        if not self._watch:
            return None
        running = self._running()
        survival = self.acceptance.survival(running)
        if survival is None:
            return None
        for place, request_id in enumerate(running):
            asking = self.active.get(request_id)
            if asking is not None and asking.asked is not None:
                survival[place, asking.asked :] = 0.0
        self._looked = running, survival
        return survival

    def fit(self, least: float, drafts: int, least_drafts: int = 0) -> None:
        """Verify those drafts alone that are likely enough, as :class:`policy.Requests` says."""
        fitting, self._least = self._least > 0, least
        if not least or self._looked is None:
            for request_id, bound in self._bounds.items():
                if bound.fitted is not None:
                    bound.fitted = None
                    self._settle(request_id, bound)
            return
        running, survival = self._looked
        every = float(drafts) if fitting else -1.0
        known = [self._bounds.get(request_id) for request_id in running]
        before = [every if one is None or one.fitted is None else float(one.fitted) for one in known]
        wanted = lengths(gains(survival), least, np.array(before))
        for request_id, one, most in zip(running, known, wanted.tolist(), strict=True):
            asked = drafts if one is None or one.asked is None else min(one.asked, drafts)
            most = max(int(most), least_drafts)
            fitted = None if most >= asked else most
            if fitted == (None if one is None else one.fitted):
                continue
            changed = one or self._bounds.setdefault(request_id, _Bound())
            if fitted == 0 and not changed.idle:
                changed.stop()
            changed.fitted, changed.ever_fitted = fitted, True
            self._settle(request_id, changed)

    def lengths(self) -> dict[int, int]:
        """Return how many requests are bounded to each number of drafts, by number; some may be waiting."""
        return Counter(bound.fitted for bound in self.active.values() if bound.fitted is not None)

    def _settle(self, request_id: str, bound: _Bound) -> None:
        if bound.bounds:
            self.active[request_id] = bound
        else:
            self.active.pop(request_id, None)
        if bound.idle:
            self._idle.add(request_id)
        else:
            self._idle.discard(request_id)

    def enter(self, request_id: str, figures: RequestFigures) -> None:
        """Put a request's bound into its figures."""
        bound = self._bounds.get(request_id)
        if bound is None or not bound.told:
            return
        figures.nwor_max_draft_tokens, figures.nwor_why_bounded = bound.now, bound.why
        figures.nwor_steps_without_drafts = bound.skipped


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
        self._nwor_tree = None if config is None else config.tree
        longest = 0  # of no chain anything is estimated that nobody asks for
        if config is not None and config.draft_tokens is not None and config.fit_windows:
            longest = config.draft_tokens.most if self._nwor_tree is None else self._nwor_tree.depth
        self._nwor_bounds = RequestBounds(self._nwor_watches, longest, self._nwor_running)
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

    def _nwor_running(self) -> list[str]:
        """Return the requests that run, all that came of their windows taken in."""
        return [request.request_id for request in self.running]

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
