"""CUDA graphs of verify steps on model runner V1: a second set for ``stage``, see :mod:`stage_graphs`.

V1 keeps its full graphs in a wrapper around the model, which captures a graph when it meets a batch that it
has none for, and replays it from then on. Here the wrapper has a second set of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.compilation.cuda_graph import CUDAGraphEntry, CUDAGraphWrapper
from vllm.forward_context import BatchDescriptor, get_forward_context, is_forward_context_available

from nwor.engine.cuda_graphs.stage_graphs import StageGraphs
from nwor.engine.window_manager import WindowManager


class NworCUDAGraphWrapper(CUDAGraphWrapper):
    """vLLM's wrapper of the target model with a second set of full graphs, chosen at replay."""

    concrete_cudagraph_entries: dict[BatchDescriptor, CUDAGraphEntry]
    stage: StageGraphs[BatchDescriptor]
    stage_entries: dict[BatchDescriptor, CUDAGraphEntry]
    #: Whether a full graph that is met now is to be captured for ``stage``.
    capturing_stage: bool

    @classmethod
    def adopt(cls, wrapper: CUDAGraphWrapper, window_manager: WindowManager) -> NworCUDAGraphWrapper:
        """Turn vLLM's wrapper into this class; nothing that will be replayed has been captured yet.

        Args:
            wrapper: the one around the target model.
            window_manager: this rank's, its layers bound.

        Raises:
            TypeError: if it is neither vLLM's nor one of this class.

        """
        if type(wrapper) not in (CUDAGraphWrapper, cls):
            raise TypeError(f"expected vLLM's CUDAGraphWrapper, found {type(wrapper).__name__}")
        wrapper.__class__ = cls
        assert isinstance(wrapper, cls)
        wrapper.stage, wrapper.stage_entries, wrapper.capturing_stage = StageGraphs(window_manager), {}, False
        return wrapper

    @contextmanager
    def capture_stage(self) -> Iterator[None]:
        """Capture for ``stage`` within this block; each pass opens its window by ``stage.forward``."""
        self.stage_entries = {}
        with self.stage.capture():
            self.capturing_stage = True
            try:
                yield
            finally:
                self.capturing_stage = False
        if self.stage.settle():
            self.stage_entries = {}

    def clear_graphs(self) -> None:
        """Forget the graphs of both sets."""
        super().clear_graphs()
        self.stage_entries.clear()
        self.stage.clear()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; in a step of full graphs, by the graph of the open window batch's mode."""
        # While it captures for `stage`, a pass after an error in a layer has no window.
        if not (self.stage.staging or self.capturing_stage) or not is_forward_context_available():
            return super().__call__(*args, **kwargs)
        context = get_forward_context()
        if context.cudagraph_runtime_mode != self.runtime_mode:
            return super().__call__(*args, **kwargs)
        batch = context.batch_descriptor
        assert batch is not None
        if not self.capturing_stage and not self.stage.take(batch):
            return super().__call__(*args, **kwargs)
        stock, self.concrete_cudagraph_entries = self.concrete_cudagraph_entries, self.stage_entries
        try:
            output = super().__call__(*args, **kwargs)
        finally:
            self.concrete_cudagraph_entries = stock
        if self.capturing_stage:
            self.stage.note(batch)
        return output
