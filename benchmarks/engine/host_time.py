"""Host time of a step, without NWOR, in mode `off` and in `stage`, in blocks of steps that take turns.

Two passes over the same batch. ``runner`` times the model runner's two calls of a step, `execute_model` and
`sample_tokens`, as wholes. They prepare inputs and launch kernels; on a single GPU none of their code waits
for the device (the wait for a step's results is in the output object's `get_output`, which is outside). What
the driver does inside a launch is not ours to see, so the second pass, ``hooks``, leaves vLLM's own part
out: it times NWOR's overrides and takes off the time of the stock methods that they call, the wait in
`get_output` included, as well as what the timing itself costs. That is measured in the same steps, at methods
that NWOR does not override: in an engine the timing takes longer than in a loop.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

#: Where it is measured.
CONTEXT, BATCH, ACCEPTANCE = 512, 64, 0.6
#: Turns of each mode in a pass.
TURNS = 4
#: Steps after a change of mode that do not count.
SKIPPED = 4


def measure(engine: Any, steps: int) -> dict[str, Any]:
    """Measure on an engine of decode.py and return microseconds by pass and mode.

    Args:
        engine: the modes that it has are compared, but for `cow`.
        steps: steps that count, for each mode and pass.

    """
    batch = min(BATCH, max(engine.args.batches))
    context = CONTEXT
    modes = [mode for mode in engine.modes if mode != "cow"]
    passes = {"runner": "bench_watch_runner", "hooks": "bench_watch_hooks"}
    engine.set_acceptance(ACCEPTANCE)
    for mode in modes:  # fills the prefix cache and warms each mode up
        engine.set_mode(mode)
        with engine.batch(context, batch) as requests:
            requests.run(SKIPPED)
    result: dict[str, Any] = {"batch": batch, "context": context, "acceptance": ACCEPTANCE}
    for name, method in passes.items():
        if name == "hooks" and not engine.nwor_modes:
            for turn in range(TURNS):  # nothing to time, but the other engine has turns here
                engine.turns.ask("host", cell=f"{name}/{turn}")
            continue
        with engine.batch(context, batch) as requests:
            engine.llm.collective_rpc(method)
            try:
                for turn in range(TURNS):
                    engine.turns.ask("host", cell=f"{name}/{turn}")
                    for mode in modes if turn % 2 == 0 else modes[::-1]:
                        engine.set_mode(mode)
                        engine.llm.collective_rpc("bench_watch_label", args=(f"{mode}/{turn}",))
                        requests.run(SKIPPED + -(-steps // TURNS))
            finally:
                seen = engine.llm.collective_rpc("bench_watch_stop")[0]
        result[name] = summarize(seen)
    return result


def summarize(seen: dict[str, dict[str, list[float]]]) -> dict[str, dict[str, float]]:
    """Return medians over the steps that count, by mode.

    Args:
        seen: by "mode/turn", ``seconds`` of each step, those of the ``timing`` among them, and when it
            ``ends``, as the worker gathered them.

    Returns:
        By mode, in microseconds: ``median`` and the quartiles ``low`` and ``high`` of the host time, without
        the timing's; ``timing``, the median of that; ``step``, the median time from one step to the next; and
        ``steps``, how many counted.

    """
    host: dict[str, list[float]] = {}
    timing: dict[str, list[float]] = {}
    between: dict[str, list[float]] = {}
    for label, values in seen.items():
        mode = label.split("/")[0]
        ends = values["ends"][SKIPPED:]
        own = values["timing"][SKIPPED:]
        net = [whole - part for whole, part in zip(values["seconds"][SKIPPED:], own, strict=True)]
        host.setdefault(mode, []).extend(net)
        timing.setdefault(mode, []).extend(own)
        between.setdefault(mode, []).extend(b - a for a, b in itertools.pairwise(ends))
    result = {}
    for mode, seconds in host.items():
        low, _, high = statistics.quantiles(seconds, n=4)
        result[mode] = {
            "median": statistics.median(seconds) * 1e6,
            "low": low * 1e6,
            "high": high * 1e6,
            "timing": statistics.median(timing[mode]) * 1e6,
            "step": statistics.median(between[mode]) * 1e6,
            "steps": len(seconds),
        }
    return result
