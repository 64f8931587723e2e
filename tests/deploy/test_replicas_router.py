"""The router, started with the flags of its manifest, finds pods over the Kubernetes API and routes to them.

The API and the pods are stand-ins over real HTTP; the router is the real one, named by NWOR_TEST_ROUTER (see
test_replicas.py). Needs kustomize or kubectl as well.
"""

from __future__ import annotations

import json
import os
import queue
import shlex
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import find_free_port
from tests.deploy.manifests import engine_labels, pod_templates, render
from tests.waiting import end_of, is_healthy, wait_until

ROUTER = os.environ.get("NWOR_TEST_ROUTER")
KEY = "user-key"
MODEL = "model-in-a-pod"

pytestmark = pytest.mark.skipif(
    not ROUTER, reason="NWOR_TEST_ROUTER names no router of vLLM's production stack"
)


class Stand:
    """An HTTP server that answers with what ``answer(handler)`` sends."""

    def __init__(self, address: str, port: int, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                answer(self)

            def do_POST(self) -> None:
                answer(self)

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        self.server = ThreadingHTTPServer((address, port), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


def reply(handler: BaseHTTPRequestHandler, body: Any, status: int = 200) -> None:
    data = json.dumps(body).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


class Pod(Stand):
    """Answers as a server of ours does, as far as the router asks; counts what it served."""

    def __init__(self, name: str, address: str, port: int) -> None:
        self.name, self.address = name, address
        self.prompts: list[str] = []
        self.refused = 0
        super().__init__(address, port, self.serve)

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        if handler.headers.get("Authorization") != f"Bearer {KEY}":
            self.refused += 1
            reply(handler, {"error": {"message": "wrong key"}}, 401)
        elif handler.command == "GET":
            model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "vllm", "root": MODEL}
            reply(handler, {"object": "list", "data": [model]})
        else:
            body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
            self.prompts.append(body["prompt"])
            reply(handler, {"id": "x", "object": "text_completion", "choices": [{"text": self.name}]})

    def object(self, ready: bool = True) -> dict[str, Any]:
        (container,) = pod_templates(render("production"))["Deployment/nwor"]["spec"]["containers"]
        status = {"name": container["name"], "ready": ready, "restartCount": 0, "image": "x", "imageID": "x"}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": self.name, "namespace": "nwor", "labels": engine_labels()},
            "spec": {"containers": [{"name": container["name"], "image": "x"}]},
            "status": {"podIP": self.address, "phase": "Running", "containerStatuses": [status]},
        }


class Api:
    """The two calls of the Kubernetes API that the router makes: watch pods, read a pod."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self.selectors: list[str] = []
        self.server = Stand("127.0.0.1", 0, self.serve).server

    def tell(self, kind: str, pod: dict[str, Any]) -> None:
        self.pods[pod["metadata"]["name"]] = pod
        self.events.put({"type": kind, "object": pod})

    def serve(self, handler: BaseHTTPRequestHandler) -> None:
        address = httpx.URL(handler.path)
        if address.path.startswith("/api/v1/namespaces/nwor/pods/"):
            reply(handler, self.pods[address.path.rpartition("/")[2]])
        elif address.path == "/api/v1/namespaces/nwor/pods":
            self.selectors.append(address.params["labelSelector"])
            handler.send_response(200)
            handler.send_header("Content-Type", "application/json")
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            while True:
                line = json.dumps(self.events.get()).encode() + b"\n"
                handler.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
        else:
            reply(handler, {"kind": "Status", "code": 404}, 404)


def manifest_flags(port: int, pod_port: int) -> list[str]:
    """Return the manifest's flags; only ports and the interface are this machine's."""
    (container,) = pod_templates(render("production"))["Deployment/nwor-router"]["spec"]["containers"]
    changed = {"--host": "127.0.0.1", "--port": str(port), "--k8s-port": str(pod_port)}
    flags = []
    for word in container["args"]:
        name, _, value = word.replace("$(POD_NAMESPACE)", "nwor").partition("=")
        flags.append(f"{name}={changed.get(name, value)}")
    return flags


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, Api, list[Pod]]]:
    pod_port, port = find_free_port(), find_free_port()
    pods = [Pod(f"nwor-{number}", f"127.0.0.{number}", pod_port) for number in (2, 3)]
    api = Api()
    where = f"http://127.0.0.1:{api.server.server_address[1]}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": where}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    log = tmp_path / "log.txt"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [*shlex.split(ROUTER or ""), *manifest_flags(port, pod_port)],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env={**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig"), "VLLM_API_KEY": KEY},
        )
    try:
        for pod in pods:
            api.tell("ADDED", pod.object())
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: is_healthy(url), 60, lambda: end_of(log))
        wait_until(lambda: len(endpoints(url)) == 2, 60, lambda: end_of(log))
        yield url, api, pods
    finally:
        process.kill()
        process.wait(30)
        for server in (api.server, *(pod.server for pod in pods)):
            server.shutdown()
            server.server_close()


def endpoints(url: str) -> list[Any]:
    return list(httpx.get(f"{url}/engines", timeout=5).json())


def complete(url: str, prompt: str, key: str = KEY) -> httpx.Response:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    return httpx.post(
        f"{url}/v1/completions", json=body, headers={"Authorization": f"Bearer {key}"}, timeout=30
    )


def test_pods_are_found_and_prefixes_stay_together(cluster: tuple[str, Api, list[Pod]]) -> None:
    url, api, pods = cluster
    assert dict(pair.split("=") for pair in api.selectors[0].split(",")) == engine_labels()
    homes = set()
    for group in range(12):
        prefix = f"{group} " * 200
        (home,) = {complete(url, prefix + str(number)).json()["choices"][0]["text"] for number in range(4)}
        homes.add(home)
    assert homes == {pod.name for pod in pods}
    assert [pod.refused for pod in pods] == [0, 0]
    assert complete(url, "x", key="nobody").status_code == 401


def test_a_pod_that_terminates_gets_no_more_requests(cluster: tuple[str, Api, list[Pod]]) -> None:
    url, api, pods = cluster
    going, staying = pods
    for group in range(12):
        complete(url, f"{group} " * 200)
    assert going.prompts
    last = going.object()
    last["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    api.tell("MODIFIED", last)
    wait_until(lambda: len(endpoints(url)) == 1, 60, "the router has dropped the pod")
    before = len(going.prompts)
    for group in range(12):
        assert complete(url, f"{group} " * 200).json()["choices"][0]["text"] == staying.name
    assert len(going.prompts) == before
