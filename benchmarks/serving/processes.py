"""What a server's processes take of the machine: processor time, the kernel's share, waits, page faults."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

#: Kinds of processes by the beginning of the names that vLLM gives them: each API server is a front.
KINDS = {"VLLM::Engi": "engine", "VLLM::Work": "worker", "VLLM::APIS": "front"}
PROC = Path("/proc")

#: By kind of process (front, engine, worker, other): ``seconds`` that it has had a core, ``system`` of them
#: in the kernel, ``waited`` seconds that its threads were ready and had none, ``faults``: minor page faults.
Usage = dict[str, dict[str, float]]


def usage(group: int, proc: Path = PROC) -> Usage:
    """Return what the processes of a group have taken so far.

    Args:
        group: the process group; the process of the same number is the front.
        proc: where Linux tells of processes.

    """
    result: Usage = {}
    tick = os.sysconf("SC_CLK_TCK")
    for stat in proc.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            if int(fields[2]) != group:
                continue
            own = "front" if int(stat.parent.name) == group else "other"
            user, system = int(fields[11]) / tick, int(fields[12]) / tick
            taken = result.setdefault(
                KINDS.get(name[:10], own), {"seconds": 0.0, "system": 0.0, "waited": 0.0, "faults": 0.0}
            )
            taken["seconds"] += user + system
            taken["system"] += system
            taken["waited"] += _waited(stat.parent)
            taken["faults"] += int(fields[7])
    return result


def _waited(process: Path) -> float:
    """Return the seconds that a process's threads, as far as they still run, waited for a core."""
    result = 0.0
    for thread in process.glob("task/*/schedstat"):
        with contextlib.suppress(OSError, ValueError):  # it has ended, or this kernel does not tell
            result += int(thread.read_text().split()[1]) / 1e9
    return result


def rates(before: Mapping[str, Mapping[str, float]], after: Usage, seconds: float) -> Usage:
    """Return what was taken a second between two looks, by kind of process: ``seconds`` are cores then."""
    return {
        kind: {
            name: round((value - before.get(kind, {}).get(name, 0.0)) / seconds, 3)
            for name, value in figures.items()
        }
        for kind, figures in after.items()
    }
