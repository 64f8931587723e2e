"""How the requests of one step are treated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nwor.modes import Mode
from nwor.tally import WindowKind


@dataclass(frozen=True)
class StepPlan:
    """How the requests of one step are treated.

    Attributes:
        mode: the mode in force.
        request_ids: the step's requests in batch order.
        draft_counts: draft tokens of each request.
        num_requests: leading requests that form the window batch; 0 where all is direct.
        num_tokens: rows of those requests.
        direct_reason: why windows outside the batch are written directly.
        faulty: whether the batch was written directly after an error.
        query_lens: rows of each request of the window batch.
        early: whether rows that are no drafts are written as the layers run; see :func:`takes_over_blocks`.
        step: number of the step among all of this rank's, verify steps or not.

    """

    mode: Mode
    request_ids: Sequence[str]
    draft_counts: Sequence[int]
    num_requests: int
    num_tokens: int
    direct_reason: str | None
    faulty: bool = False
    query_lens: Sequence[int] = ()
    early: bool = False
    step: int = 0


def leading_windows(query_lens: Sequence[int], longest: int) -> tuple[int, int]:
    """Return how many leading requests are at most ``longest`` rows long, and their rows in all."""
    if not query_lens or max(query_lens) <= longest:  # most steps
        return len(query_lens), sum(query_lens)
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
    if any(request.num_computed_tokens for request in scheduled.scheduled_new_reqs):
        return True
    cached = scheduled.scheduled_cached_reqs
    computed = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    return any(count and request in cached.resumed_req_ids for request, count in computed)


def windows_of(
    plan: StepPlan, accepted: Sequence[int]
) -> tuple[dict[str, WindowKind], Mapping[WindowKind, int]]:
    """Return what became of each window of a finished step, and how many there were of each kind.

    Args:
        plan: how the step's requests were treated.
        accepted: accepted draft tokens of each of its requests.

    """
    mode, drafts = plan.mode.value, plan.draft_counts
    inside, outside = "fault" if plan.faulty else "", plan.direct_reason or ""
    if plan.num_requests in (0, len(drafts)) and min(drafts) == max(drafts):
        # Most steps: all requests verify as many drafts, and are treated alike. No line of Python for each.
        reason = inside if plan.num_requests else outside
        kinds = [(mode, reason, drafts[0], count) for count in range(drafts[0] + 1)]
        counted = Counter(accepted)
        windows = dict(zip(plan.request_ids, map(kinds.__getitem__, accepted), strict=True))
        return windows, {kinds[count]: times for count, times in counted.items()}
    windows = {}
    for index, (request, count) in enumerate(zip(plan.request_ids, drafts, strict=True)):
        if count:
            reason = inside if index < plan.num_requests else outside
            windows[request] = (mode, reason, count, accepted[index])
    return windows, Counter(windows.values())


def leading(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the first rows of a tensor; the tensor itself where it has no others, which costs less."""
    return tensor if tensor.shape[0] == rows else tensor[:rows]


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
