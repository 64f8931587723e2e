"""How the requests of one step are treated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from nwor.counts.histogram import INT32
from nwor.counts.records import Treatment
from nwor.engine.trimmed_drafts import TrimmedDrafts
from nwor.modes import Mode
from nwor.windows.window import WindowBatch

#: Shapes of steps that are remembered.
MOST_KNOWN = 512


class KnownStep:
    """What is worked out once for all steps of one shape: as many drafts and rows for each request in turn.

    Args:
        treatment: how the windows of such a step are treated, nothing going wrong.
        query_lens: rows of each request of the window batch.
        copy: whether the windows are copied aside as they are staged; not where a graph does so by itself.

    Attributes:
        treatment: likewise.
        query_lens: likewise.
        windows: requests with draft tokens.

    """

    __slots__ = ("_addresses", "_batch", "_copy", "query_lens", "treatment", "windows")

    def __init__(self, treatment: Treatment, query_lens: Sequence[int], copy: bool = False) -> None:
        self._copy = copy
        self.treatment = treatment
        self.query_lens = query_lens
        self.windows = sum(map(bool, treatment.draft_counts))
        self._addresses: tuple[int, int, int] | None = None
        self._batch: WindowBatch | None = None

    def batch(
        self, query_start_loc: torch.Tensor, slots: Mapping[int, torch.Tensor] | torch.Tensor
    ) -> WindowBatch:
        """Return the window batch of such a step; the one before where its tensors lie in the same memory.

        Args:
            query_start_loc: int32, at least [num_requests + 1], on the device.
            slots: by slot key, int64, at least [num_tokens]; or int64 [keys, at least num_tokens].

        """
        addresses = None
        if isinstance(slots, torch.Tensor):
            # What a batch refers to is not freed, so nothing else can come to lie at these addresses.
            addresses = (query_start_loc.data_ptr(), slots.data_ptr(), slots.stride(0))
            if addresses == self._addresses:
                assert self._batch is not None
                return self._batch
            slots = dict(enumerate(slots))
        requests, tokens = self.treatment.num_requests, self.treatment.num_tokens
        batch = WindowBatch(
            mode=Mode(self.treatment.mode),
            num_requests=requests,
            num_tokens=tokens,
            query_start_loc=leading(query_start_loc, requests + 1),
            slots={key: leading(value, tokens) for key, value in slots.items()},
            copy=self._copy,
        )
        if addresses is not None:
            self._addresses, self._batch = addresses, batch
        return batch


class StepPlan:
    """How the requests of one step are treated.

    Args:
        known: what all steps of the same shape have in common.
        request_ids: the step's requests in batch order.
        early: whether rows that are no drafts are written as the layers run; see :func:`takes_over_blocks`.
        step: number of the step among all of this rank's, verify steps or not.
        trimmed: the draft tokens of each request, where the device has trimmed them; None where they are as
            scheduled.

    Attributes:
        known: likewise.
        treatment: how the windows are treated; what the shape says, unless something went wrong since.
        request_ids: likewise.
        early: likewise.
        step: likewise.
        trimmed: likewise.

    """

    __slots__ = ("early", "known", "request_ids", "step", "treatment", "trimmed")

    def __init__(
        self,
        known: KnownStep,
        request_ids: Sequence[str],
        early: bool = False,
        step: int = 0,
        trimmed: TrimmedDrafts | None = None,
    ) -> None:
        self.known = known
        self.treatment = known.treatment
        self.request_ids = request_ids
        self.early = early
        self.step = step
        self.trimmed = trimmed

    @property
    def mode(self) -> Mode:
        """The mode in force."""
        return Mode(self.treatment.mode)

    @property
    def draft_counts(self) -> Sequence[int]:
        """Draft tokens of each request; where the device trims them, as they were scheduled."""
        return self.treatment.draft_counts

    @property
    def query_lens(self) -> Sequence[int]:
        """Rows of each request of the window batch, as it was planned; those of drafts likewise."""
        return self.known.query_lens

    @property
    def num_requests(self) -> int:
        """Leading requests that form the window batch; 0 where all is direct."""
        return self.treatment.num_requests

    @property
    def num_tokens(self) -> int:
        """Rows of those requests."""
        return self.treatment.num_tokens

    @property
    def direct_reason(self) -> str | None:
        """Why windows outside the batch are written directly."""
        return self.treatment.outside or None

    @property
    def faulty(self) -> bool:
        """Whether the batch was written directly after an error."""
        return self.treatment.inside == "fault"

    def fail(self) -> None:
        """Note that the batch was written directly after an error."""
        self.treatment = self.treatment._replace(inside="fault")

    def go_direct(self, reason: str) -> None:
        """Note that the whole step is written directly, and why."""
        self.treatment = self.treatment._replace(
            num_requests=0, num_tokens=0, outside=reason, held_bytes=0, copied_bytes=0
        )

    def outcome(self) -> tuple[Treatment, int]:
        """Return the treatment with the draft tokens that were verified, and the windows among the requests.

        Where the device trims drafts, not before the step's output has come.
        """
        if self.trimmed is None:
            return self.treatment, self.known.windows
        drafts = self.trimmed.counts()
        return self.treatment._replace(drafts=int32_bytes(drafts)), int(np.count_nonzero(drafts))


_ARRAY = np.ndarray


def int32_bytes(numbers: Sequence[int] | npt.NDArray[Any]) -> bytes:
    """Return numbers as int32, in bytes; for an int32 array that is one copy."""
    if type(numbers) is _ARRAY and numbers.dtype is INT32:
        return numbers.tobytes()
    return np.asarray(numbers, INT32).tobytes()


def leading_windows(query_lens: Sequence[int], longest: int) -> tuple[int, int]:
    """Return how many leading requests are at most ``longest`` rows long, and their rows in all."""
    requests = tokens = 0
    for rows in query_lens:
        if rows > longest:
            break
        requests += 1
        tokens += rows
    return requests, tokens


def takes_over_blocks(scheduled: Any) -> bool:
    """Return whether a step brings a request that starts from blocks of the prefix cache.

    The scheduler enters a block in the prefix cache when it schedules the step that fills it, and may give it
    to a request of the same step. The layers must have written the block's last row before they attend then.

    Args:
        scheduled: vLLM's ``SchedulerOutput``.

    """
    cached = scheduled.scheduled_cached_reqs
    if not scheduled.scheduled_new_reqs and not cached.resumed_req_ids:  # most steps
        return False
    if any(request.num_computed_tokens for request in scheduled.scheduled_new_reqs):
        return True
    computed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return any(count and request in cached.resumed_req_ids for request, count in computed)


def leading(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first rows of a tensor; the tensor itself where it has no others, which costs less."""
    return tensor if tensor.shape[0] == rows else tensor[:rows]


