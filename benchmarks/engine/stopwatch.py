"""Host time in chosen methods, step by step, with the time of what they replace taken off."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


class Stopwatch:
    """Adds up the time in attached methods until a step ends.

    The timing has a time of its own, and a longer one in an engine than in a loop: between two of its calls
    the processor's caches have forgotten it. So it is measured where it is spent, by controls: methods that
    nobody overrides, timed in the same steps as if somebody did.

    Attributes:
        label: what the steps are counted under.
        seconds: by label, host time of each step in seconds; the timing's own is in it.
        timing: by label, the timing's own time in each step, as the step's controls show it; 0 without any.
        ends: by label, when each step ended, on the clock of ``time.perf_counter``.

    """

    def __init__(self) -> None:
        self.label = ""
        self.seconds: dict[str, list[float]] = {}
        self.timing: dict[str, list[float]] = {}
        self.ends: dict[str, list[float]] = {}
        self._sum, self._calls = 0.0, 0
        self._control_sum, self._controls = 0.0, 0
        self._open: dict[str, int] = {}
        self._attached: list[tuple[type, str, Any]] = []

    def attach(self, cls: type, name: str, stock: bool = False, ends_step: bool = False) -> None:
        """Time a method of a class, found as a call finds it.

        Args:
            cls: the class whose objects are called.
            name: the method.
            stock: take off the time of the method that it overrides.
            ends_step: whether a step ends with this method.

        """
        owners = [owner for owner in cls.__mro__ if name in vars(owner)]
        timed = self.whole(name, vars(owners[0])[name])
        self._replace(owners[0], name, self.ending(timed) if ends_step else timed)
        if stock:
            self.attach_stock(owners[1], name)

    def attach_stock(self, cls: type, name: str) -> None:
        """Take the time of a class's own method off, where a timed one of the same name calls it."""
        self._replace(cls, name, self.stock(name, vars(cls)[name]))

    def attach_control(self, cls: type, name: str) -> None:
        """Measure the timing's own time at a method that nobody overrides, and that calls no attached one."""
        owner = next(owner for owner in cls.__mro__ if name in vars(owner))
        self._replace(owner, name, self.control(name, vars(owner)[name]))

    def attach_result(self, cls: type, name: str, method: str) -> None:
        """Time a method that another puts on its first argument; a step ends with it."""
        owner = next(owner for owner in cls.__mro__ if name in vars(owner))
        original = vars(owner)[name]

        def attaching(instance: Any, target: Any, *args: Any) -> Any:
            result = original(instance, target, *args)
            started = time.perf_counter()
            setattr(target, method, self.ending(self.whole(method, getattr(target, method))))
            self._sum -= time.perf_counter() - started  # this is no part of what is measured
            return result

        self._replace(owner, name, attaching)

    def detach(self) -> None:
        """Put every method back."""
        while self._attached:
            cls, name, original = self._attached.pop()
            setattr(cls, name, original)

    def whole(self, name: str, function: Function) -> Function:
        """Return ``function``, its time counted under ``name``."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._open[name] = self._open.get(name, 0) + 1
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._sum += time.perf_counter() - started
                self._calls += 1
                self._open[name] -= 1

        return timed

    def stock(self, name: str, function: Function) -> Function:
        """Return ``function``, its time taken off while one that is counted under ``name`` runs."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self._open.get(name):
                return function(*args, **kwargs)
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._sum -= time.perf_counter() - started

        return timed

    def control(self, name: str, function: Function) -> Function:
        """Return ``function``, timed and its time taken off: what is left is the timing's own."""
        timed = self.whole(name, self.stock(name, function))

        def controlled(*args: Any, **kwargs: Any) -> Any:
            before = self._sum
            try:
                return timed(*args, **kwargs)
            finally:
                self._control_sum += self._sum - before
                self._controls += 1
                self._sum = before
                self._calls -= 1

        return controlled

    def ending(self, function: Function) -> Function:
        """Return ``function``, a step ended with each call."""

        def last(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            timing = self._calls * self._control_sum / self._controls if self._controls else 0.0
            self.seconds.setdefault(self.label, []).append(self._sum)
            self.timing.setdefault(self.label, []).append(timing)
            self.ends.setdefault(self.label, []).append(time.perf_counter())
            self._sum, self._calls = 0.0, 0
            self._control_sum, self._controls = 0.0, 0
            return result

        return last

    def _replace(self, cls: type, name: str, function: Function) -> None:
        self._attached.append((cls, name, vars(cls)[name]))
        setattr(cls, name, function)
