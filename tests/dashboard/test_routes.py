"""The live page over plain HTTP: what is served, with which headers, and that it is self-contained."""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from nwor.engine.eligibility import REASONS
from server import dashboard
from server.endpoint_plugin import NworEndpoints
from tests.server_process import ROOT

FILES = sorted(
    path.relative_to(dashboard.STATIC).as_posix() for path in dashboard.STATIC.rglob("*") if path.is_file()
)
#: Addresses that no one is asked for: a namespace, and the library's in its own comment.
NAMES = {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}
ASSETS = [name for name in FILES if name != dashboard.PAGE]


@pytest.fixture(scope="module")
def client() -> TestClient:
    app = FastAPI()
    dashboard.install(app)
    return TestClient(app, follow_redirects=False)


def paths_in_page() -> list[str]:
    """Return every address that the page's own markup names."""
    found: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            found.extend(value or "" for name, value in attrs if name in ("href", "src", "action"))
            assert not [name for name, _ in attrs if name == "style" or name.startswith("on")], attrs

    Reader().feed((dashboard.STATIC / dashboard.PAGE).read_text(encoding="utf-8"))
    return found


def test_the_page_and_its_headers(client: TestClient) -> None:
    answer = client.get("/dashboard")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = answer.headers["content-security-policy"]
    assert policy.split(";")[0] == "default-src 'self'"
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


@pytest.mark.parametrize("name", ASSETS)
def test_each_file_is_served_with_its_type_and_the_same_headers(client: TestClient, name: str) -> None:
    answer = client.get(f"/dashboard/{name}")
    assert answer.status_code == 200
    assert answer.content == (dashboard.STATIC / name).read_bytes()
    kinds = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".txt": "text/plain"}
    kind = kinds[Path(name).suffix]
    assert answer.headers["content-type"].split(";")[0] == kind
    for header, value in dashboard.HEADERS.items():
        assert answer.headers[header] == value
    again = client.get(f"/dashboard/{name}", headers={"If-None-Match": f'"x", W/{answer.headers["etag"]}'})
    assert (again.status_code, again.content) == (304, b"")
    head = client.head(f"/dashboard/{name}")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(answer.content))


@pytest.mark.parametrize(
    "path",
    [
        *("nothing.js", "index.html", "vendor", "vendor/", "vendor/nothing.js"),
        *("../__init__.py", "%2e%2e/__init__.py", "..%2f__init__.py", "a/b.js"),
    ],
)
def test_nothing_else_is_served(client: TestClient, path: str) -> None:
    assert client.get(f"/dashboard/{path}").status_code == 404


def test_a_trailing_slash_leads_to_the_page_without_naming_a_host(client: TestClient) -> None:
    answer = client.get("/dashboard/")
    assert (answer.status_code, answer.headers["location"]) == (308, "../dashboard")


def test_reasons_are_those_of_the_engine(client: TestClient) -> None:
    assert client.get("/dashboard/reasons.json").json() == {name: r.text for name, r in REASONS.items()}


def test_the_page_is_no_part_of_the_api(client: TestClient) -> None:
    assert client.get("/openapi.json").json()["paths"] == {}


def test_every_address_is_relative_and_leads_somewhere(client: TestClient) -> None:
    addresses = paths_in_page()
    assert {"dashboard/main.js", "dashboard/icon.svg"} <= set(addresses)
    for address in addresses:
        assert not address.startswith(("/", "http:", "https:", "//"))
        assert address == "metrics" or client.get(f"/{address}").status_code == 200
    imported = set()
    for name in FILES:
        text = (dashboard.STATIC / name).read_text(encoding="utf-8")
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= NAMES
        assert "url(" not in text
        imported |= set(re.findall(r'from "\./([^"]+)"', text))
    named = {address.removeprefix("dashboard/") for address in addresses}
    assert {"main.js"} <= named
    assert imported | named >= {name for name in FILES if name.endswith((".js", ".css"))}
    assert imported <= set(FILES)


def test_the_vendored_library_is_the_one_that_the_page_on_it_names(client: TestClient) -> None:
    text = (ROOT / "docs" / "dashboard.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| `(uPlot[\w.]+)` \| `([0-9a-f]{64})` \|$", text, re.MULTILINE))
    folder = dashboard.STATIC / "vendor"
    assert listed == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())
    }
    (version,) = set(re.findall(r"uPlot (\d+\.\d+\.\d+)", text))
    assert f"(v{version})" in (folder / "uPlot.iife.min.js").read_text(encoding="utf-8")
    assert "The MIT License" in client.get("/dashboard/vendor/uPlot.LICENSE.txt").text


def test_nothing_is_kept_in_the_browser() -> None:
    for name in FILES:
        text = (dashboard.STATIC / name).read_text(encoding="utf-8")
        for word in ("localStorage", "sessionStorage", "indexedDB", "document.cookie", "serviceWorker"):
            assert word not in text, name


def test_vllms_own_server_gets_the_page_from_the_plugin_and_ours_not_twice() -> None:
    plain, ours = FastAPI(), FastAPI()
    plain.state.args = argparse.Namespace()
    ours.state.args = argparse.Namespace(admin_api_key=None)
    for app in (plain, ours):
        NworEndpoints().attach_router(app)
    assert TestClient(plain).get("/dashboard").status_code == 200
    assert TestClient(ours).get("/dashboard").status_code == 404


def test_the_wheel_has_every_file(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core")
    # Without the compiled ops, which take long and are not what this is about.
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "-C", "wheel.cmake=false"]
    command = [sys.executable, "-m", "pip", "wheel", str(ROOT), "-w", str(tmp_path), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    (wheel,) = tmp_path.glob("nwor-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"server/dashboard/static/{name}" for name in FILES} <= names
    (licences,) = {name.split("/licenses/")[0] for name in names if "/licenses/" in name}
    for name in ("LICENSE", "server/dashboard/static/vendor/uPlot.LICENSE.txt"):
        assert f"{licences}/licenses/{name}" in names
