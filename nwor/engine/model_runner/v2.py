"""Model runner V2 with windows: what is common to CUDA and to the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch

from nwor.engine.attention.target_layers import draft_layers
from nwor.engine.fastpath.first_pass import FirstPass
from nwor.engine.model_runner.common import NworRunner
from nwor.engine.pipeline_parallel.freed import freed_by
from nwor.engine.request_isolation.common import send_failures
from nwor.engine.request_isolation.v2 import IsolatingRunnerV2
from nwor.engine.stats.step_messages import in_flight_of
from nwor.engine.step_plan import StepPlan, takes_over_blocks
from nwor.engine.trees.decoding import TreeDecoding
from nwor.modes import Mode

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as Base
else:
    Base = object


class NworRunnerV2(NworRunner, IsolatingRunnerV2, Base):
    """Mixin before vLLM's V2 runner: opens a window batch before the forward pass, commits after sampling.

    The window batch is opened once a step's inputs are on the device. The batch is sorted with verifying
    requests first, so the windows are its leading part. The commit is launched after the sampled tokens' copy
    to the host has started and before the drafter runs. A pipeline stage that does not sample holds its
    windows back until vLLM's own record of the step's counts has come (``PPHandler``).
    """

    _nwor_early: bool = False
    #: What makes windows trees; None where they are chains.
    _nwor_trees: TreeDecoding | None = None
    #: The drafter's first pass in two parts; None where it is vLLM's own.
    _nwor_first_pass: FirstPass | None = None
    #: vLLM's, which trims draft tokens on the device; None where it does not. Set by vLLM with the cache.
    adaptive_verification: Any = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model and its drafter, which then proposes trees if that was asked for."""
        super().load_model(*args, **kwargs)
        self._nwor_trees = TreeDecoding.install(self)

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any) -> None:
        """Allocate the cache and bind the layers; from then on a drafter that fails ends nothing."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)
        if self._nwor_trees is not None:
            self._nwor_trees.attach(self.nwor, self)
        if not is_profiling:
            self._nwor_part_first_pass()
            self._nwor_isolate_objects()

    def _nwor_part_first_pass(self) -> None:
        state, speculator = self.nwor.state, self.speculator
        if not state.config.fast_drafting:
            return
        layers = draft_layers(self)
        why_not = FirstPass.why_not(speculator, layers, self.vllm_config)
        state.fast_paths.note({"first_pass": why_not})
        if why_not is None:
            self._nwor_first_pass = FirstPass(speculator, layers)

    def nwor_why_no_costs(self) -> str | None:
        """Return why what steps cost by their draft tokens cannot be measured here; None where it can."""
        if self.nwor.window is None:
            return "nothing is staged"
        if self.use_pp:
            return "pipeline stages run one number of draft tokens"
        if self.adaptive_verification is not None:
            return "adaptive verification chooses how many draft tokens of each step are verified"
        if self.lora_config is not None:
            return "graphs of steps with adapters are captured for one number of draft tokens"
        mixed = self.nwor.mixed
        if mixed is not None and not mixed.graphs:
            return f"there are no graphs of windows of any length: {self.nwor.state.mixed_graphs_why_not}"
        return None

    def finish_requests(self, scheduler_output: Any) -> None:
        """Commit what this step has to find in the cache, then free the requests that have ended.

        Called at the start of every step, before requests are added and anything is launched.
        """
        if self.use_pp:
            self.nwor.next_step(in_flight_of(scheduler_output), freed_by(scheduler_output))
        self._nwor_early = takes_over_blocks(scheduler_output)
        mixed, trees = self.nwor.mixed, self._nwor_trees
        # An empty step says 0 of drafts that nobody asks for; vLLM's own steps of a warm-up may follow.
        rows = scheduler_output.total_num_scheduled_tokens
        next_drafts = scheduler_output.num_spec_tokens_to_schedule if rows else None
        verifies_trees = trees is not None and trees.begin(
            scheduler_output.scheduled_spec_decode_tokens, scheduler_output.num_scheduled_tokens
        )
        if mixed is not None:
            mixed.chosen = None  # nobody chooses where a step has to run without graphs
            mixed.verifies_trees = verifies_trees
            mixed.next_drafts = next_drafts
        if self._nwor_first_pass is not None:
            self._nwor_first_pass.next_drafts = next_drafts
        if trees is not None:
            trees.forget(scheduler_output.finished_req_ids)
        super().finish_requests(scheduler_output)

    def add_requests(self, scheduler_output: Any) -> None:
        """Add the step's new requests; some of them have to have chains."""
        super().add_requests(scheduler_output)
        if self._nwor_trees is not None:
            self._nwor_trees.add(scheduler_output.scheduled_new_reqs, self.req_states.req_id_to_index)

    def _nwor_drafted_nothing(self, batch: InputBatch) -> None:
        """Let the zeros that stand for draft tokens be chains: of a request's first there is no tree yet."""
        if self._nwor_trees is not None:
            self._nwor_trees.tables.build_chains(batch.idx_mapping)

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Prepare the step's block tables and slots, then open its window batch."""
        prepared = super().prepare_attn(input_batch)
        rank, plan, trimmed = self.nwor, None, None
        drafts = input_batch.num_draft_tokens_per_req
        if drafts is not None and self.adaptive_verification is not None:
            # Its numbers of each request are those that were scheduled, its sums those that are verified.
            if not input_batch.num_draft_tokens:
                drafts = None
            elif input_batch.num_draft_tokens != int(drafts.sum()):
                trimmed = input_batch.cu_num_logits, input_batch.num_tokens
        if drafts is not None:
            # Two sums tell most steps: no request has more drafts than this, and none fewer rows than its
            # drafts and one more.
            rows = input_batch.num_reqs * rank.longest_window
            full = (
                input_batch.num_tokens == rows and input_batch.num_draft_tokens == rows - input_batch.num_reqs
            )
            mixed = rank.mixed
            plan = rank.plan_step(
                input_batch.req_ids,
                input_batch.num_scheduled_tokens,
                drafts,
                self._nwor_early,
                full,
                None if mixed is None or mixed.chosen is None else mixed.copies(mixed.chosen),
                trimmed,
                None if mixed is None else mixed.longest,
            )
        if self._nwor_trees is not None:
            self._nwor_place(self._nwor_trees, input_batch, plan)
        rank.begin(plan, input_batch.query_start_loc, prepared[1])
        return prepared

    def _nwor_place(self, trees: TreeDecoding, batch: InputBatch, plan: StepPlan | None) -> None:
        """Give rows what their trees say; after an error the step is direct, and takes in no node."""
        state = self.nwor.state
        try:
            trees.place(batch)
        except Exception as error:
            shared = state.graphs_mode is Mode.STAGE and state.shared_graphs
            state.fail("place", error)
            if plan is None or not plan.num_requests:
                return
            if shared:
                # The ranks beside this one are about to replay a graph of `stage`, and it has to as well.
                trees.tables.place_plainly(batch)
                plan.fail()
            else:
                plan.go_direct("fault")

    def postprocess_sampled(
        self,
        idx_mapping: torch.Tensor,
        sampled_tokens: torch.Tensor,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Commit the open batch, then update the requests' state."""
        if self._nwor_trees is not None:
            self._nwor_trees.settle(num_sampled)
        self._nwor_finished = self.nwor.finish(num_rejected)
        super().postprocess_sampled(idx_mapping, sampled_tokens, num_sampled, num_rejected, *args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, commit and draft; the counts are read when the output's own copy has arrived."""
        try:
            if not self.is_last_pp_rank:
                self.nwor.defer()
            output = super().sample_tokens(grammar_output)
        except BaseException:
            self._nwor_drop()
            raise
        if not self.is_last_pp_rank:
            if self.nwor.deferral is not None:
                self._nwor_expect_counts()
            return output
        plan, self._nwor_finished = self._nwor_finished, None
        failures, self._nwor_failures = self._nwor_failures, None
        if plan is not None and output is not None:
            self._nwor_account_on_arrival(output, plan)
        elif plan is None:
            output = self._nwor_tell_facts(output)
        # Last: windows of requests that failed are committed and counted like others.
        return send_failures(output, failures)

    def _nwor_expect_counts(self) -> None:
        handler = self.pp_handler
        assert handler is not None
        # What this step's call has just put there; None where no request of the step needs its outcome.
        entry = handler.queue[-1]
        if entry is None:
            self.nwor.expect(None)
            return

        def rejected() -> torch.Tensor:
            handler.main_stream.wait_event(entry.event)
            return entry.num_rejected

        self.nwor.expect(rejected)

    def _nwor_sampled(self, output: Any, result: Any) -> Sequence[int] | npt.NDArray[Any]:
        counts: npt.NDArray[Any] = output.num_sampled_tokens_np
        return counts
