"""Engine tests once more, on model runner V1 with steps scheduled ahead, as vLLM does on a GPU.

By hand: ``NWOR_TEST_RUNNER=v1-ahead python -m pytest tests/engine/test_exactness_cpu.py``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.engine.runner import AHEAD, VARIABLE
from tests.server_process import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.skipif(AHEAD, reason="runs only beside plain V1")]


@pytest.mark.parametrize("file", ["test_exactness_cpu.py", "test_mixed_steps_cpu.py"])
def test_on_model_runner_v1_with_steps_ahead(file: str) -> None:
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            f"tests/engine/{file}",
        ],
        env={**os.environ, VARIABLE: "v1-ahead"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    assert re.search(r"^\d+ passed", run.stdout, re.MULTILINE), run.stdout[-500:]
