"""What the NWOR workers have in common: settings, and the calls that the engine makes on every rank."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nwor.config import DraftBounds
from nwor.engine import interrupts
from nwor.engine.window_manager import WindowManager
from nwor.modes import Mode

logger = logging.getLogger("vllm.nwor.worker")


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

    def compile_or_warm_up_model(self) -> Any:
        """Compile and capture; where draft tokens are chosen, measure what steps cost by their number."""
        # Where VLLM_PLUGINS leaves the plugin out, the worker's process hears of it here.
        interrupts.leave_to_server()
        took = super().compile_or_warm_up_model()  # type: ignore[misc]
        state = self._nwor.state
        state.serving = True
        state.mixed_graph_steps = 0  # vLLM may have measured what steps cost in these graphs
        bounds = state.config.draft_tokens
        if bounds is not None:
            state.draft_costs_why_not = self.model_runner.nwor_why_no_costs()
            if state.draft_costs_why_not is None:
                self._nwor_measure(bounds)
            if state.draft_costs_why_not is not None:
                by_requests = bounds.tree is not None and state.config.tree_required
                stay = "go by the number of requests" if by_requests else f"stay at {bounds.fixed}"
                logger.warning("draft tokens %s: %s", stay, state.draft_costs_why_not)
        return took

    def _nwor_measure(self, bounds: DraftBounds) -> None:
        from nwor.engine.draft_lengths.measurement import NoRoomError, measure

        state = self._nwor.state
        mode, state.mode = state.mode, Mode.STAGE
        try:
            state.draft_costs = measure(self, bounds, state.config.fit_windows)
        except NoRoomError as error:
            state.draft_costs_why_not = str(error)
        finally:
            if state.fault is None:
                state.mode = mode
            state.steps = state.mixed_graph_steps = state.self_checks = 0
            state.forget_facts()

    def nwor_set_draft_tokens(
        self, wanted: str, asked: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, Any]:
        """Have draft tokens chosen within bounds, or keep to a number, from one of the next steps on.

        Args:
            wanted: ``auto``, bounds within those of the start as ``auto:1-6``, or a number.
            asked: who asked for it and when, for the list of changes.

        Returns:
            This rank's number, what held before, what holds now, the number of verify steps so far, and what
            was changed in words.

        Raises:
            ConfigError: if it does not fit what the engine was started with.

        """
        state = self._nwor.state
        old = state.set_draft_tokens(wanted)
        what = f"set draft tokens from {old} to {state.draft_tokens} at verify step {state.steps}"
        state.note(asked, what)
        return {"rank": self.rank, "old": old, "new": state.draft_tokens, "step": state.steps, "what": what}

    def nwor_set_mode(self, mode: str, asked: Mapping[str, str] = MappingProxyType({})) -> dict[str, Any]:
        """Put a mode in force from the next step on.

        Args:
            mode: the mode.
            asked: who asked for it and when, for the list of changes.

        Returns:
            This rank's number, the old mode, the new one (both as steps run: ``off`` where nothing can be
            staged), the numbers of verify steps and of switches so far, whether it belongs to the last
            pipeline stage, and what was changed in words.

        Raises:
            ConfigError: for an unknown mode, or one that was not enabled at start-up.

        """
        state = self._nwor.state
        before = state.mode_in_force
        old = state.switch(Mode.parse(mode))
        what = f"switched the mode from {old.value} to {state.mode.value} at verify step {state.steps}"
        if state.unsupported is not None:
            what += "; nothing can be staged, so it stays off"
        state.note(asked, what)
        return {
            "rank": self.rank,
            "old": before.value,
            "new": state.mode_in_force.value,
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
