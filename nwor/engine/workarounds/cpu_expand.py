"""Sampling parameters of verify steps on a CPU: a fault of vLLM 0.32.0 mended, with and without NWOR.

The CPU implementation of ``expand_kernel`` writes into a 64-bit copy of its output and never copies back. So
a verify step's temperature, top_p (floats) and top_k (32-bit integers) come from uninitialized memory:
samples ignore them, and no seed holds. ``register_kernels`` is vLLM's own way to give a kernel another
implementation; the function that vLLM registers is exchanged too, since each new engine of a process
registers it again.
"""

from __future__ import annotations

from typing import Any

import torch

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


def mend() -> None:
    """Give the kernel this implementation, in this process; safe to call any number of times."""
    # Registers vLLM's own implementations, which must come first.
    import vllm._custom_ops
    from vllm.triton_utils.dispatcher import register_kernels
    from vllm.utils import cpu_triton_utils

    del vllm
    if cpu_triton_utils._expand_kernel_impl is not expand:
        expand.__dict__["stock"] = cpu_triton_utils._expand_kernel_impl
        cpu_triton_utils._expand_kernel_impl = expand
    register_kernels({KERNEL: expand})
