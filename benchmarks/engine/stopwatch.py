"""Host time, step by step: in chosen methods without what they replace, or in a thread without its waits."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

Function = Callable[..., Any]


class Watch:
    """What both watches have: figures of each step by label, and methods to be put back.

    Attributes:
        label: what the steps are counted under.
        seconds: by label, host time of each step in seconds.
        ends: by label, when each step ended, on the clock of ``time.perf_counter``.

    """

    #: Names of the attributes that hold figures by label.
    series: tuple[str, ...] = ("seconds", "ends")

    def __init__(self) -> None:
        self.label = ""
        self.seconds: dict[str, list[float]] = {}
        self.ends: dict[str, list[float]] = {}
        self._attached: list[tuple[type, str, Any]] = []

    def detach(self) -> None:
        """Put every method back."""
        while self._attached:
            cls, name, original = self._attached.pop()
            setattr(cls, name, original)

    def seen(self) -> dict[str, dict[str, list[float]]]:
        """Return all series by label."""
        return {label: {name: getattr(self, name)[label] for name in self.series} for label in self.seconds}

    def _replace(self, cls: type, name: str, function: Function) -> None:
        self._attached.append((cls, name, vars(cls)[name]))
        setattr(cls, name, function)


class Stopwatch(Watch):
    """Adds up the time in attached methods until a step ends.

    The timing has a time of its own, and a longer one in an engine than in a loop: between two of its calls
    the processor's caches have forgotten it. So it is measured where it is spent, by controls: methods that
    nobody overrides, timed in the same steps as if somebody did.

    Attributes:
        timing: by label, the timing's own time in each step, as the step's controls show it; 0 without any.
            The seconds contain it.

    """

    series = ("seconds", "timing", "ends")

    def __init__(self) -> None:
        super().__init__()
        self.timing: dict[str, list[float]] = {}
        self._sum, self._calls = 0.0, 0
        self._control_sum, self._controls = 0.0, 0
        self._open: dict[str, int] = {}

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


class IdleWatch(Watch):
    """Tells what a thread does from what it waits for; a step ends with its wait.

    All that the thread does between the end of a wait and the beginning of the next counts as one step's busy
    time, whosever code it is and whatever others run on the processor meanwhile. What the watch itself takes
    is four readings of clocks, alike in every engine.

    Attributes:
        cpu: by label, the thread's own processor time over the same span.

    """

    series = ("seconds", "cpu", "ends")

    def __init__(self) -> None:
        super().__init__()
        self.cpu: dict[str, list[float]] = {}
        self._thread = threading.get_ident()
        self._since: tuple[float, float] | None = None

    def attach(self, cls: type, name: str) -> None:
        """Take each call of a class's method in the thread that made this for the wait of a step."""
        self._replace(cls, name, self.waiting(vars(cls)[name]))

    def waiting(self, function: Function) -> Function:
        """Return ``function``, whose calls are the steps' waits."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*args, **kwargs)
            busy_until, cpu_until = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                cpu, ended = time.thread_time(), time.perf_counter()
                if self._since is not None:
                    self.seconds.setdefault(self.label, []).append(busy_until - self._since[0])
                    self.cpu.setdefault(self.label, []).append(cpu_until - self._since[1])
                    self.ends.setdefault(self.label, []).append(ended)
                self._since = ended, cpu

        return timed
