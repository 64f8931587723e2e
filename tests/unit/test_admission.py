"""Schemas that are looked at before the engine compiles them."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

pytest.importorskip("vllm")

from server.api.admission import check_grammar, check_integers
from server.api.refusals import RefusalError
from server.options import DEFAULT_MAX_GRAMMAR


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
