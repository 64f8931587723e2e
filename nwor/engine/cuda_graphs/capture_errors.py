"""What goes wrong in layers while graphs are captured: the engine then starts without staging, and says why.

A capture that breaks off on one rank leaves the others waiting for it, and a graph that lacks a layer cannot
be replayed. So an error is noted, and the pass goes on as a stock step. The other passes of the set are stock
steps from their start: each graph is preceded by a pass that warms up, and what fails there is not captured.
After each set all ranks settle.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from nwor.engine.pipeline_parallel.stages import gather_from_ranks
from nwor.errors import WindowStateError
from nwor.windows.layer_ops import Source
from nwor.windows.window import CapturedSources

if TYPE_CHECKING:
    from nwor.engine.window_manager import WindowManager

#: What a graph is named by.
Name = TypeVar("Name", bound=Hashable)


class CaptureErrors:
    """The errors of one rank since all ranks settled last.

    Args:
        window_manager: this rank's.

    """

    def __init__(self, window_manager: WindowManager) -> None:
        self._window_manager = window_manager
        self._errors: list[str] = []

    @property
    def found(self) -> bool:
        """Whether there are any."""
        return bool(self._errors)

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Run one pass of a capture within this block."""
        window = self._window_manager.window
        assert window is not None
        window.capture_errors = self._errors
        try:
            yield
        finally:
            window.capture_errors = None

    def captured(self, noted: Mapping[Name, Mapping[str, Source]]) -> dict[Name, CapturedSources]:
        """Return where graphs leave keys and values; nothing where a layer failed or was never staged.

        Args:
            noted: by graph and by layer, where the captured pass left them.

        """
        window = self._window_manager.window
        assert window is not None
        try:
            if not self._errors:
                return {name: window.captured(sources) for name, sources in noted.items()}
        except WindowStateError as error:
            self._errors.append(str(error))
        return {}

    def settle(self) -> bool:
        """Stage nothing in this engine if a layer failed, on whichever rank.

        Every rank of the engine has to call this after each set of graphs, with errors or without.

        Returns:
            Whether a layer did. The graphs of the set have to be thrown away then.

        """
        manager = self._window_manager
        errors, self._errors = self._errors, []
        said = gather_from_ranks(errors[0] if errors else None, manager.vllm_config)
        found = next((error for error in said if error is not None), None)
        if found is None:
            return False
        manager.unbind()
        manager.stage_nothing("capture", found)
        return True
