"""Faults of sampling and of adapters on a CPU, mended in the worker's process; the ledger has them all.

The CPU implementation of ``expand_kernel`` writes into a 64-bit copy of its output and never copies back. So
a verify step's temperature, top_p (floats) and top_k (32-bit integers) come from uninitialized memory:
samples ignore them, and no seed holds. ``register_kernels`` is vLLM's own way to give a kernel another
implementation; the function that vLLM registers is exchanged too, since each new engine of a process
registers it again.

A step without drafts goes through the rejection sampler with tensors of no rows, of which the mask of
``top_k`` alone takes the largest: the engine dies. And ``min_tokens`` looks at a window's last row with the
length before the window. Both are mended as in NWOR's runner: :mod:`nwor.engine.request_isolation.v1`.
Adapters: :mod:`nwor.engine.workarounds.adapters`. Seeded requests:
:mod:`nwor.engine.workarounds.cpu_generators`.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from nwor.engine.request_isolation.v1 import minimum_of_last_rows, without_empty_windows
from nwor.engine.workarounds import cpu_generators
from nwor.engine.workarounds.adapters import mend_cpu_operators, mend_drafter

_MARK = "_nwor_windows_mended"

KERNEL = "vllm.v1.sample.rejection_sampler.expand_kernel"


def expand(
    output: torch.Tensor,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: Any = None,  # noqa: N803 - the kernel's own name for it
) -> None:
    """Repeat each request's value for each of its tokens.

    Args:
        output: [num_tokens], any dtype; filled.
        values: [batch_size], the dtype of ``output``.
        cu_num_tokens: [batch_size], integer; tokens up to and including each request.
        replace_from: value that is replaced...
        replace_to: ...by this one.
        MAX_NUM_TOKENS: block size of the Triton kernel, not needed here.

    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    replaced = values.masked_fill(values == replace_from, replace_to)
    output.copy_(replaced.repeat_interleave(counts))


def mend_windows(runner_class: Any) -> None:
    """Exchange two methods of a model runner's class, once: sampling of its windows, and its drafter."""
    sample, load = runner_class._sample, runner_class.load_model
    if getattr(load, _MARK, False):
        return

    @wraps(sample)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        metadata = without_empty_windows(spec_decode_metadata)
        if metadata is None:
            return sample(self, logits, None)
        with minimum_of_last_rows(self.input_batch.logitsprocs, metadata.num_draft_tokens):
            return sample(self, logits, metadata)

    @wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        mend_drafter(self)

    setattr(load_model, _MARK, True)
    runner_class._sample, runner_class.load_model = _sample, load_model


def register() -> None:
    """Apply all, in this process."""
    # Registers vLLM's own implementations, which must come first.
    import vllm._custom_ops
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    del vllm
    if cpu_triton_utils._expand_kernel_impl is not expand:
        expand.__dict__["stock"] = cpu_triton_utils._expand_kernel_impl
        cpu_triton_utils._expand_kernel_impl = expand
    register_kernels({KERNEL: expand})
    cpu_generators.mend()
    mend_windows(CPUModelRunner)
    mend_cpu_operators()


class WorkerExtension:
    """Named in vLLM's ``worker_extension_cls``: importing it is what reaches the worker's process."""


register()
