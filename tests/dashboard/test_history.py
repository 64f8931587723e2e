"""Rates and amounts from scrapes: several engines, restarts, gaps. The page's module, in real Chromium."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from server import dashboard
from tests.conftest import find_free_port
from tests.dashboard.stand_in import Metrics, serve

RUN = """async ([base, scrapes]) => {
  const { read, derive } = await import(base + "figures.js");
  const { History } = await import(base + "history.js");
  const history = new History(150_000);
  for (const { time, samples, missed } of scrapes) {
    history.add(1e12 + 1000 * time, read(new Map(Object.entries(samples))), missed);
  }
  const plain = (amounts) => amounts && Object.fromEntries(amounts);
  const points = history.rates(3_600_000, 10_000);
  return {
    total: plain(history.total),
    over: plain(history.over(3_600_000)),
    lately: plain(history.over(10_000)),
    rates: points.map(({ rates }) => plain(rates)),
    gaps: points.map(({ afterGap }) => afterGap),
    now: history.latest.now,
    derived: derive(history.over(3_600_000)),
  };
}"""


@pytest.fixture(scope="module")
def run(chromium: Any) -> Any:
    """``run((seconds, metrics, whether a scrape failed before), ...)``: what the page would show."""
    with serve(find_free_port()) as server:
        page = chromium.new_page()
        page.goto(f"{server.url}/dashboard")

        def start(*scrapes: tuple[float, str] | tuple[float, str, bool]) -> Any:
            values = [
                {
                    "time": scrape[0],
                    "samples": dashboard.samples_of(text_string_to_metric_families(scrape[1])),
                    "missed": bool(scrape[2:] and scrape[2]),
                }
                for scrape in scrapes
            ]
            return page.evaluate(RUN, [f"{server.url}/dashboard/", values])

        yield start
        page.close()


def tokens(*values: float, started: float = 1) -> str:
    """Return an exposition with one engine's output tokens per value."""
    lines = [f'vllm:generation_tokens_total{{engine="{n}"}} {value}' for n, value in enumerate(values)]
    return "\n".join([f"process_start_time_seconds {started}", *lines])


def test_the_first_scrape_gives_totals_and_no_rate(run: Any) -> None:
    shown = run((0, tokens(100, 50)))
    assert shown["total"] == {"outputTokens": 150}
    assert shown["over"] == {"outputTokens": 0}
    assert shown["rates"] == [None]


def test_engines_are_summed_and_rates_are_per_second(run: Any) -> None:
    shown = run((0, tokens(100, 50)), (2, tokens(110, 60)), (4, tokens(130, 60)))
    assert shown["rates"][1:] == [{"outputTokens": 10}, {"outputTokens": 10}]
    assert shown["over"] == {"outputTokens": 40}


def test_rates_are_means_over_ten_seconds(run: Any) -> None:
    shown = run(*[(2 * n, tokens(10 * n if n > 4 else 0)) for n in range(9)])
    # At 16 s: from 6 s on, 0 -> 80.
    assert shown["rates"][-1] == {"outputTokens": 8}


def test_one_engines_counter_that_falls_counts_from_zero(run: Any) -> None:
    shown = run((0, tokens(100, 50)), (2, tokens(110, 4)))
    assert shown["over"] == {"outputTokens": 14}
    assert shown["total"] == {"outputTokens": 114}


def test_a_restart_is_seen_even_where_the_counter_has_overtaken_itself(run: Any) -> None:
    shown = run(
        (0, tokens(100)), (2, tokens(150)), (60, tokens(400, started=9)), (62, tokens(420, started=9))
    )
    assert shown["over"] == {"outputTokens": 50 + 400 + 20}
    # No rate is taken across it: what happened in between took longer than what is shown.
    assert shown["rates"] == [None, {"outputTokens": 25}, None, {"outputTokens": 10}]


def test_a_failed_scrape_leaves_a_gap_but_its_amount_counts(run: Any) -> None:
    shown = run((0, tokens(0)), (2, tokens(10)), (8, tokens(30), True), (10, tokens(34)))
    assert shown["gaps"] == [False, False, True, False]
    assert shown["rates"] == [None, {"outputTokens": 5}, None, {"outputTokens": 2}]
    assert shown["over"] == {"outputTokens": 34}


def test_a_hidden_page_asks_once_a_minute_and_has_no_gaps(run: Any) -> None:
    shown = run((0, tokens(0)), (60, tokens(60)), (120, tokens(240)))
    assert shown["rates"][1:] == [{"outputTokens": 1}, {"outputTokens": 3}]


def test_an_hour_is_kept(run: Any) -> None:
    shown = run(*[(60 * n, tokens(60 * n)) for n in range(100)])
    assert len(shown["rates"]) == 61
    assert shown["over"] == {"outputTokens": 3600}
    assert shown["total"] == {"outputTokens": 60 * 99}


def test_a_series_that_appears_later_counts_from_zero(run: Any) -> None:
    head = "process_start_time_seconds 1\n"
    shown = run((0, head), (2, head + 'nwor_direct_windows_total{reason="graph"} 3'))
    assert shown["over"] == {"direct.graph": 3}


def test_figures_over_two_engines(run: Any) -> None:
    metrics = Metrics(("0", "1"))
    start = metrics_text(metrics)
    metrics.add_windows([1, 0, 0, 0, 1], "stage", "0")
    metrics.add_windows([0, 2, 0, 0, 0], "cow", "1")
    metrics.set("vllm:kv_cache_usage_perc", 0.5, engine="1")
    metrics.set("vllm:num_requests_running", 3, engine="0")
    metrics.set("vllm:num_requests_running", 4, engine="1")
    metrics.set_mode("cow", "1")
    shown = run((0, start), (2, metrics_text(metrics)))
    derived, now = shown["derived"], shown["now"]
    # Four windows, 16 draft tokens, 4 + 2 accepted.
    assert derived["acceptance"] == 6 / 16
    assert derived["tokensPerStep"] == 1 + 6 / 4
    assert derived["rowsPerStep"] == 1 + 16 / 4
    assert derived["positions"] == [3 / 4, 1 / 4, 1 / 4, 1 / 4]
    baseline = 20 * 2560
    written = ((2 + 4) + (10 + 8 + 6)) * 2560
    assert derived["baseline"] == baseline
    assert derived["written"] == written
    assert derived["saved"] == pytest.approx((baseline - written) / baseline)
    assert derived["saved"] < 0
    assert (now["running"], now["cacheUse"], sorted(now["modes"])) == (7, 0.25, ["cow", "stage"])


def test_nothing_is_divided_by_nothing(run: Any) -> None:
    shown = run((0, metrics_text(Metrics())))["derived"]
    names = ("acceptance", "saved", "tokensPerStep", "rowsPerStep")
    assert [shown[name] for name in names] == [None] * 4


def metrics_text(metrics: Metrics) -> str:
    return generate_latest(metrics.registry).decode()
