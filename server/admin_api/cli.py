"""``nwor-server mode`` and ``nwor-server draft-tokens``: show or change a setting of running servers."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter
from collections.abc import Sequence

import httpx

from server.admin_api.fleet import Fleet, FleetError, Outcome, describe, message
from server.admin_api.settings import MODE, Setting
from server.nwor_options import ADMIN_KEY_VARIABLE
from server.options import parse_count

PROG = "nwor-server"
DEFAULT_URL = "http://127.0.0.1:8000"

#: Seconds to wait for an answer: a switch waits for the step that runs.
TIMEOUT = 90.0


def main(argv: Sequence[str], setting: Setting = MODE) -> int:
    """Run the command.

    Args:
        argv: the command line behind the setting's name.
        setting: what is shown or changed.

    Returns:
        0 when every server did as asked, 1 when one refused, could not be reached, or has another value.

    """
    args = _parse(argv, setting)
    if args.uds is not None and (args.url or args.resolve):
        return _complain("--uds names one server: drop it, or --url and --resolve")
    if len(args.url) + len(args.resolve) > 1 or args.resolve:
        return asyncio.run(_fleet(args))
    if args.uds is not None:
        return _single(args, "http://localhost", args.uds)
    return _single(args, args.url[0] if args.url else DEFAULT_URL)


def _parse(argv: Sequence[str], setting: Setting) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=f"{PROG} {setting.command}",
        description=f"Show the {setting.name} of running servers, or put another in force.",
    )
    parser.set_defaults(setting=setting)
    parser.add_argument(
        "wanted",
        nargs="?",
        metavar=setting.command,
        help=f"{setting.choices}; without it, what is in force is printed",
    )
    parser.add_argument(
        "--url",
        action="append",
        default=[],
        help=f"a server; may be given several times; default: {DEFAULT_URL}",
    )
    parser.add_argument(
        "--resolve",
        action="append",
        default=[],
        metavar="NAME[:PORT]",
        help="a name, every address of which is a server, such as a headless service of Kubernetes; port "
        "8000 where none is given, https:// in front for TLS; may be given several times",
    )
    parser.add_argument("--uds", metavar="PATH", help="the Unix socket of a server's --admin-uds")
    parser.add_argument(
        "--force",
        action="store_true",
        help="with several servers: switch those that can, even if another answers that it cannot",
    )
    parser.add_argument(
        "--tries",
        type=parse_count,
        default=4,
        help="with several servers: how often one is asked that does not answer; default: %(default)s",
    )
    parser.add_argument(
        "--admin-api-key",
        default=os.environ.get(ADMIN_KEY_VARIABLE),
        help=f"the servers' admin key; default: {ADMIN_KEY_VARIABLE}",
    )
    return parser.parse_args(list(argv))


def _complain(text: str) -> int:
    print(f"{PROG}: error: {text}", file=sys.stderr)
    return 1


async def _fleet(args: argparse.Namespace) -> int:
    async with Fleet(args.url, args.resolve, args.admin_api_key, args.tries, TIMEOUT, args.setting) as fleet:
        try:
            if args.wanted is None:
                outcomes = await fleet.show()
            else:
                outcomes = await fleet.switch(args.wanted, args.force)
        except FleetError as error:
            return _complain(str(error))
    for outcome in outcomes:
        print(outcome.line())
    return _judge([outcome for outcome in outcomes if not outcome.gone], args.wanted, args.setting)


def _judge(outcomes: list[Outcome], wanted: str | None, setting: Setting) -> int:
    """Print what is not as it should be in one line, and return the exit code."""
    values = Counter(outcome.value or "unknown" for outcome in outcomes)
    count = ", ".join(f"{number} {value}" for value, number in sorted(values.items()))
    failed = sum(outcome.problem is not None for outcome in outcomes)
    if not outcomes:
        return _complain("no replica is left")
    if failed:
        return _complain(f"{failed} of {len(outcomes)} replicas failed; {setting.names} now: {count}")
    # "auto" stands for the bounds that each was started with.
    if len(values) > 1 and wanted is None:
        return _complain(f"the replicas have different {setting.names}: {count}")
    print(f"all {len(outcomes)} replicas {setting.has} {wanted or outcomes[0].value}")
    return 0


def _single(args: argparse.Namespace, url: str, uds: str | None = None) -> int:
    headers = {} if args.admin_api_key is None else {"Authorization": f"Bearer {args.admin_api_key}"}
    try:
        transport = None if uds is None else httpx.HTTPTransport(uds=uds)
        with httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT, transport=transport) as http:
            if args.wanted is None:
                answer = http.get("/admin/nwor")
            else:
                answer = http.put(args.setting.path, json={args.setting.field: args.wanted})
            body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        return _complain(f"no answer from {uds or url}: {error}")
    if answer.status_code != httpx.codes.OK:
        return _complain(message(body, answer.status_code))
    if args.wanted is not None:
        print(describe(body))
    elif body["enabled"]:
        print(args.setting.read(body))
    else:
        print(body["detail"], file=sys.stderr)
        return 1
    return 0
