"""Where the device's time of a decode step goes, kernel by kernel, in each of NWOR's modes of one engine.

    python benchmarks/engine/kernel_times.py --shape 8b --k 4 --modes off,stage --contexts 512,4096 \
        --batches 1,16 --acceptances 0.6 --host-steps 40 --output /tmp/kernels.json

Modes take turns within a cell, `--repeats` times, each time with the same requests. A profile costs time on
the host, not in kernels; between them it may: `idle`, when no kernel runs, says less than what kernels take.
`kernels` adds up what each takes from its begin to its end; `step` is from the first begin to the last end.
Under the profiler kernels run one after another that would overlap without it, as the join of
FlashAttention's splits does with the attention before it: steps take longer, those of `off` more so.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import decode

#: Steps after the batch has begun that do not count, and fewest that do.
SKIPPED, LEAST_STEPS = 6, 20
#: Lines of a printed table, and characters of a kernel's name there.
MOST_LINES, MOST_NAME = 12, 60

#: Calls and microseconds in a step, by a kernel's name.
Kernels = dict[str, tuple[float, float]]
NONE = (0.0, 0.0)


class Times(NamedTuple):
    """Of a step, in microseconds: what each kernel takes, when none runs, from first begin to last end."""

    kernels: Kernels
    idle: float
    span: float


def by_name(spans: Iterable[tuple[str, float, float]], steps: int) -> Times:
    """Return the times of a step, of several that ran one after another.

    Args:
        spans: name, begin and end of each kernel's run, in microseconds; in any order, they may overlap.
        steps: steps that they are of.

    """
    calls: dict[str, int] = defaultdict(int)
    taken: dict[str, float] = defaultdict(float)
    ordered = sorted(spans, key=lambda span: span[1])
    first = last = ordered[0][1] if ordered else 0.0
    idle = 0.0
    for name, begin, end in ordered:
        calls[name] += 1
        taken[name] += end - begin
        idle += max(begin - last, 0.0)
        last = max(last, end)
    kernels = {name: (calls[name] / steps, taken[name] / steps) for name in taken}
    return Times(kernels, idle / steps, (last - first) / steps)


def middle(turns: Sequence[Times]) -> Times:
    """Return the medians of several turns; a kernel that a turn lacks took no time in it."""
    names = {name for turn in turns for name in turn.kernels}
    medians = {}
    for name in names:
        calls, taken = zip(*(turn.kernels.get(name, NONE) for turn in turns), strict=True)
        medians[name] = (statistics.median(calls), statistics.median(taken))
    idle, span = (statistics.median(values) for values in zip(*(turn[1:] for turn in turns), strict=True))
    return Times(medians, idle, span)


def table(seen: Mapping[str, Times]) -> list[str]:
    """Return a cell's table: totals, then the kernels that differ most between modes, microseconds a step."""
    modes = list(seen)
    names = {name for own in seen.values() for name in own.kernels}

    def differs(name: str) -> float:
        times = [own.kernels.get(name, NONE)[1] for own in seen.values()]
        return max(times) - min(times) if len(modes) > 1 else times[0]

    lines = ["| | " + " | ".join(modes) + " |", "|---|" + "---|" * len(modes)]
    totals = {
        "kernels": [sum(time for _, time in own.kernels.values()) for own in seen.values()],
        "idle": [own.idle for own in seen.values()],
        "step": [own.span for own in seen.values()],
    }
    for what, times in totals.items():
        lines.append(f"| {what} | " + " | ".join(f"{time:.0f}" for time in times) + " |")
    for name in sorted(names, key=differs, reverse=True)[:MOST_LINES]:
        of_modes = (own.kernels.get(name, NONE) for own in seen.values())
        cells = [f"{calls:.0f} x, {taken:.1f}" for calls, taken in of_modes]
        lines.append(f"| `{name[:MOST_NAME]}` | " + " | ".join(cells) + " |")
    return lines


def profile(batch: Any, steps: int, device: str = "cuda") -> Times:
    """Run steps of a batch under torch's profiler; see :func:`by_name` for what is returned.

    Args:
        batch: as :class:`drive.Batch`.
        steps: steps to run.
        device: "cuda", or "cpu" for torch's operators there.

    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    on_gpu = device == "cuda"
    with torch.profiler.profile(
        activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
    ) as seen:
        batch.run(steps)
        if on_gpu:
            torch.cuda.synchronize()
    kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in seen.events()
        if event.device_type == kind
    ]
    return by_name(spans, steps)


def main() -> None:
    """Print and record each cell's table."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the kernels are launched in this process
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    sys.path.append(str(decode.ROOT))
    args = decode.parse()
    steps = max(args.host_steps, LEAST_STEPS)
    engine = decode.Engine(args)
    engine.start()
    results = engine.record["kernel_times"] = []
    for context in args.contexts:
        for batch in args.batches:
            for acceptance in args.acceptances:
                engine.set_acceptance(acceptance)
                turns: dict[str, list[Times]] = {mode: [] for mode in engine.modes}
                for _ in range(args.repeats):
                    for mode in engine.modes:
                        engine.set_mode(mode)
                        gc.collect()
                        with engine.batch(context, batch) as requests:
                            requests.run(SKIPPED)
                            turns[mode].append(profile(requests, steps))
                seen = {mode: middle(own) for mode, own in turns.items()}
                cell = {"context": context, "batch": batch, "acceptance": acceptance, "steps": steps}
                results.append({**cell, "modes": {mode: list(own) for mode, own in seen.items()}})
                engine.save()
                print(f"\n{args.shape}, k={args.k}, {batch} x {context}, {acceptance}: us a step\n")
                print("\n".join(table(seen)), flush=True)


if __name__ == "__main__":
    main()
