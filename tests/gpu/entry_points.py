"""Makes the project's plugins known to vLLM where the package is not installed, in worker processes as well.

vLLM looks plugins up among the entry points of what is on ``sys.path``. A folder with the little that an
installation leaves of them is enough, and ``PYTHONPATH`` takes it to processes that are started later.
"""

from __future__ import annotations

import importlib.metadata
import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

ROOT = Path(__file__).resolve().parents[2]
GROUP = "vllm.general_plugins"


def write(folder: Path) -> Path:
    """Write the metadata of an installation into a folder and return its path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    package = folder / f"{project['name']}-0.dist-info"
    package.mkdir(parents=True)
    (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items()), ""]
    (package / "entry_points.txt").write_text("\n".join(lines))
    return package


def provide(folder: Path, patch: pytest.MonkeyPatch) -> bool:
    """Provide the plugins to this process and to those that it starts.

    Args:
        folder: an empty folder of the test.
        patch: takes everything back.

    Returns:
        Whether that was needed.

    """
    needed = not _are_known()
    if needed:
        write(folder)
        patch.syspath_prepend(str(folder))
    patch.setenv("PYTHONPATH", _python_path(folder if needed else None))
    return needed


def provide_to_children(folder: Path) -> None:
    """Provide the plugins to the processes that this one starts from now on.

    Args:
        folder: does not exist yet; stays as long as they run.

    """
    needed = not _are_known()
    if needed:
        write(folder)
    os.environ["PYTHONPATH"] = _python_path(folder if needed else None)


def _are_known() -> bool:
    return any(point.name == "nwor" for point in importlib.metadata.entry_points(group=GROUP))


def _python_path(folder: Path | None) -> str:
    return os.pathsep.join(filter(None, [folder and str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))
