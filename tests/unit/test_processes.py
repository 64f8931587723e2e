"""How many processes serve HTTP, what is refused, and how several of them are watched."""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from server import cli
from server.api_servers import api_process, supervisor
from server.api_servers import count as count_module
from server.api_servers.api_process import ENGINE_DIED, READY, STOP
from server.api_servers.count import resolve_processes
from server.api_servers.supervisor import ApiProcesses
from server.errors import StartupError, UsageError


@pytest.fixture(autouse=True)
def sixteen_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(count_module, "usable_processors", lambda: 16.0)


#: What vLLM and this server have where nobody says otherwise.
DEFAULTS = vars(cli.make_parser().parse_args(["model"]))


def count(device_type: str = "cuda", **given: Any) -> int:
    assert set(given) <= set(DEFAULTS)
    args = argparse.Namespace(**{**DEFAULTS, **given})
    resolve_processes(args, device_type)
    return int(args.api_server_count)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"api_server_count": 1}, 1),
        ({"api_server_count": 3}, 3),
        ({"data_parallel_size": 2, "device_type": "cpu"}, 2),
        ({"device_type": "cpu"}, 1),
        ({"data_parallel_size": 4}, 4),
        ({"data_parallel_size": 4, "api_server_count": 1}, 1),
        ({"data_parallel_size": 4, "data_parallel_rank": 1}, 1),
        ({"data_parallel_size": 4, "data_parallel_external_lb": True}, 1),
        ({"data_parallel_size": 4, "data_parallel_hybrid_lb": True, "data_parallel_size_local": 2}, 2),
        ({"data_parallel_size": 4, "data_parallel_start_rank": 2, "data_parallel_size_local": 2}, 2),
        ({"data_parallel_size": 4, "enable_elastic_ep": True}, 1),
    ],
)
def test_there_are_as_many_as_vllm_would_start(given: dict[str, Any], expected: int) -> None:
    assert count(**given) == expected


