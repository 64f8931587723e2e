"""Stock ``vllm serve`` and ``nwor-server`` on one device, in turns, under the same HTTP load.

    python -m benchmarks.serving --shape 8b --out serving.json [--minutes 8.5]

README.md in this folder says which flags answer which question. Results are written load by load; a file that
is there already is extended.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.serving import models, plan, results, servers
from benchmarks.serving.models import OWN
from benchmarks.serving.session import Session


def parse(argv: list[str]) -> argparse.Namespace:
    """Read and check the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serving", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="8b", help="8b, 1b, tiny, demo (the bundled model), demo-8b")
    parser.add_argument("--out", type=Path, required=True, help="results; extended where it is there")
    parser.add_argument(
        "--arms",
        default=",".join(plan.CORE_ARMS),
        help="stock, off, stage, cow, auto, fitted; @K for another k",
    )
    parser.add_argument(
        "--loads", help="c16: 16 clients; p12: 12 requests/s; p50%%: of capacity. Default: core grid"
    )
    parser.add_argument(
        "--lengths",
        default="512/256",
        help="medians of prompts and answers, several by commas; 512/256:0.5 has a --shared of its own",
    )
    parser.add_argument(
        "--acceptance",
        default="heads",
        help="heads, a name in curves.json, a number for each draft, or own; several share the time",
    )
    parser.add_argument("--k", type=int, default=4, help="draft tokens of arms without one of their own")
    parser.add_argument("--shared", type=float, default=0.0, help="share of prompts with a common prefix")
    parser.add_argument(
        "--hard", type=float, default=0.0, help="share of hard requests among the demo's texts"
    )
    parser.add_argument("--rounds", type=int, default=12, help="at most")
    parser.add_argument("--first-round", type=int, default=0, help="number of the first, for other requests")
    parser.add_argument("--minutes", type=float, default=8.5, help="in all, servers' starts included")
    parser.add_argument("--scale", type=float, help="of the requests in a closed loop; default 1, for 1b 2")
    parser.add_argument("--seconds", type=float, default=10.0, help="window of Poisson arrivals")
    parser.add_argument("--rest", type=float, default=0.4, help="seconds before each load")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--cache-gib", type=float, help="KV cache of each server; default 14, for 1b 10, CPU 1"
    )
    parser.add_argument("--max-len", type=int, default=8192)
    parser.add_argument("--max-seqs", type=int, default=128, help="--max-num-seqs of every server")
    parser.add_argument("--cache-dtype", default="auto", help="--kv-cache-dtype of every server")
    parser.add_argument("--capture-sizes", default="", help="sizes of CUDA graphs, for a faster start")
    parser.add_argument(
        "--flag", action="append", default=[], help="one more flag for every server, as --flag=--x=y"
    )
    parser.add_argument(
        "--nwor-flag", action="append", default=[], help="one more flag for NWOR's servers alone"
    )
    parser.add_argument("--no-step-log", action="store_true", help="without figures of single steps")
    parser.add_argument("--start-seconds", type=float, default=330.0, help="that servers may take to start")
    args = parser.parse_args(argv)
    try:
        _check(args)
    except ValueError as error:
        parser.error(str(error))
    return args


