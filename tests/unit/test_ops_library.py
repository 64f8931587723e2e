"""Finding, loading and describing the compiled libraries; what is said when one is missing or broken."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from nwor import ops
from nwor.ops import library
from nwor.version import __version__


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_missing_library_is_named(tmp_path: Path) -> None:
    done = run_python("import nwor.ops", NWOR_LIBRARY_DIR=str(tmp_path))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "LibraryError: libnwor_cpu.so is not there" in last
    assert str(tmp_path) in last
    assert "pip install --no-build-isolation" in last


def test_broken_library_is_named(tmp_path: Path) -> None:
    broken = tmp_path / library.CPU_LIBRARY
    broken.write_bytes(b"\x7fELF not really")
    done = run_python("import nwor.ops", NWOR_LIBRARY_DIR=str(tmp_path))
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert f"LibraryError: {broken} does not load under PyTorch {torch.__version__}" in last


def test_missing_cuda_library_is_an_error_for_cuda_alone(tmp_path: Path) -> None:
    """The CPU's ops work without it; nothing falls back to them in silence."""
    shutil.copy(ops.LIBRARIES.cpu, tmp_path)
    code = (
        "import torch\n"
        "from nwor import ops\n"
        "ops.LIBRARIES.require(torch.device('cpu'))\n"
        "ops.LIBRARIES.require(torch.device('cuda'))\n"
    )
    done = run_python(code, NWOR_LIBRARY_DIR=str(tmp_path))
    last = done.stderr.strip().splitlines()[-1]
    assert "LibraryError: libnwor_cuda.so is not there" in last
    assert "NWOR_CUDA=ON" in last


def test_other_devices_are_refused() -> None:
    with pytest.raises(ops.LibraryError, match="run on cpu and cuda, not on meta"):
        ops.LIBRARIES.require(torch.device("meta"))


def test_build_record() -> None:
    record = library.build_record(ops.LIBRARIES.cpu)
    assert record["library"] == "cpu"
    assert record["version"] == __version__
    assert record["torch"]
    assert record["compiler"]


def test_every_op_has_schema_and_cpu_kernel() -> None:
    for name in library.OP_NAMES:
        op = getattr(torch.ops.nwor, name).default
        assert torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU")


def test_only_stable_symbols_of_torch_are_used() -> None:
    """No c10 or ATen symbol: what lets one build load under several versions of torch."""
    nm = shutil.which("nm")
    if nm is None:
        pytest.skip("nm is not installed")
    listed = subprocess.run(
        [nm, "-DC", "--undefined-only", str(ops.LIBRARIES.cpu)], capture_output=True, text=True, check=True
    )
    names = [line.split(maxsplit=1)[-1] for line in listed.stdout.splitlines()]
    assert any(name.startswith("aoti_torch_") for name in names)
    assert not [name for name in names if name.startswith(("c10::", "at::", "torch::"))]


def test_layer_table_columns() -> None:
    """The columns are those of the C header, in its order."""
    keys = [torch.zeros(5, 2, 8)[:, :, :]]
    values = [torch.zeros(2, 5, 8).transpose(0, 1)]
    key_cache = torch.zeros(3, 2, 8, 16).permute(0, 3, 1, 2)
    value_cache = torch.zeros(3, 2, 16, 8).permute(0, 2, 1, 3)
    table = ops.make_layer_table(keys, values, [key_cache], [value_cache])
    assert table.dtype == torch.int64
    assert table.tolist() == [
        [
            keys[0].data_ptr(),
            values[0].data_ptr(),
            *(16, 8, 8, 40),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            *(256, 1, 128, 16),
            *(256, 8, 128, 1),
        ]
    ]
    assert ops.make_cache_table([key_cache], [value_cache]).tolist() == [[0] * 6 + table[0, 6:].tolist()]


def test_doctor_reports_and_passes() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "nwor.doctor"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for text in (
        "CPU library",
        "CUDA library",
        "verify_attention (cpu)",
        "argmax_rows (cpu)",
        "all well",
        torch.__version__,
    ):
        assert text in done.stdout


def test_doctor_fails_on_a_missing_library(tmp_path: Path) -> None:
    done = run_python("import sys, nwor.doctor; sys.exit(nwor.doctor.main())", NWOR_LIBRARY_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "BROKEN: libnwor_cpu.so is not there" in done.stdout
