"""Claim: models of many kinds answer in `stage` and `cow` as in `off` and under plain vLLM, or say why not.

Coverage: tiny models with random weights: a dozen kinds of attention in long runs, the rest of what runs on a
CPU where NWOR_TESTS_SLOW is set, too. Drafts by n-grams. Prompts of 3 to 200 tokens, together and alone, in
chunks, with prefix hits; greedy and seeded. Then drafters of every kind, with windows of up to 16 tokens, on
the model runner that vLLM has them on; fewer prompts on V2, which is interpreted. Windows are staged, or
written directly with the reason that is expected.
Control: where commits write nothing, answers change, so each of these tests can fail.
Tolerance: none. Tokens are compared for equality, in float32.
Records: lines of JSON in the file that NWOR_TESTS_RECORDS names; docs/works-with.md is made from such lines.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.architectures import recorded
from tests.architectures.cases import CASES, Case
from tests.architectures.drafters import DRAFTERS
from tests.engine.runner import AHEAD, VARIABLE

pytestmark = [pytest.mark.engine, pytest.mark.long, pytest.mark.skipif(AHEAD, reason="one runner is enough")]

SAME = {"greedy": 0, "hits": 0, "alone": 0, "seeded": 0}


@pytest.fixture(scope="module")
def records(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all models that tests of this run are about, and return their records by name."""
    wanted = recorded.wanted(request)
    folder = tmp_path_factory.mktemp("architectures")
    on_v1 = recorded.run([case for case in wanted if not case.v2], folder)
    on_v2 = recorded.run([case for case in wanted if case.v2], folder, environment={VARIABLE: "v2"})
    return on_v1 | on_v2


@pytest.mark.parametrize("case", recorded.parameters((*CASES, *DRAFTERS)))
def test_answers(case: Case, records: dict[str, Any]) -> None:
    record = records[case.name]
    assert "errors" not in record, record
    assert record["fault"] is None
    assert record["differing"] == {"stage": SAME, "cow": SAME, "plain": SAME}
    # Else being equal says little.
    assert record["distinct_tokens"] > 5
    for mode, counts in record["counts"].items():
        assert (counts["accepted_tokens"] > 0) == case.accepted, mode
        assert counts["accepted_tokens"] < counts["draft_tokens"], mode
        expected = {} if case.direct is None or mode == "off" else {case.direct: counts["windows"]}
        assert counts["direct_windows"] == expected, mode
        written = counts["commit_bytes"] > 0, counts["log_bytes"] > 0
        assert written == (case.direct is None and mode == "stage", case.direct is None and mode == "cow")
    if case.direct is not None:
        assert record["direct"]["reason"] == case.direct
        return
    assert record["direct"] is None
    assert record["self_checks"] > 0
    assert record["layers"]["staged"] > 0
    assert (record["layers"]["caches"], record["layers"]["shapes"]) == (case.caches, case.shapes)
    assert record["control"] >= record["prompts"] / 4
