"""``nwor-server mode``: show or switch the mode of a running server over its admin API."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import httpx

from server.nwor_options import ADMIN_KEY_VARIABLE

#: Seconds to wait for an answer: a switch waits for the step that runs.
TIMEOUT = 90.0


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: the command line behind ``mode``.

    Returns:
        0 when the server did as asked, 1 when it refused or could not be reached.

    """
    parser = argparse.ArgumentParser(
        prog="nwor-server mode", description="Show the mode of a running server, or put another in force."
    )
    parser.add_argument(
        "mode", nargs="?", help="off, stage or cow; without one, the mode in force is printed"
    )
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server; default: %(default)s")
    parser.add_argument(
        "--admin-api-key",
        default=os.environ.get(ADMIN_KEY_VARIABLE),
        help=f"the server's admin key; default: {ADMIN_KEY_VARIABLE}",
    )
    args = parser.parse_args(list(argv))
    headers = {} if args.admin_api_key is None else {"Authorization": f"Bearer {args.admin_api_key}"}
    try:
        with httpx.Client(base_url=args.url, headers=headers, timeout=TIMEOUT) as http:
            if args.mode is None:
                answer = http.get("/admin/nwor")
            else:
                answer = http.put("/admin/nwor", json={"mode": args.mode})
            body = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        print(f"nwor-server mode: error: no answer from {args.url}: {error}", file=sys.stderr)
        return 1
    if answer.status_code != httpx.codes.OK:
        print(f"nwor-server mode: error: {_message(body, answer.status_code)}", file=sys.stderr)
        return 1
    if args.mode is not None:
        print(f"{body['old']} -> {body['new']} at verify step {body['step']}, on {body['ranks']} rank(s)")
    elif body["enabled"]:
        print(body["mode"])
    else:
        print(body["detail"], file=sys.stderr)
        return 1
    return 0


def _message(body: object, status: int) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else f"status {status}"
