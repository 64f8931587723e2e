#!/usr/bin/env python3
"""Restart the composed server under load, and find out whether a client saw anything but a pause.

    NWOR_ADMIN_API_KEY=KEY deploy/restart_under_load.py [BASE_URL] [--service nwor] [--restarts N]

Clients send greedy requests, half of them streamed, and retry where no connection comes about, as clients do.
Then ``$COMPOSE restart SERVICE`` (COMPOSE: "docker compose", or "podman-compose") runs. Checked are:

- every answer is whole: status 200, finish reason "length", as many tokens as asked for, a stream's [DONE];
- every text is one that the same prompt got before the restart: nothing is mixed up or cut;
- requests that ran when the server stopped listening were finished, and none of them was dropped;
- the server is healthy again, and completes prompts;
- its metrics have started from zero: they count what was sent since and nothing else, without a mismatch;
- the mode is the configured one again, though another one was in force before.

Needs Python 3.11 and nothing else. VLLM_API_KEY: a user's key, where the server wants one. NWOR_ADMIN_URL:
where the admin API listens, if not on BASE_URL. Ends with 1 when anything was wrong.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import http.client
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
import urllib.parse
from typing import Any

PROMPTS = (
    "def add(a, b):",
    "def fibonacci(n):",
    "class Stack:",
    "import os\n\ndef read(path):",
    "for index in range(10):",
    "def test_",
)
#: Seconds that one answer may take, and that the server may take to come back.
ANSWER_SECONDS = 120.0
READY_SECONDS = 900.0
#: Seconds between two tries to connect, and between two looks at /health.
RETRY_SECONDS = 0.2
LOOK_SECONDS = 0.05
#: A connection that is this much older than the end of listening had been accepted.
ACCEPTED_SECONDS = 0.5


class Broken(Exception):  # noqa: N818  what a client sees
    """An answer that no client should get."""


class Unreachable(Exception):  # noqa: N818  what a client sees
    """No connection, or one that ended before the first byte of an answer: to be tried again."""


@dataclasses.dataclass
class Answer:
    """A completion: when it was asked for and answered (monotonic seconds), and what came."""

    prompt: str
    begun: float
    ended: float
    text: str


class Client:
    """HTTP with the standard library, one connection for each request."""

    def __init__(self, url: str, admin_url: str, api_key: str | None, admin_key: str) -> None:
        self._public, self._admin = _address(url), _address(admin_url)
        self._keys = {"user": api_key, "admin": admin_key, "": None}

    def send(self, method: str, path: str, body: Any = None, key: str = "") -> tuple[int, bytes]:
        """Return status and body.

        Raises:
            Unreachable: the connection did not come about, or ended before an answer began.
            Broken: it ended within the answer.

        """
        address = self._admin if path.startswith("/admin/") else self._public
        connection = http.client.HTTPConnection(*address, timeout=ANSWER_SECONDS)
        headers = {"Connection": "close"} | ({} if body is None else {"Content-Type": "application/json"})
        if token := self._keys[key]:
            headers["Authorization"] = f"Bearer {token}"
        try:
            try:
                data = None if body is None else json.dumps(body).encode()
                connection.request(method, path, body=data, headers=headers)
                response = connection.getresponse()
            except (TimeoutError, http.client.BadStatusLine) as error:
                if isinstance(error, http.client.RemoteDisconnected):
                    raise Unreachable(str(error)) from error
                raise Broken(f"{type(error).__name__}: {error}") from error
            except OSError as error:
                raise Unreachable(str(error)) from error
            try:
                return response.status, response.read()
            except (OSError, http.client.HTTPException) as error:
                raise Broken(f"the answer was cut: {type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def read(self, path: str, key: str = "") -> bytes:
        """Return the body of a GET that must succeed."""
        status, body = self.send("GET", path, key=key)
        if status != http.client.OK:
            raise Broken(f"GET {path} answered {status}: {body[:300]!r}")
        return body

    def complete(self, model: str, prompt: str, tokens: int, stream: bool) -> str:
        """Return the text of one completion, after checking that all of it came."""
        request = {"model": model, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        request["temperature"] = 0
        if stream:
            request |= {"stream": True, "stream_options": {"include_usage": True}}
        status, body = self.send("POST", "/v1/completions", request, key="user")
        if status != http.client.OK:
            raise Broken(f"status {status}: {body[:300]!r}")
        try:
            chunks = _events(body) if stream else [json.loads(body)]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
            counted = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk.get("usage")][-1]
            text = "".join(choice["text"] for choice in choices)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise Broken(f"no whole answer ({type(error).__name__}: {error}): {body[-300:]!r}") from error
        if reasons != ["length"] or counted != tokens:
            raise Broken(f"finish reason {reasons}, {counted} of {tokens} tokens: {body[-300:]!r}")
        return text

    def metrics(self) -> dict[str, float]:
        """Return each metric's sum over its samples, and the mode in force as ``mode:NAME``."""
        sums: dict[str, float] = collections.defaultdict(float)
        for line in self.read("/metrics").decode().splitlines():
            found = re.match(r"([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)", line)
            if found is None:
                continue
            name, labels, value = found.groups()
            if name == "nwor_mode" and (mode := re.search(r'mode="(\w+)"', labels or "")):
                name = f"mode:{mode.group(1)}"
            sums[name] += float(value)
        return dict(sums)


