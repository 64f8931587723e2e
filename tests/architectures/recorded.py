"""Runs the models that a session of pytest asks for, in a process of their own, and keeps their records."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.architectures.cases import Case

ROOT = Path(__file__).resolve().parents[2]
#: Names the file that records are added to.
RECORDS = "NWOR_TESTS_RECORDS"


def wanted(request: pytest.FixtureRequest) -> list[Case]:
    """Return the cases that the session's tests of the requesting file are about."""
    items: list[Any] = [item for item in request.session.items if item.path == request.path]
    return [item.callspec.params["case"] for item in items if not item.get_closest_marker("skip")]


def run(
    cases: Sequence[Case], folder: Path, *flags: str, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run cases and return their records by name.

    Args:
        cases: which.
        folder: for files.
        flags: of :mod:`tests.architectures.run`.
        environment: what the process has besides this one's.

    """
    if not cases:
        return {}
    path = folder / "records.jsonl"
    command = [sys.executable, "-m", "tests.architectures.run", str(path), *flags]
    command += ["--names", *(case.name for case in cases)]
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = path.read_text().splitlines(keepends=True)
    if os.environ.get(RECORDS):
        with Path(os.environ[RECORDS]).open("a") as kept:
            kept.writelines(lines)
    return {record["name"]: record for record in map(json.loads, lines)}


def marks(case: Case) -> list[pytest.MarkDecorator]:
    """Return the marks of a case's test."""
    return [] if case.quick else [pytest.mark.slow]


def parameters(cases: Sequence[Case]) -> list[Any]:
    """Return cases as parameters of a test."""
    return [pytest.param(case, id=case.name, marks=marks(case)) for case in cases]
