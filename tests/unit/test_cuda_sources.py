"""Claim: the CUDA sources keep apart what is to stay apart.

Coverage: headers of the wgmma kernel and of the mma.sync kernel, followed through all they include; Torch,
which bindings alone may include; the environment, which no launch may read; kernels, which launch.cu must not
include.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

CSRC = Path(__file__).resolve().parents[2] / "csrc"
CUDA = CSRC / "cuda"
SOURCES = sorted(p for p in CUDA.rglob("*") if p.suffix in {".cu", ".cuh", ".h", ".cpp", ".in"})
INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)


def resolve(name: str) -> Path:
    """Return the file that an include means: all are from csrc/cuda, or from csrc."""
    (found,) = [folder / name for folder in (CUDA, CSRC) if (folder / name).is_file()]
    return found


def reached(path: Path) -> set[Path]:
    """Return a file and all project files that it includes, directly or not."""
    found, left = set(), [path]
    while left:
        file = left.pop()
        if file not in found:
            found.add(file)
            left += [resolve(name) for name in INCLUDE.findall(file.read_text("utf-8"))]
    return found


def names(files: set[Path]) -> set[str]:
    return {file.name for file in files}


@pytest.mark.parametrize(("own", "other"), [("sm90", "sm80"), ("sm80", "sm90")])
def test_neither_kernel_includes_the_other(own: str, other: str) -> None:
    headers = [path for path in SOURCES if own in path.name]
    assert f"kernel_{own}.cuh" in names(set(headers))
    for path in headers:
        assert not {name for name in names(reached(path)) if other in name}, path.name


def test_bindings_alone_include_torch() -> None:
    for path in SOURCES:
        uses = "torch/" in path.read_text("utf-8") or "torch_utils.h" in names(reached(path))
        assert uses == (path.name in {"ops.cpp", "torch_utils.h"}), path


def test_no_launch_reads_the_environment() -> None:
    assert not [path for path in SOURCES if "getenv" in path.read_text("utf-8")]


def test_the_choice_of_a_kernel_includes_none() -> None:
    launch = names(reached(CUDA / "verify" / "launch.cu"))
    assert {"select.h", "configs.h"} <= launch
    assert not {name for name in launch if name.startswith("kernel_")}