def _check(args: argparse.Namespace) -> None:
    known = models.known_shapes()
    if args.shape not in known:
        raise ValueError(f"--shape {args.shape}: use one of {', '.join(known)}")
    if models.is_demo(args.shape):
        args.max_len = min(args.max_len, models.DEMO_LEN)
    args.arms = [plan.parse_arm(text, args.k) for text in args.arms.split(",")]
    if len({arm.name for arm in args.arms}) != len(args.arms):
        raise ValueError("--arms names one twice")
    args.loads = [plan.parse_load(text) for text in (args.loads or plan.core_loads(args.shape)).split(",")]
    if any(load.share for load in args.loads) and all(arm.mode != plan.STOCK for arm in args.arms):
        raise ValueError("a load at a share of stock's capacity needs the arm stock")
    if any(load.clients > args.max_seqs for load in args.loads):
        raise ValueError(f"more clients than --max-seqs {args.max_seqs}: they would wait in the queue")
    args.lengths = [plan.parse_lengths(text, args.max_len, args.shared) for text in args.lengths.split(",")]
    args.acceptances = args.acceptance.split(",")
    for acceptance in args.acceptances:
        models.rates(acceptance, args.k)
        for arm in args.arms:
            models.tree_rates(acceptance, arm)
    if len(args.acceptances) > 1 and (
        OWN in args.acceptances or any(arm.tree is not None for arm in args.arms)
    ):
        raise ValueError(
            "several values of --acceptance: neither own nor trees can be changed while servers run"
        )
    if any(arm.adaptive for arm in args.arms) and args.acceptances != [OWN]:
        raise ValueError("adaptive verification goes by how sure a real head is: it needs --acceptance own")
    if not 0 <= args.hard <= 1 or (
        args.hard and (not models.is_demo(args.shape) or args.acceptances != [OWN])
    ):
        raise ValueError(
            "--hard is a share from 0 to 1, and needs texts and a real head: a demo shape, --acceptance own"
        )
    if any(lengths.shared for lengths in args.lengths) and models.is_demo(args.shape):
        raise ValueError(
            "common prefixes: modes of one server would find each other's texts in the prefix cache"
        )
    args.scale = args.scale or {"1b": 2.0}.get(args.shape, 1.0)


def flags(args: argparse.Namespace, device: str) -> list[str]:
    """Return the flags that every server gets.

    Some shorten the start, in every arm alike: dummy weights, a given cache (no memory is profiled), and the
    sizes of graphs where they are given.
    """
    gib = args.cache_gib or (1.0 if device == "cpu" else {"1b": 10.0}.get(args.shape, 14.0))
    result = ["--max-model-len", str(args.max_len), "--max-num-seqs", str(args.max_seqs)]
    result += ["--kv-cache-memory-bytes", str(int(gib * 2**30)), "--kv-cache-dtype", args.cache_dtype]
    result += ["--disable-uvicorn-access-log"]
    shared = any(lengths.shared for lengths in args.lengths)
    result += ["--enable-prefix-caching" if shared else "--no-enable-prefix-caching"]
    if not models.is_demo(args.shape):
        result += ["--load-format", "dummy"]
    if device == "cpu":
        result += ["--enforce-eager"]
    else:
        servers_here = len({arm.server for arm in args.arms})
        # A share for each: vLLM refuses to start where less than this is free.
        result += ["--gpu-memory-utilization", f"{0.88 / servers_here:.2f}"]
        if args.capture_sizes:
            result += ["--cudagraph-capture-sizes", *args.capture_sizes.split(",")]
    return [*result, *args.flag]


def main(argv: list[str]) -> int:
    """Measure what the command line asks for."""
    args = parse(argv)
    began = time.monotonic()
    machine = results.machine()
    device = "cuda" if results.gpu() else "cpu"
    if device == "cpu" and args.acceptances != [OWN]:
        print("vLLM has no synthetic acceptance on CPUs: add --acceptance own", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="nwor-serving-"))
    target, draft, method = models.write(folder / "models", args.shape, args.max_len)
    common = flags(args, device)
    modes = [mode for mode in plan.MODES if any(arm.mode == mode for arm in args.arms)]
    commands = {
        arm.server: servers.command(
            arm.server,
            target,
            models.speculation(draft, method, arm, args.acceptances[0], args.max_seqs),
            [*common, *([] if arm.mode == plan.STOCK else args.nwor_flag)],
            modes,
            arm,
            models.tree_rates(args.acceptances[0], arm),
        )
        for arm in args.arms
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with servers.running(
        commands,
        folder,
        args.out.with_suffix(""),
        args.start_seconds,
        not args.no_step_log,
        len(args.acceptances) > 1,
    ) as up:
        session = Session(args, machine, common, up, folder, began)
        try:
            session.warm()
            session.measure()
        finally:
            session.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
