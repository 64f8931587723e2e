"""What the admin API can change in a running server, as the command line shows and sets it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from nwor.config import DraftBounds
from nwor.draft_costs import settle
from nwor.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """One setting of a server.

    Attributes:
        command: the word behind ``nwor-server``.
        field: of the body of PUT.
        path: where to PUT it.
        name: what readers know it by, and ``names``, of several.
        names: likewise.
        has: how a server is said to have a value of it, before that value.
        lost: how a server is said not to have it any more, likewise.
        choices: what may be set, in words.
        read: returns the value in force, from the answer of GET.
        cannot: returns why a server cannot take a value; None where it can.
        reached: returns whether a value is in force that was asked for.

    """

    command: str
    field: str
    path: str
    name: str
    names: str
    has: str
    lost: str
    choices: str
    read: Callable[[dict[str, Any]], str]
    cannot: Callable[[dict[str, Any], str], str | None]
    reached: Callable[[dict[str, Any], str], bool]


def _no_mode(body: dict[str, Any], wanted: str) -> str | None:
    if wanted in body["modes"]:
        # Servers of before this field do not say.
        found = None if wanted == "off" else body.get("unsupported")
        return None if found is None else f"nothing can be staged in it: {found['detail']}"
    return f"mode {wanted!r} was not enabled at start-up (enabled: {', '.join(body['modes'])})"


def _draft_tokens(body: dict[str, Any]) -> str:
    # Servers of before this setting do not say.
    return str(body.get("draft_tokens", {}).get("setting", "unknown"))


def _no_draft_tokens(body: dict[str, Any], wanted: str) -> str | None:
    found = body.get("draft_tokens")
    if found is None:
        return "its version cannot change draft tokens: upgrade it"
    if not found["can_change"]:
        if wanted == found["started_with"]:
            return None
        return (
            f"draft tokens were fixed at {found['started_with']} at start-up: restart it with "
            "--num-speculative-tokens auto"
        )
    try:
        settle(DraftBounds.parse(found["started_with"]), wanted)
    except ConfigError as error:
        return str(error)
    return None


def _has_draft_tokens(body: dict[str, Any], wanted: str) -> bool:
    if _no_draft_tokens(body, wanted) is not None:
        return False
    found = body["draft_tokens"]
    if not found["can_change"]:
        return True
    return bool(found["setting"] == settle(DraftBounds.parse(found["started_with"]), wanted))


MODE = Setting(
    command="mode",
    field="mode",
    path="/admin/nwor",
    name="mode",
    names="modes",
    has="are in mode",
    lost="not in mode",
    choices="off, stage or cow",
    read=lambda body: str(body["mode"]),
    cannot=_no_mode,
    reached=lambda body, wanted: bool(body["mode"] == wanted),
)
DRAFT_TOKENS = Setting(
    command="draft-tokens",
    field="draft_tokens",
    path="/admin/nwor/draft-tokens",
    name="draft tokens",
    names="draft tokens",
    has="have draft tokens",
    lost="not at draft tokens",
    choices="auto, auto:LEAST-MOST or a number",
    read=_draft_tokens,
    cannot=_no_draft_tokens,
    reached=_has_draft_tokens,
)
#: By the word behind ``nwor-server``.
SETTINGS = {setting.command: setting for setting in (MODE, DRAFT_TOKENS)}
