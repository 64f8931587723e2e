"""``python -m nwor.doctor``: what was built, for what, and whether each op loads and works here.

Exit code 0 when everything that should work on this machine does, 1 otherwise.
"""

from __future__ import annotations

import functools
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from nwor.engine.plugin import tested, vllm_version, why_not
from nwor.version import __version__


class Report:
    """Lines for the reader, and whether one of them was bad."""

    def __init__(self) -> None:
        self.failed = False

    def line(self, name: str, text: str) -> None:
        """Print a fact."""
        print(f"{name:<24} {text}")

    def fail(self, name: str, text: str) -> None:
        """Print a fault and remember it."""
        self.failed = True
        print(f"{name:<24} BROKEN: {text}")

    def check(self, name: str, work: Callable[[], str]) -> None:
        """Print what ``work`` returns, or its exception as a fault."""
        try:
            self.line(name, work())
        except Exception as error:
            self.fail(name, f"{type(error).__name__}: {error}")


def _versions(report: Report) -> None:
    report.line("nwor", __version__)
    report.line("python", f"{platform.python_version()} on {platform.machine()}")
    built_for = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    report.line("torch", f"{torch.__version__} ({built_for})")
    vllm = vllm_version()
    if vllm is None:
        report.line("vllm", "not installed (the ops work without it)")
        return
    report.line("vllm", f"{vllm}, tested: {tested(vllm) or 'not this version'}")
    reason = why_not()
    if reason is not None:
        report.line("plugin", f"not available: {reason}")


def _fast_paths(report: Report) -> None:
    """Say which fast paths step aside, because vLLM's code is not the one that they stand for."""
    if vllm_version() is None:
        return
    try:
        from nwor.engine.fastpath.copies import standing_aside

        aside = standing_aside()
    except Exception as error:  # vLLM's import may fail in any way; its engines would say so themselves
        report.line("fast paths", f"not known, vLLM cannot be imported: {type(error).__name__}: {error}")
        return
    for path, reason in aside.items():
        report.line(f"fast path {path}", f"as vLLM does it: {reason}")
    if not aside:
        report.line("fast paths", "all of vLLM's code that they stand for is the known one")


def _library(report: Report, path: Path | None, name: str) -> None:
    from nwor.ops.library import build_record

    if path is None:
        report.line(name, "not built")
        return

    def describe() -> str:
        record = build_record(path)
        if record["version"] != __version__:
            raise RuntimeError(f"{path} was built from version {record['version']}: reinstall nwor")
        parts = [
            f"{key} {record[key]}" for key in ("version", "torch", "compiler", "cuda") if record.get(key)
        ]
        if record.get("architectures"):
            parts.append(f"for {record['architectures']}")
        else:
            parts.append(f"for {record['processor']}")
        return f"{path} (built {record['built']}: {', '.join(parts)})"

    report.check(name, describe)


def _tensor_fill(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    flat = torch.arange(count, device=device, dtype=torch.float32).mul_(0.37).sin_()
    return flat.view(shape).to(dtype)


def check_attention(device: torch.device, dtype: torch.dtype) -> str:
    """Run verify_attention on a small batch, with a plan where there are any; compare with the reference."""
    from nwor import ops, reference

    query = _tensor_fill((4, 4, 64), device, dtype)
    key, value = (_tensor_fill((4, 2, 64), device, dtype) * factor for factor in (0.9, 1.1))
    caches = [_tensor_fill((3, 16, 2, 64), device, dtype) * factor for factor in (0.8, 1.2)]
    table = torch.tensor([[2, 0], [1, 1]], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 3, 4], dtype=torch.int32, device=device)
    lengths = torch.tensor([20 + 3, 7 + 1], dtype=torch.int32, device=device)
    output = torch.empty_like(query)
    size = ops.verify_attention_workspace_size(device, 4, 2, 64, 3)
    workspace = torch.zeros(size, dtype=torch.uint8, device=device)
    arguments = (query, key, value, caches[0], caches[1], table, starts, lengths)
    plan = ops.make_verify_plan(device)
    if plan is not None:
        ops.plan_verify_attention(
            starts,
            lengths,
            plan,
            num_heads=4,
            num_kv_heads=2,
            head_size=64,
            max_query_len=3,
            source_dtype=dtype,
        )
    ops.verify_attention(*arguments, output, workspace, scale=0.125, max_query_len=3, plan=plan)
    want, _ = reference.verify_attention(*arguments, scale=0.125)
    error = (output.to(torch.float64) - want).abs().max().item()
    if not error < 2e-2:
        raise AssertionError(f"differs from the reference by {error}")
    planned = "no plans on a CPU" if plan is None else "planned by plan_verify_attention"
    return f"ok, largest error {error:.1e}; {planned}"