@pytest.mark.parametrize(
    ("processors", "given", "expected"),
    [
        (7.9, {}, 1),
        (8.0, {}, 2),
        (8.0, {"tensor_parallel_size": 2}, 1),
        (12.0, {"tensor_parallel_size": 2}, 2),
        (19.0, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 1),
        (20.0, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, 2),
        (64.0, {"data_parallel_size": 3}, 3),
        (64.0, {"data_parallel_hybrid_lb": True}, 1),
    ],
)
def test_an_engine_has_two_where_the_machine_has_processors_for_them(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    processors: float,
    given: dict[str, Any],
    expected: int,
) -> None:
    monkeypatch.setattr(count_module, "usable_processors", lambda: processors)
    assert count(**given) == expected
    # What differs from vLLM is said.
    assert ("--api-server-count 1 has one" in capsys.readouterr().err) == (expected == 2)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"headless": True}, "vllm serve --headless"),
        ({"grpc": True}, "--grpc is not supported"),
        ({"data_parallel_multi_port_external_lb": True}, "one nwor-server for each engine"),
        ({"api_server_count": 0}, "leaves nobody to serve HTTP"),
        ({"api_server_count": 2, "enable_elastic_ep": True}, "--enable-elastic-ep"),
    ],
)
def test_what_cannot_be_served_says_what_to_do(given: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        count(**given)


@pytest.mark.parametrize("variable", ["VLLM_ALLOW_RUNTIME_LORA_UPDATING", "VLLM_ENABLE_RESPONSES_API_STORE"])
def test_what_one_process_keeps_needs_one_process(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    assert count(api_server_count=1) == 1
    with pytest.raises(UsageError, match=f"{variable}.*one process of them"):
        count(api_server_count=2)
    # Where nobody asked for several there is one.
    assert count() == count(data_parallel_size=2) == 1


@pytest.mark.parametrize(
    "given",
    [
        {"enable_logging_iteration_details": True},
        {"cudagraph_metrics": True},
        {"enable_mfu_metrics": True},
        {"enable_server_load_tracking": True},
        {"kv_transfer_config": {"kv_connector": "x"}},
        {"ec_transfer_config": {"ec_connector": "x"}},
        {"max_num_queued_tokens": 8192},
        {"enable_lora": True},
        {"middleware": ["a.b"]},
        {"profiler_config": SimpleNamespace(profiler="torch")},
    ],
    ids=lambda given: next(iter(given)),
)
def test_what_several_do_in_part_has_one_unless_more_are_asked_for(given: dict[str, Any]) -> None:
    assert count() == 2
    assert count(**given) == 1
    assert count(**given, api_server_count=2) == count(**given, data_parallel_size=2) == 2


def test_developers_mode_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    assert count() == 1
    assert count(api_server_count=2) == 2


def test_the_command_line_decides_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    asked: list[str] = []
    monkeypatch.setattr(cli, "resolve_processes", lambda args, device_type: asked.append(device_type))
    monkeypatch.setattr(type(current_platform), "device_type", "cuda")
    cli.parse(["--demo", "--port", "0"])
    assert asked == ["cuda"]
    assert [count(device_type) for device_type in ("cuda", "xpu", "cpu")] == [2, 2, 1]


class Process:
    """A stand-in for a process: it ends when its test says so."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sentinel, self._end = multiprocessing.Pipe(duplex=False)
        self.exitcode: int | None = None
        self._code = 0

    def ends(self, code: int) -> None:
        self._code = code
        self._end.close()

    def join(self, timeout: float) -> None:
        self.exitcode = self._code


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch) -> tuple[ApiProcesses, list[Process]]:
    monkeypatch.setattr(supervisor, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(supervisor, "_END_SECONDS", 0.1)
    monkeypatch.setattr(supervisor, "ABORT_GRACE", 0.1)
    args = argparse.Namespace(api_server_count=3, drain_timeout=0.1)
    return ApiProcesses(args, "", None, None), [Process(f"ApiServer_{i}") for i in range(3)]


def told(own: ApiProcesses, process: int) -> list[str]:
    said = []
    while own._theirs[process].poll():
        said.append(own._theirs[process].recv())
    return said


Three = tuple[ApiProcesses, list[Process]]


def test_an_orderly_end(three: Three) -> None:
    own, processes = three
    own._on_signal()
    assert [told(own, i) for i in range(3)] == [[STOP]] * 3
    own._on_signal()
    assert [told(own, i) for i in range(3)] == [[STOP]] * 3
    for process in processes:
        process.ends(0)
    assert own._watch(processes) == 0


def test_a_process_that_dies_takes_the_others_along_after_a_drain(three: Three) -> None:
    own, processes = three
    processes[1].ends(-9)
    assert own._watch(processes) == 1  # the others do not end, so they are ended
    assert [told(own, i) for i in (0, 2)] == [[STOP]] * 2


def test_a_process_that_dies_in_a_drain_does_not_hurry_the_others(three: Three) -> None:
    own, processes = three
    own._on_signal()
    for process, code in zip(processes, (0, -9, 0), strict=True):
        process.ends(code)
    assert own._watch(processes) == 1
    assert told(own, 0) == [STOP]


def test_the_death_of_an_engine_is_told_and_is_the_exit_code(three: Three) -> None:
    own, processes = three
    own._watch_engines(SimpleNamespace(monitor_engine_liveness=lambda: None))
    for process in processes:
        process.ends(1)
    assert own._watch(processes) == 1
    assert [told(own, i) for i in range(3)] == [[ENGINE_DIED]] * 3


def test_engines_that_are_ended_have_not_died(three: Three) -> None:
    own, _ = three
    own._end()
    own._watch_engines(SimpleNamespace(monitor_engine_liveness=lambda: None))
    assert told(own, 0) == []


def test_without_its_coordinator_data_parallelism_ends(three: Three) -> None:
    own, processes = three
    own._coordinator = Process("coordinator")
    own._coordinator.ends(1)
    assert own._watch(processes) == 1
    assert told(own, 2) == [ENGINE_DIED]


def test_ready_is_when_all_are(three: Three) -> None:
    own, processes = three
    for pipe in own._theirs:
        pipe.send(READY)
    own._wait_until_ready(processes)
    own._theirs[0].send(READY)
    own._theirs[1].close()
    with pytest.raises(StartupError, match="ApiServer_1 ended before it was ready"):
        own._wait_until_ready(processes)


def test_orders_are_carried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = multiprocessing.Pipe()
    done: list[str] = []
    lifecycle = SimpleNamespace(stop=lambda why: done.append("stop"), engine_died=lambda: done.append("dead"))
    readers: list[Any] = []
    loop = SimpleNamespace(
        add_signal_handler=lambda *args: None, add_reader=lambda fd, *call: readers.append(call)
    )
    api_process.Orders(theirs).listen(loop, lifecycle)
    ((carry_out, *arguments),) = readers
    for order in (STOP, ENGINE_DIED, STOP):
        ours.send(order)
        carry_out(*arguments)
    assert done == ["stop", "dead", "stop"]
    # Nobody is left to look after it.
    monkeypatch.setattr(api_process.os, "_exit", sys.exit)
    ours.close()
    with pytest.raises(SystemExit) as end:
        carry_out(*arguments)
    assert end.value.code == 1


def test_sockets_reach_a_process_that_starts_afresh() -> None:
    """What vLLM starts the processes with: all of it has to be there again on the other side."""
    from multiprocessing.reduction import ForkingPickler

    from server.admin_api.listener import AdminListener
    from server.nwor_options import Secret

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        address = sock.getsockname()
        listener = AdminListener(sock, "http://127.0.0.1:1")
        args = argparse.Namespace(admin_api_key=Secret("boss"))
        ours, theirs = multiprocessing.Pipe()
        sent = partial(api_process.run, [theirs], listener), sock, args
        target, arrived, again = ForkingPickler.loads(ForkingPickler.dumps(sent))
    with arrived, target.args[1].sock as own:
        ([pipe], there), function = target.args, target.func
        assert function is api_process.run
        assert there.address == listener.address
        assert own.getsockname() == arrived.getsockname() == address
        ours.send(STOP)
        assert pipe.recv() == STOP
    assert again == args
    assert isinstance(again.admin_api_key, Secret)
