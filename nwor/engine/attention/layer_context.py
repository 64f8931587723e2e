"""What ties one attention layer of vLLM to the rank's window."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from nwor import ops
from nwor.errors import WindowStateError
from nwor.windows.window import StagedLayer, Window, WindowBatch
from nwor.worker_state import WorkerState


@dataclass(frozen=True)
class AttentionParameters:
    """What a layer's attention computes, beside its tensors.

    Attributes:
        scale: factor on the logits.
        sliding_window: tokens that a query sees, itself included; -1 for all.
        softcap: soft cap on the logits; 0 for none.
        sinks: [num_query_heads] extra logits, None for none.
        max_query_len: the longest window of this engine.
        query_scales: float32 [num_kv_heads], factors of quantized queries where heads have their own; None
            where ``scale`` holds the one factor of all.

    """

    scale: float
    sliding_window: int
    softcap: float
    sinks: torch.Tensor | None
    max_query_len: int
    query_scales: torch.Tensor | None = None


def parameters_of(layer: Any, max_query_len: int) -> AttentionParameters:
    """Return what one of vLLM's attention layers computes; reads scales on the host, so at start-up only.

    Args:
        layer: the layer, its weights loaded.
        max_query_len: the longest window of this engine.

    """
    impl, window = layer.impl, layer.impl.sliding_window
    # FlashAttention keeps (left, right), left without the query itself; the CPU backend keeps the size.
    if isinstance(window, tuple):
        window = window[0] + 1 if window[0] >= 0 else -1
    scale, query_scales = impl.scale, None
    if getattr(layer, "query_quant", None) is not None:
        query_scales = layer._q_scale.detach().reshape(-1).to(torch.float32)
        if query_scales.numel() == 1:
            scale, query_scales = scale * float(query_scales), None
    return AttentionParameters(
        scale=scale,
        sliding_window=window if window and window > 0 else -1,
        softcap=float(getattr(impl, "logits_soft_cap", 0) or 0),
        sinks=impl.sinks,
        max_query_len=max_query_len,
        query_scales=query_scales,
    )


class AttentionPlan:
    """Which thread block attends to what: found once a step for all layers of the same heads and window.

    In full CUDA graphs the first layer that attends while one is captured has the plan written there, and so
    each replay writes it from its own lengths. Where layers of a pure step are launched one by one the
    kernels plan for themselves: there the host is the limit, and one launch more is none less. Beside prompts
    the device is, and the plan is written.

    Args:
        memory: where the plan is kept.
        arguments: what ``plan_verify_attention`` is told of the layers.

    """

    def __init__(self, memory: torch.Tensor, arguments: Mapping[str, Any]) -> None:
        self._memory = memory
        self._arguments = arguments
        self._quantized_query = False  # what the plan in memory was written for

    @classmethod
    def share(
        cls,
        known: dict[Hashable, AttentionPlan],
        device: torch.device,
        num_heads: int,
        layer: StagedLayer,
        parameters: AttentionParameters,
    ) -> AttentionPlan | None:
        """Return the plan of a layer, that of an earlier one where both attend alike; None on a CPU.

        Args:
            known: the plans of the layers before, added to.
            device: where the attention runs.
            num_heads: query heads of the layer.
            layer: its cache.
            parameters: its attention.

        """
        _, _, kv_heads, head_size = layer.key_cache.shape
        arguments = {
            "num_heads": num_heads,
            "num_kv_heads": kv_heads,
            "head_size": head_size,
            "max_query_len": parameters.max_query_len,
            "source_dtype": layer.source_dtype,
            "kv_cache_dtype": layer.kv_cache_dtype,
            "sliding_window": parameters.sliding_window,
        }
        key = tuple(arguments.values())
        if key not in known:
            memory = ops.make_verify_plan(device)
            if memory is None:
                return None
            known[key] = cls(memory, arguments)
        return known[key]

    def of(
        self,
        window: Window,
        query_dtype: torch.dtype,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        mixed: bool = False,
        longest: int | None = None,
    ) -> torch.Tensor | None:
        """Return the plan of the open batch; the first call since it was begun has it written.

        None where neither a graph is being captured nor prompts stand beside the windows.

        Args:
            window: the rank's window. Its batch may be the very object of earlier steps, with other lengths.
            query_dtype: of the queries as they came to the layer. Whether vLLM quantizes them is its
                choice, layer by layer, and what they are then needs no prediction.
            query_start_loc: int32 [requests + 1].
            seq_lens: int32 [requests], context and window together.
            mixed: whether prompts stand beside the windows.
            longest: rows of the longest window; None for that of the engine.

        """
        if not mixed and not torch.cuda.is_current_stream_capturing():
            return None
        return self.written(window.shared, query_dtype, query_start_loc, seq_lens, longest)

    def written(
        self,
        shared: dict[object, Any],
        query_dtype: torch.dtype,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        longest: int | None = None,
    ) -> torch.Tensor:
        """Return the plan of some lengths; the first call with a new ``shared`` has it written.

        Args:
            shared: what has been made for these lengths.
            query_dtype: as for :meth:`of`, like all that follow.
            query_start_loc: int32 [requests + 1].
            seq_lens: int32 [requests].
            longest: likewise.

        """
        quantized = query_dtype is torch.float8_e4m3fn
        # A layer whose queries are not like those of the layer before has the plan written anew: layers run
        # one after another.
        if self not in shared or quantized != self._quantized_query:
            arguments = self._arguments if longest is None else {**self._arguments, "max_query_len": longest}
            ops.plan_verify_attention(
                query_start_loc, seq_lens, self._memory, **arguments, quantized_query=quantized
            )
            shared[self] = True
            self._quantized_query = quantized
        return self._memory


@dataclass
class LayerContext:
    """Attached to a layer's attention implementation as ``nwor``.

    Attributes:
        window: the rank's window.
        state: the rank's state, for faults.
        layer: the layer's cache.
        parameters: the layer's attention.
        workspace: scratch of ``verify_attention``, shared by all layers of the rank.
        plan: the plan of the layer and of those that attend alike; None on a CPU, which needs none.
        row_masks: int64 [most rows of a step]: which rows of its window each row sees; None for chains.

    """

    window: Window
    state: WorkerState
    layer: StagedLayer
    parameters: AttentionParameters
    workspace: torch.Tensor
    plan: AttentionPlan | None = None
    row_masks: torch.Tensor | None = None
    _checked: set[torch.dtype] = field(default_factory=set)

    @property
    def batch(self) -> WindowBatch:
        """The open window batch."""
        assert self.window.batch is not None
        return self.window.batch

    def stage(self, key: torch.Tensor, value: torch.Tensor) -> int:
        """Hand the window's rows over; after an error the whole step is written directly from here on.

        Args:
            key: [rows, num_kv_heads, head_size] of the whole step.
            value: likewise.

        Returns:
            How many leading rows belong to the window; 0 after an error, when what was held back so far has
            been written and this layer's rows are still to be.

        """
        tokens = self.batch.num_tokens
        try:
            self.window.stage(self.layer.name, key, value)
        except Exception as error:
            self.give_up("stage", error)
            return 0
        return tokens

    def rest_slots(self, slots: torch.Tensor) -> torch.Tensor:
        """Return the step's cache slots, -1 for the windows' rows; made once for all layers that share them.

        Args:
            slots: int64 [at least the window's rows], of the whole step.

        """
        key = ("slots", slots.data_ptr())
        known = self.window.shared.get(key)
        if known is None:
            rest = slots.clone()
            rest[: self.batch.num_tokens].fill_(-1)
            known = self.window.shared[key] = rest, slots  # `slots` is kept: its address is the key
        return known[0]

    def attend_window(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        metadata: Any,
        output: torch.Tensor,
        rest_of: Callable[[Any, int, int], Any],
    ) -> tuple[int, Any] | None:
        """Attend the leading rows of a step, which are the window's.

        Args:
            query: [rows, num_query_heads, head_size] of the whole step.
            key: [rows, num_kv_heads, head_size], likewise; None as for :meth:`attend`.
            value: likewise.
            metadata: the backend's metadata of the step (``block_table``, ``query_start_loc``, ``seq_lens``).
            output: [rows, num_query_heads, head_size]; the window's rows are written.
            rest_of: makes the metadata of a step without so many leading requests and their rows.

        Returns:
            How many rows that were, and the metadata of those behind them; None for it where there are none.
            None after an error: what was held back so far has been written, and the step is a stock step
            from here on.

        """
        requests, tokens = self.batch.num_requests, self.batch.num_tokens
        rest = None
        try:
            if tokens < metadata.num_actual_tokens:
                rest = rest_of(metadata, requests, tokens)
            self.attend(
                query[:tokens],
                key if key is None else key[:tokens],
                value if value is None else value[:tokens],
                metadata.block_table[:requests],
                metadata.query_start_loc[: requests + 1],
                metadata.seq_lens[:requests],
                output[:tokens],
            )
        except Exception as error:
            self.give_up("verify attention", error)
            return None
        return tokens, rest

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        block_table: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        output: torch.Tensor,
        mixed: bool = False,
    ) -> None:
        """Attend to the context in the cache and to the window's own rows.

        Args:
            query: [at least tokens, num_query_heads, head_size], in the layer's dtype, or quantized to float8
                (e4m3) as vLLM does before attention where the cache is fp8; either goes to the kernels as it
                is. Rows behind the windows' are left alone.
            key: [as many, num_kv_heads, head_size]; None where the layer attends once more to what it has
                staged in this step, as layers of looped models do.
            value: likewise.
            block_table: int32 [requests, blocks].
            query_start_loc: int32 [requests + 1].
            seq_lens: int32 [requests], context and window together.
            output: [as many, num_query_heads, head_size], written.
            mixed: whether prompts stand beside the windows.

        """
        layer, parameters = self.layer, self.parameters
        longest, masks = parameters.max_query_len, self.row_masks
        kind = self.window.kind
        if kind is not None:
            longest, masks = kind.longest, masks if kind.trees else None
        if key is None or value is None:
            key, value = self._staged()
            # What was copied aside has the windows' rows alone, and what was not has all of the step's.
            rows = min(key.shape[0], query.shape[0])
            query, key, value, output = query[:rows], key[:rows], value[:rows], output[:rows]
        ops.verify_attention(
            query,
            key,
            value,
            layer.key_cache,
            layer.value_cache,
            block_table,
            query_start_loc,
            seq_lens,
            output,
            self.workspace,
            scale=parameters.scale,
            max_query_len=longest,
            kv_cache_dtype=layer.kv_cache_dtype,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            q_scale=parameters.query_scales if query.dtype is torch.float8_e4m3fn else None,
            sliding_window=parameters.sliding_window,
            softcap=parameters.softcap,
            sinks=parameters.sinks,
            ancestor_mask=None if masks is None else masks[: query.shape[0]],
            plan=None
            if self.plan is None
            else self.plan.of(self.window, query.dtype, query_start_loc, seq_lens, mixed, longest),
            # What a layer's calls have in common is checked once; shapes the op itself looks at each time.
            validate=query.dtype not in self._checked,
        )
        self._checked.add(query.dtype)

    def _staged(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the windows' keys and values that this layer has staged in the open batch."""
        window, name = self.window, self.layer.name
        sources = window.sources if window.split is None else window.split.sources
        if name not in sources:
            raise WindowStateError(f"attend {name}: no keys and values, and none were staged in this step")
        return sources[name]

    def give_up(self, where: str, error: BaseException) -> None:
        """Turn NWOR off after an error and finish the open batch by direct writes.

        While a graph is captured the error is noted instead, and the pass goes on as a stock step: so no
        capture breaks off, and no rank waits for one that has.
        """
        window = self.window
        where = f"{where}, layer {self.layer.name}"
        if window.capture_errors is None:
            self.state.fail(where, error)
        else:
            window.capture_errors.append(f"{where}: {type(error).__name__}: {error}")
            if window.batch is None:
                return  # a mixed step's graph
        window.finish_direct()
