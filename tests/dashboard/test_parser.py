"""The browser's reader of /metrics against prometheus_client's own, in real Chromium."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import find_free_port
from tests.dashboard.stand_in import serve

# NaN and infinities have no place in JSON: numbers travel as text.
READ = """async ([url, text]) => {
  const { parse } = await import(url);
  const samples = [];
  for (const [name, list] of parse(text)) {
    for (const { labels, value } of list) samples.push([name, { ...labels }, String(value)]);
  }
  return samples;
}"""


@pytest.fixture(scope="module")
def read(chromium: Any) -> Any:
    """``read(text)``: the samples as (name, labels, value), by the page's reader."""
    with serve(find_free_port()) as server:
        page = chromium.new_page()
        page.goto(f"{server.url}/dashboard")
        module = f"{server.url}/dashboard/prometheus.js"
        yield lambda text: page.evaluate(READ, [module, text])
        page.close()


def reference(text: str) -> list[tuple[str, str, float]]:
    return sorted(
        (sample.name, json.dumps(sample.labels, sort_keys=True), sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    )


def same(read: Any, text: str) -> None:
    numbers = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    ours = sorted(
        (name, json.dumps(labels, sort_keys=True), numbers[value] if value in numbers else float(value))
        for name, labels, value in read(text)
    )
    theirs = reference(text)
    assert [sample[:2] for sample in ours] == [sample[:2] for sample in theirs]
    for (*_, value), (*_, expected) in zip(ours, theirs, strict=True):
        assert value == expected or (math.isnan(value) and math.isnan(expected))


@settings(max_examples=100)
@given(
    label=st.text(max_size=20),
    help_text=st.text(max_size=20),
    values=st.lists(st.floats(), min_size=1, max_size=4),
    amount=st.floats(min_value=0, allow_infinity=False),
)
def test_whatever_the_client_library_writes_is_read_as_it_reads_it(
    read: Any, label: str, help_text: str, values: list[float], amount: float
) -> None:
    registry = CollectorRegistry()
    gauge = Gauge("vllm:some_gauge", help_text, ["name", "number"], registry=registry)
    for number, value in enumerate(values):
        gauge.labels(label, number).set(value)
    Counter("plain", help_text, registry=registry).inc(amount)
    Histogram("spread", help_text, ["name"], registry=registry).labels(label).observe(amount)
    same(read, generate_latest(registry).decode())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n\n# HELP a b\n# a comment without sense { \n",
        "a 1",
        "a{} 1\n",
        "  a   1  \n",
        'a{x="1",} 2\n',
        'a { x = "1" , y = "2" } 3\n',
        'a{x="}",y=",",z="="} 4\n',
        r'a{x="\\n",y="\"",z="\n"} 5' + "\n",
        "a 1 1700000000000\n",
        "a +Inf\nb -Inf\nc NaN\nd 1e-7\ne 1.5E+3\nf -0.5\n",
        'a{x="日本 {}"} 1\n',
        "a 1\r\nb 2\r\n",
    ],
)
def test_the_formats_corners(read: Any, text: str) -> None:
    same(read, text)


def test_names_in_quotes(read: Any) -> None:
    assert read('{"a.b",x="1"} 2\n') == [["a.b", {"x": "1"}, "2"]]


@pytest.mark.parametrize(
    "text",
    ["a", "a one", "a{", 'a{x="1} 2', "a{x=1} 2", 'a{x} "2"', "{} 1", "1a 2", "a 1 2 3", "<html>", "a 0x10"],
)
def test_what_is_not_the_format_is_refused_with_its_line(read: Any, text: str) -> None:
    with pytest.raises(Exception, match="line 2 of the metrics"):
        read(f"ok 1\n{text}\n")
