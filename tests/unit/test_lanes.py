"""Claim: lanes share the processors out without overlap, and what is named as longest exists."""

from __future__ import annotations

import pytest

from tests import lanes
from tests.engine import test_runner_v2
from tests.server_process import ROOT


@pytest.mark.parametrize(("processors", "count"), [(2, 2), (16, 4), (7, 3), (1, 1)])
def test_no_two_lanes_share_a_processor(processors: int, count: int) -> None:
    shares = [lanes.share(list(range(10, 10 + processors)), lane, count) for lane in range(count)]
    taken = [processor for share in shares for processor in share]
    assert len(taken) == len(set(taken)) == processors // count * count
    assert {len(share) for share in shares} == {processors // count}


def test_more_lanes_than_processors_still_have_one_each() -> None:
    assert [lanes.share([4, 5], lane, 3) for lane in range(3)] == [[4], [5], [4]]


def test_groups() -> None:
    assert lanes.group_of("tests/server/test_admin.py::test_wrong_requests") == lanes.SERVER
    assert lanes.group_of("tests/engine/test_faults_cpu.py::test_one[a-b]") == "test_faults_cpu"
    assert lanes.group_of("tests/engine/test_runner_v2.py::test_two[faults]") == "test_runner_v2[faults]"
    assert lanes.group_of("tests/engine/test_runner_v2.py::test_three") == "test_runner_v2"


def test_every_file_that_takes_the_shared_server_says_so(request: pytest.FixtureRequest) -> None:
    takers = {
        item.nodeid.partition("::")[0]
        for item in request.session.items
        if "server" in getattr(item, "fixturenames", ()) and "tests/unit" not in item.nodeid
    }
    assert [path for path in takers if not lanes.shares_the_server(path)] == []


def test_the_longest_are_groups_of_today() -> None:
    names = {path.stem for path in (ROOT / "tests").rglob("test_*.py")} | {lanes.SERVER}
    names |= {f"{lanes.AGAIN}[{name}]" for name in test_runner_v2.FILES}
    assert len(lanes.LONGEST) == len(set(lanes.LONGEST))
    assert set(lanes.LONGEST) <= names
