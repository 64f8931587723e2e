"""The patience of the tests: it ends, and a machine that stood still does not end it."""

import pytest

from tests import waiting


class Clock:
    """A clock that jumps by ``pauses`` when it sleeps, in turn."""

    def __init__(self, *pauses: float) -> None:
        self.now = 0.0
        self.pauses = list(pauses)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += self.pauses.pop(0) if self.pauses else seconds


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    with pytest.raises(AssertionError, match="not within 3 s: the lamp is lit"):
        waiting.wait_until(lambda: False, 3, "the lamp is lit", every=0.5)
    assert clock.now == pytest.approx(3)


def test_a_machine_that_stood_still_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.5, 600.0)
    monkeypatch.setattr(waiting, "time", clock)
    looks: list[float] = []

    def lit() -> bool:
        looks.append(clock.now)
        return len(looks) == 4

    waiting.wait_until(lit, 10, "the lamp is lit", every=0.5)
    assert looks == [0.0, 0.5, 600.5, 601.0]


def test_what_is_asked_for_only_when_it_did_not_happen() -> None:
    waiting.wait_until(lambda: True, 0, lambda: pytest.fail("it did happen"))
    with pytest.raises(AssertionError, match="told"):
        waiting.wait_until(lambda: False, 0, lambda: "told")