def check_commit(device: torch.device, dtype: torch.dtype) -> str:
    """Commit one of two tokens in two layers and compare whole caches with the reference."""
    from nwor import ops, reference

    keys = [_tensor_fill((2, 2, 64), device, dtype) + layer for layer in range(2)]
    caches = [torch.zeros(2, 16, 2, 64, dtype=dtype, device=device) for _ in range(4)]
    slots = torch.tensor([17, 18], device=device)
    starts = torch.tensor([0, 2], dtype=torch.int32, device=device)
    counts = torch.ones(1, dtype=torch.int32, device=device)
    want = [
        cache
        for key, layer in zip(keys, (0, 1), strict=True)
        for cache in reference.commit_window(
            key, key, caches[layer], caches[2 + layer], slots, starts, commit_counts=counts
        )
    ]
    ops.commit_window(
        ops.make_layer_table(keys, keys, caches[:2], caches[2:]),
        caches,
        slots,
        starts,
        commit_counts=counts,
        num_kv_heads=2,
        head_size=64,
        block_size=16,
        source_dtype=dtype,
    )
    got = [caches[0], caches[2], caches[1], caches[3]]
    if not all(torch.equal(one, other) for one, other in zip(got, want, strict=True)):
        raise AssertionError("the caches differ from the reference")
    return "ok"


def check_log(device: torch.device, dtype: torch.dtype) -> str:
    """Log a slot, overwrite it, restore it."""
    from nwor import ops

    caches = [_tensor_fill((2, 16, 2, 64), device, dtype) * factor for factor in (1, 2)]
    before = [cache.clone() for cache in caches]
    table = ops.make_cache_table(caches[:1], caches[1:])
    log = ops.make_slot_log(1, 2, 2, 64, caches[0].element_size(), device)
    slots = torch.tensor([3, 4], device=device)
    starts = torch.tensor([0, 2], dtype=torch.int32, device=device)
    ops.log_slots(table, caches, log, slots, starts, num_kv_heads=2, head_size=64, block_size=16)
    for cache in caches:
        cache[0, 4] = 5
    counts = torch.ones(1, dtype=torch.int32, device=device)
    ops.restore_slots(table, caches, log, slots, starts, counts, num_kv_heads=2, head_size=64, block_size=16)
    if not all(torch.equal(cache, old) for cache, old in zip(caches, before, strict=True)):
        raise AssertionError("the restored caches differ from those before")
    return "ok"


def check_stage(device: torch.device, dtype: torch.dtype) -> str:
    """Copy one row of two aside."""
    from nwor import ops

    source = _tensor_fill((2, 2, 64), device, dtype)
    key, value = torch.zeros_like(source), torch.zeros_like(source)
    count = torch.ones(1, dtype=torch.int32, device=device)
    ops.stage_window([source], [source], [key], [value], count)
    if not (torch.equal(key[0], source[0]) and torch.equal(value[0], source[0]) and not key[1].any()):
        raise AssertionError("the staged rows differ from the source")
    return "ok"


def check_argmax(device: torch.device, dtype: torch.dtype) -> str:
    """Find the largest elements of rows that are long and not aligned, twice with one workspace."""
    from nwor import ops

    logits = _tensor_fill((3, 20011), device, dtype)[:, 1:]
    output = torch.empty(3, dtype=torch.int64, device=device)
    workspace = ops.make_argmax_workspace(3, device)
    for _ in range(2):
        ops.argmax_rows(logits, output.fill_(-1), workspace)
        if not torch.equal(output, logits.argmax(dim=-1)):
            raise AssertionError("the indices differ from torch's")
    return "ok"


def _self_checks(report: Report, device: torch.device, dtype: torch.dtype) -> None:
    for name, check in (
        ("verify_attention", check_attention),
        ("commit_window", check_commit),
        ("log/restore_slots", check_log),
        ("stage_window", check_stage),
        ("argmax_rows", check_argmax),
    ):
        report.check(f"{name} ({device.type})", functools.partial(check, device, dtype))


def main() -> int:
    """Print the report and return the exit code."""
    report = Report()
    _versions(report)
    try:
        from nwor import ops
        from nwor.ops.library import CUDA_LIBRARY, find
    except Exception as error:
        report.fail("libraries", str(error))
        return 1
    _library(report, ops.LIBRARIES.cpu, "CPU library")
    _library(report, ops.LIBRARIES.cuda or find(CUDA_LIBRARY), "CUDA library")
    _fast_paths(report)
    report.line("CPU kernels", ops.LIBRARIES.cpu_kernels)
    _self_checks(report, torch.device("cpu"), torch.float32)
    if torch.cuda.is_available():
        report.line(
            "GPU",
            f"{torch.cuda.get_device_name()}, sm_{''.join(map(str, torch.cuda.get_device_capability()))}",
        )
        _self_checks(report, torch.device("cuda", torch.cuda.current_device()), torch.bfloat16)
    else:
        report.line("GPU", "none (the CUDA library is not loaded)")
    print("something is broken, see above" if report.failed else "all well")
    return int(report.failed)


if __name__ == "__main__":
    sys.exit(main())
