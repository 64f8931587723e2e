"""``nwor-server mode`` over several servers, against real HTTP servers that answer like the admin API."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from server.admin_api import cli as admin_cli
from server.admin_api import fleet, settings

KEY = "admin-secret"
#: Answers of the admin API by status, in its own words.
PROBLEMS = {401: "The admin key is not valid", 403: "The admin API is closed", 503: "The engine is dead"}


class Replica:
    """One server: a mode, the modes it offers, and what it does before it answers as it should."""

    def __init__(self, address: str = "127.0.0.1", port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.mode = "stage"
        self.modes = ["off", "stage", "cow"]
        self.draft_tokens: dict[str, Any] | None = {
            "setting": "auto:0-8",
            "started_with": "auto:0-8",
            "can_change": True,
        }
        self.enabled = True
        self.ranks_agree = True
        #: Statuses of the next answers; 0 cuts the connection.
        self.failures: list[int] = []
        #: Cuts the connection of a PUT, once, after having switched.
        self.loses_answers = False
        self.stuck = False
        self.requests: list[tuple[str, str, str | None]] = []
        replica = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                replica.answer(self, None)

            def do_PUT(self) -> None:
                replica.answer(self, json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

            def log_message(self, *_: object) -> None:
                """Stay silent."""

        self.server = ThreadingHTTPServer((address, port), Handler)
        self.address, self.port = self.server.server_address[:2]
        if tls is not None:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.url = f"http://{self.address}:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: BaseHTTPRequestHandler, body: dict[str, Any] | None) -> None:
        self.requests.append((request.command, request.path, request.headers["Host"]))
        if self.failures:
            status = self.failures.pop(0)
            if status:
                self.send(request, status, {"error": {"message": PROBLEMS[status], "code": status}})
            else:
                request.connection.shutdown(socket.SHUT_RDWR)
        elif request.headers["Authorization"] != f"Bearer {KEY}":
            self.send(request, 401, {"error": {"message": PROBLEMS[401], "code": 401}})
        elif body is None:
            self.send(request, 200, self.report())
        elif request.path == "/admin/nwor/draft-tokens":
            assert self.draft_tokens is not None
            old, new = self.draft_tokens["setting"], body["draft_tokens"]
            new = self.draft_tokens["started_with"] if new == "auto" else new
            self.draft_tokens["setting"] = old if self.stuck else new
            self.send(request, 200, {"old": old, "new": new, "step": 7, "ranks": 1})
        else:
            old = self.mode
            self.mode = old if self.stuck else body["mode"]
            if self.loses_answers:
                self.loses_answers = False
                self.failures = [0] * 3
                request.connection.shutdown(socket.SHUT_RDWR)
            else:
                self.send(request, 200, {"old": old, "new": body["mode"], "step": 7, "ranks": 1})

    #: Why nothing can be staged.
    unsupported: dict[str, str] | None = None

    def report(self) -> dict[str, Any]:
        if not self.enabled:
            return {"enabled": False, "detail": "this engine has no NWOR"}
        ranks = [{"rank": 0, "mode": self.mode, "fault": None, "unsupported": self.unsupported}]
        if not self.ranks_agree:
            ranks.append({"rank": 1, "mode": self.mode, "fault": "out of memory", "unsupported": None})
        return {
            "enabled": True,
            "mode": self.mode,
            "modes": self.modes,
            "unsupported": self.unsupported,
            **({} if self.draft_tokens is None else {"draft_tokens": self.draft_tokens}),
            "ranks_agree": self.ranks_agree,
            "ranks": ranks,
        }

    @staticmethod
    def send(request: BaseHTTPRequestHandler, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        request.send_response(status)
        request.send_header("Content-Length", str(len(data)))
        request.end_headers()
        request.wfile.write(data)

    @property
    def puts(self) -> int:
        return sum(method == "PUT" for method, _, _ in self.requests)


@pytest.fixture
def make_replica() -> Iterator[Callable[..., Replica]]:
    with contextlib.ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> Replica:
            replica = Replica(*args, **kwargs)
            stack.callback(replica.close)
            return replica

        yield make


@pytest.fixture
def three(make_replica: Callable[..., Replica]) -> list[Replica]:
    return [make_replica() for _ in range(3)]


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NWOR_ADMIN_API_KEY", KEY)
    monkeypatch.setattr(fleet, "FIRST_PAUSE", 0.001)


def run(*words: str, replicas: list[Replica]) -> int:
    return admin_cli.main([*words, *(word for one in replicas for word in ("--url", one.url))])


def line_of(text: str, replica: Replica) -> str:
    (line,) = [line for line in text.splitlines() if line.startswith(f"{replica.url}  ")]
    return line


def test_all_replicas_are_switched_and_named(
    three: list[Replica], capsys: pytest.CaptureFixture[str]
) -> None:
    three[1].mode = "off"
    assert run("cow", replicas=three) == 0
    out, err = capsys.readouterr()
    assert [one.mode for one in three] == ["cow"] * 3
    assert line_of(out, three[0]).endswith("stage -> cow at verify step 7, on 1 rank(s)")
    assert "off -> cow" in line_of(out, three[1])
    assert out.splitlines()[-1] == "all 3 replicas are in mode cow"
    assert err == ""


def test_showing_agrees_or_fails(three: list[Replica], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(replicas=three) == 0
    assert "all 3 replicas are in mode stage" in capsys.readouterr().out
    three[2].mode = "off"
    assert run(replicas=three) == 1
    out, err = capsys.readouterr()
    assert line_of(out, three[2]).endswith("  off")
    assert "have different modes: 1 off, 2 stage" in err
    assert [one.puts for one in three] == [0, 0, 0]


@pytest.mark.parametrize("failures", [[503], [0], [0, 503, 0]])
def test_passing_failures_are_tried_again(three: list[Replica], failures: list[int]) -> None:
    three[1].failures = failures
    assert run("off", replicas=three) == 0
    assert [one.mode for one in three] == ["off"] * 3


def test_a_server_that_stays_away_is_named_and_the_others_switch(
    three: list[Replica], capsys: pytest.CaptureFixture[str]
) -> None:
    three[0].failures = [503] * 99
    assert run("off", "--tries", "2", replicas=three) == 1
    out, err = capsys.readouterr()
    assert line_of(out, three[0]).endswith("FAILED (mode unknown): The engine is dead")
    assert [one.mode for one in three] == ["stage", "off", "off"]
    assert "1 of 3 replicas failed; modes now: 2 off, 1 unknown" in err
    assert len(three[0].requests) == 2


def test_a_closed_port_is_no_answer(
    three: list[Replica], free_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("off", "--url", f"http://127.0.0.1:{free_port}", replicas=three) == 1
    assert f"http://127.0.0.1:{free_port}  FAILED (mode unknown): no answer" in capsys.readouterr().out
    assert [one.mode for one in three] == ["off"] * 3


@pytest.mark.parametrize("case", ["key", "closed", "mode", "no nwor"])
def test_nothing_is_switched_where_one_cannot_follow_unless_forced(
    three: list[Replica], case: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if case == "mode":
        three[1].modes = ["off", "stage"]
        said = "'cow' was not enabled at start-up (enabled: off, stage)"
    elif case == "no nwor":
        three[1].enabled = False
        said = "this engine has no NWOR"
    else:
        three[1].failures = [401 if case == "key" else 403] * 99
        said = PROBLEMS[three[1].failures[0]]
    assert run("cow", replicas=three) == 1
    out, err = capsys.readouterr()
    assert said in line_of(out, three[1])
    assert "left alone" in line_of(out, three[0])
    assert "3 of 3 replicas failed" in err
    assert [one.puts for one in three] == [0, 0, 0]
    assert len(three[1].requests) == 1, "a refusal is not asked again"

    assert run("cow", "--force", replicas=three) == 1
    out, err = capsys.readouterr()
    assert [one.mode for one in three] == ["cow", "stage", "cow"]
    assert said in line_of(out, three[1])
    assert "1 of 3 replicas failed" in err


def test_an_engine_that_stages_nothing_takes_off_alone(
    three: list[Replica], capsys: pytest.CaptureFixture[str]
) -> None:
    three[1].mode, three[1].unsupported = "off", {"reason": "mla", "detail": "another kind of cache"}
    assert run("stage", replicas=three) == 1
    assert "nothing can be staged in it: another kind of cache" in line_of(capsys.readouterr().out, three[1])
    assert [one.puts for one in three] == [0, 0, 0]
    assert run("off", replicas=three) == 0
    capsys.readouterr()
    three[1].ranks_agree = False
    assert run(replicas=three) == 1
    said = "rank 0: another kind of cache; rank 1: out of memory"
    assert said in line_of(capsys.readouterr().out, three[1])


def test_a_lost_answer_is_looked_up(three: list[Replica], capsys: pytest.CaptureFixture[str]) -> None:
    three[1].loses_answers = True
    assert run("off", replicas=three) == 0
    assert line_of(capsys.readouterr().out, three[1]).endswith("  off")


def test_a_mode_that_did_not_stay_is_a_failure(
    three: list[Replica], capsys: pytest.CaptureFixture[str]
) -> None:
    three[1].stuck = True
    assert run("off", replicas=three) == 1
    out, err = capsys.readouterr()
    assert "FAILED (stage): not in mode off any more" in line_of(out, three[1])
    assert "modes now: 2 off, 1 stage" in err


def test_ranks_that_differ_are_a_failure_that_a_switch_may_mend(
    three: list[Replica], capsys: pytest.CaptureFixture[str]
) -> None:
    three[1].ranks_agree = False
    assert run(replicas=three) == 1
    assert "ranks do not agree: rank 0: stage; rank 1: out of memory" in capsys.readouterr().out
    assert run("off", replicas=three) == 1, "asked again after the switch, they still differ"
    assert [one.puts for one in three] == [1, 1, 1]


def run_draft_tokens(*words: str, replicas: list[Replica]) -> int:
    urls = [word for one in replicas for word in ("--url", one.url)]
    return admin_cli.main([*words, *urls], settings.DRAFT_TOKENS)


@pytest.mark.parametrize("wanted", ["auto:1-6", "3", "0"])
def test_draft_tokens_of_all_replicas(
    three: list[Replica], wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_draft_tokens(wanted, replicas=three) == 0
    out = capsys.readouterr().out
    assert line_of(out, three[0]).endswith(f"auto:0-8 -> {wanted} at verify step 7, on 1 rank(s)")
    assert out.splitlines()[-1] == f"all 3 replicas have draft tokens {wanted}"
    assert {one.draft_tokens["setting"] for one in three if one.draft_tokens} == {wanted}
    assert run_draft_tokens(replicas=three) == 0
    assert f"all 3 replicas have draft tokens {wanted}" in capsys.readouterr().out
    assert {one.mode for one in three} == {"stage"}


def test_auto_means_the_bounds_that_each_replica_was_started_with(
    three: list[Replica], capsys: pytest.CaptureFixture[str]
) -> None:
    three[1].draft_tokens = {"setting": "2", "started_with": "auto:1-4", "can_change": True}
    assert run_draft_tokens("auto", replicas=three) == 0
    assert "2 -> auto:1-4" in line_of(capsys.readouterr().out, three[1])
    assert run_draft_tokens(replicas=three) == 1
    assert "have different draft tokens: 2 auto:0-8, 1 auto:1-4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("has", "wanted", "said"),
    [
        ({"setting": "4", "started_with": "4", "can_change": False}, "3", "--num-speculative-tokens auto"),
        ({"setting": "2", "started_with": "auto:1-4", "can_change": True}, "5", "outside of auto:1-4"),
        ({"setting": "2", "started_with": "auto:1-4", "can_change": True}, "auto:0-4", "outside of auto:1-4"),
        (None, "3", "its version cannot change draft tokens"),
    ],
)
def test_no_draft_tokens_are_set_where_one_cannot_follow(
    three: list[Replica], has: Any, wanted: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    three[1].draft_tokens = has
    assert run_draft_tokens(wanted, replicas=three) == 1
    out, err = capsys.readouterr()
    assert said in line_of(out, three[1])
    assert "3 of 3 replicas failed; draft tokens now:" in err
    assert [one.puts for one in three] == [0, 0, 0]


def test_what_is_no_number_of_draft_tokens(three: list[Replica], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_draft_tokens("many", replicas=three) == 1
    assert "use auto, bounds as auto:1-8, or a number" in capsys.readouterr().out
    assert [one.puts for one in three] == [0, 0, 0]


def test_draft_tokens_that_did_not_stay(three: list[Replica], capsys: pytest.CaptureFixture[str]) -> None:
    three[2].stuck = True
    assert run_draft_tokens("3", replicas=three) == 1
    assert "not at draft tokens 3 any more" in line_of(capsys.readouterr().out, three[2])


def test_draft_tokens_of_one_server(
    make_replica: Callable[..., Replica], capsys: pytest.CaptureFixture[str]
) -> None:
    one = make_replica()
    assert run_draft_tokens(replicas=[one]) == 0
    assert capsys.readouterr().out == "auto:0-8\n"
    assert run_draft_tokens("5", replicas=[one]) == 0
    assert capsys.readouterr().out == "auto:0-8 -> 5 at verify step 7, on 1 rank(s)\n"


class Names:
    """Stands in for the resolver: the addresses behind one name, changing as a headless service's do."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: list[Replica]) -> None:
        self.answers = list(answers)
        real = socket.getaddrinfo

        def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
            if host != "replicas.test":
                return real(host, port, *args, **kwargs)
            current = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            if not current:
                raise socket.gaierror("Name or service not known")
            return [entry for one in current for entry in real(one.address, port, *args, **kwargs)]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture
