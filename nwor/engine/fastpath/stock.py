"""Whether code is vLLM's own, and which: what NWOR asks before it stands for some.

A copy of vLLM's code is right only beside the source that it was written for. So each names what it stands
for with a digest of the source, for each release that it has been compared with. Where a digest is another,
the copy steps aside and vLLM's own code runs.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Mapping
from hashlib import sha256
from types import FunctionType
from typing import Any

from torch.utils import _contextlib

#: What a copy stands for. By module and path in it: the digests of the source, one for each release in
#: :data:`nwor.engine.plugin.TESTED` from the first on. One that is left out is that before it; None says that
#: the module or class has no such member of its own.
Sources = Mapping[tuple[str, str], tuple[str | None, ...]]


def replaced_in(owner: type) -> str | None:
    """Return a method of a class of vLLM that somebody replaced; None if there is none."""
    for name, member in vars(owner).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if isinstance(function, FunctionType) and not is_of(function, owner.__module__):
            return f"{owner.__name__}.{name}"
    return None


def is_of(function: Any, module: str) -> bool:
    """Return whether a function or class was written in a module; one that wraps it only says so.

    What torch wraps as its decorators do, such as ``inference_mode``, is where it was written.
    """
    if isinstance(function, type):
        return function.__module__ == module
    while function.__code__.co_filename == _contextlib.__file__ and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return bool(function.__code__.co_filename == sys.modules[module].__file__)


def digest(function: Any) -> str:
    """Return the first 16 digits of the hash of a function's or class' source.

    Raises:
        OSError: there is no source.
        TypeError: it is neither.

    """
    return sha256(inspect.getsource(function).encode()).hexdigest()[:16]


def found_digest(module: str, path: str) -> str | None:
    """Return the digest of what is installed; None where a module or class has no such member of its own.

    Args:
        module: of vLLM.
        path: of a function, class or method in it.

    Returns:
        Empty where it cannot be told, and where somebody has replaced it.

    """
    try:
        found: Any = importlib.import_module(module)
        *owners, name = path.split(".")
        for owner in owners:
            found = getattr(found, owner)
        if name not in vars(found):
            return None
        found = getattr(found, name)
        found = getattr(found, "fn", found)  # what Triton compiles
        return digest(found) if is_of(found, module) else ""
    except (ImportError, AttributeError, OSError, TypeError):
        return ""


def changed(*tables: Sources) -> str | None:
    """Return why copies do not stand for what is installed; None where they do.

    All sources have to be those of one release: a mixture has been compared with nothing.

    Args:
        tables: what the copies stand for.

    """
    found = {place: found_digest(*place) for table in tables for place in table}
    releases = max(len(digests) for table in tables for digests in table.values())
    other: list[list[str]] = []
    for release in range(releases):
        other.append(
            [
                path
                for table in tables
                for (module, path), digests in table.items()
                if digests[min(release, len(digests) - 1)] != found[module, path]
            ]
        )
        if not other[-1]:
            return None
    return f"{min(other, key=len)[0]} is not the known one"
