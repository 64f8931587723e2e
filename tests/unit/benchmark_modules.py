"""Modules of the benchmarks, which are scripts that import one another by their bare names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@contextmanager
def imported(folder: str, name: str) -> Iterator[Any]:
    """Import a module of a benchmark; it and its neighbours are forgotten afterwards.

    Args:
        folder: the benchmark.
        name: the module.

    """
    place, before = str(BENCHMARKS / folder), set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        try:
            yield importlib.import_module(name)
        finally:
            for other, module in list(sys.modules.items()):
                if other not in before and str(getattr(module, "__file__", None)).startswith(place):
                    del sys.modules[other]
