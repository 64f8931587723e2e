"""Whether code is vLLM's own: what every fast path asks before it stands for some."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any


def replaced_in(owner: type) -> str | None:
    """Return a method of a class of vLLM that somebody replaced; None if there is none."""
    for name, member in vars(owner).items():
        function = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        if isinstance(function, FunctionType) and not is_of(function, owner.__module__):
            return f"{owner.__name__}.{name}"
    return None


def is_of(function: Any, module: str) -> bool:
    """Return whether a function was written in a module; one that wraps it only says so."""
    return bool(function.__code__.co_filename == sys.modules[module].__file__)
