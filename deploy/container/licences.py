"""Print name, version and licence of every Python package that is installed beside this interpreter.

The packages' own licence texts stay where their wheels put them, in ``*.dist-info``.
"""

from importlib import metadata


def licence(package: metadata.PackageMetadata) -> str:
    """Return a package's licence: its SPDX expression, else its classifiers, else the field."""
    if "License-Expression" in package:
        return str(package["License-Expression"])
    prefix = "License :: "
    classifiers = [
        entry.rsplit(" :: ", 1)[-1] for entry in package.get_all("Classifier", []) if entry.startswith(prefix)
    ]
    if classifiers:
        return ", ".join(sorted(set(classifiers)))
    text = str(package["License"] or "").strip() if "License" in package else ""
    return text.splitlines()[0][:100] if text else "see the package"


def rows() -> list[tuple[str, str, str]]:
    """Return (name, version, licence) of each package, sorted by name."""
    found = {
        (str(entry.metadata["Name"]), entry.version, licence(entry.metadata))
        for entry in metadata.distributions()
    }
    return sorted(found, key=lambda row: row[0].lower())


if __name__ == "__main__":
    for row in rows():
        print("\t".join(row))
