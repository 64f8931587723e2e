"""A second set of CUDA graphs, for ``stage``, beside vLLM's own: what both model runners do with it alike.

A graph replays kernels, not Python, so what a step does is settled when it is captured. vLLM's graphs write
the cache; those of this set leave the window where the forward pass made it. Switching the mode is a choice
between two sets at replay.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
from vllm.utils.torch_utils import weak_ref_tensors

from nwor.engine.window_manager import WindowManager
from nwor.modes import Mode
from nwor.windows.layer_ops import Source
from nwor.windows.window import CapturedSources, Window, WindowBatch, WindowKind
from nwor.worker_state import WorkerState

#: What vLLM names a graph by.
Name = TypeVar("Name", bound=Hashable)
#: What vLLM takes a graph for at least.
LEAST_GRAPH_BYTES = 1 << 20


def expected_bytes(rows: Sequence[int], samples: Sequence[int], row_bytes: int) -> int:
    """Return about what the graphs of a set will take, before there are any.

    Activations share the memory of vLLM's own graphs. A layer's keys and values do not: they have to outlive
    the layers behind it. All graphs have them in the same memory, that of the largest.

    Args:
        rows: of each graph.
        samples: bytes that the largest of vLLM's own full graphs took; the first took those that all share.
        row_bytes: bytes that keep the keys and values of one row, over all layers.

    """
    if not rows:
        return 0
    each = max(samples[-1] if len(samples) > 1 else 0, LEAST_GRAPH_BYTES)
    return len(rows) * each + max(rows) * row_bytes


@contextmanager
def capture_counted(state: WorkerState, device: torch.device) -> Iterator[None]:
    """Add the time and the device memory that this block takes to what captures took."""
    started, free = time.perf_counter(), torch.cuda.mem_get_info(device)[0]
    yield
    state.capture_seconds += time.perf_counter() - started
    state.capture_bytes += free - torch.cuda.mem_get_info(device)[0]


def weak_sources(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Return the same keys and values by layer as tensors that do not own their memory."""
    tensors = [tensor for source in sources.values() for tensor in source]
    weak: list[Any] = weak_ref_tensors(tensors)
    return dict(zip(sources, zip(weak[::2], weak[1::2], strict=True), strict=True))


class StageGraphs(Generic[Name]):
    """Where each graph of the set leaves the window's keys and values, and the choice at replay.

    Args:
        window_manager: this rank's, its layers bound.

    """

    def __init__(self, window_manager: WindowManager) -> None:
        self._window_manager = window_manager
        self._noted: dict[Name, dict[str, Source]] = {}
        self._sources: dict[Name, CapturedSources] = {}
        self._latest: tuple[Name, CapturedSources | None] | None = None

    @property
    def wanted(self) -> bool:
        """Whether the engine may ever stage, so that the set has to be captured."""
        window_manager = self._window_manager
        # Where every step's windows are copied as the layers run, no step could replay them.
        return (
            window_manager.window is not None
            and Mode.STAGE in window_manager.state.config.modes
            and not window_manager.always_copies
        )

    @property
    def staging(self) -> bool:
        """Whether a window batch of mode ``stage`` is open."""
        return self._window_manager.window is not None and self._window_manager.window.staging

    @property
    def _window(self) -> Window:
        assert self._window_manager.window is not None
        return self._window_manager.window

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the set within this block: time and memory of it are reported, replays are known after.

        After an error in a layer no graph of the set is known; see ``CaptureErrors.settle``.
        """
        self.clear()
        with capture_counted(self._window_manager.state, self._window_manager.device):
            yield
            self._sources = self._window_manager.capture_errors.captured(self._noted)
            self._noted, self._latest = {}, None

    @contextmanager
    def forward(self, num_requests: int, num_tokens: int, kind: WindowKind | None = None) -> Iterator[None]:
        """Run one pass of a capture, a warm-up or the captured one, with an open window batch.

        After an error in a layer it is a stock pass.

        Args:
            num_requests: requests of the graph's batch, all of which are windows.
            num_tokens: its rows.
            kind: of the windows; None for any of the engine's.

        """
        if self._window_manager.capture_errors.found:
            yield
            return
        batch = WindowBatch(
            mode=Mode.STAGE,
            num_requests=num_requests,
            num_tokens=num_tokens,
            query_start_loc=torch.empty(0, dtype=torch.int32, device=self._window_manager.device),
            slots={},
        )
        window = self._window
        with self._window_manager.capture_errors.noting():
            window.begin(batch)
            window.kind = kind
            try:
                yield
            finally:
                window.kind = None
                window.abort()

    def settle(self) -> bool:
        """Forget all graphs if a layer failed in one, on whichever rank; return whether one did."""
        if not self._window_manager.capture_errors.settle():
            return False
        self.clear()
        return True

    def note(self, name: Name) -> None:
        """Note where the pass that has just been captured left its window."""
        self._noted[name] = weak_sources(self._window.sources)

    def take(self, name: Name) -> bool:
        """Settle which set's graph the open batch, which is to be staged, runs in.

        Returns:
            Whether it is this set's. If not, the batch has become one of direct writes, and is counted so.

        """
        window = self._window_manager.window
        assert window is not None
        batch = window.batch
        assert batch is not None
        # A decode runs the same graph step after step, and a look-up by value costs as much as all else here.
        latest = self._latest
        if latest is None or latest[0] is not name:
            latest = self._latest = name, self._sources.get(name)
        sources = latest[1]
        # The graphs of `stage` write nothing, so they leave nothing for others of the same step to read.
        # Nor do they copy, as a step has to that is large or whose code takes its memory again.
        if sources is None or batch.early is not None or batch.copy:
            self._window_manager.go_direct("graph")
            return False
        try:
            window.adopt(sources)
        except Exception as error:
            self._window_manager.state.fail("graph", error)
            self._window_manager.go_direct("fault")
            return False
        return True

    def clear(self) -> None:
        """Forget all graphs."""
        self._noted, self._sources = {}, {}
        self._latest = None
