"""Attention of a drafter's passes over a tree: nodes see their ancestors, and the context in the cache.

Keys and values of all nodes so far stand in a window of their own, one for each request. It has a place for
each node that is expanded, by level, so that all passes are of one shape and fit into one CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from nwor import ops
from nwor.engine.attention.attachment import CacheViews, staged_layer
from nwor.engine.attention.layer_context import AttentionParameters, AttentionPlan, parameters_of
from nwor.windows.window import StagedLayer


@dataclass
class DraftWindowStep:
    """What the passes of one step have in common, for all layers.

    Attributes:
        requests: of the batch.
        width: rows of each request in a pass.
        window: rows of each request's window.
        row_masks: int64 [requests * window].
        starts: int32 [requests + 1]: first rows of the windows.
        seq_lens: int32 [requests], context and window together.
        level: the pass, from 0.
        shared: plans that hold for all passes.

    """

    requests: int
    width: int
    window: int
    row_masks: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    level: int = 0
    shared: dict[object, Any] = field(default_factory=dict)


class DraftWindow:
    """The window of one layer of the drafter; attached to its implementation as ``nwor_draft_window``.

    Args:
        layer: vLLM's, its cache allocated.
        staged: its cache.
        parameters: its attention.
        plan: shared by layers that attend alike; None on a CPU.
        workspace: of ``verify_attention``, shared by all layers.
        requests: most requests.

    Attributes:
        step: the passes under way; None at all other times.

    """

    def __init__(
        self,
        layer: Any,
        staged: StagedLayer,
        parameters: AttentionParameters,
        plan: AttentionPlan | None,
        workspace: torch.Tensor,
        requests: int,
    ) -> None:
        self.step: DraftWindowStep | None = None
        self._staged, self._parameters, self._plan = staged, parameters, plan
        self._workspace = workspace
        _, _, kv_heads, size = staged.key_cache.shape
        rows, device = requests * parameters.max_query_len, staged.kv_cache.device

        def zeros(heads: int) -> torch.Tensor:
            return torch.zeros(rows, heads, size, dtype=staged.source_dtype, device=device)

        self._key, self._value = zeros(kv_heads), zeros(kv_heads)
        self._output = zeros(layer.impl.num_heads)
        self._queries: dict[torch.dtype, torch.Tensor] = {}

    def _place(self, buffer: torch.Tensor, step: DraftWindowStep) -> torch.Tensor:
        """Return the rows of a pass within a buffer of windows: [requests, width, heads, size]."""
        first = step.level * step.width
        windows = buffer[: step.requests * step.window].unflatten(0, (step.requests, step.window))
        return windows[:, first : first + step.width]

    def keep(self, key: torch.Tensor, value: torch.Tensor) -> None:
        """Put the keys and values of a pass into the window.

        Args:
            key: [at least requests * width, num_kv_heads, head_size].
            value: likewise.

        """
        step = self.step
        assert step is not None
        if step.level == 0:
            # Nobody sees the rows of levels to come, but what is no number stays so times a weight of zero.
            # Left by one step, it would be in all that follow.
            self._value[: step.requests * step.window].zero_()
        for buffer, rows in ((self._key, key), (self._value, value)):
            place = self._place(buffer, step)
            place.copy_(rows[: place.shape[0] * place.shape[1]].unflatten(0, place.shape[:2]))

    def attend(self, query: torch.Tensor, block_table: torch.Tensor, output: torch.Tensor) -> None:
        """Attend to the context in the drafter's cache and to the nodes so far.

        Args:
            query: [at least requests * width, num_query_heads, head_size], of the layer's dtype or quantized.
            block_table: int32 [at least requests, blocks].
            output: as query, of the layer's dtype; written.

        """
        step, layer, parameters = self.step, self._staged, self._parameters
        assert step is not None
        if query.dtype not in self._queries:
            self._queries[query.dtype] = torch.zeros(
                self._output.shape, dtype=query.dtype, device=query.device
            )
        queries, rows = self._queries[query.dtype], step.requests * step.window
        place = self._place(queries, step)
        used = place.shape[0] * place.shape[1]
        place.copy_(query[:used].unflatten(0, place.shape[:2]))
        ops.verify_attention(
            queries[:rows],
            self._key[:rows],
            self._value[:rows],
            layer.key_cache,
            layer.value_cache,
            block_table[: step.requests],
            step.starts,
            step.seq_lens,
            self._output[:rows],
            self._workspace,
            scale=parameters.scale,
            max_query_len=parameters.max_query_len,
            kv_cache_dtype=layer.kv_cache_dtype,
            k_scale=layer.k_scale,
            v_scale=layer.v_scale,
            q_scale=parameters.query_scales if query.dtype is torch.float8_e4m3fn else None,
            sliding_window=parameters.sliding_window,
            softcap=parameters.softcap,
            sinks=parameters.sinks,
            ancestor_mask=step.row_masks,
            plan=None
            if self._plan is None
            else self._plan.written(step.shared, query.dtype, step.starts, step.seq_lens),
        )
        output[:used].unflatten(0, place.shape[:2]).copy_(self._place(self._output, step))


def attach(
    layers: list[Any],
    cache_views: CacheViews,
    dtype: torch.dtype,
    device: torch.device,
    window: int,
    requests: int,
) -> list[DraftWindow]:
    """Give each layer of a drafter a window, once its cache is allocated.

    Args:
        layers: vLLM's.
        cache_views: how to see a layer's cache as strided K and V.
        dtype: of keys and values as passes make them.
        device: where they are.
        window: rows of a request's window.
        requests: most requests.

    """
    plans: dict[Any, AttentionPlan] = {}
    staged = [staged_layer(layer.layer_name, layer, cache_views, dtype) for layer in layers]
    size = 0
    for layer, own in zip(layers, staged, strict=True):
        _, _, kv_heads, head_size = own.key_cache.shape
        size = max(
            size,
            ops.verify_attention_workspace_size(device, layer.impl.num_heads, kv_heads, head_size, window),
        )
    workspace = torch.zeros(size, dtype=torch.uint8, device=device)
    windows = []
    for layer, own in zip(layers, staged, strict=True):
        parameters = parameters_of(layer, window)
        plan = AttentionPlan.share(plans, device, layer.impl.num_heads, own, parameters)
        layer.impl.nwor_draft_window = DraftWindow(layer, own, parameters, plan, workspace, requests)
        windows.append(layer.impl.nwor_draft_window)
    return windows
