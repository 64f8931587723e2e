"""Engine tests in a process of their own, on another of vLLM's model runners."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.engine.runner import VARIABLE
from tests.server_process import ROOT


def run_again(files: str, runner: str, program: str) -> None:
    """Run files of this folder in one process; in each some tests must pass and none may fail.

    Args:
        files: their names, without "test_" and ".py", separated by blanks.
        runner: the model runner, as ``NWOR_TEST_RUNNER`` names it.
        program: the module that runs tests.

    """
    paths = [f"tests/engine/test_{name}.py" for name in files.split()]
    run = subprocess.run(
        [sys.executable, "-m", program, "-q", "-rA", "-p", "no:cacheprovider", "--durations=8", *paths],
        # Its lane's processors are this one's already.
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")} | {VARIABLE: runner},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    for path in paths:
        assert f"PASSED {path}" in run.stdout, path
    print(run.stdout[run.stdout.rfind("= slowest") :])
