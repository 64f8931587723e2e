"""Claim: with several API server processes and several engines all figures add up, and one call switches all.

Coverage: a real server over HTTP with two engines (data parallelism on CPUs), and so two processes: requests
of whole and streamed answers on connections of their own, switches from many connections at once, reports,
resets, and the death of one engine. How several processes drain is in test_lifecycle.py.
Tolerance: none.
"""

from __future__ import annotations

import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import ADMIN_KEY
from tests.server_figures import ADMIN, check_request, last_event
from tests.server_process import DEMO_MODEL, ServerProcess
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.long]

ENGINES = PROCESSES = 2


@pytest.fixture(scope="module")
def pair(start_server: Callable[..., ServerProcess]) -> Iterator[ServerProcess]:
    """A server of two engines and two processes, each of which serves the admin API as well."""
    server = start_server(
        *("--demo", "--data-parallel-size", str(ENGINES), "--max-num-seqs", "8", "--max-model-len", "2048"),
        *("--admin-api-key", ADMIN_KEY),
    )
    # /health answers as soon as one process serves.
    wait_until(lambda: "is ready on" in server.log, 120, "all processes serve")
    yield server
    server.kill()


def admin(pair: ServerProcess, method: str, path: str = "", **kwargs: Any) -> Any:
    answer = httpx.request(method, f"{pair.url}/admin/nwor{path}", headers=ADMIN, timeout=120, **kwargs)
    assert answer.status_code == 200, answer.text
    return answer.json()


