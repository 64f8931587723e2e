"""Skips that are failures: where NWOR_TESTS_REQUIRE names a program, a test that misses it fails.

``NWOR_TESTS_REQUIRE="chromium promtool" python -m pytest``: what may be named is in :data:`MISSING`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator

import pytest

VARIABLE = "NWOR_TESTS_REQUIRE"

#: What may be required, and how the reasons of skips for want of it begin or read.
MISSING = {
    "chromium": r"needs Chromium",
    "playwright": r"'playwright",
    "promtool": r"needs promtool",
    "prometheus": r"needs prometheus",
    "kustomize": r"needs kustomize",
    "kubernetes-validate": r"'kubernetes_validate'",
    "hadolint": r"hadolint is not installed",
    "compose": r"neither docker compose nor podman-compose",
    "image": r"that holds the image",
    "router": r"NWOR_TEST_ROUTER",
    "ray": r"Ray is not installed",
    "compiler": r"needs a C\+\+ compiler",
    "triton": r"'triton'",
    "vllm": r"'vllm(\.\w+)*'|CPU build of vLLM",
    "openssl": r"needs the command openssl",
    "curl": r"needs curl",
    "nm": r"nm is not installed",
    "cuda": r"needs an NVIDIA GPU|no CUDA device",
}


def required(environ: str) -> list[str]:
    """Return the names in the variable's value.

    Raises:
        pytest.UsageError: one of them is unknown.

    """
    names = environ.replace(",", " ").split()
    unknown = sorted(set(names) - MISSING.keys())
    if unknown:
        known = ", ".join(sorted(MISSING))
        raise pytest.UsageError(f"{VARIABLE} names {', '.join(unknown)}; known are {known}")
    return names


def missed(reason: str, names: list[str]) -> str | None:
    """Return which of these programs a skip is for want of."""
    return next((name for name in names if re.search(MISSING[name], reason)), None)


def pytest_configure() -> None:
    required(os.environ.get(VARIABLE, ""))


def _fail_if_required(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    name = missed(reason, required(os.environ.get(VARIABLE, "")))
    if name is not None:
        report.outcome = "failed"
        report.longrepr = f"{reason}\n{VARIABLE} requires {name}: install it, or take it out of there."


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a test into a failure."""
    report = yield
    _fail_if_required(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the skip of a whole module into a failure."""
    report = yield
    _fail_if_required(report)
    return report
