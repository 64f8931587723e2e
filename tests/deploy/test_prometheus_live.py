"""A real Prometheus scrapes the real server: every expression of the rules and the dashboard is evaluated."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml

from tests.conftest import ADMIN_KEY, find_free_port
from tests.deploy.test_prometheus import ALERTS, DASHBOARD, PROMETHEUS, RULES, targets
from tests.server_process import DEMO_MODEL, ServerProcess
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

PATIENCE = 90.0


class NotReadyError(Exception):
    """Prometheus listens, but has not yet read what it has stored."""


class Prometheus:
    """Prometheus with the repository's configuration; only addresses and intervals are other ones."""

    def __init__(self, folder: Path, servers: list[str]) -> None:
        shutil.copytree(PROMETHEUS, folder / "etc")
        path = folder / "etc" / "prometheus.yml"
        config = yaml.safe_load(path.read_text("utf-8"))
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        port = find_free_port()
        for job, addresses in zip(config["scrape_configs"], [servers, [f"127.0.0.1:{port}"]], strict=True):
            job["static_configs"][0]["targets"] = addresses
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        self.url = f"http://127.0.0.1:{port}"
        with (folder / "log").open("wb") as sink:
            self.process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={path}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=sink,
                stderr=subprocess.STDOUT,
            )

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer of its API."""
        response = httpx.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30)
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise NotReadyError
        answer = response.json()
        assert answer["status"] == "success", answer
        assert not answer.get("warnings"), answer
        return answer["data"]

    def query(self, expression: str) -> list[Any]:
        """Return an instant vector, or raise on an error of the expression."""
        return self.get("query", query=expression)["result"]

    def wait(self, expression: str) -> list[Any]:
        """Return the expression's vector once it is not empty."""
        found: list[Any] = []

        def look() -> bool:
            try:
                found[:] = self.query(expression)
            except (httpx.TransportError, NotReadyError):
                assert self.process.poll() is None, "Prometheus has ended"
            return bool(found)

        wait_until(look, PATIENCE, f"data for {expression}", every=0.3)
        return found


@pytest.fixture(scope="module")
def prometheus(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """One server that answers, in all modes, under load; and one target where nobody listens."""
    if shutil.which("prometheus") is None:
        pytest.skip("needs prometheus")
    address = urlsplit(server.url).netloc
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), [address, f"127.0.0.1:{find_free_port()}"])
    try:
        # What every rate needs is a value from before.
        running.wait(f'nwor_mode{{instance="{address}"}}')
        for mode in ("off", "cow", "stage"):
            switch(server, mode)
            load(server)
        # The load has been scraped.
        running.wait(f"nwor_commits_total > 0 and nwor_commits_total == {server.total('nwor_commits_total')}")
        yield running
    finally:
        running.process.terminate()
        running.process.wait(30)


def switch(server: ServerProcess, mode: str) -> None:
    answer = httpx.put(
        f"{server.url}/admin/nwor",
        json={"mode": mode},
        headers={"Authorization": f"Bearer {ADMIN_KEY}"},
        timeout=90,
    )
    assert answer.status_code == 200


def load(server: ServerProcess) -> None:
    body = {"model": DEMO_MODEL, "prompt": "def f(a, b):\n    return ", "max_tokens": 48, "ignore_eos": True}
    with server.client() as http, ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: http.post("/v1/completions", json=body), range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8


def fill_in(expression: str) -> str:
    """Put in what Grafana does: a minute, and all servers and models."""
    return expression.replace("$__rate_interval", "1m").replace("$instance", ".*").replace("$model", ".*")


def test_every_panel_has_data(prometheus: Prometheus) -> None:
    # Nothing went wrong, so these are rightly empty; that their metrics exist is test_prometheus.py's.
    empty = {"Windows written directly against the mode", "Alerts"}
    # The server has a fixed number of draft tokens.
    empty |= {"Steps by draft tokens", "Draft tokens chosen", "Estimated acceptance by position"}
    without = {title for title, expr in targets() if not prometheus.query(fill_in(expr))}
    assert without <= empty
    assert len(list(targets())) > 40


def test_numbers_are_the_servers(prometheus: Prometheus, server: ServerProcess) -> None:
    for metric in ("nwor_windows_total", "nwor_kv_write_bytes_total", "vllm:generation_tokens_total"):
        (shown,) = prometheus.query(f"sum({metric})")
        assert float(shown["value"][1]) == server.total(metric)
    panels = {
        panel["title"]: panel["targets"][0]["expr"] for panel in DASHBOARD["panels"] if panel.get("targets")
    }
    (mode,) = prometheus.query(fill_in(panels["Mode in force"]))
    assert mode["value"][1] == "1"
    positions = prometheus.query(fill_in(panels["Acceptance by position"]))
    assert sorted(found["metric"]["position"] for found in positions) == ["0", "1", "2", "3"]


def test_all_rules_are_evaluated_without_error(prometheus: Prometheus) -> None:
    # The rate over a day is in the first evaluation after the load already: there are two scrapes of it.
    for rule in RULES:
        if "record" in rule:
            direct = rule["record"] == "nwor:direct_windows:ratio_rate5m"
            assert direct or prometheus.wait(rule["record"])
    groups = prometheus.get("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert len(rules) == len(RULES)
    assert [(rule["name"], rule.get("lastError")) for rule in rules if rule["health"] != "ok"] == []


def test_the_target_that_does_not_answer_is_on_its_way_to_an_alert(prometheus: Prometheus) -> None:
    pending = prometheus.wait('ALERTS{alertname="NworEngineDown"}')
    assert [found["metric"]["alertstate"] for found in pending] == ["pending"]
    (down,) = prometheus.query('up{job="nwor"} == 0')
    assert pending[0]["metric"]["instance"] == down["metric"]["instance"]
    others = {found["metric"]["alertname"] for found in prometheus.query("ALERTS")}
    assert others == {"NworEngineDown"} < {rule["alert"] for rule in ALERTS}
