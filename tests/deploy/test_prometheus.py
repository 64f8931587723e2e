"""Prometheus' configuration and rules, and the Grafana dashboard: checked by promtool, and for real names."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
import yaml

from tests.server_process import ROOT

PROMETHEUS = ROOT / "deploy" / "prometheus"
GRAFANA = ROOT / "deploy" / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "nwor.json").read_text(encoding="utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((PROMETHEUS / "rules" / "nwor.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]

#: What Prometheus itself makes.
OWN_NAMES = {"up", "ALERTS"}

# The registry of a server on the demo model, without starting its engine.
REGISTERED = """
from prometheus_client import REGISTRY
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.metrics.loggers import PrometheusStatLogger
from nwor.engine.stats.metrics import NworStatLogger
from server import demo
from server.api.stream_pacing import StreamPacer

draft = {"method": demo.draft_method(), "model": str(demo.draft_path()), "num_speculative_tokens": 4}
nwor = {"nwor": {"mode": "stage"}}
args = EngineArgs(model=str(demo.model_path()), speculative_config=draft, additional_config=nwor)
config = args.create_engine_config()
loggers = PrometheusStatLogger(config, [0]), NworStatLogger(config, [0]), StreamPacer()
ends = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
names = [family.name + end for family in REGISTRY.collect() for end in ends.get(family.type, [""])]
print("NAMES", *names)
"""


def promtool(*words: str) -> str:
    """Run promtool, or skip where it is not installed; returns what it prints."""
    if shutil.which("promtool") is None:
        pytest.skip("needs promtool, which comes with Prometheus")
    ended = subprocess.run(["promtool", *words], capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def targets() -> Iterator[tuple[str, str]]:
    """Yield title and expression of everything that the dashboard asks for."""
    for panel in PANELS:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield annotation["name"], annotation["expr"]


def names_in(expression: str) -> set[str]:
    """Return the metrics that an expression names: all of ours, and whatever has a selector."""
    without_text = re.sub(r'"[^"]*"', '""', expression)
    selected = re.findall(r"([a-zA-Z_:][\w:]*)\s*\{", without_text)
    return {*selected, *re.findall(r"\b(?:nwor|vllm)[_:][\w:]+", without_text)}


@pytest.fixture(scope="module")
def registered() -> set[str]:
    ended = subprocess.run(
        [sys.executable, "-c", REGISTERED], cwd=ROOT, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return set(ended.stdout.rsplit("NAMES", 1)[1].split())


def test_configuration_and_rules_pass_promtool() -> None:
    assert "valid prometheus config" in promtool("check", "config", str(PROMETHEUS / "prometheus.yml"))
    checked = promtool("check", "rules", "--lint=all", "--lint-fatal", str(PROMETHEUS / "rules" / "nwor.yml"))
    assert f"{len(RULES)} rules found" in checked


def test_rules_do_what_their_tests_say() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(PROMETHEUS / "tests" / "nwor.yml"))


def test_every_rule_has_a_test() -> None:
    text = (PROMETHEUS / "tests" / "nwor.yml").read_text(encoding="utf-8")
    for rule in ALERTS:
        # Once with labels that it must have, that is: firing.
        assert re.search(rf"alertname: {rule['alert']}\n\s+eval_time: \w+\n\s+exp_alerts:\n", text), rule


def test_every_metric_in_rules_dashboard_and_page_is_registered(registered: set[str]) -> None:
    recorded = {rule["record"] for rule in RULES if "record" in rule}
    used = {name for rule in RULES for name in names_in(rule["expr"])}
    used |= {name for _, expression in targets() for name in names_in(expression)}
    page = (ROOT / "server" / "dashboard" / "static" / "figures.js").read_text(encoding="utf-8")
    in_page = set(re.findall(r"\b(?:vllm:\w+|nwor_\w+|process_\w+)", page))
    assert {"nwor_kv_write_bytes_total", "vllm:num_requests_running", "nwor_mode"} <= used & in_page
    assert (used | in_page) - registered - recorded - OWN_NAMES == set()


def test_alerts_say_what_is_wrong_and_where_to_read_on() -> None:
    assert len({rule["alert"] for rule in ALERTS}) == len(ALERTS)
    sections = re.findall(
        r"^#+ (Nwor\w+)$", (ROOT / "docs" / "operations.md").read_text("utf-8"), re.MULTILINE
    )
    assert sorted(sections) == sorted(rule["alert"] for rule in ALERTS)
    for rule in ALERTS:
        notes = rule["annotations"]
        assert set(notes) == {"summary", "description", "runbook_url"}
        assert notes["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_the_job_has_one_name_everywhere() -> None:
    config = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    (job,) = [job for job in config["scrape_configs"] if job["job_name"] == "nwor"]
    assert job["static_configs"] == [{"targets": ["nwor:8000"]}]
    for expression in [rule["expr"] for rule in RULES] + [expr for _, expr in targets()]:
        for selector in re.findall(r"\{([^}]*)\}", expression):
            assert 'job="nwor"' in selector or "alertstate" in selector, expression


def test_dashboard_is_whole() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    source = {"type": "prometheus", "uid": "${datasource}"}
    for panel in PANELS:
        assert panel["datasource"] == source
        assert panel["title"]
        assert panel["description"]
        assert panel["targets"]
        assert all(target["datasource"] == source for target in panel["targets"])
        if panel["type"] != "heatmap":
            assert panel["fieldConfig"]["defaults"]["unit"]
    variables = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    known = {"datasource", "__rate_interval", *variables}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used - known - {"__all"} == set()


def test_panels_do_not_overlap() -> None:
    def cells(panel: dict[str, Any]) -> set[tuple[int, int]]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        return {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }

    for one, other in combinations(DASHBOARD["panels"], 2):
        assert not cells(one) & cells(other), (one["title"], other["title"])


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    provisioning = GRAFANA / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text("utf-8"))[
        "datasources"
    ]
    assert (source["type"], source["url"], source["isDefault"]) == (
        "prometheus",
        "http://prometheus:9090",
        True,
    )
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "nwor.yml").read_text("utf-8"))["providers"]
    assert provider["options"]["path"] == "/var/lib/grafana/dashboards"
    assert provider["type"] == "file"
