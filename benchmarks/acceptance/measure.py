"""Measure speculative acceptance through a running server, on prompts from held-out files.

    python benchmarks/acceptance/measure.py --url http://127.0.0.1:8000 --output results.json

The figures come from the server's own ``vllm:spec_decode_*`` counters, before and after; where responses
carry ``metrics.speculative_decoding`` the requests' figures are added up too, and a difference is an error.
Nothing else may use the server meanwhile.
"""

import argparse
import codeop
import concurrent.futures
import datetime
import json
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).resolve().parent
PREFIX = "vllm:spec_decode_num_"
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:]+)(?:\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")
# Counts of ``metrics.speculative_decoding``, and the counters that they must add up to.
_COUNTS = {
    "num_spec_steps": "drafts",
    "num_draft_tokens": "draft_tokens",
    "num_accepted_draft_tokens": "accepted_tokens",
}
# The demo model's end of text; what follows it is another document.
_END = re.compile(r"<\|(eos|end)\|>")
_POSITION = re.compile(r'position="(\d+)"')


def read_counters(client: httpx.Client) -> dict[str, Any]:
    """Drafts, draft tokens, accepted tokens, and these by position, summed over engines, from /metrics.

    Raises:
        SystemExit: the server has no such counters, so it does not decode speculatively.
    """
    found: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in client.get("/metrics").raise_for_status().text.splitlines():
        match = _SAMPLE.match(line)
        if not match or not match["name"].startswith(PREFIX):
            continue
        name, value = match["name"].removeprefix(PREFIX).removesuffix("_total"), float(match["value"])
        if name == "accepted_tokens_per_pos":
            at = _POSITION.search(match["labels"] or "")
            if at:
                positions[int(at[1])] = positions.get(int(at[1]), 0.0) + value
        elif not name.endswith("_created"):
            found[name] = found.get(name, 0.0) + value
    if "drafts" not in found:
        raise SystemExit(
            "the server reports no vllm:spec_decode_* counters: start it with a draft model "
            "(--draft, --demo or --speculative-config)"
        )
    return {**found, "per_position": [positions[i] for i in sorted(positions)]}


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was counted between two readings."""
    old = before["per_position"] or [0.0] * len(after["per_position"])
    return {
        **{k: after[k] - before.get(k, 0.0) for k in after if k != "per_position"},
        "per_position": [b - a for a, b in zip(old, after["per_position"], strict=True)],
    }


def python_prefix(source: str) -> bool:
    """True where the whole lines of ``source`` are Python, or the beginning of Python that may go on."""
    lines = source[: source.rfind("\n") + 1]
    flags = codeop.PyCF_ALLOW_INCOMPLETE_INPUT | codeop.PyCF_DONT_IMPLY_DEDENT
    try:
        compile(lines, "completion", "exec", flags, dont_inherit=True)
    except SyntaxError as error:
        return "incomplete input" in str(error)
    except (ValueError, MemoryError):
        return False
    return True


def repeats(text: str) -> bool:
    """True where a line of 8 characters or more comes three times: the loops of small greedy models."""
    lines = [line.strip() for line in text.splitlines() if len(line.strip()) >= 8]
    return any(lines.count(line) >= 3 for line in set(lines))


def complete(client: httpx.Client, model: str, prompt: str, tokens: int) -> dict[str, Any]:
    """One greedy completion of exactly ``tokens`` tokens."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        # All completions have the same length, also where a file would end.
        "ignore_eos": True,
        "skip_special_tokens": False,
    }
    return client.post("/v1/completions", json=body).raise_for_status().json()


def by_requests(responses: list[dict[str, Any]]) -> dict[str, float] | None:
    """The requests' own figures, added up; None where the responses carry none."""
    found = [(r.get("metrics") or {}).get("speculative_decoding") for r in responses]
    if not all(found):
        return None
    total: dict[str, float] = {}
    for item in found:
        for key, value in item.items():
            if key in _COUNTS:
                total[key] = total.get(key, 0) + value
    return total


