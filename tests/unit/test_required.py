"""Claim: a skip for want of a program that NWOR_TESTS_REQUIRE names is a failure, and every other one stays.

Coverage: tests, fixtures and whole modules that skip, in a pytest of their own; all that may be named.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.required import MISSING, VARIABLE, missed, required
from tests.server_process import ROOT

TESTS = """
import pytest

@pytest.fixture
def browser():
    pytest.skip("needs Chromium: found none of chromium, google-chrome")

def test_page(browser):
    pass

def test_rules():
    pytest.skip("needs promtool, which comes with Prometheus")

@pytest.mark.skipif(True, reason="needs curl")
def test_script():
    pass

@pytest.mark.xfail(reason="needs Chromium")
def test_known():
    assert False
"""


def run(folder: Path, names: str, tests: str = TESTS) -> tuple[int, str]:
    (folder / "test_sample.py").write_text(tests)
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "tests.required",
            "-p",
            "no:cacheprovider",
            "-rsf",
            str(folder),
        ],
        env={**os.environ, VARIABLE: names, "PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    return ended.returncode, ended.stdout + ended.stderr


def test_named_skips_fail_and_say_why(tmp_path: Path) -> None:
    code, printed = run(tmp_path, "chromium, curl")
    assert code == 1
    assert "1 skipped, 1 xfailed, 2 errors" in printed, printed
    assert f"{VARIABLE} requires chromium" in printed
    assert f"{VARIABLE} requires curl" in printed


def test_nothing_fails_where_nothing_is_named(tmp_path: Path) -> None:
    code, printed = run(tmp_path, "")
    assert (code, "3 skipped, 1 xfailed" in printed) == (0, True), printed


def test_a_module_that_skips_fails_too(tmp_path: Path) -> None:
    tests = "import pytest\npytest.importorskip('playwright.nothing')\n"
    assert run(tmp_path, "promtool", tests)[0] == 5
    code, printed = run(tmp_path, "playwright", tests)
    assert (code, f"{VARIABLE} requires playwright" in printed) == (2, True), printed


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    code, printed = run(tmp_path, "chrome")
    assert code == 4
    assert "names chrome; known are" in printed
    with pytest.raises(pytest.UsageError, match="chrome"):
        required("chromium chrome")


def test_every_program_is_one_that_tests_skip_for() -> None:
    reasons = (
        "\n".join(
            line
            for path in (ROOT / "tests").rglob("*.py")
            if path.name not in ("required.py", Path(__file__).name)
            for line in path.read_text(encoding="utf-8").splitlines()
        )
        .replace('importorskip("', "'")
        .replace('"', "'")
        .replace("{ROUTER_VARIABLE}", "NWOR_TEST_ROUTER")
    )
    assert [name for name in MISSING if missed(reasons, [name]) is None] == []
