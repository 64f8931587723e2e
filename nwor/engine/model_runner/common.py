"""What the mixins of both model runners have in common: the rank, its layers, and how steps are counted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from nwor.config import NworConfig
from nwor.counts.records import WorkerFacts
from nwor.engine import draft_head
from nwor.engine.attention.attachment import CacheViews
from nwor.engine.attention.backends import extended_backends
from nwor.engine.attention.target_layers import slot_keys, target_layers
from nwor.engine.pipeline_parallel.stages import PipelineStages
from nwor.engine.stats.step_messages import attach, attach_costs, attach_facts, fast_paths_of
from nwor.engine.step_plan import StepPlan
from nwor.engine.window_manager import WindowManager
from nwor.engine.workarounds.adapters import mend_drafter

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as Base
else:
    Base = object


class NworRunner(Base):
    """Stands before vLLM's runner in the method order, behind the mixin of V1 or V2."""

    nwor: WindowManager
    _nwor_draft_head: draft_head.DraftHead | None = None
    #: The plan of the step that was committed last, until it is counted.
    _nwor_finished: StepPlan | None = None
    #: Whether the scheduler knows what steps cost.
    _nwor_costs_sent: bool = False
    #: What the scheduler was told last in a step without a record.
    _nwor_facts_told: WorkerFacts | None = None

    #: The only attention backend that takes part; None where the settings name those that do.
    nwor_backend: Any = None
    #: Set by subclasses: how the cache of a layer looks.
    nwor_cache_views: CacheViews

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model and its drafter, which needs no adapters and may have a vocabulary of its own."""
        super().load_model(*args, **kwargs)
        mend_drafter(self)
        config = NworConfig.from_additional_config(self.vllm_config.additional_config)
        self._nwor_draft_head = draft_head.install(self, config.draft_vocabulary if config else None)

    def reload_weights(self, *args: Any, **kwargs: Any) -> Any:
        """Load weights anew, and what was taken from them."""
        result = super().reload_weights(*args, **kwargs)
        if self._nwor_draft_head is not None:
            self._nwor_draft_head.refresh()
        return result

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any) -> None:
        """Allocate the cache, then bind the target's layers to it; those of a profiling run stay unbound."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)
        config = NworConfig.from_additional_config(self.vllm_config.additional_config)
        assert config is not None
        self.nwor = WindowManager(self.vllm_config, config, self.device)
        if (head := self._nwor_draft_head) is not None:
            self.nwor.state.draft_vocabulary = {"tokens": head.size, "of": head.vocabulary}
        if is_profiling:
            return
        keys = slot_keys(self.kv_cache_config)
        backends = (
            extended_backends(config.attention_backends)
            if self.nwor_backend is None
            else (self.nwor_backend,)
        )
        self.nwor.bind(target_layers(self), keys, self.nwor_cache_views, backends, PipelineStages.current())

    def shutdown(self) -> None:
        """End: vLLM takes the cache from the layers, so must we."""
        if hasattr(self, "nwor"):  # not where the start failed
            self.nwor.unbind()
        super().shutdown()

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run one step; a window batch left open by an exception is dropped without a write."""
        found = fast_paths_of(args[0] if args else kwargs.get("scheduler_output"))
        if found is not None:
            self.nwor.state.fast_paths.note(found)
        try:
            return super().execute_model(*args, **kwargs)
        except BaseException:
            self._nwor_drop()
            raise

    def _nwor_drop(self) -> None:
        self._nwor_finished = None
        if hasattr(self, "nwor"):  # not in the profiling run before the cache is there
            self.nwor.drop()

    def _nwor_sampled(self, output: Any, result: Any) -> Sequence[int] | npt.NDArray[Any]:
        """Return the tokens that a step gave each of its requests, in the order of its batch.

        Args:
            output: what the runner's ``sample_tokens`` returned.
            result: vLLM's ``ModelRunnerOutput``, all of it on the host.

        """
        raise NotImplementedError

    def nwor_why_no_costs(self) -> str | None:
        """Return why what steps cost by their draft tokens cannot be measured here; None where it can."""
        return "model runner V1 takes no steps of the measurement's own"

    def _nwor_account(self, output: Any, result: Any, plan: StepPlan) -> Any:
        state = self.nwor.state
        if state.draft_costs is not None and not self._nwor_costs_sent:
            self._nwor_costs_sent = True
            attach_costs(result, state.draft_costs)
        return attach(result, self.nwor.account_sampled(plan, self._nwor_sampled(output, result)))

    def _nwor_tell_facts(self, output: Any) -> Any:
        """Let a step that verifies nothing say what has changed for this rank; return its output.

        Where draft tokens are chosen, or fixed at 0, no record of a verify step may come for long.
        """
        state = self.nwor.state
        if output is None or state.config.draft_tokens is None or state.facts is self._nwor_facts_told:
            return output
        facts = self._nwor_facts_told = state.facts
        get_output = getattr(output, "get_output", None)
        if get_output is None:
            attach_facts(output, facts)
            return output

        def told() -> Any:
            del output.get_output
            result = get_output()
            attach_facts(result, facts)
            return result

        output.get_output = told
        return output

    def _nwor_account_on_arrival(self, output: Any, plan: StepPlan) -> None:
        """Count a step once its output's own copy to the host has arrived; nobody waits for that here."""
        get_output = output.get_output

        def counted() -> Any:
            # Else the output would refer to itself, and its tensors would wait for the garbage collector.
            del output.get_output
            return self._nwor_account(output, get_output(), plan)

        output.get_output = counted
