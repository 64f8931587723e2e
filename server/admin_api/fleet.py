"""One setting on every replica: show it, or change it, and say for each replica how it ended.

A change over several servers cannot be atomic. What this module sees to is that it is never half done in
silence: nothing is switched while a replica says that it cannot follow, what fails is tried again, all
replicas are asked once more at the end, and whatever does not agree is named.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

import httpx

from server.admin_api.settings import MODE, Setting

#: Port of a resolved name that has none.
DEFAULT_PORT = 8000
#: Seconds before the second try; each further pause is twice as long.
FIRST_PAUSE = 1.0
#: Seconds for a connection.
CONNECT_TIMEOUT = 5.0
#: Times that the names are resolved anew, for replicas that appear while others are switched.
ROUNDS = 3

_PATH = "/admin/nwor"


class FleetError(Exception):
    """No replica could be found; the message says where was looked."""


@dataclass(frozen=True)
class Replica:
    """One server.

    Attributes:
        url: where its requests go.
        host: the name that the address was found under, for the Host header and TLS; else None.

    """

    url: str
    host: str | None = None


@dataclass
class Outcome:
    """How it ended on one replica.

    Attributes:
        replica: whose.
        setting: what was asked for.
        value: the value in force when it was last asked; None where it never answered.
        body: that answer.
        change: what the change reported, for the reader.
        problem: why it could not be shown or changed; None where all is well.
        refused: the problem is the replica's own answer, and trying again would not change it.
        gone: its address is no longer behind the name, so it needs no value.

    """

    replica: Replica
    setting: Setting = MODE
    value: str | None = None
    body: dict[str, Any] | None = None
    change: str | None = None
    problem: str | None = None
    refused: bool = False
    gone: bool = False

    def line(self) -> str:
        """Return one line for the reader."""
        if self.gone:
            return f"{self.replica.url}  gone, it ended meanwhile"
        if self.problem is None:
            return f"{self.replica.url}  {self.change or self.value}"
        return f"{self.replica.url}  FAILED ({self.value or self.setting.name + ' unknown'}): {self.problem}"


def find_replicas(urls: Iterable[str], names: Iterable[str]) -> list[Replica]:
    """Return the replicas behind addresses and names, each once, sorted.

    Args:
        urls: addresses of single servers, ``http://host:port``.
        names: ``[http[s]://]NAME[:PORT]``; every address that the name resolves to is a replica, as behind a
            headless service of Kubernetes.

    Raises:
        FleetError: a name does not resolve, or is none.

    """
    found = {url: Replica(url) for url in (given.rstrip("/") for given in urls)}
    for name in names:
        address = urlsplit(name if "://" in name else f"http://{name}")
        try:
            # Not by way of httpx, which takes a port that is the scheme's own for none.
            port = DEFAULT_PORT if address.port is None else address.port
        except ValueError as error:
            raise FleetError(f"{name} has no valid port: {error}") from error
        if not address.hostname:
            raise FleetError(f"{name} names no host")
        try:
            entries = socket.getaddrinfo(address.hostname, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise FleetError(f"{address.hostname} does not resolve: {error}") from error
        for family, _, _, _, where in entries:
            host = f"[{where[0]}]" if family == socket.AF_INET6 else where[0]
            url = f"{address.scheme}://{host}:{port}"
            found.setdefault(url, Replica(url, address.hostname))
    return [found[url] for url in sorted(found)]


class Fleet:
    """All replicas of one service.

    Args:
        urls: see :func:`find_replicas`.
        names: see :func:`find_replicas`.
        key: the admin key; None sends none.
        tries: how often a replica is asked that does not answer, at least 1.
        timeout: seconds to wait for one answer.
        setting: what is shown or changed.

    """

    def __init__(
        self,
        urls: Sequence[str],
        names: Sequence[str],
        key: str | None,
        tries: int,
        timeout: float,
        setting: Setting = MODE,
    ) -> None:
        self._setting = setting
        self._urls = urls
        self._names = names
        self._tries = tries
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._http = httpx.AsyncClient(
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=CONNECT_TIMEOUT),
            # The system's authorities, or those of SSL_CERT_FILE.
            verify=ssl.create_default_context(),
            # Not through the proxy that the environment may name: addresses of pods mean nothing to it.
            trust_env=False,
        )

    async def __aenter__(self) -> Fleet:
        """Return the fleet itself."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def show(self) -> list[Outcome]:
        """Ask every replica for its value.

        Returns:
            An outcome for each; one whose ranks differ has a problem.

        Raises:
            FleetError: there is no replica.

        """
        return await self._ask_all(await self._find())

    async def switch(self, wanted: str, force: bool = False) -> list[Outcome]:
        """Put a value in force on every replica.

        Nothing is switched where a replica answers that it cannot follow, unless ``force`` is set. A replica
        that does not answer holds nobody back: nobody is served by it either.

        Args:
            wanted: the value.
            force: switch those that can, even if others cannot.

        Returns:
            An outcome for each replica, after a last look at all that were switched.

        Raises:
            FleetError: there is no replica.

        """
        outcomes = {outcome.replica: outcome for outcome in await self._ask_all(await self._find(), wanted)}
        if not force and any(outcome.refused for outcome in outcomes.values()):
            for outcome in outcomes.values():
                outcome.problem = outcome.problem or "left alone, because another replica cannot follow"
            return list(outcomes.values())
        fresh = list(outcomes.values())
        for _ in range(ROUNDS):
            await asyncio.gather(*(self._put(outcome, wanted) for outcome in fresh if not outcome.problem))
            try:
                current = await self._find()
            except FleetError as error:
                where = Replica(" ".join(self._names))
                failure = Outcome(where, self._setting, problem=f"cannot look for new ones: {error}")
                return [*await self._verify(list(outcomes.values()), wanted), failure]
            for outcome in outcomes.values():
                outcome.gone = outcome.replica not in current
            fresh = await self._ask_all([replica for replica in current if replica not in outcomes], wanted)
            outcomes |= {outcome.replica: outcome for outcome in fresh}
            if not fresh:
                break
        return await self._verify(list(outcomes.values()), wanted)

    async def _find(self) -> list[Replica]:
        return await asyncio.to_thread(find_replicas, self._urls, self._names)

    async def _ask_all(self, replicas: list[Replica], wanted: str | None = None) -> list[Outcome]:
        """Ask for values; with ``wanted``, only whether that one can be put in force is a problem."""
        outcomes = [Outcome(replica, self._setting) for replica in replicas]
        await asyncio.gather(*(self._ask(outcome) for outcome in outcomes))
        for outcome in outcomes:
            if wanted is None or outcome.body is None:
                continue
            # A change is what makes ranks agree again.
            outcome.problem = self._setting.cannot(outcome.body, wanted)
            outcome.refused = outcome.problem is not None
        return outcomes

    async def _verify(self, outcomes: list[Outcome], wanted: str) -> list[Outcome]:
        """Ask all that could follow once more: an answer may have been lost, a server may have restarted."""
        asked = [o for o in outcomes if not o.gone and not o.refused and o.body is not None]
        earlier = [outcome.problem for outcome in asked]
        for outcome in asked:
            outcome.problem = None
        await asyncio.gather(*(self._ask(outcome) for outcome in asked))
        for outcome, problem in zip(asked, earlier, strict=True):
            if outcome.problem is not None or outcome.body is None:
                continue
            if not self._setting.reached(outcome.body, wanted):
                said = f"{self._setting.lost} {wanted} any more, after {outcome.change}"
                outcome.problem = problem or said
        return outcomes

    async def _ask(self, outcome: Outcome) -> None:
        body = await self._request(outcome, "GET", _PATH)
        if body is None:
            return
        if not body["enabled"]:
            outcome.problem, outcome.refused = str(body["detail"]), True
            return
        outcome.value, outcome.body = self._setting.read(body), body
        if not body["ranks_agree"]:
            ranks = (
                f"rank {rank['rank']}: {rank['fault'] or _unsupported(rank) or rank['mode']}"
                + (f", draft tokens {rank['draft_tokens']}" if rank.get("draft_tokens") else "")
                for rank in body["ranks"]
            )
            outcome.problem = f"its ranks do not agree: {'; '.join(ranks)}"

    async def _put(self, outcome: Outcome, wanted: str) -> None:
        body = await self._request(outcome, "PUT", self._setting.path, {self._setting.field: wanted})
        if body is not None:
            outcome.change = describe(body)
            outcome.value = str(body["new"])

    async def _request(
        self, outcome: Outcome, method: str, path: str, body: Any = None
    ) -> dict[str, Any] | None:
        """Send until there is an answer; PUT may be repeated, what is in force stays in force."""
        replica = outcome.replica
        headers = (
            {"Host": httpx.URL(replica.url).copy_with(host=replica.host).netloc.decode()}
            if replica.host
            else {}
        )
        extensions = {"sni_hostname": replica.host} if replica.host else {}
        problem, refused = "", False
        for number in range(self._tries):
            if number:
                await asyncio.sleep(FIRST_PAUSE * 2 ** (number - 1))
            try:
                answer = await self._http.request(
                    method, replica.url + path, json=body, headers=headers, extensions=extensions
                )
                found = answer.json()
            except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
                problem = f"no answer: {str(error) or type(error).__name__}"
                continue
            if answer.status_code == HTTPStatus.OK and isinstance(found, dict):
                return found
            problem = message(found, answer.status_code)
            refused = answer.is_client_error
            if refused:
                break
        outcome.problem, outcome.refused = problem, refused
        return None


def describe(body: dict[str, Any]) -> str:
    """Return what the answer to a change says, for the reader."""
    return f"{body['old']} -> {body['new']} at verify step {body['step']}, on {body['ranks']} rank(s)"


def message(body: object, status: int) -> str:
    """Return the message of an error's body, or the status where there is none."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message")) if isinstance(error, dict) else f"status {status}"


def _unsupported(rank: dict[str, Any]) -> str | None:
    found = rank["unsupported"]
    return None if found is None else str(found["detail"])
