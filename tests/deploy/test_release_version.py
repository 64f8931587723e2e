"""The version stands in one place; ``--version`` tells what is installed, at once and whatever is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import nwor
from nwor.version import __version__
from server import version
from tests.server_process import ROOT

RELEASE = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")


def facts(text: str) -> dict[str, str]:
    first, *lines = text.splitlines()
    assert first == f"nwor-server {__version__}"
    return {line[2:15].strip(): line[15:] for line in lines}


def test_one_file_holds_the_version() -> None:
    assert RELEASE.fullmatch(__version__)
    pattern = re.compile(rf"(?<![\d.]){re.escape(__version__)}(?![\d.])")
    files = [*ROOT.glob("*.toml"), ROOT / "Makefile"]
    for folder in ("nwor", "server", "csrc"):
        files += [
            path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".txt", ".cmake", ".h")
        ]
    with_it = {
        str(path.relative_to(ROOT)) for path in files if pattern.search(path.read_text(encoding="utf-8"))
    }
    assert with_it == {"nwor/version.py"}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["scikit-build"]["metadata"]["version"]["input"] == "nwor/version.py"


def test_the_changelog_has_an_entry_for_this_version() -> None:
    text = (ROOT / "docs" / "CHANGELOG.md").read_text(encoding="utf-8")
    entries = re.findall(r"^## (\S+)", text, re.MULTILINE)
    assert entries[0] == "Unreleased" or entries[0] == __version__
    assert __version__ in entries


def test_versions_of_all_parts() -> None:
    torch = pytest.importorskip("torch")
    library = pytest.importorskip("nwor.ops.library")
    told = facts(version.report())
    assert told["torch"].startswith(torch.__version__)
    assert told["torch"].endswith(f"(built for CUDA {torch.version.cuda})" if torch.version.cuda else "CPU)")
    for name, label in ((library.CPU_LIBRARY, "CPU kernels"), (library.CUDA_LIBRARY, "CUDA kernels")):
        path = library.find(name)
        if path is None:
            assert told[label] == "not built"
            continue
        record = library.build_record(path)
        assert f"version {record['version']}" in told[label]
        assert f"with torch {record['torch']}" in told[label]
        assert version.STABLE_ABI in told[label]


def test_the_libraries_are_looked_for_where_the_ops_look() -> None:
    library = pytest.importorskip("nwor.ops.library")
    assert (library.CPU_LIBRARY, library.CUDA_LIBRARY) == version.LIBRARIES
    for name in version.LIBRARIES:
        assert version._find(name) == library.find(name)


def test_the_stable_abi_is_the_one_that_is_compiled_for() -> None:
    text = (ROOT / "csrc" / "CMakeLists.txt").read_text(encoding="utf-8")
    (target,) = re.findall(r"TORCH_TARGET_VERSION=0x([0-9a-f]{16})", text)
    assert f"{int(target[:2], 16)}.{int(target[2:4], 16)}" == version.STABLE_ABI


def test_architectures_of_a_cuda_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = {"library": "cuda", "version": __version__, "torch": "2.11.0", "compiler": "GNU 12"}
    members |= {"processor": "x86_64", "cuda": "13.0.1", "architectures": "80-real,90a-real"}
    record = json.dumps(members, separators=(",", ":"))
    (tmp_path / "libnwor_cuda.so").write_bytes(b"\x7fELF\0" + record.encode() + b"\0more")
    (tmp_path / "libnwor_cpu.so").write_bytes(b"\x7fELF")
    monkeypatch.setenv("NWOR_LIBRARY_DIR", str(tmp_path))
    told = facts(version.report())
    assert "CUDA 13.0.1, for 80-real 90a-real, compiled by GNU 12 with torch 2.11.0" in told["CUDA kernels"]
    assert "carries no build record" in told["CPU kernels"]
    (tmp_path / "libnwor_cuda.so").write_bytes(record.replace(__version__, "0.0.1").encode() + b"\0")
    assert f"version 0.0.1 (not {__version__}: reinstall nwor)" in facts(version.report())["CUDA kernels"]


def test_what_is_missing_or_broken_is_said_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libnwor_cpu.so").write_bytes(b'{"library":"cpu", broken\0')
    monkeypatch.setenv("NWOR_LIBRARY_DIR", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(version.metadata, "version", _no_version)
    told = facts(version.report())
    assert told["vllm"] == told["torch"] == "not installed"
    assert told["CPU kernels"].startswith("unknown: JSONDecodeError")
    assert told["CUDA kernels"] == "not built"


def _no_version(name: str) -> str:
    raise version.metadata.PackageNotFoundError(name)


def test_the_command_needs_nothing_but_the_standard_library(tmp_path: Path) -> None:
    """Without site-packages: neither torch nor vLLM nor httpx can be imported, and nothing is."""
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "server", "--version"],
        cwd=ROOT,
        env={**os.environ, "NWOR_LIBRARY_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert facts(ended.stdout)["torch"] == "not installed"


def test_the_command_imports_nothing_heavy() -> None:
    code = "import sys; from server.cli import main; main(['--version']); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    heavy = {"torch", "vllm", "transformers", "fastapi", "httpx"}
    assert not heavy & set(ended.stdout.splitlines()[-1].split())
    assert nwor.__version__ in ended.stdout
