"""Measures on one GPU what `fast_sampling` exchanges, beside what it takes the place of.

    python benchmarks/kernels/sampling.py [--out sampling.json]

`argmax` is torch's against `nwor.argmax_rows`; `rejection` is vLLM's `rejection_sample` against NWOR's for a
batch of greedy requests with full windows. Each runs in a CUDA graph of several calls on the same logits, the
graphs in turns, so logits that fit the L2 cache are read from there. A time is the median over the turns, its
noise half the distance between the quartiles; microseconds a call.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from device import Graph, interleaved

from nwor import ops

ROWS = (1, 16, 64, 80, 320)
REQUESTS = (1, 16, 64)
VOCABULARIES = (32000, 128256)
DRAFTS = 4
CALLS = 10  # in a graph


def logits_of(rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, device="cuda").to(torch.bfloat16)


def argmax(rows: int, vocab: int) -> dict[str, Callable[[], Any]]:
    """Return both ways to the most likely tokens."""
    logits, output = logits_of(rows, vocab), torch.empty(rows, dtype=torch.int64, device="cuda")
    workspace = ops.make_argmax_workspace(rows, "cuda")
    ops.argmax_rows(logits, output, workspace)
    assert torch.equal(output, logits.argmax(dim=-1))
    return {
        "stock": lambda: logits.argmax(dim=-1),
        "nwor": lambda: ops.argmax_rows(logits, output, workspace, validate=False),
    }


def rejection(requests: int, vocab: int) -> dict[str, Callable[[], Any]]:
    """Return both ways to the tokens of greedy requests, most of whose drafts are right."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

    from nwor.engine.fastpath.greedy_rejection import rejection_sample_greedy

    window, rows = DRAFTS + 1, requests * (DRAFTS + 1)
    logits = logits_of(rows, vocab)
    int32 = {"dtype": torch.int32, "device": "cuda"}
    likely = logits.argmax(dim=-1).roll(1).to(torch.int32)
    drafts = torch.where(
        torch.rand(rows, device="cuda") < 0.7, likely, torch.randint(0, vocab, (rows,), **int32)
    )
    starts = torch.arange(0, rows + 1, window, **int32)
    states = torch.arange(requests, device="cuda")
    each = states.repeat_interleave(window)
    step = torch.arange(window, **int32).repeat(requests)
    positions = 500 + step.long()
    seeds = torch.arange(requests, device="cuda")
    temperature = torch.zeros(requests, device="cuda")
    workspace = ops.make_argmax_workspace(rows, "cuda")

    def stock() -> tuple[torch.Tensor, torch.Tensor]:
        return rejection_sample(
            logits, None, drafts, starts, positions, states, each, step, temperature, seeds, DRAFTS
        )

    def nwor() -> tuple[torch.Tensor, torch.Tensor]:
        return rejection_sample_greedy(
            logits, None, drafts, starts, positions, states, seeds, DRAFTS, None, workspace
        )

    assert torch.equal(stock()[1], nwor()[1])
    return {"stock": stock, "nwor": nwor}


def repeated(function: Callable[[], Any]) -> Callable[[], None]:
    def calls() -> None:
        for _ in range(CALLS):
            function()

    return calls


def measure(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Return each way's time and noise in microseconds."""
    pool = torch.cuda.graph_pool_handle()
    graphs = [Graph(repeated(function), pool) for function in ways.values()]
    row: dict[str, float] = {}
    series: Sequence[Sequence[float]] = interleaved(graphs, repeats, 2000.0)
    for name, times in zip(ways, series, strict=True):
        low, middle, high = statistics.quantiles(times, n=4)
        row[name] = middle / CALLS
        row[f"{name}_noise"] = (high - low) / 2 / CALLS
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="write the results as JSON, too")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    torch.manual_seed(0)
    results: list[dict[str, Any]] = []
    for title, count, sizes, make in (
        ("argmax", "rows", ROWS, argmax),
        ("rejection", "requests", REQUESTS, rejection),
    ):
        print(f"| {title}: {count} | vocabulary | stock, us | nwor, us | ratio |\n|---|---|---|---|---|")
        for vocab in VOCABULARIES:
            for size in sizes:
                row = measure(make(size, vocab), args.repeats)
                results.append({"what": title, count: size, "vocab": vocab, **row})
                stock, nwor = (f"{row[way]:.1f} +- {row[f'{way}_noise']:.1f}" for way in ("stock", "nwor"))
                print(
                    f"| {size} | {vocab} | {stock} | {nwor} | {row['stock'] / row['nwor']:.2f} |", flush=True
                )
        print()
    if args.out:
        with open(args.out, "w") as file:
            json.dump(
                {"gpu": torch.cuda.get_device_name(), "drafts": DRAFTS, "results": results}, file, indent=1
            )


if __name__ == "__main__":
    main()
