"""How many tokens a server makes in virtual time: vLLM's scheduler, NWOR's choice, a device made of a table.

    python -m benchmarks.engine.virtual_loop --costs h200-8b --clients 16,64 --texts heads,half

The scheduler is the real one, a step ahead of results, as in serving. A step takes what the table of costs
says, and drafts are accepted by chance, so what is compared is the choice alone: its regret beside fixed
numbers, in loads of many kinds, without a GPU. No figure of it is a measurement of a server.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import statistics
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.engine.scheduler_rig import Drive, Setup, make_request, make_scheduler
from benchmarks.serving import models
from nwor.config import DraftBounds
from nwor.counts.records import StepRecord, Treatment, WorkerFacts
from nwor.draft_costs import StepCosts
from nwor.engine import scheduler as nwor_scheduler
from nwor.engine.draft_lengths import lookup
from nwor.engine.draft_lengths.step_times import StepTimes
from nwor.engine.scheduler import NworAsyncScheduler
from nwor.engine.stats.step_messages import attach, attach_costs

COSTS = Path(__file__).parent / "costs"
BOUNDS = DraftBounds(0, 8)
#: Chance of each draft of an easy and of a hard request.
EASY, HARD = 0.85, 0.2
#: Steps that may be under way.
AHEAD = 2

#: The chance of a draft, by its place; drawn for each request.
Chances = Callable[[int], float]


def read_costs(name: str) -> StepCosts:
    """Return a table of costs of the folder ``costs``, as the admin report of a server has it."""
    plain = json.loads((COSTS / f"{name}.json").read_text("utf-8"))
    seconds = tuple(
        tuple(math.inf if value is None else value / 1e3 for value in row)
        for row in plain["milliseconds"].values()
    )
    rows = plain["prompt_milliseconds"]
    return StepCosts(
        tuple(map(int, plain["milliseconds"])),
        tuple(plain["draft_tokens"]),
        seconds,
        tuple(map(int, rows)),
        tuple(value / 1e3 for value in rows.values()),
        tuple(value / 1e3 for value in plain["pass_milliseconds"].values()),
    )


def chances_of(texts: str, draws: random.Random) -> Chances:
    """Return the chances of a new request's drafts.

    Args:
        texts: ``heads`` or a number, as in benchmarks/serving; ``half``: every second request is hard;
            ``wide``: any chance; ``bursty``: easy and hard passages within a request.
        draws: random numbers.

    """
    if texts == "half":
        chance = draws.choice((EASY, HARD))
        return lambda _: chance
    if texts == "wide":
        chance = draws.betavariate(3.0, 1.6)
        return lambda _: chance
    if texts == "bursty":
        state = [draws.random() < 0.5]

        def passage(_: int) -> float:
            state[0] ^= draws.random() < 0.03
            return 0.9 if state[0] else 0.45

        return passage
    accepted = [1.0, *models.rates(texts, BOUNDS.most)]
    each = [later / before for before, later in itertools.pairwise(accepted)]
    return lambda place: each[min(place, len(each) - 1)]


@dataclass(frozen=True)
class Load:
    """What clients send.

    Attributes:
        clients: of a closed loop, at most.
        texts: as :func:`chances_of` takes it.
        prompt: median of the prompts' tokens, log-normal (sigma 0.6).
        answer: median of the answers' (sigma 0.5).

    """

    clients: int
    texts: str
    prompt: int = 512
    answer: int = 256


@dataclass
class _Clock:
    now: float = 0.0

    def perf_counter(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now


@contextmanager
def _virtual(clock: _Clock) -> Iterator[None]:
    """Have the scheduler's side read this clock."""
    modules: tuple[Any, ...] = (lookup, nwor_scheduler)
    before = [module.time for module in modules]
    for module in modules:
        module.time = SimpleNamespace(perf_counter=clock.perf_counter, monotonic=clock.monotonic)
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.time = own