def pods(make_replica: Callable[..., Replica]) -> list[Replica]:
    """Three servers on one port, each on an address of its own, like pods."""
    first = make_replica("127.0.0.2")
    return [first, make_replica("127.0.0.3", first.port), make_replica("127.0.0.4", first.port)]


def test_every_address_of_a_name_is_a_replica(
    pods: list[Replica], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Names(monkeypatch, pods)
    assert admin_cli.main(["off", "--resolve", f"replicas.test:{pods[0].port}"]) == 0
    assert [one.mode for one in pods] == ["off"] * 3
    assert "all 3 replicas are in mode off" in capsys.readouterr().out
    assert {host for one in pods for _, _, host in one.requests} == {f"replicas.test:{pods[0].port}"}


@pytest.mark.parametrize(
    ("name", "url"),
    [
        ("localhost", "http://127.0.0.1:8000"),
        ("localhost:80", "http://127.0.0.1:80"),
        ("https://localhost:443", "https://127.0.0.1:443"),
        ("https://localhost", "https://127.0.0.1:8000"),
        ("127.0.0.1:8081", "http://127.0.0.1:8081"),
        ("[::1]:80", "http://[::1]:80"),
    ],
)
def test_a_port_that_is_named_is_the_one_that_is_asked(name: str, url: str) -> None:
    assert url in [replica.url for replica in fleet.find_replicas([], [name])]


@pytest.mark.parametrize("name", ["localhost:http", "localhost:99999", ":80", "http://"])
def test_what_is_no_name_and_port_is_refused(name: str) -> None:
    with pytest.raises(fleet.FleetError, match=name):
        fleet.find_replicas([], [name])


def test_replicas_that_come_and_go_meanwhile(
    pods: list[Replica], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Names(monkeypatch, pods[:2], pods[1:])
    assert admin_cli.main(["off", "--resolve", f"replicas.test:{pods[0].port}"]) == 0
    out = capsys.readouterr().out
    assert "gone" in line_of(out, pods[0])
    assert [one.mode for one in pods[1:]] == ["off", "off"]
    assert "all 2 replicas are in mode off" in out


def test_a_name_that_is_lost_halfway_is_said(
    pods: list[Replica], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Names(monkeypatch, pods, [])
    assert admin_cli.main(["off", "--resolve", f"replicas.test:{pods[0].port}"]) == 1
    out, err = capsys.readouterr()
    assert [one.mode for one in pods] == ["off"] * 3
    assert "does not resolve" in out
    assert "1 of 4 replicas failed" in err


def test_a_name_that_does_not_resolve(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Names(monkeypatch, [])
    assert admin_cli.main(["off", "--resolve", "replicas.test"]) == 1
    assert "replicas.test does not resolve" in capsys.readouterr().err


def test_names_have_port_8000_and_may_have_tls(monkeypatch: pytest.MonkeyPatch, pods: list[Replica]) -> None:
    Names(monkeypatch, pods[:1])
    assert fleet.find_replicas([], ["replicas.test"])[0].url == "http://127.0.0.2:8000"
    assert fleet.find_replicas([], ["https://replicas.test:8443"])[0] == fleet.Replica(
        "https://127.0.0.2:8443", "replicas.test"
    )
    assert fleet.find_replicas(["http://[::1]:9/", "http://[::1]:9"], []) == [fleet.Replica("http://[::1]:9")]
    both = fleet.find_replicas(["http://127.0.0.2:8000", "http://a"], ["replicas.test"])
    assert [replica.url for replica in both] == ["http://127.0.0.2:8000", "http://a"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl to make a certificate")
def test_a_certificate_is_checked_against_the_name_not_the_address(
    make_replica: Callable[..., Replica],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=pods",
         "-addext", "subjectAltName=DNS:replicas.test", "-keyout", str(key), "-out", str(certificate)],
        check=True,
        capture_output=True,
    )  # fmt: skip
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    pod = make_replica("127.0.0.2", tls=context)
    Names(monkeypatch, [pod])
    name = f"https://replicas.test:{pod.port}"
    assert admin_cli.main(["off", "--tries", "1", "--resolve", name]) == 1
    assert "self-signed certificate" in capsys.readouterr().out
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    assert admin_cli.main(["off", "--tries", "1", "--resolve", name]) == 0
    assert pod.mode == "off"
    by_address = ["--tries", "1", "--url", f"https://127.0.0.2:{pod.port}", "--url", "http://127.0.0.2:9"]
    assert admin_cli.main(by_address) == 1
    assert "IP address mismatch" in capsys.readouterr().out
