"""Claim: windows count what came in them, ratios pair rounds, results merge, reports are made from them.

Coverage: the pure parts of benchmarks/serving. No server runs here, and no test looks at a duration.
"""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving import (
    client,
    figures,
    metrics,
    mixed_cells,
    mixed_report,
    mixed_steps,
    plan,
    report,
    results,
    step_log,
    summary,
)
from benchmarks.serving.stream import FailedError, Stream, payload
from benchmarks.serving.summary import Timeline

RESULTS = Path(report.__file__).parent / "results"


def test_a_window_counts_the_tokens_that_came_in_it() -> None:
    whole = Timeline(0.0, [1.0, 2.0, 3.0], tokens=7)  # one token, then three a chunk
    across = Timeline(0.5, [1.5, 2.5])  # cut off: the others' three a chunk
    assert summary.tokens_between([whole, across], 0.0, 9.0) == pytest.approx(7 + 1 + 3)
    assert summary.tokens_between([whole, across], 1.2, 2.2) == pytest.approx(3 + 1)
    found = summary.summarize([whole, across], 0.0, 4.0)
    assert found["requests"] == 1
    assert found["ttft_ms"] == [1000.0, 1000.0]
    assert found["tpot_ms"] == [pytest.approx(333.3333)]
    assert found["stall_ms"] == [1000.0]
    assert found["tokens_s"] == pytest.approx(11 / 4)


def test_arrivals_count_by_when_they_were_sent() -> None:
    early, inside = Timeline(0.0, [5.0, 6.0], 2), Timeline(4.0, [7.0, 8.0], 3)
    found = summary.summarize([early, inside], 3.0, 6.5, "sent")
    assert found["requests"] == 1
    assert found["ttft_ms"] == [3000.0]


def test_quantiles_interpolate() -> None:
    assert summary.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert summary.quantile([1.0, 2.0], 0.25) == 1.25
    assert math.isnan(summary.quantile([], 0.5))


def test_steps_are_pure_or_mixed() -> None:
    lines = [
        step_log.line(0, [0.01, 0.012, 0.011], 9, 0, 1.0),
        step_log.line(1, [0.02, 0.02], 7, 512, 2.0),
        step_log.line(2, [], 2, 900, 3.0),
    ]
    found = step_log.summarize(lines)
    assert found["pure"]["median_ms"] == pytest.approx(11.0)
    assert found["mixed"] == {
        "steps": 1,
        "median_ms": 20.0,
        "mean_ms": 20.0,
        "p99_ms": 20.0,
        "requests": 2,
        "prompt_tokens": 512,
    }
    assert (found["mixed_share"], found["prompts_only"]) == (0.5, 1)
    assert step_log.summarize([]) == {}


def test_a_step_log_is_read_window_by_window(tmp_path: Path) -> None:
    path = tmp_path / "steps"
    path.write_text("[1.0, 0, 1, 5.0, 2, 0]\n[2.0, 0, 1, 6.0, 2, 0]\n[3.0, 0, 1, 7.0, 2, 0]\n[4.0, 0,")
    assert [line[3] for line in step_log.read(path, 1.5, 9.0)] == [6.0, 7.0]
    assert step_log.read(tmp_path / "none", 0, 1) == []


def test_the_plugin_can_be_found(tmp_path: Path) -> None:
    from importlib.metadata import distributions

    [found] = distributions(path=[str(step_log.provide(tmp_path))])
    groups = [point.group for point in found.entry_points]
    assert groups == ["vllm.stat_logger_plugins", "vllm.general_plugins"]


METRICS = """
# HELP nwor_windows windows
nwor_windows_total{engine="0",model_name="m",outcome="committed"} 10.0
nwor_windows_total{engine="0",model_name="m",outcome="direct"} 2.0
nwor_direct_windows_total{engine="0",model_name="m",reason="large_step"} 2.0
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 12.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 18.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 6.0
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:other 1.0
"""


def test_metrics_are_read_and_subtracted() -> None:
    after = metrics.parse(METRICS)
    before = {"nwor_windows_total[outcome=committed]": 4.0}
    found = metrics.describe(metrics.difference(before, after))
    assert found["windows"] == {"committed": 6.0, "direct": 2.0}
    assert found["direct_reasons"] == {"large_step": 2.0}
    assert found["by_position"] == [0.75, 0.5]
    assert (found["drafts"], found["accepted"]) == (12.0, 18.0)
    assert metrics.running(after) == 3