@dataclass
class Device(Drive):
    """Answers steps as a rank in mode ``stage`` does, with records of their windows.

    Attributes:
        costs: what the rank measured when it started.
        wanted: draft tokens asked for: a number, bounds, or empty for what the engine was started with.

    """

    costs: StepCosts | None = None
    wanted: str = ""
    chances: dict[str, Chances] = field(default_factory=dict)
    _windows: int = 0
    _draws: random.Random = field(default_factory=lambda: random.Random(3))

    def answer(self, output: Any) -> Any:
        """Return what a step samples."""
        names = list(output.num_scheduled_tokens)
        drafts = [len(output.scheduled_spec_decode_tokens.get(name, ())) for name in names]
        tokens = []
        for name, count in zip(names, drafts, strict=True):
            if self.scheduler.requests[name].is_prefill_chunk:
                tokens.append([])
                continue
            chance, accepted = self.chances[name], 0
            while accepted < count and self._draws.random() < chance(accepted):
                accepted += 1
            tokens.append([2] * (accepted + 1))
        result = ModelRunnerOutput(names, {name: row for row, name in enumerate(names)}, tokens)
        if any(drafts):
            self._windows += sum(map(bool, drafts))
            sampled = np.array([len(some) for some in tokens], np.int32).tobytes()
            treatment = Treatment("stage", np.array(drafts, np.int32).tobytes(), len(names), 0)
            facts = WorkerFacts("stage", 1, 1024, draft_tokens=self.wanted)
            attach(result, StepRecord(names, treatment, sampled, facts, self._windows))
        if self.costs is not None:
            attach_costs(result, self.costs)
            self.costs = None
        return result


class VirtualServer:
    """A server, its device and its clients.

    Args:
        folder: an empty folder.
        costs: what steps take.
        load: what clients send.
        wanted: draft tokens: a number, or ``auto``.
        believed: what the engine takes steps to cost; as ``costs`` where it is None.
        fits: whether windows may be fitted to requests.

    """

    def __init__(
        self,
        folder: Path,
        costs: StepCosts,
        load: Load,
        wanted: str,
        believed: StepCosts | None = None,
        fits: bool = True,
    ) -> None:
        self.load, self.clock, self._device_costs = load, _Clock(), StepTimes(costs)
        settings: dict[str, Any] = {"mode": "stage", "draft_tokens": str(BOUNDS), "fit_windows": fits}
        setup = Setup(
            drafts=BOUNDS.most,
            by_requests=tuple((low, high, k) for low, high, k in BOUNDS.schedule),
            blocks=1 << 16,
            requests=max(load.clients, 2),
            length=8192,
            caching=False,
            settings=settings,
        )
        with _virtual(self.clock):
            self.scheduler: Any = make_scheduler(folder, setup, NworAsyncScheduler)
        number = "" if wanted == "auto" else wanted
        self.device = Device(self.scheduler, costs=believed or costs, wanted=number)
        self.clients = load.clients
        self.numbers: Counter[int] = Counter()
        self._new, self._count, self._tokens = random.Random(1), 0, 0
        self._ends: deque[float] = deque()
        self._free_at = 0.0

    def run(self, seconds: float, clients: int | None = None) -> float:
        """Go on for so many seconds with so many clients, and return the tokens of each."""
        self.clients = min(self.clients if clients is None else clients, self.load.clients)
        with _virtual(self.clock):
            before, began = self._tokens, self.clock.now
            while self.clock.now < began + seconds:
                self._step()
            return (self._tokens - before) / (self.clock.now - began)

    def _step(self) -> None:
        while len(self.scheduler.requests) < self.clients:
            self._send()
        if self.device.under_way < AHEAD:
            output = self.device.make()
            self._free_at = max(self._free_at, self.clock.now) + self._seconds(output)
            self._ends.append(self._free_at)
            if output.total_num_scheduled_tokens:
                self.numbers[output.num_spec_tokens_to_schedule] += 1
                if self.device.under_way < AHEAD:
                    return
        self.clock.now = max(self.clock.now, self._ends.popleft())
        _, result = self.device._under_way[0]
        self._tokens += sum(map(len, result.sampled_token_ids))
        self.device.take()

    def _send(self) -> None:
        self._count += 1
        name, load, new = str(self._count), self.load, self._new
        prompt = min(6000, max(8, round(load.prompt * new.lognormvariate(0.0, 0.6))))
        answer = min(2000, max(8, round(load.answer * new.lognormvariate(0.0, 0.5))))
        if self._count <= load.clients:  # they do not end together
            answer = max(8, round(answer * new.random()))
        self.device.chances[name] = chances_of(load.texts, new)
        sampling = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        self.scheduler.add_request(make_request(self.scheduler, name, [3] * prompt, sampling))

    def _seconds(self, output: Any) -> float:
        """Return what the device takes for a step."""
        scheduled = output.num_scheduled_tokens
        if not scheduled:
            return 0.0
        drafts = output.scheduled_spec_decode_tokens
        requests, made = len(scheduled), output.num_spec_tokens_to_schedule
        rows = requests + sum(map(len, drafts.values()))
        prompt = sum(scheduled.values()) - rows
        times = self._device_costs
        whole = times.costs.step(requests, made)
        if not math.isfinite(whole):
            return 1.0  # nothing was measured, for nobody should be there
        seconds = whole - float(times.saved(requests, made, BOUNDS.candidates, np.array(float(rows))))
        return seconds + (times.costs.beside(rows, prompt) if prompt else 0.0)


