"""One run: servers that are up, rounds of loads on their arms in turns, records written one by one."""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.serving import client, metrics, models, plan, processes, results, step_log
from benchmarks.serving.servers import MODEL, ROOT, Server
from benchmarks.serving.summary import quantile

#: Clients of the load that finds out what stock serves at most.
CAPACITY_CLIENTS = 128
#: Size of the loads by which servers learn, relative to those that are measured.
LEARNING_SCALE = 0.5
#: Seconds beyond which a load has failed.
_LOAD_SECONDS = 900.0


class Session:
    """Measures, round by round.

    Args:
        args: the command line.
        machine: what it runs on.
        flags: that every server got.
        servers: by name.
        folder: for what is not kept.
        began: when the command began.

    """

    def __init__(
        self,
        args: argparse.Namespace,
        machine: dict[str, Any],
        flags: list[str],
        servers: Mapping[str, Server],
        folder: Path,
        began: float,
    ) -> None:
        self.args, self.servers, self.folder = args, servers, folder
        self.until = began + 60 * float(args.minutes)
        self.document = results.load(args.out)
        self.device: str = machine["device"]
        self._settings = {
            **machine,
            "k": args.k,
            "temperature": args.temperature,
            "hard": args.hard,
            "flags": flags,
            "cache_dtype": args.cache_dtype,
            "start_s": {name: server.started for name, server in servers.items()},
            "nwor": {name: server.state() for name, server in servers.items() if server.key},
        }
        self._took: dict[tuple[plan.Lengths, str], float] = {}
        self._capacity: dict[plan.Lengths, float] = {}
        self._begin(args.acceptances[0])
        self._began = began
        self._vocabulary = models.vocabulary(args.shape)
        self._texts = self._write_texts()

    def _begin(self, acceptance: str) -> None:
        """Begin a run of its own in the results, with this acceptance."""
        arms = self.args.arms
        self.acceptance, self._began = acceptance, time.monotonic()
        self._took.clear()
        self._capacity.clear()
        self.run = f"{self._settings['date']} {self.args.shape} {acceptance} k{self.args.k}"
        self.document["runs"][self.run] = {
            **self._settings,
            "rates": {arm.name: models.rates(acceptance, arm.k) for arm in arms if arm.k},
            "tree_rates": {arm.name: models.tree_rates(acceptance, arm) for arm in arms if arm.tree},
        }

    def _write_texts(self) -> str:
        """Return the file of token ids that the demo model's prompts are cut from."""
        if not models.is_demo(self.args.shape):
            return ""
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(ROOT / "server/demo/model/tokenizer.json"))
        lines = (ROOT / "benchmarks/acceptance/prompts.jsonl").read_text("utf-8").splitlines()
        ids = [token for line in lines for token in tokenizer.encode(json.loads(line)["prompt"]).ids]
        path = self.folder / "texts.json"
        path.write_text(json.dumps(ids))
        return str(path)

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.until - time.monotonic()

    def warm(self) -> None:
        """Load every server once in each mode, all servers at the same time; nothing of it counts.

        Those that choose their draft tokens learn what steps cost, so nothing runs beside them, and they get
        each load once more.
        """
        began = time.monotonic()
        most = max((load.clients for load in self.args.loads), default=0) or 16
        lengths = self.args.lengths[0]

        def one(server: Server) -> None:
            for arm in [arm for arm in self.args.arms if arm.server == server.name]:
                server.switch(arm)
                for clients, scale in ((most, 0.1), (1, 0.25)):
                    job = self._job(server, arm, f"c{clients}", 0.0, lengths, "warm", scale)
                    self._load(job)

        choosing = {arm.server for arm in self.args.arms if arm.chosen}
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(one, [server for name, server in self.servers.items() if name not in choosing]))
        for name in sorted(choosing):
            one(self.servers[name])
        self._learn()
        print(f"warm after {time.monotonic() - began:.0f} s", flush=True)

    def _learn(self) -> None:
        """Load those that choose their draft tokens, alone."""
        lengths = self.args.lengths[0]
        for arm in [arm for arm in self.args.arms if arm.chosen]:
            server = self.servers[arm.server]
            for load in [load for load in self.args.loads if load.clients]:
                self._load(self._job(server, arm, load.name, 0.0, lengths, "alone", LEARNING_SCALE))

    def measure(self) -> None:
        """Measure all loads with each acceptance, which share the time."""
        end, acceptances = self.until, self.args.acceptances
        for place, acceptance in enumerate(acceptances):
            self.until = time.monotonic() + (end - time.monotonic()) / (len(acceptances) - place)
            if place:
                self._accept(acceptance)
            self._measure()
        self.until = end

    def _accept(self, acceptance: str) -> None:
        """Go on with another acceptance."""
        self._end()
        self._begin(acceptance)
        for server in self.servers.values():
            arm = next(arm for arm in self.args.arms if arm.server == server.name)
            if rates := models.rates(acceptance, arm.k):
                server.accept(rates)
        self._learn()

    def _measure(self) -> None:
        """Measure all loads, round by round, until the rounds are done or the time is up."""
        for number in range(self.args.rounds):
            for lengths in self.args.lengths:
                for load in self.args.loads:
                    if not self._fits(lengths, load):
                        print(f"no time for {load.name} in round {number + 1}", flush=True)
                        continue
                    self._turn(self.args.first_round + number, lengths, load)

    def _fits(self, lengths: plan.Lengths, load: plan.Load) -> bool:
        took = self._took.get((lengths, load.name))
        return self.left > (1.15 * took + 1 if took is not None else 5)

    def _turn(self, number: int, lengths: plan.Lengths, load: plan.Load) -> None:
        """Measure one load on every arm."""
        began = time.monotonic()
        rate = load.rate
        if load.share:
            rate = load.share * self.capacity(lengths)
            began = time.monotonic()
        place = self.args.loads.index(load)
        for arm in plan.order(self.args.arms, number + place):
            record = self._record(number, lengths, load, rate, arm)
            self.document["records"].append(record)
            self.document = results.merge([self.document])
            results.save(self.args.out, self.document)
            print(_line(record), flush=True)
        self._took[lengths, load.name] = time.monotonic() - began

    def capacity(self, lengths: plan.Lengths) -> float:
        """Return how many requests a second stock serves at most: measured once, in a closed loop."""
        if lengths not in self._capacity:
            stock = [arm for arm in self.args.arms if arm.mode == plan.STOCK]
            arm = next((arm for arm in stock if arm.name == plan.STOCK), stock[0])
            clients = min(CAPACITY_CLIENTS, self.args.max_seqs)
            server = self.servers[arm.server]
            figures = self._load(self._job(server, arm, f"c{clients}", 0.0, lengths, "capacity", 1.0))
            server.settle(self.args.rest)
            self._capacity[lengths] = served = figures["requests"] / figures["seconds"]
            name = f"{lengths.name}:{lengths.shared}" if lengths.shared else lengths.name
            self.document["runs"][self.run].setdefault("capacity", {})[name] = served
            print(f"{arm.name} serves {served:.2f} requests/s at most", flush=True)
        return self._capacity[lengths]

    def _record(
        self, number: int, lengths: plan.Lengths, load: plan.Load, rate: float, arm: plan.Arm
    ) -> results.Record:
        server = self.servers[arm.server]
        server.switch(arm)
        before = server.settle(self.args.rest)
        job = self._job(server, arm, load.name, rate, lengths, str(number), self.args.scale)
        taken = server.usage()
        figures = self._load(job)
        host = processes.rates(taken, server.usage(), figures["wall_s"])
        grown = metrics.difference(before, server.settle(max(self.args.rest, 2 * step_log.FLUSH_SECONDS)))
        window = figures.pop("window")
        steps = step_log.summarize(step_log.read(server.steps, *window))
        choice = {"choice": server.choice()} if arm.chosen else {}
        return {
            "run": self.run,
            "device": self.device,
            "shape": self.args.shape
            + (f" {self.args.cache_dtype}" if self.args.cache_dtype != "auto" else ""),
            "lengths": lengths.name,
            "acceptance": self.acceptance + (f" {self.args.hard:.0%}" if self.args.hard else ""),
            "shared": lengths.shared,
            "load": load.name,
            "rate": rate,
            "round": number,
            "arm": arm.name,
            **figures,
            "cores": {kind: used["seconds"] for kind, used in host.items()},
            "host": host,
            "steps": steps,
            "counters": metrics.describe(grown),
            **choice,
        }

    def _job(
        self,
        server: Server,
        arm: plan.Arm,
        load: str,
        rate: float,
        lengths: plan.Lengths,
        number: str,
        scale: float,
    ) -> client.Job:
        salt = arm.name
        # Nobody finds prompts of an earlier acceptance, or of requests that share less, in the prefix cache.
        if self.acceptance != self.args.acceptances[0]:
            salt += f" {self.acceptance}"
        if lengths.shared:
            salt += f" {lengths.shared} shared"
        return client.Job(
            port=server.port,
            model=MODEL,
            load=load,
            rate=rate,
            lengths=lengths.name,
            max_len=self.args.max_len,
            vocabulary=self._vocabulary,
            seed=f"{lengths.name} {load} {number}",
            salt=salt,
            shared=lengths.shared,
            temperature=self.args.temperature,
            scale=scale,
            seconds=self.args.seconds,
            ramp=max(1.0, self.args.seconds / 5),
            texts=self._texts,
            hard=self.args.hard,
        )

    def _load(self, job: client.Job) -> dict[str, Any]:
        """Run the load generator.

        Raises:
            RuntimeError: if it fails.

        """
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.serving.client"],
            input=client.describe(job),
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=_LOAD_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"load {job.load} failed: {done.stderr[-2000:]}")
        figures: dict[str, Any] = json.loads(done.stdout)
        return figures

    def close(self) -> None:
        """Write what there is."""
        self._end()
        print(f"{len(self.document['records'])} records in {self.args.out}", flush=True)

    def _end(self) -> None:
        """End a run: keep what servers that choose say of their choice."""
        run = self.document["runs"][self.run]
        run["draft_tokens"] = {
            arm.name: self.servers[arm.server].state().get("draft_tokens")
            for arm in self.args.arms
            if arm.chosen and self.servers[arm.server].healthy()
        }
        run["seconds"] = round(time.monotonic() - self._began, 1)
        results.save(self.args.out, self.document)


