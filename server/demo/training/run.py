"""Make the demo model: prepare the corpus, train the target, generate, train both heads, measure, export.

On one NVIDIA H200 with 16 cores:

    python -m server.demo.training.run --work build/demo

In miniature, on a CPU, in a few minutes:

    python -m server.demo.training.run --work build/demo --device cpu --tiny
"""

import argparse
import json
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from server.demo.training.acceptance import Acceptance, greedy_acceptance
from server.demo.training.export import export_head, export_target, load_target
from server.demo.training.generate import greedy_after, self_generated
from server.demo.training.heads import EagleHead
from server.demo.training.model import Target, TargetShape
from server.demo.training.optim import Schedule
from server.demo.training.prepare import prepare
from server.demo.training.train_heads import train_heads
from server.demo.training.train_target import train_target

DRAFT_STEPS = 4
NEW_TOKENS = 64
AUX_LAYERS = (1, 3, 5)

_TINY = {
    "cap_characters": 400_000, "total_characters": 4_000_000, "workers": 2, "target_steps": 60, "batch": 4,
    "length": 128, "head_steps": 120, "head_batch": 8, "generate_rows": 64, "generate_most": 256,
    "window": 72, "warmup": 20, "prompts": 8,
}  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--work", type=Path, required=True, help="folder for data, logs and results")
    add("--device", default="cuda")
    add("--seed", type=int, default=20261121)
    add("--workers", type=int, default=16)
    add("--cap-characters", type=int, default=16_000_000, help="most that is taken of one package")
    add("--total-characters", type=int, default=260_000_000)
    add("--target", type=Path, help="take this exported target and train the heads alone")
    add("--target-minutes", type=float, default=8.5)
    add("--target-steps", type=int, default=0, help="repeat a run by steps, not by time")
    add("--batch", type=int, default=64)
    add("--length", type=int, default=2048)
    add("--rate", type=float, default=4e-3)
    add("--warmup", type=int, default=200)
    add("--prompts", type=int, default=128, help="held-out prompts that acceptance is measured on")
    add("--generate-minutes", type=float, default=0.8)
    add("--generate-rows", type=int, default=4096)
    add("--generate-most", type=int, default=200_000)
    add("--window", type=int, default=384, help="tokens in a window that the heads are trained on")
    add("--head-minutes", type=float, default=4.7)
    add("--head-steps", type=int, default=0, help="repeat a run by steps, not by time")
    add("--head-batch", type=int, default=128)
    add("--head-rate", type=float, default=3e-3)
    add("--until", choices=("prepare", "target", "heads"), default="heads", help="stop after this stage")
    add("--no-compile", action="store_true")
    add("--tiny", action="store_true", help="sizes that a CPU finishes in minutes; the shapes stay")
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(_TINY, no_compile=True)
    return args


class Stages:
    """Prints and records how long each stage took, in seconds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def done(self, name: str) -> None:
        """Close a stage."""
        now = time.monotonic()
        self.seconds[name] = round(now - self._last, 1)
        self._last = now
        print(f"== {name}: {self.seconds[name]} s", flush=True)


def _report(acceptance: Acceptance) -> dict[str, Any]:
    return {
        "mean_acceptance_length": round(acceptance.mean_length, 4),
        "drafts": acceptance.drafts,
        "accepted": acceptance.accepted,
        "per_position": [round(p, 4) for p in acceptance.per_position],
    }


def main() -> None:
    """Entry point."""
    args = _arguments()
    work: Path = args.work
    work.mkdir(parents=True, exist_ok=True)
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    stages = Stages()
    shape = TargetShape()
    if not (work / "data.pt").exists():
        prepare(work, shape.vocab_size, args.cap_characters, args.total_characters, args.seed, args.workers)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    data = {name: tensor.to(device) for name, tensor in torch.load(work / "data.pt").items()}
    lines = (work / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    prompts = [tokenizer.encode(json.loads(line)["prompt"]).ids for line in lines[: args.prompts]]
    stages.done("prepare")
    if args.until == "prepare":
        return

    target = Target(shape)
    target_steps = 0
    if args.target:
        load_target(target, args.target)
        target.to(device)
    else:
        target.initialize(torch.Generator().manual_seed(args.seed))
        target.to(device)
        target_steps = train_target(
            target, data, work / "target.csv", batch=args.batch, length=args.length, rate=args.rate,
            seed=args.seed, schedule=Schedule(args.target_steps, args.target_minutes, args.warmup, 0.5),
            compiled=not args.no_compile, checkpoint=lambda: export_target(target, tokenizer, work / "model"),
            every=30 if args.tiny else 250,
        )  # fmt: skip
    export_target(target, tokenizer, work / "model")
    stages.done("target")
    if args.until == "target":
        return

    # The heads learn from the target as it is served.
    target.freeze_as_served()
    windows, _ = self_generated(
        target, data["train"], data["train_starts"], rows=args.generate_rows, length=args.window,
        minutes=args.generate_minutes, most=args.generate_most, seed=args.seed,
    )  # fmt: skip
    print(f"generated {tuple(windows.shape)}; first: {tokenizer.decode(windows[2].tolist())!r}", flush=True)
    stages.done("generate")

    heads = {"eagle": EagleHead(shape), "eagle3": EagleHead(shape, AUX_LAYERS)}
    for head in heads.values():
        head.initialize(torch.Generator().manual_seed(args.seed))
        head.to(device)

    held_out = greedy_after(target, prompts, NEW_TOKENS + DRAFT_STEPS + 1)
    row, given = held_out[0][0].tolist(), int(held_out[1][0])
    print(f"held-out: {tokenizer.decode(row[:given])!r} -> {tokenizer.decode(row[given:])!r}", flush=True)

    def measure(head: EagleHead) -> Acceptance:
        return greedy_acceptance(target, head, *held_out, NEW_TOKENS, DRAFT_STEPS)

    head_steps = train_heads(
        target, heads, windows, work, batch=args.head_batch, steps=DRAFT_STEPS, rate=args.head_rate,
        seed=args.seed, schedule=Schedule(args.head_steps, args.head_minutes, args.warmup, 0.6),
        compiled=not args.no_compile, measure=lambda head: measure(head).mean_length,
        every=50 if args.tiny else 500,
    )  # fmt: skip
    stages.done("heads")

    results = {}
    for name, head in heads.items():
        export_head(head, work / f"draft-{name}")
        head.to(torch.bfloat16)
        results[name] = _report(measure(head))
    best = max(results, key=lambda name: results[name]["mean_acceptance_length"])
    shutil.copytree(work / f"draft-{best}", work / "draft", dirs_exist_ok=True)
    stages.done("measure")
    summary = {
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "target_steps": target_steps,
        "target_tokens": target_steps * args.batch * args.length,
        "generated_windows": windows.shape[0],
        "head_steps": head_steps,
        "head_windows": head_steps * args.head_batch,
        "acceptance_estimate": results,
        "shipped_head": best,
        "seconds": stages.seconds,
    }
    (work / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print("ALL DONE", json.dumps(results), flush=True)


if __name__ == "__main__":
    main()