def _record(
    arm: str, number: int, tokens_s: float, load: str = "c16", run: str = "r", **more: Any
) -> dict[str, Any]:
    counters = {"drafts": 1e6, "accepted": 1.8e6, "preemptions": 0.0}
    if arm != "stock":
        counters |= {"windows": {"committed": 99.0, "direct": 1.0}, "direct_reasons": {"why": 1.0}}  # type: ignore[dict-item]
    return {
        "run": run,
        "device": "card",
        "shape": "8b",
        "lengths": "512/256",
        "acceptance": "heads",
        "shared": 0.0,
        "load": load,
        "round": number,
        "arm": arm,
        "tokens_s": tokens_s,
        "ttft_ms": [10.0, 20.0],
        "tpot_ms": [1000.0 / tokens_s],
        "stall_ms": [50.0],
        "client_cpu": 0.1,
        "steps": {"steps": 9, "mixed_share": 0.25, "pure": {"median_ms": 9.0}},
        "counters": counters,
    } | more


def _document(*records: dict[str, Any]) -> dict[str, Any]:
    run = {
        "date": "2026-01-02 03:04 UTC",
        "device": "card",
        "cores": 16,
        "vllm": "0.32.0",
        "torch": "2",
        "k": 4,
    }
    return {"schema": 1, "runs": {record["run"]: run for record in records}, "records": list(records)}


def test_ratios_pair_arms_of_one_round() -> None:
    records = [
        _record("stock", 0, 100.0),
        _record("stage", 0, 110.0),
        _record("stock", 1, 200.0),
        _record("stage", 1, 242.0),
        _record("stage", 2, 900.0),  # without a partner
        _record("stock", 2, 1.0, run="another"),
    ]
    found = figures.compare(records, "stage", "stock", "tokens_s")
    assert found.mean == pytest.approx(math.sqrt(1.1 * 1.21))
    assert found.rounds == 2
    assert figures.compare(records, "stage", "stock", "tpot").mean == pytest.approx(found.mean)
    assert str(figures.compare(records, "stage", "off", "tokens_s")) == "-"


def test_unequal_acceptance_is_said() -> None:
    other = {"drafts": 1e6, "accepted": 1.9e6, "preemptions": 0.0}
    assert figures.acceptance_warnings([_record("stock", 0, 1.0), _record("stage", 0, 1.0)]) == []
    [said] = figures.acceptance_warnings([_record("stock", 0, 1.0), _record("stage", 0, 1.0, counters=other)])
    assert "stage" in said
    # So few drafts that chance alone does this; and another k accepts other numbers anyway.
    few = {"drafts": 10.0, "accepted": 19.0, "preemptions": 0.0}
    assert (
        figures.acceptance_warnings([_record("stock", 0, 1.0), _record("stage", 0, 1.0, counters=few)]) == []
    )
    assert (
        figures.acceptance_warnings([_record("stock", 0, 1.0), _record("stock@2", 0, 1.0, counters=other)])
        == []
    )


def test_results_are_merged_by_key(tmp_path: Path) -> None:
    first = _document(_record("stock", 0, 1.0), _record("stage", 0, 2.0))
    second = _document(_record("stage", 0, 3.0), _record("stage", 1, 4.0))
    merged = results.merge([first, second])
    assert [(one["arm"], one["round"], one["tokens_s"]) for one in merged["records"]] == [
        ("stock", 0, 1.0),
        ("stage", 0, 3.0),
        ("stage", 1, 4.0),
    ]
    path = tmp_path / "folder" / "results.json"
    results.save(path, merged)
    assert results.load(path) == merged
    assert results.load(tmp_path / "none.json") == results.empty()
    with pytest.raises(ValueError, match="schema"):
        results.merge([{"schema": 0}])