def _line(record: results.Record) -> str:
    """Return a record in one line."""
    steps, counters = record["steps"], record["counters"]
    shared = f":{record['shared']}" if record["shared"] else ""
    parts = [
        f"{record['lengths']}{shared} {record['load']:<5} r{record['round']} {record['arm']:<8}",
        f"{record['tokens_s']:8.1f} tokens/s",
        f"first {quantile(record['ttft_ms'], 0.5):7.1f} ms",
        f"each {quantile(record['tpot_ms'], 0.5):6.2f} ms",
        f"stall99 {quantile(record['stall_ms'], 0.99):6.0f} ms",
    ]
    if steps:
        pure, mixed = (steps.get(kind, {}).get("median_ms", math.nan) for kind in ("pure", "mixed"))
        parts.append(f"steps {pure:.2f}/{mixed:.2f} ms, {steps['mixed_share']:.0%} mixed")
    if counters["drafts"]:
        parts.append(f"length {1 + counters['accepted'] / counters['drafts']:.3f}")
    if counters.get("windows"):
        parts.append(
            "windows " + " ".join(f"{name} {value:.0f}" for name, value in counters["windows"].items())
        )
    if cores := record.get("cores"):
        parts.append("cores " + " ".join(f"{kind} {value:.2f}" for kind, value in sorted(cores.items())))
    if record["client_cpu"] > 0.5:
        parts.append(f"CLIENT {record['client_cpu']:.0%} of a core")
    return "  ".join(parts)
