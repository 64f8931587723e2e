"""The architecture page names every module once, and only files and methods that exist."""

import ast
import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "architecture.md"
PACKAGES = ("nwor", "server", "csrc")
SUFFIXES = (".py", ".h", ".cuh", ".cu", ".cpp", ".cmake", ".in")
#: Compiled libraries and CMake's own folders may stand beside the sources.
NOT_SOURCES = ("__pycache__", "lib", "build")

METHODS = sorted(set(re.findall(r"`([\w/]+\.py):([\w.]+)`", PAGE.read_text("utf-8"))))


def _rows() -> list[str]:
    """Return the files that have a row, as paths from the root."""
    rows, package = [], ""
    modules = PAGE.read_text("utf-8").split("\n## Modules\n")[1].split("\n## ")[0]
    for line in modules.splitlines():
        if line.startswith("### "):
            package = line.removeprefix("### ")
        elif found := re.match(r"\| `([^`]+)` \| \S.* \|$", line):
            rows.append(f"{package}/{found[1]}")
    return rows


def _holds_code(path: Path) -> bool:
    """Return whether a file defines something: a package's `__init__` that only imports does not."""
    if path.name != "__init__.py":
        return True
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return any(isinstance(node, kinds) for node in ast.parse(path.read_text("utf-8")).body)


def _modules() -> list[str]:
    return [
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if (path.suffix in SUFFIXES or path.name == "CMakeLists.txt")
        and not set(path.relative_to(ROOT).parts) & set(NOT_SOURCES)
        and _holds_code(path)
    ]


def test_every_module_has_one_row():
    rows = Counter(_rows())
    modules = set(_modules())
    assert {row for row, times in rows.items() if times > 1} == set()
    assert {"no row": modules - set(rows), "no file": set(rows) - modules} == {
        "no row": set(),
        "no file": set(),
    }


def test_a_step_has_eight_numbered_steps():
    decode = PAGE.read_text("utf-8").split("\n## A decode step\n")[1].split("\n## ")[0]
    assert re.findall(r"^\| (\d) \|.*`[\w/]+\.py:[\w.]+` \|$", decode, re.MULTILINE) == list("12345678")


@pytest.mark.parametrize(("file", "name"), METHODS, ids=[f"{file}:{name}" for file, name in METHODS])
def test_methods_exist(file, name):
    body = ast.parse((ROOT / file).read_text("utf-8")).body
    for part in name.split("."):
        found = [node for node in body if getattr(node, "name", None) == part]
        assert found, f"{file} has no {name}"
        body = getattr(found[-1], "body", [])
