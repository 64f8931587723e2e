"""The page's figures against those of /metrics: the same samples, from one registry."""

from __future__ import annotations

import json
import math
from typing import Any

from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from server import dashboard

Samples = list[tuple[str, str, float | None]]


def served(registry: CollectorRegistry) -> Samples:
    """Return the samples that the page is given."""
    app = FastAPI()
    dashboard.install(app, lambda: registry)
    answer = TestClient(app).get(dashboard.FIGURES)
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-security-policy"] == dashboard.HEADERS["Content-Security-Policy"]
    body: dict[str, list[dict[str, Any]]] = answer.json()
    return sorted(
        (
            (name, json.dumps(sample["labels"], sort_keys=True), sample["value"])
            for name, samples in body.items()
            for sample in samples
        ),
        key=str,
    )


def exposed(registry: CollectorRegistry) -> Samples:
    """Return the same of /metrics' text, as prometheus_client reads it."""
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return sorted(
        (
            (
                sample.name,
                json.dumps(sample.labels, sort_keys=True),
                sample.value if math.isfinite(sample.value) else None,
            )
            for family in families
            for sample in family.samples
            if sample.name.startswith(dashboard.FIGURE_NAMES) and not sample.name.endswith("_bucket")
        ),
        key=str,
    )


@given(
    st.dictionaries(
        st.text(max_size=8), st.floats(min_value=0, allow_nan=False, allow_infinity=False), max_size=4
    ),
    st.lists(st.floats(), max_size=4),
)
def test_the_page_is_given_what_metrics_tells(counts: dict[str, float], gauges: list[float]) -> None:
    registry = CollectorRegistry()
    windows = Counter("nwor_windows", ".", ("outcome",), registry=registry)
    for label, value in counts.items():
        windows.labels(label).inc(value)
    running = Gauge("vllm:num_requests_running", ".", ("engine",), registry=registry)
    for engine, value in enumerate(gauges):
        running.labels(str(engine)).set(value)
    Histogram("vllm:e2e", ".", registry=registry).observe(0.3)
    Gauge("python_info", ".", registry=registry).set(1)
    found = served(registry)
    assert found == exposed(registry)
    names = {name for name, *_ in found}
    assert "python_info" not in names
    assert {"vllm:e2e_sum", "vllm:e2e_count"} <= names
    assert not [name for name in names if name.endswith("_bucket")]


def test_without_a_registry_of_its_own_it_is_vllms() -> None:
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    metric = Gauge("nwor_of_this_test", ".", registry=get_prometheus_registry())
    try:
        metric.set(3)
        app = FastAPI()
        dashboard.install(app)
        assert TestClient(app).get(dashboard.FIGURES).json()["nwor_of_this_test"] == [
            {"labels": {}, "value": 3.0}
        ]
    finally:
        get_prometheus_registry().unregister(metric)
