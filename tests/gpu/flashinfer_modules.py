"""Whether FlashInfer's kernels are to be had here, and where they come from."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path

#: Names the folder of modules that ``benchmarks/kernels/flashinfer_modules.py --engine`` compiled.
FOLDER = "NWOR_FLASHINFER_MODULES"


def why_not() -> str | None:
    """Return why FlashInfer's kernels cannot run here; None where they can."""
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer-python is not installed"
    from vllm.utils.flashinfer import has_flashinfer

    if not has_flashinfer():
        return (
            "vLLM does not use FlashInfer: nvcc or ninja is missing, and VLLM_HAS_FLASHINFER_CUBIN=1 was not "
            f"set at the start, which is right where {FOLDER} has what they would make"
        )
    folder = os.environ.get(FOLDER)
    if folder and not Path(folder).is_dir():
        return f"{FOLDER} names {folder}, which is no folder"
    try:
        import flashinfer.decode
        import flashinfer.prefill  # noqa: F401
    except ImportError as error:
        return f"flashinfer cannot be imported: {error}"
    return None


def use() -> None:
    """Let FlashInfer load the modules of the folder; what is not there it compiles."""
    folder = os.environ.get(FOLDER)
    if not folder:
        return
    from flashinfer.jit import env

    # Modules that were linked where there is no driver do not name the library whose functions they call.
    ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
    env.FLASHINFER_AOT_DIR = Path(folder).resolve()
