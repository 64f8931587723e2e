"""What the NWOR workers have in common: settings, and the calls that the engine makes on every rank."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nwor.engine.window_manager import WindowManager
from nwor.modes import Mode


class NworWorkerMixin:
    """Methods for ``collective_rpc``; each runs between two steps, on all ranks at the same one."""

    model_runner: Any
    rank: int

    @property
    def _nwor(self) -> WindowManager:
        manager: WindowManager = self.model_runner.nwor
        return manager

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        """Load weights anew; the scales of an fp8 cache may be others then."""
        super().reload_weights(*args, **kwargs)  # type: ignore[misc]
        self._nwor.take_scales()

    def finish_weight_update(self) -> None:
        """End an update of the weights in the running engine; see :meth:`reload_weights`."""
        super().finish_weight_update()  # type: ignore[misc]
        self._nwor.take_scales()

    def nwor_set_mode(self, mode: str, asked: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        """Put a mode in force from the next step on.

        Args:
            mode: the mode.
            asked: who asked for it and when, for the list of changes.

        Returns:
            This rank's number, the old mode, the new one, the numbers of verify steps and of switches so far,
            whether it belongs to the last pipeline stage, and what was changed in words.

        Raises:
            ConfigError: for an unknown mode, or one that was not enabled at start-up.

        """
        state = self._nwor.state
        old = state.switch(Mode.parse(mode))
        what = f"switched the mode from {old.value} to {state.mode.value} at verify step {state.steps}"
        state.note(asked, what)
        return {
            "rank": self.rank,
            "old": old.value,
            "new": state.mode.value,
            "step": state.steps,
            "switches": state.switches,
            "last_stage": state.last_stage,
            "what": what,
        }

    def nwor_reset_stats(self, asked: Mapping[str, str] = MappingProxyType({})) -> int:
        """Start this rank's counters anew and return its number; the metrics of the server go on."""
        self._nwor.state.reset()
        self._nwor.state.note(asked, "reset the counters")
        return self.rank

    def nwor_report(self) -> dict[str, Any]:
        """Return this rank's state and counters as plain values."""
        return {"rank": self.rank, **self._nwor.state.report()}
