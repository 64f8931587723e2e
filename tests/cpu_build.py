"""Whether vLLM's build for CPUs is installed, found without a part of it being loaded.

Its ``vllm._C`` has AVX-512 instructions: on other processors an import of it ends the process. What is loaded
there is ``vllm._C_AVX2``.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


def _is_there() -> bool:
    package = find_spec("vllm")
    places = (package and package.submodule_search_locations) or ()
    return any(next(Path(place).glob("_C.*"), None) is not None for place in places)


#: For tests and modules that need it.
needs_cpu_build = pytest.mark.skipif(not _is_there(), reason="the CPU build of vLLM is not installed")
