"""The command ``nwor-server``: vLLM's command line plus ours, checked before anything heavy starts."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from nwor.engine import interrupts, vllm_features
from nwor.version import __version__
from server import environment, token_counts
from server.admin_api.settings import SETTINGS
from server.api_servers.count import resolve_processes
from server.checks import check_port, prescan
from server.errors import StartupError, UsageError
from server.models import is_local
from server.nwor_options import DEFAULT_ADMIN_HOST, add_nwor_options, admin_is_separate, resolve_nwor
from server.options import (
    add_server_options,
    apply_device_defaults,
    check_device,
    resolve_models,
    speculates,
    use_one_grammar_backend,
    use_reporting_scheduler,
)

PROG = "nwor-server"
EXIT_FAILED = 1
EXIT_USAGE = 2
_CHILD_SECONDS = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until a signal ends it.

    Args:
        argv: the command line without the program's name; None takes the process'.

    Returns:
        The exit code: 0 after an orderly stop, 1 when the server could not start or the engine died, 2 for a
        command line that cannot be served.

    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--version" in arguments:
        from server import version

        print(version.report())
        return 0
    if arguments[:1] == [token_counts.COMMAND]:
        return token_counts.main(arguments[1:])
    if (setting := SETTINGS.get(next(iter(arguments), ""))) is not None:
        from server.admin_api import cli as admin_cli

        return admin_cli.main(arguments[1:], setting)
    try:
        early = prescan(arguments)
        environment.set_defaults(offline=early.demo or (early.model is not None and is_local(early.model)))
        args = parse(arguments)
        return _run(args)
    except UsageError as error:
        _complain(error)
        return EXIT_USAGE
    except StartupError as error:
        _complain(error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(f"{PROG}: stopped before it was ready", file=sys.stderr)
        return 128 + signal.SIGINT


def _complain(error: Exception) -> None:
    print(f"{PROG}: error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse and check a whole command line.

    Args:
        argv: the command line without the program's name.

    Returns:
        vLLM's attributes and ours, with models, draft and device settled.

    Raises:
        StartupError: the line cannot be served; the message says what to do.

    """
    from vllm.platforms import current_platform

    # Without a device, vLLM's parser cannot even name its defaults.
    check_device(current_platform.device_type)
    parser = make_parser()
    default_model = parser.get_default("model")
    try:
        args = parser.parse_args(list(argv))
        vllm_features.cli_args().validate_parsed_serve_args(args)
    except (ValueError, TypeError, AssertionError) as error:
        raise UsageError(str(error)) from error
    resolve_models(args, default_model, current_platform.device_type)
    use_reporting_scheduler(args)
    use_one_grammar_backend(args)
    resolve_nwor(args, speculates(args), current_platform.device_type)
    eager_given, dtype_given = (
        any(arg.replace("_", "-").startswith(flags) for arg in argv)
        for flags in (("--enforce-eager", "--no-enforce-eager"), "--dtype")
    )
    apply_device_defaults(args, current_platform.device_type, eager_given, dtype_given)
    resolve_processes(args, current_platform.device_type)
    check_port(args.host, args.port, args.uds)
    if admin_is_separate(args):
        check_port(args.admin_host or DEFAULT_ADMIN_HOST, args.admin_port or 0, args.admin_uds, "--admin-")
    return args


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of every flag: vLLM's for engine and front end, and ours in their own group."""
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    class Parser(FlexibleArgumentParser):
        """Reports a wrong command line as an exception instead of printing the usage of 300 flags."""

        def error(self, message: str) -> NoReturn:
            raise UsageError(_explain(message, self._option_string_actions))

    parser: argparse.ArgumentParser = vllm_features.cli_args().make_arg_parser(
        Parser(
            prog=PROG,
            usage=f"{PROG} MODEL [--draft DRAFT] [options]\n       {PROG} --demo [options]",
            description="OpenAI-compatible server with EAGLE speculative decoding, on vLLM.",
            epilog=f"All flags: {PROG} --help=all; a section: {PROG} --help=NworServer; "
            f"one flag: {PROG} --help=draft",
        )
    )
    parser.add_argument("--version", action="store_true", help="Print the versions of all parts and exit.")
    add_server_options(parser)
    add_nwor_options(parser)
    parser.set_defaults(per_request_spec_decode_metrics="summary")
    return parser


