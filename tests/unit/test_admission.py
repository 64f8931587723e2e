"""What is refused before the engine sees it: schemas, and bounds of draft tokens."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

pytest.importorskip("vllm")


from nwor.engine.patches import SCHEDULER
from server.api.admission import Admission, check_grammar, check_integers
from server.api.refusals import RefusalError
from server.options import DEFAULT_MAX_GRAMMAR, REPORTING_SCHEDULER


def check(schema: Any) -> None:
    check_grammar(SimpleNamespace(json=schema), DEFAULT_MAX_GRAMMAR)


def chain(links: int, last: dict[str, Any]) -> dict[str, Any]:
    """Return a schema in which each definition refers to the next one."""
    parts = {str(number): {"$ref": f"#/$defs/{number + 1}"} for number in range(links)}
    return {"$ref": "#/$defs/0", "$defs": {**parts, str(links): last}}


@pytest.mark.parametrize(
    "last", [{"type": "string"}, {"$ref": "#/nowhere"}, {"anyOf": [{"$ref": "#/$defs/0"}, {"type": "null"}]}]
)
def test_references_that_lead_somewhere(last: dict[str, Any]) -> None:
    check(chain(5, last))


@pytest.mark.parametrize("back", [0, 3, 5])
def test_references_that_lead_to_themselves(back: int) -> None:
    with pytest.raises(RefusalError, match="refers to nothing but itself"):
        check(chain(5, {"$ref": f"#/$defs/{back}"}))


def test_a_long_chain_takes_no_time() -> None:
    """From each of its links to the end it would take five seconds, in which nobody is served."""
    began = time.monotonic()
    check(chain(3900, {"type": "string"}))
    assert time.monotonic() - began < 1


def test_integers_that_no_message_holds() -> None:
    params = SamplingParams(stream_interval=2**64)
    with pytest.raises(RefusalError, match="stream_interval: an integer has more than 64 bits") as caught:
        check_integers(params)
    assert caught.value.parameter == "stream_interval"
    for value in (2**64, -(2**63) - 1):
        with pytest.raises(RefusalError, match="deep"):
            check_integers({"priority": 0, "deep": {"list": [1, value]}})


def test_integers_that_a_message_holds() -> None:
    check_integers(SamplingParams(stream_interval=2**64 - 1, seed=-(2**63), stop_token_ids=[5]))
    check_integers({"priority": -(2**63), "trace_headers": None, "other": object()})


def admission(**changes: Any) -> Admission:
    config = {
        "speculative_config": SimpleNamespace(),
        "additional_config": {"nwor": {"mode": "stage"}},
        "scheduler_config": SimpleNamespace(scheduler_cls=SCHEDULER),
        **changes,
    }
    return Admission(SimpleNamespace(vllm_config=SimpleNamespace(**config), input_processor=None))


def params(bound: Any, name: str = "nwor_max_draft_tokens") -> SamplingParams:
    return SamplingParams(extra_args={name: bound, "session_id": "of somebody else"})


@pytest.mark.parametrize("bound", [0, 1, 63])
def test_a_bound_of_the_draft_tokens(bound: int) -> None:
    admission().check(params(bound))
    admission(scheduler_config=SimpleNamespace(scheduler_cls=REPORTING_SCHEDULER)).check(params(bound))
    # Without speculation every bound is kept to.
    admission(speculative_config=None, additional_config={}).check(params(bound))


@pytest.mark.parametrize("bound", [-1, 64, 1.0, 1.5, "0", True, [1], 10**18])
def test_what_is_no_bound_of_the_draft_tokens(bound: Any) -> None:
    with pytest.raises(RefusalError, match=r"must be a whole number from 0, .* to 63, not"):
        admission().check(params(bound))


def test_a_misspelled_bound() -> None:
    with pytest.raises(RefusalError, match="unknown field 'nwor_max_drafts': NWOR knows 'nwor_max_draft"):
        admission().check(params(0, "nwor_max_drafts"))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"additional_config": {}}, "without NWOR"),
        ({"scheduler_config": SimpleNamespace(scheduler_cls="mine.Scheduler")}, "--scheduler-cls"),
        ({"diffusion_config": SimpleNamespace()}, "diffusion"),
    ],
)
def test_a_bound_that_nobody_keeps_to(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(RefusalError, match=why):
        admission(**changes).check(params(0))
