"""The page of models says what the records beside it say."""

from __future__ import annotations

from tests.architectures import works_with
from tests.architectures.cases import CASES
from tests.architectures.drafters import DRAFTERS


def test_the_page_is_made_from_the_records() -> None:
    records = works_with.read(works_with.KEPT)
    assert works_with.PAGE.read_text() == works_with.page(records.values())


def test_each_model_that_continuous_integration_runs_is_on_the_page() -> None:
    records = works_with.read(works_with.KEPT)
    for case in (*CASES, *DRAFTERS):
        if case.quick:
            direct = records[case.name]["direct"]
            assert (None if direct is None else direct["reason"]) == case.direct
