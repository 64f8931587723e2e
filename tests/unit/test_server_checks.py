"""Checks that run before vLLM is imported."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from server import demo
from server.checks import check_port, prescan
from server.errors import StartupError, UsageError

MODEL, DRAFT = str(demo.model_path()), str(demo.draft_path())


def test_prescan_reads_what_it_can(free_port: int) -> None:
    args = prescan([MODEL, "--max-model-len", "64", "--draft", DRAFT, "--port", str(free_port)])
    assert (args.model, args.draft, args.demo) == (MODEL, DRAFT, False)


def test_prescan_takes_underscores(free_port: int) -> None:
    with pytest.raises(StartupError, match="nowhere"):
        prescan(["--demo", f"--port={free_port}", "--draft=/nowhere"])


def test_prescan_leaves_a_word_behind_a_flag_alone(free_port: int) -> None:
    assert prescan(["--dtype", "/nowhere", "--port", str(free_port)]).model is None


def test_prescan_leaves_help_and_configuration_files_alone() -> None:
    prescan(["/nowhere", "--help=draft"])
    prescan(["/nowhere", "--config", "serve.yaml"])


def test_prescan_needs_neither_torch_nor_vllm() -> None:
    code = (
        "import sys; from server.checks import prescan; import server.cli; prescan(['/nowhere', '--help']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'transformers')))"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_a_taken_port_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(StartupError, match="is in use"):
            check_port("127.0.0.1", taken.getsockname()[1], None)


@pytest.mark.parametrize("port", [-1, 65536])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(UsageError, match="not a port"):
        check_port(None, port, None)


def test_a_host_of_another_machine_is_refused(free_port: int) -> None:
    with pytest.raises(StartupError, match="check --host"):
        check_port("192.0.2.1", free_port, None)


@pytest.mark.parametrize("kind", ["file", "link to nothing", "socket in use"])
def test_an_existing_unix_socket_is_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as other:
        if kind == "file":
            path.touch()
        elif kind == "socket in use":
            other.bind(str(path))
            other.listen()
        else:
            path.symlink_to(tmp_path / "nothing")
        with pytest.raises(StartupError, match=r"exists.*--admin-uds"):
            check_port(None, 8000, str(path), "--admin-")
        assert os.path.lexists(path)


def test_a_unix_socket_that_nobody_listens_on_makes_room(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))
        killed.listen()
    check_port(None, 8000, str(path))
    assert not path.exists()


def test_free_addresses_pass(free_port: int, tmp_path: Path) -> None:
    check_port("127.0.0.1", free_port, None)
    check_port(None, 0, None)
    check_port(None, free_port, str(tmp_path / "socket"))
