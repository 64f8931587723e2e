"""Streams of many clients: pieces of answers are merged while the front end is behind the engine.

A step gives each request a piece of its answer. However many tokens it has, it costs about as much: a JSON
document, a chunk, a system call. A fast engine gives more pieces than one process can write. Then new
requests wait behind them, and the engine runs out of work.

The engine notes when it made a step's outputs, so the front end knows how late it is. While it is late, a
stream gets its next piece no sooner than some milliseconds after the last one. What comes in between is
merged, as vLLM does where a stream's reader is slow. First and last pieces never wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge
from vllm.outputs import RequestOutput
from vllm.v1.engine.output_processor import RequestOutputCollector

logger = logging.getLogger("vllm.nwor.server")

#: Most seconds between two pieces of a stream for this reason: less than a reader notices.
MOST_HOLD = 0.05
#: Seconds that a front end which keeps up may be late.
FREE = 0.002
#: Seconds between two pieces for each second that the front end is late.
GAIN = 10.0
#: Seconds over which the mean is taken of how late it is, and the most weight of a step: one says little.
MEAN_OVER, MOST_WEIGHT = 0.1, 0.25
#: Engine and front end share a clock on one machine. What differs more comes from two.
SAME_CLOCK = 1.0
#: Seconds between two looks at what is held.
LOOK = 0.005
#: Seconds without outputs after which the front end counts as one that keeps up.
REST = 1.0


#: Both metrics, once they exist.
_known: list[tuple[Gauge, Counter]] = []


def _metrics() -> tuple[Gauge, Counter]:
    """Return the metrics, made anew where a later engine of this process has taken all away."""
    if not _known or _known[0][0] not in REGISTRY._collector_to_names:
        _known[:] = [
            (
                Gauge(
                    "nwor_stream_hold_seconds",
                    "Least time between two pieces of a stream; 0 while the front end keeps up.",
                    multiprocess_mode="livemax",
                ),
                Counter(
                    "nwor_stream_pieces_merged", "Pieces of answers that were merged into the next ones."
                ),
            )
        ]
    return _known[0]


class StreamPacer:
    """Knows how late the front end is, and delivers what was held."""

    def __init__(self) -> None:
        #: Seconds that lie between two pieces of a stream at least.
        self.hold = 0.0
        #: When the outputs were taken in that are dealt out now.
        self.now = 0.0
        self._late = self._made = self._noted = 0.0
        self._held: list[PacedCollector] = []
        self._timer: asyncio.TimerHandle | None = None
        self._resting: asyncio.TimerHandle | None = None
        #: Pieces merged since that was last told.
        self.merged = 0
        self._gauge, self._counter = _metrics()

    def note(self, made: float | None) -> None:
        """Take in when the engine made the outputs that are about to be dealt out.

        Args:
            made: seconds of its monotonic clock; None where it did not say.

        """
        self.now = now = time.monotonic()
        # vLLM deals out many outputs in parts: only the first part comes at once.
        if made is None or made == self._made or not 0.0 <= now - made < SAME_CLOCK:
            return
        weight = min((now - self._noted) / MEAN_OVER, MOST_WEIGHT)
        self._made, self._noted = made, now
        self._late += weight * (now - made - self._late)
        self._set(min(max(GAIN * (self._late - FREE), 0.0), MOST_HOLD))
        if self.hold and self._resting is None:
            self._resting = asyncio.get_running_loop().call_later(REST, self._rest)

    def _set(self, hold: float) -> None:
        if hold != self.hold:
            self.hold = hold
            self._gauge.set(hold)

    def _rest(self) -> None:
        """Go back to none where no outputs have come for a while, so that the gauge says so."""
        left = REST - (time.monotonic() - self.now)
        if left <= 0:
            self._late = 0.0
            self._set(0.0)
        again = asyncio.get_running_loop().call_later(max(left, LOOK), self._rest) if self.hold else None
        self._resting = again

    def keep(self, collector: PacedCollector) -> None:
        """See to it that a collector delivers what it holds."""
        self._held.append(collector)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK, self._look)

    def _look(self) -> None:
        now, held = time.monotonic(), self._held
        self._held, self._timer = [], None
        self._counter.inc(self.merged)
        self.merged = 0
        for collector in held:
            try:
                delivered = collector.deliver(now)
            except Exception as error:
                # As in vLLM's own handler of outputs, but for the others, which go on.
                logger.exception("A piece of a stream could not be delivered.")
                collector.put(error)
            else:
                if not delivered:
                    self.keep(collector)


def _ends(output: RequestOutput) -> bool:
    """Return whether a request, one of its answers, or one of its inputs ends with a piece."""
    return output.finished or any(one.finish_reason is not None for one in output.outputs)


class PacedCollector(RequestOutputCollector):
    """What a stream's own collector becomes."""

    _nwor_pacer: StreamPacer
    _nwor_held: RequestOutput | None = None
    #: When the next piece may be delivered; the first one may at once.
    _nwor_due = 0.0

    def put(self, output: Any) -> None:
        """Take in a piece: it is delivered now, or merged with those that follow."""
        pacer, held = self._nwor_pacer, self._nwor_held
        if not isinstance(output, RequestOutput):
            # An error ends the stream, and says why.
            self._nwor_held = None
            super().put(output)
            return
        if held is not None:
            held.add(output, aggregate=True)
            pacer.merged += 1
            if _ends(held):
                self._nwor_held = None
                super().put(held)
        elif _ends(output) or pacer.now >= self._nwor_due:
            self._nwor_due = pacer.now + pacer.hold
            super().put(output)
        else:
            self._nwor_held = output
            pacer.keep(self)

    def deliver(self, now: float) -> bool:
        """Deliver what is held once it is due, and return whether nothing is held any more."""
        held, pacer = self._nwor_held, self._nwor_pacer
        if held is not None and now >= self._nwor_due:
            self._nwor_due, self._nwor_held = now + pacer.hold, None
            super().put(held)
        return self._nwor_held is None


def pace(collector: Any, pacer: StreamPacer) -> None:
    """Have a pacer see to a request's collector; those that are no streams of pieces stay as they are."""
    if type(collector) is RequestOutputCollector and collector.aggregate:
        collector.__class__ = PacedCollector
        collector._nwor_pacer = pacer