def _address(url: str) -> tuple[str, int]:
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise SystemExit(f"{url!r} is not a URL such as http://127.0.0.1:8000")
    return parts.hostname, parts.port or 80


def _events(body: bytes) -> list[dict[str, Any]]:
    lines = [line[6:] for line in body.decode().splitlines() if line.startswith("data: ")]
    if not lines or lines[-1] != "[DONE]":
        raise ValueError("the stream has no [DONE]")
    return [json.loads(line) for line in lines[:-1]]


class Load:
    """Workers that send completions until told to stop, and what they saw."""

    def __init__(self, client: Client, model: str, tokens: int, workers: int) -> None:
        self._client, self._model, self._tokens = client, model, tokens
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.answers: list[Answer] = []
        self.broken: list[str] = []
        #: When each try began that found no server, or was cut off before an answer began.
        self.refused: list[float] = []
        self._threads = [threading.Thread(target=self._work, args=(n,), daemon=True) for n in range(workers)]

    def start(self) -> None:
        """Begin to send."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Return once every request that was sent is answered."""
        self._stop.set()
        for thread in self._threads:
            thread.join(ANSWER_SECONDS + READY_SECONDS)

    def count(self) -> int:
        """Return how many answers have come."""
        with self._lock:
            return len(self.answers)

    def wait_for(self, answers: int) -> None:
        """Return once that many more answers have come, or something broke."""
        wanted, deadline = self.count() + answers, time.monotonic() + ANSWER_SECONDS
        while self.count() < wanted and not self.broken and time.monotonic() < deadline:
            time.sleep(0.05)

    def _work(self, number: int) -> None:
        turn = number
        while not self._stop.is_set():
            self._ask(PROMPTS[turn % len(PROMPTS)], stream=bool((turn // len(PROMPTS) + number) % 2))
            turn += 1

    def _ask(self, prompt: str, stream: bool) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while True:
            begun = time.monotonic()
            try:
                text = self._client.complete(self._model, prompt, self._tokens, stream)
            except Unreachable as error:
                with self._lock:
                    self.refused.append(begun)
                    if begun > deadline:
                        self.broken.append(f"no connection for {READY_SECONDS:g} s: {error}")
                        return
                time.sleep(RETRY_SECONDS)
                continue
            except Broken as error:
                with self._lock:
                    self.broken.append(f"{'stream' if stream else 'request'} for {prompt!r}: {error}")
                return
            with self._lock:
                self.answers.append(Answer(prompt, begun, time.monotonic(), text))
            return


class Check:
    """Prints each finding, and remembers whether one was bad."""

    def __init__(self) -> None:
        self.failed = False

    def __call__(self, good: bool, what: str, got: str) -> None:
        """Report one check."""
        self.failed |= not good
        print(f"{'ok    ' if good else 'FAILED'} {what}: {got}", flush=True)


@dataclasses.dataclass
class Times:
    """A restart in monotonic seconds: command begun, port closed, command ended, healthy again."""

    began: float
    closed: float
    ended: float
    healthy: float


def restart(compose: list[str], service: str, grace: int, client: Client) -> Times:
    """Restart the service, and return when what happened, once it is healthy again."""

    def is_healthy() -> bool:
        try:
            return client.send("GET", "/health")[0] == http.client.OK
        except (Unreachable, Broken):
            return False

    closed: list[float] = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set() and not closed:
            if not is_healthy():
                closed.append(time.monotonic())
            time.sleep(LOOK_SECONDS)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    began = time.monotonic()
    command = [*compose, "restart", "-t", str(grace), service]
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    ended = time.monotonic()
    done.set()
    watcher.join()
    if result.returncode:
        raise SystemExit(f"{shlex.join(command)} ended with {result.returncode}:\n{result.stdout[-2000:]}")
    if not closed:
        raise SystemExit(f"{shlex.join(command)} ended, and the server answered all the while: no restart")
    while not is_healthy():
        if time.monotonic() > ended + READY_SECONDS:
            raise SystemExit(f"the server is not healthy {READY_SECONDS:g} s after the restart")
        time.sleep(RETRY_SECONDS)
    return Times(began, closed[0], ended, time.monotonic())


def run_round(args: argparse.Namespace, client: Client, model: str, check: Check) -> None:
    """One restart under load, with its checks."""
    configured = json.loads(client.read("/admin/nwor", key="admin"))
    other = next((mode for mode in configured["modes"] if mode != configured["mode"]), configured["mode"])
    load = Load(client, model, args.tokens, args.workers)
    load.start()
    # Each prompt comes several times, beside different others and in both modes: the order in which a kernel
    # adds may turn a near tie of two tokens.
    load.wait_for(args.answers_before)
    status, body = client.send("PUT", "/admin/nwor", {"mode": other}, key="admin")
    if status != http.client.OK:
        raise Broken(f"PUT /admin/nwor answered {status}: {body[:300]!r}")
    load.wait_for(args.answers_before // 2)
    before = client.metrics()
    times = restart(shlex.split(args.compose), args.service, args.grace, client)
    load.wait_for(args.answers_after)
    load.stop()
    after = client.metrics()

    known: dict[str, set[str]] = collections.defaultdict(set)
    for answer in load.answers:
        if answer.ended < times.began:
            known[answer.prompt].add(answer.text)
    drained = [answer for answer in load.answers if answer.begun < times.closed <= answer.ended]
    # The new server needs longer to start than the command to end.
    later = [answer for answer in load.answers if answer.ended > times.ended]
    new = [answer for answer in drained + later if answer.text not in known[answer.prompt]]
    dropped = [begun for begun in load.refused if begun < times.closed - ACCEPTED_SECONDS]

    whole = f"{load.count()} answers are whole"
    check(not load.broken, "no answer was broken", "; ".join(load.broken[:3]) or whole)
    check(bool(drained), "requests under way when the port closed were finished", f"{len(drained)}")
    check(not dropped, "none of them was dropped", f"{len(dropped)} dropped")
    check(bool(later), "requests after the restart were answered", f"{len(later)}")
    if args.compare:
        got = f"{len(new)} of {len(drained + later)} differ"
        if new:
            got += f", for one {new[0].prompt!r} gave {new[0].text!r}"
        check(not new, "every text is as it was before", got)
    away = f"{times.healthy - times.closed:.1f} s without service, {len(load.refused)} tries to connect"
    check(True, "healthy again", away)
    finished, earlier = (figures.get("vllm:request_success_total", 0) for figures in (after, before))
    check(
        earlier > 0 and finished == len(later),
        "metrics started from zero (requests of others would show here)",
        f"{earlier:g} requests before, {finished:g} now, {len(later)} sent since",
    )
    mismatches = after.get("nwor_accounting_mismatches_total", 0)
    check(mismatches == 0, "accounting mismatches", f"{mismatches:g}")
    modes = [name[5:] for name, value in after.items() if name.startswith("mode:") and value]
    check(
        modes == [args.mode or configured["mode"]],
        f"the mode is the configured one (it was {other!r} before the restart)",
        ", ".join(modes) or "none",
    )


def main() -> int:
    """Run the restarts; return 0 when nothing was wrong."""
    parser = argparse.ArgumentParser(description="Restart the composed server under load.")
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000", help="default: %(default)s")
    parser.add_argument("--service", default="nwor", help="service to restart; default: %(default)s")
    parser.add_argument("--compose", default=os.environ.get("COMPOSE", "docker compose"), help="or: COMPOSE")
    parser.add_argument("--grace", type=int, default=60, help="seconds to stop in; default: %(default)s")
    parser.add_argument("--restarts", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--workers", type=int, default=4, help="clients at a time; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=256, help="tokens of each answer; default: %(default)s")
    parser.add_argument("--answers-before", type=int, default=60, help="default: %(default)s")
    parser.add_argument("--answers-after", type=int, default=30, help="default: %(default)s")
    parser.add_argument("--mode", help="the configured mode; default: the one in force")
    parser.add_argument(
        "--no-compare",
        dest="compare",
        action="store_false",
        help="do not compare texts: for models whose greedy texts depend on what else is in the batch",
    )
    args = parser.parse_args()
    admin_key = os.environ.get("NWOR_ADMIN_API_KEY")
    if not admin_key:
        parser.error("set NWOR_ADMIN_API_KEY to the server's admin key")
    client = Client(
        args.url, os.environ.get("NWOR_ADMIN_URL") or args.url, os.environ.get("VLLM_API_KEY"), admin_key
    )
    check = Check()
    try:
        model = json.loads(client.read("/v1/models", key="user"))["data"][0]["id"]
        for number in range(args.restarts):
            print(f"restart {number + 1} of {args.restarts}", flush=True)
            run_round(args, client, model, check)
    except (Broken, Unreachable) as error:
        raise SystemExit(f"{args.url}: {error}") from error
    print("something is wrong, see above" if check.failed else "nothing wrong")
    return int(check.failed)


if __name__ == "__main__":
    sys.exit(main())