def samples(url: str, name: str, *, by: str = "engine") -> Counter[str]:
    """Return the samples of one metric, added up by one label."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=60).text):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels[by]] += sample.value  # type: ignore[assignment]
    return found


def modes_shown(pair: ServerProcess) -> dict[str, str]:
    """Return the mode that /metrics shows of each engine."""
    shown: dict[str, str] = {}
    for family in text_string_to_metric_families(httpx.get(f"{pair.url}/metrics", timeout=60).text):
        for sample in family.samples:
            if sample.name == "nwor_mode" and sample.value == 1:
                assert sample.labels["engine"] not in shown
                shown[sample.labels["engine"]] = sample.labels["mode"]
    return shown


def figures_of(pair: ServerProcess, number: int) -> dict[str, Any]:
    """Send a request on a connection of its own and return its figures."""
    body = {"model": DEMO_MODEL, "prompt": f"def f_{number}(a, b):\n    return ", "max_tokens": 24}
    body |= {"ignore_eos": True, "temperature": 0.5, "stream": number % 2 == 1}
    answer = httpx.post(f"{pair.url}/v1/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    figures = (last_event(answer.text) if number % 2 else answer.json())["metrics"]["nwor"]
    check_request(figures)
    return figures


def all_figures(pair: ServerProcess, requests: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda number: figures_of(pair, number), range(requests)))


def test_requests_add_up_over_engines_and_processes(pair: ServerProcess) -> None:
    answers = all_figures(pair, 24)
    total = {name: sum(figures[name] for figures in answers) for name in answers[0] if name != "modes"
             and isinstance(answers[0][name], int)}  # fmt: skip
    windows = samples(pair.url, "nwor_windows_total")
    # Both engines had their share, or the sums would say nothing.
    assert set(windows) == {"0", "1"}
    assert all(windows.values())
    assert windows.total() == total["windows"]
    ended = samples(pair.url, "nwor_request_windows_total", by="end")
    assert {end: count for end, count in ended.items() if count} == {"finished": total["windows"]}
    tokens = samples(pair.url, "nwor_tokens_total", by="kind")
    for kind in ("first", "draft", "accepted", "rejected"):
        assert tokens[kind] == total[f"{kind}_tokens"]
    assert samples(pair.url, "nwor_kv_write_bytes_total").total() == total["kv_bytes_written"]
    assert samples(pair.url, "nwor_kv_write_bytes_baseline_total").total() == total["kv_bytes_baseline"]
    assert samples(pair.url, "nwor_window_accepted_tokens_count") == windows
    assert samples(pair.url, "nwor_accounting_mismatches_total").total() == 0
    accepted = samples(pair.url, "vllm:spec_decode_num_accepted_tokens_total")
    assert accepted.total() == total["accepted_tokens"] > 0
    # The engines' own counters say the same.
    report = admin(pair, "GET")
    assert [(rank["engine"], rank["rank"]) for rank in report["ranks"]] == [(0, 0), (1, 0)]
    assert report["counters"]["windows"] == total["windows"]
    assert report["counters"]["accepted_tokens"] == total["accepted_tokens"]
    assert report["counters"]["saved_bytes"] == total["kv_bytes_saved"]
    # One process writes vLLM's lines about throughput for all, which it would not.
    wait_until(lambda: "SpecDecoding metrics: " in pair.log, 30, "the throughput is logged")
    assert re.search(r"2 Engines Aggregated: .*generation throughput: (?!0\.0)\d+\.\d tokens/s", pair.log)
    logged = [int(count) for count in re.findall(r"Accepted: (\d+) tokens", pair.log)]
    assert 0 < sum(logged) <= total["accepted_tokens"]
    assert "disabling stats logging" not in pair.log


def test_one_call_switches_every_engine(pair: ServerProcess) -> None:
    for mode in ("off", "cow", "stage"):
        assert admin(pair, "PUT", json={"mode": mode})["ranks"] == ENGINES
        report = admin(pair, "GET")
        assert report["ranks_agree"] is True
        assert {rank["mode"] for rank in report["ranks"]} == {mode}
        assert modes_shown(pair) == {"0": mode, "1": mode}
        for figures in all_figures(pair, 6):
            assert figures["modes"] == [mode]
        # Whichever process heard of a step, none shows a mode that is no more.
        assert modes_shown(pair) == {"0": mode, "1": mode}
    assert samples(pair.url, "nwor_mode_switches_total") == {"0": 3, "1": 3}


def test_a_reset_reaches_every_engine_and_leaves_the_metrics(pair: ServerProcess) -> None:
    before = samples(pair.url, "nwor_windows_total")
    assert admin(pair, "POST", "/reset-stats") == {"reset": True, "ranks": ENGINES}
    assert admin(pair, "GET")["counters"]["windows"] == 0
    assert samples(pair.url, "nwor_windows_total") == before


def test_switches_at_once_over_both_processes_come_in_one_order(pair: ServerProcess) -> None:
    first = admin(pair, "GET")["mode"]
    modes = ["off", "cow", "stage"] * 8
    with ThreadPoolExecutor(len(modes)) as pool:
        done = list(pool.map(lambda mode: admin(pair, "PUT", json={"mode": mode}), modes))
    report = admin(pair, "GET")
    last = report["mode"]
    # Each found what the one before had left: in whatever order they came, they make one chain.
    found, left = (Counter(change[end] for change in done) for end in ("old", "new"))
    assert found - left == (Counter([first]) if first != last else Counter())
    assert left - found == (Counter([last]) if first != last else Counter())
    # Both engines went through the same ones.
    assert report["ranks_agree"] is True
    assert len({rank["switches"] for rank in report["ranks"]}) == 1
    assert modes_shown(pair) == {"0": last, "1": last}
    # Both processes took part, or this would say nothing of several.
    logged = re.findall(r"\((ApiServer_\d) pid=\d+\)[^\n]* Admin key \w+ switched", pair.log)
    assert set(logged) == {f"ApiServer_{number}" for number in range(PROCESSES)}


def test_the_death_of_one_engine_ends_the_server(pair: ServerProcess) -> None:
    """Requests of both engines fail aloud; nobody goes on with half of a server."""
    failed: list[int] = []
    body = {"model": DEMO_MODEL, "prompt": "x = ", "max_tokens": 1900, "ignore_eos": True, "n": 8}

    def run() -> None:
        failed.append(httpx.post(f"{pair.url}/v1/completions", json=body, timeout=300).status_code)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    running = "vllm:num_requests_running"
    # More than eight: sequences of both requests, for each has eight.
    wait_until(
        lambda: samples(pair.url, running).total() > 8,
        60,
        lambda: f"sequences of both requests run: {samples(pair.url, running)}",
    )
    pids = dict(re.findall(r"\(EngineCore_DP(\d) pid=(\d+)\)", pair.log))
    os.kill(int(pids["1"]), signal.SIGKILL)
    assert pair.wait(60) == 1, pair.log[-3000:]
    for thread in threads:
        thread.join(10)
    assert failed == [500, 500]
    assert "The engine died" in pair.log
