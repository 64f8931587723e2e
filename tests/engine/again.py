"""Engine tests in a process of their own, on another of vLLM's model runners."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.engine.runner import VARIABLE
from tests.server_process import ROOT


def run_again(file: str, runner: str, program: str) -> None:
    """Run a file of this folder, all of whose tests must pass.

    Args:
        file: its name.
        runner: the model runner, as ``NWOR_TEST_RUNNER`` names it.
        program: the module that runs tests.

    """
    run = subprocess.run(
        [sys.executable, "-m", program, "-q", "-x", "-p", "no:cacheprovider", f"tests/engine/{file}"],
        env={**os.environ, VARIABLE: runner},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    assert re.search(r"^\d+ passed", run.stdout, re.MULTILINE), run.stdout[-500:]
