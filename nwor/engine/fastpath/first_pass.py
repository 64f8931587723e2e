"""The first pass of an EAGLE drafter in two parts: keys and values of all rows, then one row of each request.

The first pass reads every row of a step, because the drafter's cache needs the keys and values of all. What
comes behind those of the last layer (its attention, output product and MLP: three quarters of an EAGLE head)
is read of each request's last row alone. So the first part ends there, whatever the model is. The second runs
the model once more for those rows. A step that makes no drafts ends with the first part.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.spec_decode.eagle.speculator import EagleSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator import TargetDependentARSpeculator

from nwor.engine.attention.draft_pass import AllWritten, LastRowsPass, WrittenPass, attending, is_causal
from nwor.engine.fastpath.stock import Sources, changed

logger = logging.getLogger("vllm.nwor.first_pass")

_PASSES = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"

#: What a pass in two parts relies on: that its model runs once, that states of last rows are all it reads,
#: and what is noted of requests that pad a batch.
FIRST_PASS: Sources = {
    (_PASSES, "TargetDependentARSpeculator._prefill"): ("82f51701026e52c8", "a571704bfe1fb51d"),
    (_PASSES, "TargetDependentARSpeculator._run_model"): ("e50d6a230099694b", "8a7a506a9deaf39a"),
    (_PASSES, "TargetDependentARSpeculator.propose"): ("55c66c96992f7eca", "7e919b6a89f0ae05"),
    (_PASSES, "TargetDependentARSpeculator.capture"): ("f67f14d6be90a64d",),
    (_PASSES, "_prepare_prefill_inputs_kernel"): ("b09e3977036c8bde",),
}

#: Rows from which two parts cost less than one pass: below, a pass takes what reading the weights takes, and
#: the second part reads those of the first again (a quarter of a layer).
LEAST_ROWS = 192


class _OfRequests:
    """Hidden states of one row for each request, where vLLM indexes those of all rows."""

    def __init__(self, states: torch.Tensor) -> None:
        self._states = states

    def __getitem__(self, rows: torch.Tensor) -> torch.Tensor:
        return self._states


class FirstPass:
    """Takes the place of one speculator's ``_prefill``.

    Args:
        speculator: vLLM's, its layers bound to the cache.
        layers: its attention layers.

    Attributes:
        next_drafts: draft tokens that the step will make for each request; None for the engine's number.
        replay_last_rows: runs the second part for so many requests in a graph; returns whether there is one.

    """

    def __init__(self, speculator: Any, layers: Sequence[Any]) -> None:
        self._speculator = speculator
        self._layers = layers
        self._stock = speculator._prefill
        self._capturing = self._failed = False
        self.next_drafts: int | None = None
        self.replay_last_rows: Callable[[int], bool] = lambda num_reqs: False
        requests = int(speculator.max_num_reqs)
        self._places = torch.arange(requests + 1, dtype=torch.int32, device=speculator.device)
        speculator._prefill = self.run
        speculator.capture = self._captures(speculator.capture)

    @staticmethod
    def why_not(speculator: Any, layers: Sequence[Any], vllm_config: Any) -> str | None:
        """Return why a drafter's first pass stays one; None where it need not.

        Args:
            speculator: vLLM's, or None.
            layers: its attention layers.
            vllm_config: the engine's configuration.

        """
        if speculator is None:
            return "no drafter runs here"
        known = isinstance(speculator, EagleSpeculator) and all(
            getattr(type(speculator), name) is getattr(TargetDependentARSpeculator, name)
            for name in ("_prefill", "_run_model")
        )
        if not known:
            return "the drafter is of another kind than EAGLE's"
        if (other := changed(FIRST_PASS)) is not None:
            return other
        if len(layers) != 1:
            # Those before the last attend for all rows, and may add to the states that the second part reads.
            return "the drafter has more than one layer"
        if not hasattr(getattr(layers[0], "impl", None), "nwor_last_rows"):
            return "the attention backend of the drafter cannot attend for last rows alone"
        if vllm_config.lora_config is not None:
            return "adapters are given by row"
        if vllm_config.kv_transfer_config is not None:
            return "a KV connector takes the cache of whole layers"
        if speculator.pcp_manager is not None or speculator.dcp_size > 1 or speculator.dp_size > 1:
            return "ranks share the step's rows"
        if speculator.supports_mm_inputs:
            return "the drafter takes embeddings"
        return None

    @property
    def stock(self) -> Callable[..., Any]:
        """vLLM's own, in one part."""
        return self._stock  # type: ignore[no-any-return]

    def run(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
        mm_inputs: Any = None,
        **skip: bool,
    ) -> None:
        """Run the pass, as vLLM's ``_prefill`` does; of many rows in two parts.

        Args:
            num_reqs: requests.
            num_tokens: rows, padding included.
            attn_metadata: the step's, by layer; None in a pass without attention.
            slot_mappings: likewise, int64 [num_tokens].
            num_tokens_across_dp: as vLLM passes it on.
            cudagraph_runtime_mode: likewise.
            mm_inputs: likewise.
            skip: ``skip_sample``, which vLLM 0.33 says of steps that make no drafts.

        """
        drafts_nothing = not self._capturing and (self.next_drafts == 0 or any(skip.values()))
        # All pieces of a graph have to be captured, also those that only passes in one part replay.
        in_pieces = self._capturing and cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
        parts = (num_tokens >= LEAST_ROWS or drafts_nothing) and not in_pieces and not self._failed
        parts = parts and is_causal(attn_metadata, self._layers)
        arguments = attn_metadata, slot_mappings, num_tokens_across_dp
        if not parts:
            self._stock(num_reqs, num_tokens, *arguments, cudagraph_runtime_mode, mm_inputs, **skip)
            return
        try:
            self.rows(num_tokens, *arguments, cudagraph_runtime_mode)
            if self._capturing or not (drafts_nothing or self.replay_last_rows(num_reqs)):
                self.last_rows(num_reqs, num_tokens, *arguments)
        except Exception:
            logger.error("the drafter's first pass failed in two parts; from the next step on it runs in one")
            self._failed = True
            raise

    def rows(
        self,
        num_tokens: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None = None,
        cudagraph_runtime_mode: CUDAGraphMode = CUDAGraphMode.NONE,
    ) -> None:
        """Write the keys and values of all rows: the first part.

        Args:
            num_tokens: rows, padding included.
            attn_metadata: the step's, by layer.
            slot_mappings: likewise, int64 [num_tokens].
            num_tokens_across_dp: as vLLM passes it on.
            cudagraph_runtime_mode: likewise.

        """
        with attending(self._layers, WrittenPass()):
            try:
                self._speculator._run_model(
                    num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp, cudagraph_runtime_mode
                )
            except AllWritten:
                return

    def last_rows(
        self,
        num_reqs: int,
        num_tokens: int,
        attn_metadata: dict[str, Any] | None,
        slot_mappings: dict[str, torch.Tensor] | None,
        num_tokens_across_dp: torch.Tensor | None = None,
        *_: Any,
    ) -> None:
        """Draft the first token of each request by its last row: the second part.

        Args:
            num_reqs: requests.
            num_tokens: of no matter.
            attn_metadata: the step's, by layer, of at least so many requests.
            slot_mappings: likewise.
            num_tokens_across_dp: as vLLM passes it on.

        """
        speculator = self._speculator
        buffers = speculator.input_buffers
        run_model = speculator._run_model

        def run(*_: Any, **__: Any) -> tuple[Any, Any]:
            rows = speculator.last_token_indices[:num_reqs]
            positions = buffers.positions[rows]
            buffers.positions[:num_reqs] = positions
            buffers.input_ids[:num_reqs] = buffers.input_ids[rows]
            speculator.hidden_states[:num_reqs] = speculator.hidden_states[rows]
            # What was rejected stands behind the last row. Requests that pad the batch have no length.
            lengths = torch.minimum(buffers.seq_lens[:num_reqs], (positions + 1).to(torch.int32))
            starts = torch.minimum(self._places[: num_reqs + 1], (lengths > 0).sum(dtype=torch.int32))
            with attending(self._layers, LastRowsPass(starts, lengths)):
                last, fed_back = run_model(num_reqs, attn_metadata, slot_mappings, num_tokens_across_dp)
            own = _OfRequests(last)
            return own, own if fed_back is last else _OfRequests(fed_back)

        speculator._run_model = run
        try:
            self._stock(num_reqs, num_tokens, attn_metadata, slot_mappings, num_tokens_across_dp)
        finally:
            del speculator._run_model

    def _captures(self, capture: Callable[[], None]) -> Callable[[], None]:
        def captured() -> None:
            self._capturing = True
            try:
                capture()
            finally:
                self._capturing = False

        return captured
