"""Claim: seeded requests start without placeholder drafts, and nothing else of a step is touched.

Reference: the step's numbers, by hand. Tolerance: none.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from nwor.engine.workarounds.seeded_starts import drop_placeholders

SEEDED, FREE = SamplingParams(seed=1), SamplingParams()


def step(**changes: Any) -> Any:
    """Return a step of a running request, two that start and one that resumes, each with two drafts."""
    drafts = {"running": [7, 8], "seeded": [-1, -1], "free": [-1, -1], "resumed": [-1, -1]}
    return SimpleNamespace(
        **{
            "scheduled_new_reqs": [SimpleNamespace(req_id="seeded"), SimpleNamespace(req_id="free")],
            "scheduled_cached_reqs": SimpleNamespace(resumed_req_ids={"resumed"}),
            "scheduled_spec_decode_tokens": drafts,
            "num_scheduled_tokens": dict.fromkeys(drafts, 3),
            "total_num_scheduled_tokens": 12,
            "kv_connector_metadata": None,
            "ec_connector_metadata": None,
            **changes,
        }
    )


REQUESTS = {
    name: SimpleNamespace(sampling_params=params)
    for name, params in {"running": SEEDED, "seeded": SEEDED, "free": FREE, "resumed": SEEDED}.items()
}


def test_placeholders_of_seeded_requests_go() -> None:
    made = step()
    drop_placeholders(made, REQUESTS)
    assert made.scheduled_spec_decode_tokens == {"running": [7, 8], "free": [-1, -1]}
    assert made.num_scheduled_tokens == {"running": 3, "seeded": 1, "free": 3, "resumed": 1}
    assert made.total_num_scheduled_tokens == 8


def test_async_placeholders_of_running_requests_stay() -> None:
    made = step(scheduled_spec_decode_tokens={"running": [-1, -1]})
    drop_placeholders(made, REQUESTS)
    assert made.scheduled_spec_decode_tokens == {"running": [-1, -1]}
    assert made.total_num_scheduled_tokens == 12


@pytest.mark.parametrize("name", ["kv_connector_metadata", "ec_connector_metadata"])
def test_steps_with_a_connectors_metadata_stay(name: str) -> None:
    made = step(**{name: object()})
    drop_placeholders(made, REQUESTS)
    assert made.total_num_scheduled_tokens == 12
