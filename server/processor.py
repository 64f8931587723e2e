"""What the processors can do and how many there are, for defaults that depend on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path

#: Where Linux lists a processor's instruction sets.
CPUINFO = Path("/proc/cpuinfo")

#: Where Linux lists this process' control groups, and where it has their files.
CGROUPS, CGROUP_FILES = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")

#: Instruction sets with products of bfloat16 numbers, as Linux names them: x86-64's, and Arm's.
BF16_SETS = ("amx_bf16", "avx512_bf16", "bf16")


def bf16_instructions(cpuinfo: Path | None = None) -> str | None:
    """Return the processor's instructions for bfloat16.

    Args:
        cpuinfo: what Linux tells of the processors; its own file where None.

    Returns:
        The name of the instruction set; empty where there is none; None where that cannot be known.

    """
    try:
        text = (cpuinfo or CPUINFO).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    lists = [line.partition(":")[2].split() for line in lines]
    if not lists:
        return None
    # Machines of different processors run on any of them.
    common = set(lists[0]).intersection(*lists[1:])
    return next((name for name in BF16_SETS if name in common), "")


def demo_dtype() -> tuple[str | None, str]:
    """Return the dtype that suits the demo model on this processor, and why.

    Returns:
        vLLM's name of the dtype, None to leave it to vLLM (the model's own, bfloat16); and a sentence.

    """
    found = bf16_instructions()
    if found is None:
        return None, f"bfloat16, the model's own: what a {platform.machine()} can do is not known here"
    if found:
        return None, f"bfloat16, the model's own: the processor has instructions for it ({found})"
    return "float32", f"float32: the processor has no instructions for bfloat16 ({', '.join(BF16_SETS[:2])})"


def usable_processors(cgroups: Path = CGROUPS, files: Path = CGROUP_FILES) -> float:
    """Return how many processors this process and those that it starts can keep busy.

    Args:
        cgroups: the list of this process' control groups, of either version.
        files: the folder of their files.

    Returns:
        The processors that it may run on, or its share of them where that is less: the least quota of its
        groups and those around them.

    """
    try:
        processors = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # not on Linux
        processors = float(os.cpu_count() or 1)
    return min([processors, *_shares(cgroups, files)])


def _shares(cgroups: Path, files: Path) -> Iterator[float]:
    """Yield the quotas of this process as numbers of processors."""
    try:
        lines = cgroups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # of the second version
            base, names = files, ["cpu.max"]
        elif "cpu" in controllers.split(","):
            base, names = files / "cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        # A container sees its own group as the root, or a path that is not there: then the root counts.
        own = base / path.lstrip("/")
        for folder in (own, *(above for above in own.parents if above.is_relative_to(base))):
            share = _share([folder / name for name in names])
            if share is not None:
                yield share


def _share(files: Sequence[Path]) -> float | None:
    """Return a quota as a number of processors; None where there is none, which is "max" or -1."""
    try:
        quota, period = " ".join(file.read_text(encoding="utf-8") for file in files).split()
        share = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return share if share > 0 else None
