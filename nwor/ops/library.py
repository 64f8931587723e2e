"""Finding and loading the compiled libraries.

``libnwor_cpu.so`` holds the ops' schemas and CPU kernels, ``libnwor_cuda.so`` the CUDA kernels. Both use
libtorch's stable ABI: one build loads under PyTorch 2.11 to 2.13.
"""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path
from typing import Any

import torch

import nwor
from nwor.errors import NworError

CPU_LIBRARY = "libnwor_cpu.so"
CUDA_LIBRARY = "libnwor_cuda.so"
OP_NAMES = (
    "verify_attention",
    "plan_verify_attention",
    "commit_window",
    "stage_window",
    "log_slots",
    "restore_slots",
    "argmax_rows",
)

_REINSTALL = (
    "reinstall nwor next to this PyTorch: pip install --no-build-isolation --no-deps --force-reinstall ."
)


class LibraryError(NworError, ImportError):
    """A compiled library is missing or does not load; the message names the file and what to do."""


def directories() -> list[Path]:
    """Return where libraries are looked for: ``NWOR_LIBRARY_DIR`` alone if set, else ``lib`` in the package.

    An editable install has two package directories, the installed one and the sources'.
    """
    override = os.environ.get("NWOR_LIBRARY_DIR")
    if override:
        return [Path(override)]
    return [Path(entry) / "lib" for entry in nwor.__path__]


def find(name: str) -> Path | None:
    """Return the path of library ``name``, or None where it was not built."""
    for directory in directories():
        if (directory / name).is_file():
            return directory / name
    return None


def load(name: str) -> Path:
    """Load library ``name`` and return its path.

    Raises:
        LibraryError: if it is missing or does not load.

    """
    path = find(name)
    if path is None:
        looked = ", ".join(str(directory) for directory in directories())
        advice = _REINSTALL
        if name == CUDA_LIBRARY:
            advice += " (with nvcc on PATH and NWOR_CUDA=ON in the environment)"
        raise LibraryError(f"{name} is not there (looked in {looked}); {advice}")
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        cause = error.__cause__ or error
        raise LibraryError(
            f"{path} does not load under PyTorch {torch.__version__}: {cause}; {_REINSTALL}"
        ) from error
    return path


def build_record(path: Path) -> dict[str, Any]:
    """Return what library ``path`` recorded about its own build: version, compiler, torch, architectures.

    Read from the file, so a CUDA library can be asked where it cannot be loaded.

    Raises:
        LibraryError: if the library carries no record.

    """
    start = b'{"library":"'
    data = path.read_bytes()
    at = data.find(start)
    if at < 0:
        raise LibraryError(f"{path} carries no build record; {_REINSTALL}")
    record: dict[str, Any] = json.loads(data[at : data.index(b"\0", at)])
    return record


class Libraries:
    """The libraries of this process: the CPU's at once, the CUDA one where PyTorch was built for CUDA."""

    def __init__(self) -> None:
        self._commits: dict[str, Any] = {}
        self.cpu = load(CPU_LIBRARY)
        self._cpu = ctypes.CDLL(str(self.cpu))
        self._cpu.nwor_cpu_verify_workspace_size.argtypes = [ctypes.c_int64] * 2
        self._cpu.nwor_cpu_verify_workspace_size.restype = ctypes.c_int64
        self._cpu.nwor_cpu_kernels.restype = ctypes.c_char_p
        self.cuda: Path | None = None
        # Loading makes no CUDA context, so this is safe before a fork. Where the file is missing, require()
        # says so on the first CUDA tensor: the CPU ops of such an install are whole.
        if torch.version.cuda is not None and find(CUDA_LIBRARY) is not None:
            self._load_cuda()

    def require(self, device: torch.device) -> None:
        """Raise LibraryError unless the ops run on ``device``."""
        if device.type == "cpu" or (device.type == "cuda" and self.cuda is not None):
            return
        if device.type != "cuda":
            raise LibraryError(f"nwor's ops run on cpu and cuda, not on {device.type}")
        self._load_cuda()  # raises, unless the library was put there after the start

    def _load_cuda(self) -> None:
        self.cuda = load(CUDA_LIBRARY)
        self._cuda = ctypes.CDLL(str(self.cuda))
        try:
            size = self._cuda.nwor_cuda_verify_workspace_bytes
        except AttributeError as error:
            raise LibraryError(f"{self.cuda} was built from other sources: {error}; {_REINSTALL}") from error
        size.argtypes = [ctypes.c_int64] * 5
        size.restype = ctypes.c_int64
        self._cuda.nwor_cuda_verify_plan_size.argtypes = [ctypes.c_int64]
        self._cuda.nwor_cuda_verify_plan_size.restype = ctypes.c_int64

    def commit_entry(self, device: torch.device) -> Any:
        """Return the entry point of ``csrc/commit_call.h`` for a device."""
        entry = self._commits.get(device.type)
        if entry is None:
            # A launch is over in microseconds: giving the interpreter's lock up for it would cost more than
            # that, and another thread might keep it for milliseconds. The CPU's commit does the work itself.
            library = ctypes.PyDLL(str(self.cuda)) if device.type == "cuda" else self._cpu
            name = f"nwor_{device.type}_commit"
            try:
                entry = self._commits[device.type] = getattr(library, name)
            except AttributeError as error:
                raise LibraryError(f"the library has no {name}; {_REINSTALL}") from error
            entry.argtypes = [ctypes.c_void_p] * 3
            entry.restype = ctypes.c_char_p
        return entry

    @property
    def cpu_kernels(self) -> str:
        """The instruction set that the CPU kernels use on this machine."""
        name: bytes = self._cpu.nwor_cpu_kernels()
        return name.decode()

    def cpu_workspace_size(self, workers: int, head_size: int) -> int:
        """Bytes of workspace for ``workers`` threads."""
        return int(self._cpu.nwor_cpu_verify_workspace_size(workers, head_size))

    def cuda_workspace_size(self, *limits: int) -> int:
        """Bytes of workspace for (multiprocessors, heads, KV heads, head size, longest window)."""
        return int(self._cuda.nwor_cuda_verify_workspace_bytes(*limits))

    def plan_size(self, device: torch.device) -> int:
        """Bytes of a plan of verify_attention on a device; 0 on a CPU, which plans in each call."""
        if device.type == "cpu":
            return 0
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        return int(self._cuda.nwor_cuda_verify_plan_size(sms))