def _explain(message: str, known: dict[str, Any]) -> str:
    prefix = "unrecognized arguments: "
    if not message.startswith(prefix):
        return message
    word = message[len(prefix) :].split()[0]
    if not word.startswith("-"):
        return f"unexpected argument {word!r}: one model is served at a time; list the flags with --help=all"
    close = difflib.get_close_matches(word.split("=")[0], known, n=1, cutoff=0.75)
    hint = f"did you mean {close[0]}?" if close else "list the flags with --help=all"
    return f"unknown flag {word}: {hint}"


def _run(args: argparse.Namespace) -> int:
    import uvloop
    from vllm.entrypoints.launchers.launcher import setup_server

    # Not at the top: the commands that start no engine need the standard library alone.
    from server.api_servers.descendants import end_descendants

    # Until the event loop has handlers of its own.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, partial(_interrupt, args, end_descendants))
    interrupts.claim()
    try:
        address, sock = setup_server(args, reuse_port=False)
    except (KeyError, OSError) as error:
        raise StartupError(str(error.args[0]) if isinstance(error, KeyError) else str(error)) from error
    from server.admin_api.listener import open_listener
    from server.serving import serve

    try:
        admin = open_listener(args)
    except OSError as error:
        sock.close()
        raise StartupError(f"the admin API has nowhere to listen: {error}") from error
    ready = partial(_announce, args, address, admin)
    try:
        if args.api_server_count > 1:
            from server.api_servers.supervisor import ApiProcesses

            return ApiProcesses(args, address, sock, admin).serve(ready)
        # As vLLM has it where the one process starts the engine.
        args.api_server_count = None
        return int(uvloop.run(serve(args, sock, admin, ready=ready)))
    finally:
        if admin is not None:
            admin.close()
        sock.close()
        if args.uds and os.path.exists(args.uds):
            os.unlink(args.uds)


def _interrupt(
    args: argparse.Namespace, end_descendants: Callable[[float], None], number: int, _: object
) -> NoReturn:
    """End a start-up at once: an exception would get lost in what the event loop is in the middle of."""
    print(f"{PROG}: stopped before it was ready", file=sys.stderr, flush=True)
    end_descendants(_CHILD_SECONDS)
    if own := sys.modules.get("vllm.v1.metrics.prometheus"):
        folder = own._prometheus_multiproc_dir  # of several API server processes
        if folder is not None:
            folder.cleanup()
    for path in filter(None, (args.uds, args.admin_uds)):
        with contextlib.suppress(OSError):
            os.unlink(path)
    os._exit(128 + number)


def _announce(args: argparse.Namespace, address: str, admin: Any) -> None:
    name = args.served_model_name[0] if args.served_model_name else args.model
    body = f'{{"model": "{name}", "prompt": "def fibonacci(n):", "max_tokens": 48, "temperature": 0}}'
    reachable = address.replace("://0.0.0.0:", "://127.0.0.1:").replace("://[::]:", "://[::1]:")
    where = f"--unix-socket {args.uds} http://localhost" if args.uds else reachable
    key = ' -H "Authorization: Bearer $API_KEY"' if args.api_key else ""
    if admin is not None:
        print(f"\nThe admin API and the live page are on {admin.address}.", flush=True)
    print(
        f"\n{PROG} {__version__} is ready on {address}. Try:\n"
        f"  curl -s {where}/v1/completions{key} -H 'Content-Type: application/json' -d '{body}'\n",
        flush=True,
    )
