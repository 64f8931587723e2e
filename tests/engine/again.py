"""Engine tests in a process of their own, on another of vLLM's model runners."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.engine.runner import VARIABLE
from tests.server_process import ROOT


def path_of(name: str) -> str:
    """Return where a file is, given its name as :func:`run_again` takes it."""
    folder, _, own = name.rpartition("/")
    return f"tests/{folder or 'engine'}/test_{own}.py"


def run_again(files: str, runner: str, program: str) -> None:
    """Run files in one process; in each some tests must pass and none may fail.

    Args:
        files: their names, without "test_" and ".py", separated by blanks; of other folders than this one
            with the folder in front, as in "unit/tree_kernels".
        runner: the model runner, as ``NWOR_TEST_RUNNER`` names it.
        program: the module that runs tests.

    """
    paths = [path_of(name) for name in files.split()]
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
