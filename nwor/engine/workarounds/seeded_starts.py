"""A seeded request begins with the same random numbers beside others as alone.

A request that needs one token only, and that starts beside others, gets placeholders (-1) for drafts from
vLLM, so that the step keeps its CUDA graph. All are rejected, and the request's token is drawn as a rejected
draft's replacement: from the right distribution, but with other random numbers than without placeholders.
Seeded requests start without them here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.sampling_params import SamplingParams


def drop_placeholders(step: Any, requests: Mapping[str, Any]) -> None:
    """Take the placeholders of seeded requests that start out of a step, in place.

    To be called before the scheduler advances its requests. A step that carries a connector's metadata stays
    as it is: that was made with the placeholders.

    Args:
        step: vLLM's ``SchedulerOutput``.
        requests: the scheduler's requests by id.

    """
    drafts = step.scheduled_spec_decode_tokens
    if not drafts or step.kv_connector_metadata is not None or step.ec_connector_metadata is not None:
        return
    starting = [request.req_id for request in step.scheduled_new_reqs]
    starting += step.scheduled_cached_reqs.resumed_req_ids
    for name in starting:
        placeholders = drafts.get(name)
        if placeholders and set(placeholders) == {-1} and _is_seeded(requests[name].sampling_params):
            del drafts[name]
            step.num_scheduled_tokens[name] -= len(placeholders)
            step.total_num_scheduled_tokens -= len(placeholders)


def _is_seeded(params: SamplingParams | None) -> bool:
    return params is not None and params.seed is not None
