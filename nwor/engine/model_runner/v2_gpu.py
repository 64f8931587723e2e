"""vLLM's model runner V2 on CUDA with windows."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from nwor.config import MAX_WINDOW
from nwor.engine.attention.split_step import MOST_SPLIT_ROWS
from nwor.engine.attention.staged_attention import layer_cache_views
from nwor.engine.attention.target_layers import draft_layers, target_layers
from nwor.engine.cuda_graphs import mixed as mixed_graphs
from nwor.engine.cuda_graphs.draft import (
    NworDraftGraphManager,
    NworDraftPassesManager,
    graph_numbers,
    request_sizes,
)
from nwor.engine.cuda_graphs.mixed_sizes import LEAST_LARGEST, descriptors, graph_sizes, largest_size
from nwor.engine.cuda_graphs.stage_graphs import LEAST_GRAPH_BYTES, expected_bytes
from nwor.engine.cuda_graphs.v2 import NworCudaGraphManager, ProfiledCudaGraphManager, stageable
from nwor.engine.eligibility import Unsupported, check_engine, check_graphs, memory_is_reused
from nwor.engine.fastpath import worker as fast_paths
from nwor.engine.model_runner.v2 import NworRunnerV2
from nwor.modes import Mode

logger = logging.getLogger("vllm.nwor.runner")


class NworGPUModelRunnerV2(NworRunnerV2, GPUModelRunner):
    """The CUDA runner with windows and with a second set of graphs."""

    cudagraph_manager: Any

    nwor_cache_views = staticmethod(layer_cache_views)
    #: What the graphs of `stage` are expected to take; set while vLLM finds out what its own do.
    _nwor_expected_bytes: int = 0
    #: Whether graphs of mixed steps are among those that vLLM captures for their size; why they cannot be.
    _nwor_profiles_mixed: bool = False
    _nwor_mixed_failed: str | None = None

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **kwargs: Any) -> None:
        """Allocate the cache, bind the layers, and take over the graphs before the first is captured."""
        super().initialize_kv_cache(kv_cache_config, is_profiling, **kwargs)
        state = self.nwor.state
        descs = self._nwor_mixed_descs()
        tree_descs = self._nwor_mixed_descs(trees=True) if descs and state.config.tree is not None else []
        if is_profiling:
            if descs:
                # All ranks in the same order.
                every = sorted(dict.fromkeys([*descs, *tree_descs]), key=lambda desc: -desc.num_tokens)
                ProfiledCudaGraphManager.adopt(self.cudagraph_manager, every)
                self._nwor_profiles_mixed = True
        else:
            self.cudagraph_manager = NworCudaGraphManager.adopt(
                self.cudagraph_manager, self.nwor, descs, tree_descs
            )
            if descs:
                self._nwor_follow()
            bounds = state.config.draft_tokens
            if bounds is not None:
                NworDraftPassesManager.adopt(self.speculator, bounds)
            state.fast_paths.note(
                fast_paths.apply(
                    state.config, self.speculator, self.rejection_sampler, self.max_num_reqs, self.device
                )
            )

    def _nwor_follow(self) -> None:
        """Have the drafter's first pass run in graphs of the target's sizes, or in vLLM's where those do."""
        mixed = self.nwor.mixed
        assert mixed is not None
        if self.lora_config is None and NworDraftGraphManager.adopt(
            self.speculator, mixed, draft_layers(self), self._nwor_first_pass
        ):
            return
        mode = self.vllm_config.compilation_config.cudagraph_mode
        if mode.mixed_mode() == CUDAGraphMode.FULL:
            # A full graph of vLLM's would read a schedule that was made for the target's number of requests.
            self.cudagraph_manager.mixed_descs = []
            mixed.of_trees = None
            self.nwor.state.mixed_graphs_why_not = "the drafter has full graphs of its own for mixed steps"

    def _nwor_mixed_descs(self, trees: bool = False) -> list[Any]:
        """Return vLLM's names of the graphs of mixed steps to capture, the largest first.

        Args:
            trees: those of steps in which a window may be a tree, instead of those of all others.

        """
        manager, config, state = self.cudagraph_manager, self.vllm_config, self.nwor.state
        if not self._nwor_stages():
            state.mixed_graphs_why_not = "nothing is staged"
            return []
        if self._nwor_mixed_failed is not None:
            state.mixed_graphs_why_not = self._nwor_mixed_failed
            return []
        layers = target_layers(self)
        if state.config.mixed_graph_rows == 0:
            state.mixed_graphs_why_not = "they are off (mixed_graph_rows is 0)"
            return []
        state.mixed_graphs_why_not = mixed_graphs.why_not(config, layers, self.uses_inputs_embeds)
        if state.mixed_graphs_why_not is not None:
            logger.info("mixed steps run piece by piece: %s", state.mixed_graphs_why_not)
            return []
        most = min(
            self._nwor_largest_graph(len(layers)),
            config.scheduler_config.max_num_batched_tokens,
            # No step has more, and a capture spreads its rows over as many requests as there may be.
            self.max_num_reqs * self.max_model_len,
        )
        tree = state.config.tree if trees else None
        rows = None if tree is None else 1 + min(tree.choices)
        descs = descriptors(most, self.max_num_reqs, manager.lora_capture_cases, rows)
        if not descs:
            state.mixed_graphs_why_not = f"no step has the {graph_sizes(64)[0]} rows of the smallest"
        return descs

    def _nwor_largest_graph(self, layers: int) -> int:
        """Return the rows of the largest graph of a mixed step, by the setting or else by the model."""
        wanted = self.nwor.state.config.mixed_graph_rows
        if wanted is not None:
            return wanted
        # Elements of packed weights say little of what products compute. Ranks have to have the same graphs,
        # and may have unequal shares of the weights.
        if self.vllm_config.quant_config is not None or self.parallel_config.tensor_parallel_size > 1:
            return LEAST_LARGEST
        return largest_size(sum(weight.numel() for weight in self.get_model().parameters()), layers)

    def _nwor_stages(self) -> bool:
        """Return whether this engine's graphs may ever be those of ``stage``."""
        settings = self.vllm_config.compilation_config
        if Mode.STAGE not in self.nwor.state.config.modes or memory_is_reused(settings):
            return False
        try:
            check_engine(self.vllm_config, MAX_WINDOW)
            check_graphs(settings)
        except Unsupported:
            return False
        return True

    def profile_cudagraph_memory(self) -> int:
        """Return what all graphs will take, those of ``stage`` too: vLLM leaves it out of the cache."""
        self._nwor_expected_bytes = 0
        try:
            return super().profile_cudagraph_memory() + self._nwor_expected_bytes
        except Exception as error:
            # Without memory on one rank alone, its peers would go on with what it gives up.
            alone = self.parallel_config.tensor_parallel_size == 1
            if not self._nwor_profiles_mixed or (isinstance(error, torch.OutOfMemoryError) and not alone):
                raise
            logger.exception("mixed steps run piece by piece: a graph of one could not be captured")
            self._nwor_mixed_failed = f"capture failed: {type(error).__name__}: {error}"
            self._nwor_profiles_mixed = False
        self._nwor_expected_bytes = 0
        return super().profile_cudagraph_memory() + self._nwor_expected_bytes

    def capture_model(self, *, profile_only: bool = False) -> int:
        """Capture all graphs; where vLLM does so for their size alone, its own are enough to go by."""
        taken = super().capture_model(profile_only=profile_only)
        if profile_only:
            try:
                self._nwor_expected_bytes = self._nwor_expect()
            except Exception as error:  # no reason not to start: the graphs then come on top
                logger.warning("what the CUDA graphs of `stage` will take is not known: %r", error)
        return taken

    def _nwor_expect(self) -> int:
        window_manager, manager = self.nwor, self.cudagraph_manager
        if not self._nwor_stages():
            return 0
        descs = manager._capture_descs.get(CUDAGraphMode.FULL, [])
        rows = [desc.num_tokens for desc in descs if stageable(desc, window_manager.longest_window)]
        elements = kv_elements = query_elements = 0
        for layer in target_layers(self).values():
            impl = getattr(layer, "impl", None)  # a layer without one is refused when the cache is there
            if impl is not None:
                # Values are a view of what one product made for queries, keys and values, and keep all of it.
                elements += (impl.num_heads + 2 * impl.num_kv_heads) * impl.head_size
                kv_elements += 2 * impl.num_kv_heads * impl.head_size
                query_elements = max(query_elements, impl.num_heads * impl.head_size)
        itemsize = self.model_config.dtype.itemsize
        taken = expected_bytes(rows, manager._capture_mem_samples or [], elements * itemsize)
        mixed = [desc.num_tokens for desc in self._nwor_mixed_descs()]
        if mixed:
            # Their activations are among what vLLM has just measured; what they keep is not.
            kept = max((size for size in mixed if size <= mixed_graphs.MOST_KEPT_ROWS), default=0)
            taken += max(0, kept - max(rows, default=0)) * elements * itemsize
            if mixed[0] > mixed_graphs.MOST_KEPT_ROWS:
                taken += min(window_manager.most_window_rows, mixed[0]) * kv_elements * itemsize
            # FlashAttention's partial results, in float32; vLLM measured graphs that do not split.
            taken += MOST_SPLIT_ROWS * query_elements * 4
            speculator = getattr(self, "speculator", None)
            if getattr(speculator, "prefill_cudagraph_manager", None) is not None:
                # The drafter's first pass: hidden states, its head's and those fed back, and graphs, in one
                # part and in two.
                taken += 2 * mixed[0] * self.model_config.get_hidden_size() * itemsize
                graphs = len(set(mixed)) + len(request_sizes(self.max_num_reqs))
                taken += (1 + self.nwor.state.config.fast_drafting) * graphs * LEAST_GRAPH_BYTES
        state = self.nwor.state
        bounds = state.config.draft_tokens
        if mixed and bounds is not None:
            # Graphs of windows of any length, and the drafter's for each number of tokens.
            samples = manager._capture_mem_samples or []
            if state.config.tree is not None:
                mixed += [desc.num_tokens for desc in self._nwor_mixed_descs(trees=True)]
            windows = [size for size in mixed if size <= mixed_graphs.MOST_WINDOW_ROWS]
            taken += expected_bytes(windows, samples, 0)
            passes = len(graph_numbers(bounds)) * len(manager._capture_descs.get(CUDAGraphMode.FULL, []))
            taken += passes * LEAST_GRAPH_BYTES
        if self._nwor_trees is not None:
            taken += self._nwor_trees.expected_bytes(graphs_measured=bounds is None)
        return taken
