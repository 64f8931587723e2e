"""Host time of a step, without NWOR, in mode `off` and in `stage`, in runs of steps that take turns.

Three passes over the same batch:

- ``busy``: all that the engine's thread does in a step, vLLM's part and NWOR's: from the end of one wait for
  the device to the beginning of the next. In the engine of decode.py one thread does everything: it schedules
  a step, prepares and launches it, waits for the results of the step before, takes them in and makes them
  outputs. Of all this one call waits for the device: that for the event behind the results' copy to the host,
  in `AsyncOutput.get_output`, and it is left out. In it are: what the driver does inside a launch, even if it
  should wait there; what the device does not notice, as it is busy itself, as well as what it waits for; the
  few lines of the benchmark between steps, which are the same in every engine; and what interrupts the
  thread. Not in it are detokenization, which these requests go without, and other processes: a server's front
  end and its messages. ``cpu`` is the thread's processor time over the same span: were there a wait that
  nobody knows of, it would be in ``busy`` and not in ``cpu``.
- ``hooks``: NWOR's overrides of the runner alone, the time of the stock methods that they call taken off, the
  wait in `get_output` included, as well as what the timing itself costs. That is measured in the same steps,
  at methods that NWOR does not override: in an engine the timing takes longer than in a loop. What NWOR saves
  elsewhere, in the scheduler above all, is not in it.
- ``runner``: the model runner's two calls of a step, `execute_model` and `sample_tokens`, as wholes.

Each run of steps has a batch of its own with the same prompts, so that in each mode and process the same
requests of the same lengths take the same steps. What two modes differ by is the mean over all turns of what
they differed by in each, and its standard error says how far turns agree. Stock vLLM runs in another process
than NWOR's modes: what one start of a process differs from another by, no turn can show.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

#: Where it is measured.
CONTEXT, BATCH, ACCEPTANCE = 512, 64, 0.6
#: Steps after a change of mode that do not count.
SKIPPED = 8

#: By mode, as in :func:`summarize`.
Summary = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Pass:
    """One way to look at the steps.

    Attributes:
        name: what its result is called.
        method: what starts it on the worker.
        turns: turns of each mode.
        share: share of the steps that were asked for.
        nwor: whether there is nothing of it to see without NWOR.

    """

    name: str
    method: str
    turns: int
    share: float = 1.0
    nwor: bool = False


PASSES = (
    Pass("busy", "bench_watch_busy", turns=10),
    Pass("hooks", "bench_watch_hooks", turns=10, nwor=True),
    Pass("runner", "bench_watch_runner", turns=4, share=0.2),
)


def measure(engine: Any, steps: int) -> None:
    """Measure on an engine of decode.py and put microseconds by pass and mode into its record.

    Args:
        engine: the modes that it has are compared, but for `cow`.
        steps: steps that count, for each mode in each pass that takes all of them.

    """
    batch = min(BATCH, max(engine.args.batches))
    modes = [mode for mode in engine.modes if mode != "cow"]
    engine.set_acceptance(ACCEPTANCE)
    for mode in modes:  # fills the prefix cache and warms each mode up
        engine.set_mode(mode)
        with engine.batch(CONTEXT, batch) as requests:
            requests.run(SKIPPED)
    result = engine.record["host_time"] = {"batch": batch, "context": CONTEXT, "acceptance": ACCEPTANCE}
    for watched in PASSES:
        run = -(-int(steps * watched.share) // watched.turns)
        seen = watch(engine, watched, modes, batch, SKIPPED + run)
        if not seen:
            continue
        result[watched.name] = summarize(seen)
        if watched.name == "busy":
            result["cpu"] = summarize(seen, "cpu")
            # Else the spans between waits are no steps.
            wrong = {label: len(values["ends"]) for label, values in seen.items()}
            wrong = {label: waits for label, waits in wrong.items() if abs(waits - SKIPPED - run) > 1}
            if wrong:
                result["error"] = f"waits in {SKIPPED + run} steps: {wrong}"
        engine.save()


def watch(
    engine: Any, watched: Pass, modes: list[str], batch: int, steps: int
) -> dict[str, dict[str, list[float]]]:
    """Run a pass in turns with the other engine.

    Returns:
        By "mode/turn" what :func:`summarize` takes; empty where the engine has nothing of it to see.

    """
    blind = watched.nwor and not engine.nwor_modes
    call = engine.llm.collective_rpc
    if not blind:
        call(watched.method)
    try:
        for turn in range(watched.turns):
            engine.turns.ask("host", cell=f"{watched.name}/{turn}")
            if blind:  # the other engine has its turns all the same
                continue
            for mode in modes if turn % 2 == 0 else modes[::-1]:
                engine.set_mode(mode)
                with engine.batch(CONTEXT, batch) as requests:
                    gc.collect()  # not in the middle of it
                    call("bench_watch_label", args=(f"{mode}/{turn}",))
                    requests.run(steps)
                    call("bench_watch_label", args=("",))
    finally:
        seen = {} if blind else call("bench_watch_stop")[0]
    return {label: values for label, values in seen.items() if label}


def summarize(seen: Mapping[str, Mapping[str, list[float]]], series: str = "seconds") -> Summary:
    """Return the figures of the steps that count, by mode.

    Args:
        seen: by "mode/turn", ``seconds`` of each step, those of the ``timing`` among them where it is known,
            and when it ``ends``, as the worker gathered them; turns in their order.
        series: what takes the place of ``seconds``.

    Returns:
        By mode, in microseconds: ``median`` and the quartiles ``low`` and ``high`` of the host time, without
        the timing's; ``timing``, the median of that; ``step``, the median time from one step to the next;
        ``turns`` and ``means``, the median and the mean of each turn; and ``steps``, how many counted.

    """
    host: dict[str, list[list[float]]] = {}
    timing: dict[str, list[float]] = {}
    between: dict[str, list[float]] = {}
    for label, values in seen.items():
        mode = label.split("/")[0]
        counted = values[series][SKIPPED:]
        own = values.get("timing", [0.0] * len(values[series]))[SKIPPED:]
        host.setdefault(mode, []).append([whole - part for whole, part in zip(counted, own, strict=True)])
        timing.setdefault(mode, []).extend(own)
        ends = values["ends"][SKIPPED:]
        between.setdefault(mode, []).extend(b - a for a, b in itertools.pairwise(ends))
    result: Summary = {}
    for mode, turns in host.items():
        seconds = list(itertools.chain.from_iterable(turns))
        low, _, high = statistics.quantiles(seconds, n=4)
        result[mode] = {
            "median": statistics.median(seconds) * 1e6,
            "low": low * 1e6,
            "high": high * 1e6,
            "timing": statistics.median(timing[mode]) * 1e6,
            "step": statistics.median(between[mode]) * 1e6,
            "turns": [statistics.median(turn) * 1e6 for turn in turns],
            "means": [statistics.fmean(turn) * 1e6 for turn in turns],
            "steps": len(seconds),
        }
    return result


def difference(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], of: str = "turns"
) -> tuple[float, float] | None:
    """Return what two modes of :func:`summarize` differ by, and its standard error, in microseconds.

    Turns of the same number are neighbours in time, so each is compared with its own.

    Args:
        ours: the mode that is looked at.
        theirs: the one that it is compared with.
        of: "turns" for the turns' medians, "means" for their means, in which rare work counts as well: what
            is done once in many steps, but also what interrupts a step.

    Returns:
        None where there are fewer than two turns of both.

    """
    apart = [a - b for a, b in zip(ours.get(of, ()), theirs.get(of, ()), strict=False)]
    if len(apart) < 2:
        return None
    return statistics.fmean(apart), statistics.stdev(apart) / math.sqrt(len(apart))
