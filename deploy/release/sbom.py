"""Bills of materials (CycloneDX) and the licence list of what nwor-server is installed with.

``python deploy/release/sbom.py FOLDER`` writes three files:

- ``nwor-VERSION-cpu.cdx.json``: what is installed here out of ``cpu.txt``, and torch, with licences;
- ``nwor-VERSION-cuda.cdx.json``: what ``cuda.txt`` pins, with hashes; not installed here, so no licences;
- ``nwor-VERSION-cpu-licences.csv``: package, version, licence, address.

cyclonedx-py and pip-licenses do the work. The environment also holds development tools, which are left out.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "deploy" / "requirements"
# So that it runs as a file, without the package being installed.
sys.path.insert(0, str(ROOT))

from nwor.version import __version__  # noqa: E402

#: Installed beside the lock file, by version in a step of its own.
UNLOCKED = ("torch",)

#: Licences of packages whose metadata names none, from the licence file that each carries.
READ_BY_HAND = {"oss-harmony": "Apache-2.0", "setuptools": "MIT"}


def normal(name: str) -> str:
    """Return a package's name in the form that package indexes compare."""
    return re.sub(r"[-_.]+", "-", name).lower()


def locked(lock: Path) -> set[str]:
    """Return the normal names that a lock file pins."""
    return {
        normal(found) for found in re.findall(r"^([A-Za-z0-9._-]+)==", lock.read_text("utf-8"), re.MULTILINE)
    }


def keep_only(bill: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """Take every component out of a bill that is not among ``names``, and all mentions of it."""
    dropped = {part["bom-ref"] for part in bill["components"] if normal(part["name"]) not in names}
    bill["components"] = [part for part in bill["components"] if part["bom-ref"] not in dropped]
    bill["dependencies"] = [
        {**entry, "dependsOn": [ref for ref in entry.get("dependsOn", []) if ref not in dropped]}
        for entry in bill.get("dependencies", [])
        if entry["ref"] not in dropped
    ]
    return bill


def run(*command: str) -> None:
    """Run a tool of this environment; what it prints goes to the terminal."""
    subprocess.run([str(Path(sys.executable).parent / command[0]), *command[1:]], cwd=ROOT, check=True)


def write_bill(target: Path, *command: str, names: set[str] | None = None) -> int:
    """Let cyclonedx-py write a bill, with this package as its subject.

    Args:
        target: the file.
        command: what cyclonedx-py is to read.
        names: normal names of the packages to keep; None keeps all.

    Returns:
        The number of packages in it.

    """
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "bill.json"
        run("cyclonedx-py", *command, "--output-reproducible", "--output-file", str(raw))
        bill = json.loads(raw.read_text("utf-8"))
    if names is not None:
        keep_only(bill, names)
    subject = {"type": "application", "name": "nwor", "version": __version__, "bom-ref": "nwor-server"}
    bill.setdefault("metadata", {})["component"] = subject
    text = json.dumps(bill, indent=1, sort_keys=True) + "\n"
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if problem is not None:
        raise ValueError(f"{target.name} is not valid CycloneDX 1.6: {problem}")
    target.write_text(text, "utf-8")
    return len(bill["components"])


def write_licences(target: Path, names: set[str]) -> list[str]:
    """Write the licence list, and return the packages that tell of none."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "licences.json"
        run(
            *("pip-licenses", "--from", "mixed", "--format", "json", "--with-urls", "--with-system"),
            *("--output-file", str(raw), "--packages", *sorted(names)),
        )
        rows = json.loads(raw.read_text("utf-8"))
    with target.open("w", encoding="utf-8", newline="") as sink:
        writer = csv.writer(sink)
        writer.writerow(["package", "version", "licence", "address"])
        for row in rows:
            # Some packages put the whole text where the name belongs.
            row["License"] = row["License"].strip().splitlines()[0]
            if row["License"] == "UNKNOWN":
                row["License"] = READ_BY_HAND.get(normal(row["Name"]), "UNKNOWN")
            address = "" if row["URL"] == "UNKNOWN" else row["URL"]
            writer.writerow([row["Name"], row["Version"], row["License"], address])
    return [row["Name"] for row in rows if row["License"] == "UNKNOWN"]


def main(folder: Path) -> int:
    """Write the three files; the exit code is 1 where a package has no licence."""
    folder.mkdir(parents=True, exist_ok=True)
    names = locked(LOCKS / "cpu.txt") | set(UNLOCKED)
    bills = {"cpu": ("environment", sys.executable), "cuda": ("requirements", str(LOCKS / "cuda.txt"))}
    for kind, command in bills.items():
        target = folder / f"nwor-{__version__}-{kind}.cdx.json"
        count = write_bill(target, *command, names=names if kind == "cpu" else None)
        print(f"{target}: {count} packages")
    target = folder / f"nwor-{__version__}-cpu-licences.csv"
    unknown = write_licences(target, names)
    print(f"{target}: {len(unknown)} packages without a licence {unknown or ''}")
    return 1 if unknown else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "dist")))