def processor() -> str:
    """Name of this machine's processor."""
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def report(result: dict[str, Any]) -> str:
    """The table that is printed."""
    lines = [
        f"prompts {result['prompts']}, new tokens each {result['new_tokens']}, greedy",
        f"drafts {result['drafts']:.0f}, draft tokens {result['draft_tokens']:.0f}, "
        f"accepted {result['accepted_tokens']:.0f}",
        f"mean acceptance length (bonus token included): {result['mean_acceptance_length']:.3f}",
        "",
        "| position | accepted | share of drafts |",
        "|---|---|---|",
    ]
    for i, value in enumerate(result["per_position"]):
        lines.append(f"| {i + 1} | {value:.0f} | {value / result['drafts']:.3f} |")
    lines += [
        "",
        f"completions in which the model ended its text before: {result['ended_early']}",
        f"completions that are the beginning of Python: {result['python_prefix_share']:.1%}",
        f"completions that repeat a line three times or more: {result['repeating_share']:.1%}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens per prompt")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--prompts", type=Path, default=HERE / "prompts.jsonl")
    parser.add_argument("--device", default=processor(), help="the server's device, for the record")
    parser.add_argument("--note", default="", help="how the server was started, for the record")
    parser.add_argument("--output", type=Path, help="write the result here as JSON")
    parser.add_argument("--samples", type=int, default=3, help="completions to print")
    args = parser.parse_args()
    prompts = [json.loads(line) for line in args.prompts.read_text(encoding="utf-8").splitlines()]
    headers = {"Authorization": f"Bearer {args.api_key}"} if args.api_key else {}
    with httpx.Client(base_url=args.url, headers=headers, timeout=600) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        version = client.get("/version").raise_for_status().json().get("version", "")
        before = read_counters(client)
        begin = time.monotonic()
        with concurrent.futures.ThreadPoolExecutor(args.concurrency) as pool:
            responses = list(pool.map(lambda p: complete(client, model, p["prompt"], args.tokens), prompts))
        seconds = time.monotonic() - begin
        # The counters are published with the engine's next statistics, shortly after the last response.
        time.sleep(2)
        counted = difference(before, read_counters(client))
    if not counted["drafts"]:
        raise SystemExit("the server drafted nothing for these requests")
    texts = [_END.split(r["choices"][0]["text"])[0] for r in responses]
    checks = [python_prefix(p["prompt"] + t) for p, t in zip(prompts, texts, strict=True)]
    # A prompt that is itself no beginning of Python says nothing about its completion.
    judged = [ok for p, ok in zip(prompts, checks, strict=True) if python_prefix(p["prompt"])]
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "device": args.device,
        "note": args.note,
        "engine_version": version,
        "prompts": len(prompts),
        "new_tokens": args.tokens,
        "mean_acceptance_length": 1 + counted["accepted_tokens"] / counted["drafts"],
        **counted,
        "generated_tokens": sum(r["usage"]["completion_tokens"] for r in responses),
        "seconds": round(seconds, 2),
        "python_prefix_share": sum(judged) / max(len(judged), 1),
        "python_prefix_judged": len(judged),
        "ended_early": sum(bool(_END.search(r["choices"][0]["text"])) for r in responses),
        "repeating_share": sum(map(repeats, texts)) / len(texts),
        "by_requests": by_requests(responses),
        "samples": [
            {"name": p["name"], "prompt": p["prompt"], "completion": t}
            for p, t in list(zip(prompts, texts, strict=True))[:: max(len(prompts) // 8, 1)]
        ],
    }
    print(report(result))
    for sample in result["samples"][: args.samples]:
        print(f"\n--- {sample['name']}\n{sample['prompt'][-200:]}[>>>]{sample['completion']}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    requests = result["by_requests"]
    if requests is not None:
        print("\nadded up over the requests:", json.dumps(requests))
        for key, counter in _COUNTS.items():
            if requests.get(key, 0) != counted[counter]:
                sys.exit(f"the requests' {key} ({requests.get(key, 0)}) differs from the counter {counter}")


if __name__ == "__main__":
    main()
