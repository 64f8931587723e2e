"""What the processors can do and how many there are, for defaults that depend on it."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path

#: Where Linux lists a processor's instruction sets.
CPUINFO = Path("/proc/cpuinfo")

#: Where Linux tells a container its share of the processors: by the second version of control groups, "quota
#: period" in one file, or by the first, in two. The quota is "max" or -1 where there is none.
CPU_QUOTAS = (
    (Path("/sys/fs/cgroup/cpu.max"),),
    (Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")),
)

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


def usable_processors(quotas: Sequence[Sequence[Path]] | None = None) -> float:
    """Return how many processors this process and those that it starts can keep busy.

    Args:
        quotas: where a container's share stands; :data:`CPU_QUOTAS` where None.

    Returns:
        The processors that it may run on, or its share of them where that is less.

    """
    try:
        processors = float(len(os.sched_getaffinity(0)))
    except AttributeError:  # not on Linux
        processors = float(os.cpu_count() or 1)
    shares = (_share(files) for files in (CPU_QUOTAS if quotas is None else quotas))
    return min([processors, *(share for share in shares if share is not None)])


def _share(files: Sequence[Path]) -> float | None:
    """Return a quota as a number of processors; None where there is none."""
    try:
        quota, period = " ".join(file.read_text(encoding="utf-8") for file in files).split()
        share = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return None
    return share if share > 0 else None