def test_the_report_has_every_load_and_the_means(tmp_path: Path) -> None:
    records = [
        _record(arm, number, base * speed, load)
        for load, base in (("p12", 50.0), ("c1", 100.0), ("c16", 400.0))
        for number in (0, 1)
        for arm, speed in (("stock", 1.0), ("off", 1.02), ("stage", 1.1))
    ]
    text = report.markdown(_document(*records))
    assert text.index("| c1 |") < text.index("| c16 |") < text.index("| p12 |")
    assert (
        "| geometric mean |  | 1.020 of 2 loads | 1.100 of 2 loads | 1.078 of 2 loads "
        "| 1.020 of 3 loads | 1.100 of 3 loads | 1.078 of 3 loads |"
    ) in text
    assert "99.00% | why 2" in text
    path = tmp_path / "plot.svg"
    pytest.importorskip("matplotlib")
    report.plot(_document(*records), path)
    assert path.stat().st_size > 1000


def test_the_best_k_is_found_load_by_load() -> None:
    records = [
        _record(arm, 0, speed) for arm, speed in (("stock", 100.0), ("stock@2", 120.0), ("stage", 126.0))
    ]
    assert figures.best_stock(records) == "stock@2"
    assert "| c16 | 100 | 120 | stock@2 | 1.050 |" in report.markdown(_document(*records))


def _blocks(*typical: float) -> list[dict[str, Any]]:
    return [
        {"typical": one, "host": one, "mean": one, "counts": {"windows": 9, "direct": {}}} for one in typical
    ]


def test_mixed_cells_come_in_order() -> None:
    assert [cell.name for cell in mixed_cells.parse("", 2)][:3] == ["16x128", "64x128", "16x512"]
    assert mixed_cells.parse("4x0", 2) == [mixed_cells.Cell(4, 0, 2)]
    for wrong in ("4", "0x8", "4x0:5/1", "4x0:2", "axb"):
        with pytest.raises(ValueError, match="cell"):
            mixed_cells.parse(wrong, 2)
    [cell] = mixed_cells.parse("8x128:4/1", 2)
    assert cell.name == "8x128:4/1"
    assert [cell.bound(index) for index in range(8)] == [1, None] * 4
    [few] = mixed_cells.parse("8x0:3/0", 2)
    assert sum(few.bound(index) == 0 for index in range(8)) == 3
    assert [mixed_cells.Cell(4, 0).bound(index) for index in range(4)] == [None] * 4


def test_modes_with_a_number_of_draft_tokens() -> None:
    assert mixed_cells.parse_mode("off", 4) == ("off", None)
    assert mixed_cells.parse_mode("stage@0", 4) == ("stage", 0)
    assert mixed_cells.parse_mode("stage@4", 4) == ("stage", 4)
    for wrong in ("stage@5", "stage@7", "stock@1", "off@0", "stage@", "stage@-1"):
        with pytest.raises(ValueError, match="stage@0, stage@1, stage@2, stage@3, stage@4"):
            mixed_cells.parse_mode(wrong, 4)
    with pytest.raises(ValueError, match="is no mode"):
        mixed_steps.main(["--out", "x.json", "--modes", "off,stage@9"])


def test_blocks_of_steps_are_described() -> None:
    steps = [mixed_cells.Step(0.010, 0.004, 4, 0), mixed_cells.Step(0.020, 0.010, 4, 128)] * 2
    found = mixed_cells.describe(steps)
    assert found["typical"] == pytest.approx(15.0)
    assert found["host"] == pytest.approx(8.0)
    assert found["mixed"] == {"steps": 2, "mean": 20.0, "median": 20.0, "rows": 128}
    blocks = {"off": _blocks(10.0, 12.0), "stage": _blocks(8.0, 12.0)}
    assert mixed_cells.ratios(blocks, "off", "stage", "typical") == [1.25, 1.0]
    assert mixed_cells.ratios(blocks, "off", "stage", "mixed.median") == []


def test_mixed_steps_are_reported() -> None:
    cell = {
        "requests": 16,
        "prompt": 128,
        "every": 2,
        "blocks": {"off": _blocks(10.0, 10.0), "stage": _blocks(8.0, 8.0)},
    }
    cell["blocks"]["stage"][0]["counts"]["direct"] = {"large": 3}  # type: ignore[index]
    engine = {"shape": "8b", "cache": "fp8", "k": 4, "cells": [cell], "skipped": ["4x0"], "error": None}
    bounded = {**engine, "name": "8b", "cells": [cell, cell | {"bounded": 8, "drafts": 1}]}
    assert mixed_steps.summary([bounded], "stage", "off") == (
        "stage/off over 2 cells: 0.8000; below 1: 8b 16x128 0.800, 8b 16x128:8/1 0.800"
    )
    assert "| 16, 8 of at most 1 drafts | 128 | 10.00 |" in mixed_report.markdown([bounded])
    text = mixed_report.markdown([engine, {**engine, "cells": [], "error": "Error: no memory"}])
    assert "| 16 | 128 | 10.00 | 8.00 | 1.250 ± 0.000 | - | - | 10.00 | 8.00 | stage: large 3 |" in text
    assert "Not measured, the time was up: 4x0." in text
    assert "Error: no memory" in text
    assert "over all 1 cells: geometric mean 1.2500, 0 below 1." in text


