"""A stand-in for the server with just what the scripts of deploy/ look at, and faults that they must find.

As a program it is what a composed service is to a client: ``fake_server.py serve PORT FAULTS`` drains on
SIGTERM, and ``fake_server.py restart -t SECONDS SERVICE`` does what ``docker compose`` does, with the process
that the environment names (FAKE_PID, FAKE_PORT, FAKE_FAULTS).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

MODEL = "fake/model"
API_KEY = "user-key"
ADMIN_KEY = "admin-key"
MODES = ["off", "stage", "cow"]


class FakeServer(ThreadingHTTPServer):
    """Serves until closed; ``faults`` names what it does wrong."""

    # Requests that run when it closes are waited for, as the real server does.
    daemon_threads = False
    request_queue_size = 64

    def __init__(self, port: int = 0, faults: tuple[str, ...] = (), seconds: float = 0.0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.faults = faults
        self.seconds = seconds
        self.mode = "stage"
        #: The server whose mode /admin shows and sets: another one where this is the admin's own port.
        self.switches = self
        self.tokens = 0
        self.requests = 1000 if "old metrics" in faults else 0
        self.lock = threading.Lock()
        #: When the requests that run began, by their threads.
        self.running: dict[int, float] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: FakeServer

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, status: int, body: Any, kind: str = "application/json") -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def refuse(self, status: int) -> None:
        self.answer(status, {"error": {"message": "no", "type": "Error", "param": None, "code": status}})

    def has_key(self, key: str) -> bool:
        return self.headers.get("Authorization") == f"Bearer {key}"

    def body(self) -> Any:
        return json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"null")

    def do_GET(self) -> None:
        faults = self.server.faults
        if self.path == "/health":
            self.answer(503 if "sick" in faults else 200, b"")
        elif self.path == "/metrics":
            self.answer(200, self.metrics().encode(), "text/plain")
        elif self.path == "/v1/models":
            permission = [{"id": "modelperm-1"}]
            data = [{"id": MODEL, "object": "model", "permission": permission}]
            self.answer(200, {"object": "list", "data": data})
        elif self.path == "/admin/nwor" and "no admin" not in faults:
            if "open admin" in faults or self.has_key(ADMIN_KEY):
                mode = self.server.switches.mode
                ranks = [{"rank": 0, "mode": mode}]
                agree = "ranks differ" not in faults
                self.answer(200, {"mode": mode, "modes": MODES, "ranks_agree": agree, "ranks": ranks})
            else:
                self.refuse(403 if "no admin key" in faults else 401)
        else:
            self.refuse(404)

    def do_PUT(self) -> None:
        wanted = self.body()["mode"]
        if "any admin key" not in self.server.faults and not self.has_key(ADMIN_KEY):
            self.refuse(401)
            return
        old = self.server.switches.mode
        if "stuck mode" not in self.server.faults:
            self.server.switches.mode = wanted
        self.answer(200, {"old": old, "new": wanted, "step": 1, "ranks": 1})

    def do_POST(self) -> None:
        request, faults = self.body(), self.server.faults
        if "open api" not in faults and not self.has_key(API_KEY):
            self.refuse(401)
            return
        if self.headers.get("Content-Type") != "application/json":
            self.refuse(400)
            return
        if request["model"] != MODEL and "any model" not in faults:
            self.refuse(404)
            return
        self.server.running[threading.get_ident()] = time.monotonic()
        time.sleep(self.server.seconds)
        del self.server.running[threading.get_ident()]
        count = request["max_tokens"] - ("short" in faults)
        word = "wrong" if "other text" in faults else "token"
        words = [f" {word}-{request['prompt'][:6]}-{number}" for number in range(count)]
        with self.server.lock:
            self.server.requests += 1
            if "no counting" not in faults:
                self.server.tokens += count
        usage = {"prompt_tokens": 4, "completion_tokens": count, "total_tokens": 4 + count}
        if not request.get("stream"):
            choice = {"index": 0, "text": "".join(words), "finish_reason": "length"}
            if "aborts" in faults:
                choice["finish_reason"] = "abort"
            self.answer(200, {"object": "text_completion", "choices": [choice], "usage": usage})
            return
        chunks: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "text": text, "finish_reason": None}]} for text in words
        ]
        chunks[-1]["choices"][0]["finish_reason"] = "length"
        chunks.append({"choices": [], "usage": usage})
        lines = [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]
        if "cut streams" not in faults:
            lines.append("data: [DONE]\n\n")
        self.answer(200, "".join(lines).encode(), "text/event-stream")

    def metrics(self) -> str:
        server = self.server
        lines = [
            "# TYPE vllm:generation_tokens counter",
            f'vllm:generation_tokens_total{{engine="0",model_name="{MODEL}"}} {float(server.tokens)}',
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {float(2 * server.tokens)}',
            f'vllm:request_success_total{{finished_reason="length"}} {float(server.requests)}',
            'vllm:request_success_total{finished_reason="abort"} 0.0',
            f'nwor_accounting_mismatches_total{{figure="windows"}} {float("mismatches" in server.faults)}',
        ]
        lines += [f'nwor_mode{{engine="0",mode="{mode}"}} {float(mode == server.mode)}' for mode in MODES]
        return (
            "\n".join(line for line in lines if "no nwor" not in server.faults or "nwor_" not in line) + "\n"
        )


def serve(port: int, faults: tuple[str, ...]) -> None:
    """Serve until SIGTERM; then finish what runs, unless the fault is to drop it."""
    server = FakeServer(port, faults, seconds=1.2 if "drops requests" in faults else 0.15)
    if "keeps mode" in faults:
        server.mode = "off"

    told = threading.Event()

    def stop() -> None:
        told.wait()
        if "drops requests" in faults:
            # The script allows for connections that were never accepted: what is dropped has run for a while.
            while not any(time.monotonic() - begun > 0.8 for begun in list(server.running.values())):
                time.sleep(0.01)
            os._exit(0)
        server.shutdown()

    # A handler that started the thread could deadlock: the main thread starts one for each request.
    threading.Thread(target=stop, daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: told.set())
    server.serve_forever(poll_interval=0.02)
    server.server_close()


def spawn(port: int, faults: str) -> subprocess.Popen[bytes]:
    """Start a server in a process of its own."""
    return subprocess.Popen([sys.executable, __file__, "serve", str(port), faults])


def restart() -> None:
    """Stop the process that FAKE_PID names, wait until it is gone, and start another in its place."""
    pid_file = Path(os.environ["FAKE_PID"])
    pid = int(pid_file.read_text())
    if os.environ["FAKE_FAULTS"] == "no restart":
        return
    os.kill(pid, signal.SIGTERM)
    with contextlib.suppress(ProcessLookupError):
        # The parent collects it; until then it is a zombie.
        while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
            time.sleep(0.02)
    time.sleep(0.3)
    command = f'sleep 1; exec {sys.executable} {__file__} serve {os.environ["FAKE_PORT"]} "$FAKE_FAULTS"'
    new = subprocess.Popen(["/bin/sh", "-c", command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    pid_file.write_text(str(new.pid))


if __name__ == "__main__":
    if sys.argv[1] == "restart":
        restart()
    else:
        serve(int(sys.argv[2]), tuple(sys.argv[3].split(",")))
