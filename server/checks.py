"""Checks that need neither torch nor vLLM, so a wrong start fails at once."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Sequence
from typing import NoReturn

from server.drafters import METHODS
from server.errors import StartupError, UsageError
from server.models import check_model, is_local
from server.speculation import check_fit


class _QuietParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def prescan(argv: Sequence[str]) -> argparse.Namespace:
    """Check what can be checked before vLLM's parser, which takes seconds to import, sees the command line.

    Args:
        argv: the command line without the program's name.

    Returns:
        ``model`` (None where only the whole parser can tell), ``draft`` and ``demo``.

    Raises:
        StartupError: a model or draft folder that is not there, or a port in use.

    """
    parser = _QuietParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--model")
    parser.add_argument("--draft")
    parser.add_argument("--speculative-method", choices=list(METHODS))
    parser.add_argument("--demo", action="store_true")
    parser.add_argument("--host")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--uds")
    parser.add_argument("--config")
    args, _ = parser.parse_known_args([_dashed(word) for word in argv])
    # Behind another flag, a bare word may be that flag's value.
    if args.model is None and argv and not argv[0].startswith("-"):
        args.model = argv[0]
    # A configuration file may set any of these; --help=... needs no port.
    if args.config is None and not any(word.startswith(("-h", "--help")) for word in argv):
        if args.model is not None:
            check_model(args.model, "model")
        if args.draft is not None:
            check_model(args.draft, "draft")
        if args.model is not None and args.draft is not None and is_local(args.model):
            check_fit(args.model, args.draft, args.speculative_method)
        if args.model is not None or args.demo:
            check_port(args.host, args.port, args.uds)
    return args


def _dashed(word: str) -> str:
    """Return a flag with dashes for underscores, as vLLM's parser takes both."""
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def check_port(host: str | None, port: int, uds: str | None, prefix: str = "--") -> None:
    """Check that the address can be listened on.

    Args:
        host: name or address; None is every interface.
        port: 0 takes any free port.
        uds: path of a Unix socket, which goes before host and port.
        prefix: how the flags begin that set them, for messages.

    Raises:
        StartupError: it is taken, not this machine's, or not permitted.

    """
    if uds:
        if os.path.lexists(uds) and not _remove_left_over(uds):
            raise StartupError(
                f"{uds!r} exists, and another server may be using it: remove it or choose another socket "
                f"with {prefix}uds"
            )
        return
    if not 0 <= port <= 65535:
        raise UsageError(f"{prefix}port {port} is not a port: choose one from 1 to 65535")
    family = socket.AF_INET6 if _is_ipv6(host) else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host or "", port))
        except OSError as error:
            raise StartupError(_explain(error, host, port, prefix)) from error


def _remove_left_over(path: str) -> bool:
    """Remove a Unix socket on which nobody listens any more, as a server leaves it that was killed."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(path)
    except ConnectionRefusedError:
        os.unlink(path)
        return True
    except OSError:
        return False
    return False


def _explain(error: OSError, host: str | None, port: int, prefix: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} is in use: stop the other server or choose another with {prefix}port"
    if error.errno == errno.EACCES:
        return (
            f"port {port} needs privileges that this process lacks: choose one from 1024 up with {prefix}port"
        )
    return f"cannot listen on {host or '0.0.0.0'}:{port}: {error.strerror or error}: check {prefix}host"


def _is_ipv6(host: str | None) -> bool:
    try:
        return host is not None and ipaddress.ip_address(host).version == 6
    except ValueError:
        return False