class _Answers:
    """A server that answers each request with given parts, one write each."""

    def __init__(self, *parts: bytes) -> None:
        self.parts = parts
        self.asked: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            self.asked.append(await reader.readexactly(length))
            for part in self.parts:
                writer.write(part)
                await writer.drain()
                await asyncio.sleep(0.005)


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
TEXT = b'9\r\ndata: {"choices":[{"text":"w1"}]}\n\n\r\n'
USAGE = b'9\r\ndata: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}\n\n\r\n'
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "chunks"),
    [
        ((HEAD, TEXT, TEXT, USAGE, END), 2),
        ((HEAD + TEXT, TEXT + TEXT, USAGE + END), 3),
        ((HEAD, TEXT[:6], TEXT[6:], USAGE, END[:9], END[9:]), 1),
    ],
)
async def test_a_stream_counts_chunks_however_they_are_cut(parts: tuple[bytes, ...], chunks: int) -> None:
    answers = _Answers(*parts)
    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    stream = await Stream.open("127.0.0.1", port)
    for _ in range(2):  # one connection serves request after request
        timeline = await stream.send(payload("127.0.0.1", port, b'{"a":1}'), Timeline(0.0))
        assert (len(timeline.chunks), timeline.tokens) == (chunks, 5)
    assert answers.asked == [b'{"a":1}'] * 2
    stream.close()
    server.close()


async def test_a_refusal_is_an_error() -> None:
    refusal = b"HTTP/1.1 400 Bad Request\r\ncontent-length: 5\r\n\r\nwrong"
    server = await asyncio.start_server(_Answers(refusal), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    stream = await Stream.open("127.0.0.1", port)
    with pytest.raises(FailedError, match="400"):
        await stream.send(payload("127.0.0.1", port, b"{}"), Timeline(0.0))
    server.close()


def _job(port: int, load: str, **more: Any) -> client.Job:
    return client.Job(port, "m", load, 0.0, "16/8", 256, 1000, "s", "a", **more)


def test_a_job_travels_as_json() -> None:
    assert client.Job(**json.loads(client.describe(_job(1, "c4")))) == _job(1, "c4")


async def test_a_closed_loop_keeps_its_clients_busy_until_the_window_ends() -> None:
    answers = _Answers(HEAD + TEXT, TEXT, USAGE + END)
    server = await asyncio.start_server(answers, "127.0.0.1", 0)
    loader = client.Loader(_job(server.sockets[0].getsockname()[1], "c3"))
    found = await loader.run()
    wanted = plan.size(3)
    assert wanted.total - 3 <= len(answers.asked) <= wanted.total
    # The last ones are under way when none is left to send.
    assert wanted.measured - 3 <= found["requests"] <= wanted.measured
    assert found["tokens_per_chunk"] == 4.0
    server.close()


async def test_arrivals_go_on_until_those_of_the_window_have_ended() -> None:
    server = await asyncio.start_server(_Answers(HEAD + TEXT, TEXT, USAGE + END), "127.0.0.1", 0)
    job = client.Job(
        server.sockets[0].getsockname()[1],
        "m",
        "p50",
        50.0,
        "16/8",
        256,
        1000,
        "s",
        "a",
        seconds=0.4,
        ramp=0.1,
    )
    loader = client.Loader(job)
    found = await loader.run()
    assert found["requests"] >= 5
    start, end = found["window"]
    assert found["requests"] == sum(start < one.sent <= end for one in loader.timelines)
    server.close()


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_pages_of_results_are_made_from_them(path: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.md"
    assert report.main([str(path), "--markdown", str(made)]) == 0
    assert made.read_text("utf-8") == path.with_suffix(".md").read_text("utf-8")
