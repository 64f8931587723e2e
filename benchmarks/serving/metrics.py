"""Figures from a server's /metrics: read, subtracted, put in words."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_LINE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
#: Labels that say which server it is.
_DROPPED = ("model_name", "engine")
_KEPT = (
    "nwor_windows_total",
    "nwor_tokens_total",
    "nwor_direct_windows_total",
    "nwor_accounting_mismatches_total",
    "vllm:spec_decode_num_",
    "vllm:num_preemptions_total",
    "vllm:generation_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
)


def parse(text: str) -> dict[str, float]:
    """Return the figures that are used, by name and labels, over all engines."""
    result: dict[str, float] = {}
    for one in text.splitlines():
        if not one.startswith(_KEPT):
            continue
        match = _LINE.match(one)
        if match is None:
            continue
        labels = [f"{name}={value}" for name, value in _LABEL.findall(match[2] or "") if name not in _DROPPED]
        key = match[1] + (f"[{','.join(sorted(labels))}]" if labels else "")
        result[key] = result.get(key, 0.0) + float(match[3])
    return result


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return by how much each counter has grown, without those that have not."""
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: value for name, value in grown.items() if value and "_created" not in name}


def running(figures: Mapping[str, float]) -> int:
    """Return how many requests a server has."""
    return int(figures.get("vllm:num_requests_running", 0) + figures.get("vllm:num_requests_waiting", 0))


def describe(grown: Mapping[str, float]) -> dict[str, Any]:
    """Return what a load's counters say: acceptance, preemptions, and what became of NWOR's windows."""
    drafts = grown.get("vllm:spec_decode_num_drafts_total", 0.0)
    per_position = {
        int(name.split("position=")[1].rstrip("]")): value / drafts
        for name, value in grown.items()
        if name.startswith("vllm:spec_decode_num_accepted_tokens_per_pos_total[") and drafts
    }
    result: dict[str, Any] = {
        "drafts": drafts,
        "accepted": grown.get("vllm:spec_decode_num_accepted_tokens_total", 0.0),
        "by_position": [round(per_position[place], 4) for place in sorted(per_position)],
        "preemptions": grown.get("vllm:num_preemptions_total", 0.0),
        "generated": grown.get("vllm:generation_tokens_total", 0.0),
        "prompt_tokens": grown.get("vllm:prompt_tokens_total", 0.0),
        "cached_tokens": grown.get("vllm:prefix_cache_hits_total", 0.0),
    }
    windows = _by_label(grown, "nwor_windows_total", "outcome")
    if windows:
        result["windows"] = windows
        result["direct_reasons"] = _by_label(grown, "nwor_direct_windows_total", "reason")
        result["mismatches"] = sum(_by_label(grown, "nwor_accounting_mismatches_total", "figure").values())
    return result


def _by_label(figures: Mapping[str, float], name: str, label: str) -> dict[str, float]:
    start = f"{name}[{label}="
    return {key[len(start) : -1]: value for key, value in figures.items() if key.startswith(start)}
