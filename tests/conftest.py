"""What several folders share: markers for hardware, free ports, servers that never outlive the run."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.server_process import ServerProcess, find_free_port

# How long an example takes says nothing on a shared machine.
settings.register_profile("nwor", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("nwor")


#: Set, tests with these marks run too.
LONG, SLOW = "NWOR_TESTS_LONG", "NWOR_TESTS_SLOW"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for mark, variable in (("long", LONG), ("slow", SLOW)):
        if os.environ.get(variable):
            continue
        for item in items:
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=f"{mark}: set {variable}=1"))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        skip = pytest.mark.skip(reason="needs an NVIDIA GPU with CUDA")
        for item in marked:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Let collections of garbage pass over what has been imported: engines and benchmarks make many."""
    gc.freeze()


@pytest.fixture
def free_port() -> int:
    return find_free_port()


pytest_plugins = ("tests.lanes", "tests.required")

#: Servers of this run, for the reports of failed tests.
servers: list[ServerProcess] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ends of logs beside a failure: of all servers that run, and of the last one started."""
    report = yield
    if report.failed:
        for server in servers:
            if server.process.poll() is None or server is servers[-1]:
                report.sections.append((f"log of the server at {server.url}", server.log[-3000:]))
    return report


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ServerProcess]]:
    """Start servers: ``start_server(*flags, wait=True)``; all of them are gone when the run ends."""

    def start(*flags: str, wait: bool = True) -> ServerProcess:
        log: Path = tmp_path_factory.mktemp("server") / "log.txt"
        server = ServerProcess([*flags, "--host", "127.0.0.1"], find_free_port(), log)
        servers.append(server)
        if wait:
            server.wait_until_ready()
        return server

    yield start
    for server in servers:
        server.kill()


#: Both keys of the shared server.
API_KEYS = ("first-key", "second-key")
#: Key of its admin API.
ADMIN_KEY = "admin-key"


@pytest.fixture(scope="session")
def server(start_server: Callable[..., ServerProcess]) -> ServerProcess:
    """One server on the demo model for every test that only sends requests."""
    shared = start_server(
        *("--demo", "--max-body-size", "1Mi", "--api-key", *API_KEYS),
        *("--admin-api-key", ADMIN_KEY),
        # A small model may fill its budget with blanks between JSON's tokens. Also: dotted flags arrive.
        *("--structured-outputs-config.backend", "xgrammar"),
        *("--structured-outputs-config.disable_any_whitespace", "true"),
    )
    shared.api_key = API_KEYS[0]
    return shared
