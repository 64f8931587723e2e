"""What a step costs, by its requests and draft tokens, as measured when the engine started."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from nwor.config import DraftBounds
from nwor.errors import ConfigError


def settle(started: DraftBounds | None, wanted: str) -> str:
    """Return what draft tokens are set to by a running engine, in one form.

    Args:
        started: the bounds that the engine was started with; None where the number was fixed.
        wanted: ``auto`` for those bounds, bounds within them, or a number.

    Raises:
        ConfigError: if it is none of these, or the engine has not prepared for it.

    """
    if started is None:
        raise ConfigError(
            "the number of draft tokens was fixed when the engine was started: restart it with "
            "--num-speculative-tokens auto, or under vllm serve with draft_tokens in --additional-config"
        )
    wanted, known = wanted.strip().lower(), started.candidates
    if wanted.isdecimal():
        settled, fits = str(int(wanted)), int(wanted) <= started.most
        prepared = int(wanted) in (0, *known)
    else:
        bounds = started if wanted == "auto" else DraftBounds.parse(wanted, or_number=True)
        settled, fits = str(bounds), started.least <= bounds.least and bounds.most <= started.most
        prepared = any(bounds.least <= number <= bounds.most for number in known)
    if not fits:
        raise ConfigError(
            f"draft tokens {settled} lie outside of {started}, with which the engine was started"
        )
    if not prepared:
        numbers = ", ".join(map(str, sorted({0, *known})))
        raise ConfigError(f"draft tokens {settled} were not prepared at the start: the engine has {numbers}")
    return settled


@dataclass(frozen=True)
class StepCosts:
    """Seconds of steps, drafting included.

    Attributes:
        requests: numbers of requests that were measured, ascending.
        drafts: numbers of draft tokens, ascending.
        seconds: [requests][drafts]: a step in which each request verifies so many drafts and gets as many;
            infinite where no step has room for that.
        rows: rows of steps that consist of a prompt, ascending.
        row_seconds: [rows]: such a step.
        pass_seconds: [requests]: one more pass of the drafter; empty where it was not measured.

    """

    requests: tuple[int, ...]
    drafts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    rows: tuple[int, ...] = ()
    row_seconds: tuple[float, ...] = ()
    pass_seconds: tuple[float, ...] = ()

    def step(self, requests: int, drafts: int) -> float:
        """Return the seconds of a step without prompts.

        Args:
            requests: of the step; numbers between those measured are interpolated.
            drafts: of each; one of those measured.

        Returns:
            Infinity for more requests than were measured, where the next number of them had no room.

        """
        column = self.drafts.index(drafts)
        seconds = [row[column] for row in self.seconds]
        fit = sum(map(isfinite, seconds))
        if not fit or (fit < len(seconds) and requests > self.requests[fit - 1]):
            return inf
        return _interpolate(self.requests[:fit], seconds[:fit], requests)

    def beside(self, rows: int, prompt: int) -> float:
        """Return the seconds that a prompt of ``prompt`` rows adds to a step of ``rows`` others."""
        if len(self.rows) < 2:
            return 0.0
        both = _interpolate(self.rows, self.row_seconds, rows + prompt)
        return max(0.0, both - _interpolate(self.rows, self.row_seconds, rows))

    def passes(self, requests: int, drafts: int) -> float:
        """Return the seconds that the drafter's passes take beyond its first one, where that was measured.

        Args:
            requests: of the step.
            drafts: tokens of each request's chain.

        """
        if not self.pass_seconds or drafts < 2:
            return 0.0
        return (drafts - 1) * max(0.0, _interpolate(self.requests, self.pass_seconds, requests))

    def plain(self) -> dict[str, Any]:
        """Return it as plain JSON values, in milliseconds."""
        return {
            "draft_tokens": list(self.drafts),
            "milliseconds": {
                str(count): [round(1e3 * value, 4) if isfinite(value) else None for value in row]
                for count, row in zip(self.requests, self.seconds, strict=True)
            },
            "prompt_milliseconds": {
                str(rows): round(1e3 * value, 4)
                for rows, value in zip(self.rows, self.row_seconds, strict=True)
            },
            "pass_milliseconds": {
                str(count): round(1e3 * value, 4)
                for count, value in zip(self.requests, self.pass_seconds, strict=False)
            },
        }


def _interpolate(places: Sequence[int], values: Sequence[float], place: int) -> float:
    """Return the value at a place; outside the measured range the nearest two go on in a line."""
    if len(places) == 1:
        return values[0]
    if place <= places[0]:
        return values[0]
    index = min(bisect_right(places, place), len(places) - 1)
    left, right = places[index - 1], places[index]
    share = (place - left) / (right - left)
    grows = values[index] - values[index - 1]
    if place > right:
        grows = max(grows, 0.0)  # more never takes less time, whatever the last two say
    return values[index - 1] + share * grows if place <= right else values[index] + (share - 1.0) * grows