def early_batch(plan: StepPlan, batch: WindowBatch, device: torch.device) -> WindowBatch:
    """Return the batch of a step whose rows that are no drafts are written as the layers run."""
    if plan.trimmed is None:
        drafts = draft_rows(plan, device)
    else:
        drafts = plan.trimmed.rows(batch.query_start_loc, batch.num_tokens)
    return replace(batch, slots=only(drafts, batch.slots), early=only(~drafts, batch.slots))


def draft_rows(plan: StepPlan, device: torch.device) -> torch.Tensor:
    """Return bool [num_tokens] on the device: the rows of the window batch that are drafts."""
    rows: list[bool] = []
    for count, drafts in zip(plan.query_lens, plan.draft_counts, strict=False):
        rows += [False] * (count - drafts) + [True] * drafts
    return upload(rows, torch.bool, device)


def upload(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return [values] on the device; the host does not wait."""
    on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def rejected_drafts(sampled: torch.Tensor, draft_counts: Sequence[int], vocabulary: int) -> torch.Tensor:
    """Return int32 [requests]: the draft tokens of each request that rejection sampling threw away.

    Computed on the device; the host does not wait.

    Args:
        sampled: [requests, 1 + most drafts] sampled ids: the accepted drafts and one token more, then -1. A
            request without drafts has one.
        draft_counts: draft tokens of each request.
        vocabulary: ids from here on are no tokens, as vLLM reads its output.

    """
    # On a CPU each of torch's operations takes ten times as long.
    count = rejected_on_host if sampled.device.type == "cpu" else rejected_on_device
    return count(sampled, draft_counts, vocabulary)


def rejected_on_host(sampled: torch.Tensor, draft_counts: Sequence[int], vocabulary: int) -> torch.Tensor:
    """Do as :func:`rejected_drafts` for a tensor of the host's."""
    ids, counts = sampled.numpy(), np.asarray(draft_counts, np.int32)
    valid = ((ids >= 0) & (ids < vocabulary)).sum(axis=1, dtype=np.int32)
    return torch.from_numpy(np.minimum(1 + counts - valid, counts))


def rejected_on_device(sampled: torch.Tensor, draft_counts: Sequence[int], vocabulary: int) -> torch.Tensor:
    """Do as :func:`rejected_drafts` by torch's operations."""
    valid = ((sampled >= 0) & (sampled < vocabulary)).sum(dim=1, dtype=torch.int32)
    fewest, most = min(draft_counts), max(draft_counts)
    if fewest == most:
        # Most steps; nothing to upload. A row without any valid id has no draft accepted.
        return (1 + most - valid).clamp_(max=most)
    drafts = upload(draft_counts, torch.int32, sampled.device)
    return torch.minimum(1 + drafts - valid, drafts)


def only(rows: torch.Tensor, slots: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Return the slots of some rows, -1 for all others.

    Args:
        rows: bool [num_tokens] on the device.
        slots: by slot key, int64 [num_tokens].

    """
    return {key: torch.where(rows, value, -1) for key, value in slots.items()}