def _measure(
    costs: StepCosts, load: Load, clients: Sequence[int], wanted: str, args: argparse.Namespace
) -> tuple[list[float], str]:
    """Return the tokens/s of each phase, and the shares of the numbers of draft tokens."""
    with tempfile.TemporaryDirectory(prefix="nwor-virtual-") as folder:
        number = "auto" if wanted == "fitted" else wanted
        server = VirtualServer(Path(folder), costs, load, number, fits=wanted == "fitted")
        for count in clients:
            server.run(args.warm, count)
        server.numbers.clear()
        rates = [server.run(args.seconds, count) for _ in range(args.times) for count in clients]
        steps = sum(server.numbers.values())
        shares = ", ".join(f"{k}: {count / steps:.0%}" for k, count in sorted(server.numbers.items()))
        return rates, shares


def main(argv: Sequence[str]) -> int:
    """Print tokens/s of each number, and those of what is chosen beside the best."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--costs", default="h200-8b", help="a file of the folder costs, without .json")
    parser.add_argument("--clients", default="16,64,128,256", help="8-64: by turns so many")
    parser.add_argument("--texts", default="heads,half", help="heads, 0.6, half, wide, bursty")
    parser.add_argument("--numbers", default="0,1,2,4,auto,fitted", help="fitted: auto with fitted windows")
    parser.add_argument("--seconds", type=float, default=10.0, help="of virtual time, for each phase")
    parser.add_argument("--warm", type=float, default=8.0, help="seconds before, likewise")
    parser.add_argument("--times", type=int, default=1, help="that the phases come one after the other")
    parser.add_argument("--lengths", default="512/256")
    args = parser.parse_args(argv)
    costs = read_costs(args.costs)
    prompt, answer = map(int, args.lengths.split("/"))
    found: dict[str, list[float]] = {}
    for texts in args.texts.split(","):
        for phases in args.clients.split(","):
            clients = [int(count) for count in phases.split("-")]
            load = Load(max(clients), texts, prompt, answer)
            rates: dict[str, list[float]] = {}
            for number in args.numbers.split(","):
                rates[number], shares = _measure(costs, load, clients, number, args)
                if not number.isdecimal():
                    print(f"  {texts} {phases} {number}: {shares}", flush=True)
            fixed = [rate for number, rate in rates.items() if number.isdecimal()]
            # The best number of each phase: more than any one number gives where loads change.
            best = statistics.fmean(max(same) for same in zip(*fixed, strict=True))
            said = "  ".join(f"{number} {statistics.fmean(rate):.0f}" for number, rate in rates.items())
            ratios = {
                number: statistics.fmean(rate) / best
                for number, rate in rates.items()
                if not number.isdecimal()
            }
            for number, ratio in ratios.items():
                found.setdefault(number, []).append(ratio)
            told = "  ".join(f"{number} / best {ratio:.3f}" for number, ratio in ratios.items())
            print(f"{texts} {phases}: {said}  {told}", flush=True)
    for number, all_ratios in found.items():
        print(
            f"{number} / best: geometric mean {statistics.geometric_mean(all_ratios):.3f}, "
            f"least {min(all_ratios):.3f}"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
