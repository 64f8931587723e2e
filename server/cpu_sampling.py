"""Faults of sampling and of adapters on a CPU, mended in the worker's process.

Ledger of what is exchanged in vLLM 0.32.0:

- target: the CPU implementation of ``vllm.v1.sample.rejection_sampler.expand_kernel``
- why: it writes into a 64-bit copy of its output and never copies back, so a verify step's temperature, top_p
  (floats) and top_k (32-bit integers) come from uninitialized memory: samples ignore them, and no seed holds
- how: ``register_kernels``, vLLM's own way to give a kernel another implementation, in the worker's process;
  the function that vLLM registers is exchanged too, since each new engine in a process registers it again
- removal: when vLLM's implementation fills outputs of any type (a unit test fails on that day)

- target: ``CPUModelRunner._sample`` and ``._bookkeeping_sync``
- why: for a seeded request whose prompt takes several steps, vLLM turns the generator back by an offset,
  which CPU generators do not have: the engine dies, and any client can bring that about
- how: their state is put back after sampling instead, and they are hidden while vLLM would turn them back
- removal: when vLLM asks for the generator's kind before it turns one back (a unit test fails on that day)

- target: ``CPUModelRunner._sample`` again
- why: a step without drafts goes through the rejection sampler with tensors of no rows, of which the mask of
  ``top_k`` alone takes the largest: the engine dies. And ``min_tokens`` looks at a window's last row with the
  length before the window, so that answers run past their natural end
- how: as in NWOR's runner, see ``nwor.engine.isolation_v1``
- removal: when vLLM's rejection sampler does both (an engine test fails without either)

- target: ``CPUModelRunner.load_model`` and the operators of LoRA adapters on a CPU
- why: the drafter gets the target's layers with adapters around them, and rows without adapter take one
- how: see ``nwor.engine.adapters``
- removal: when base requests beside an adapter get their own tokens (an engine test fails without either)
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import torch

from nwor.engine.adapters import mend_cpu_operators, mend_drafter
from nwor.engine.isolation_v1 import minimum_of_last_rows, without_empty_windows

_MARK = "_nwor_mended"

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


def unfinished_generators(runner: Any) -> dict[int, torch.Generator]:
    """Return the generators of seeded requests whose prompt is unfinished, by their row in the batch."""
    rows = np.nonzero(runner.discard_request_mask.np[: runner.input_batch.num_reqs])[0]
    generators = runner.input_batch.generators
    return {int(row): generators[int(row)] for row in rows if int(row) in generators}


def mend_runner(runner_class: Any) -> None:
    """Exchange the two methods of a model runner's class, once."""
    sample, bookkeeping = runner_class._sample, runner_class._bookkeeping_sync
    if getattr(sample, _MARK, False):
        return

    @wraps(sample)
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in unfinished_generators(self).values()]
        metadata = without_empty_windows(spec_decode_metadata)
        if metadata is None:
            output = sample(self, logits, None)
        else:
            with minimum_of_last_rows(self.input_batch.logitsprocs, metadata.num_draft_tokens):
                output = sample(self, logits, metadata)
        for generator, state in states:
            generator.set_state(state)
        return output

    @wraps(bookkeeping)
    def _bookkeeping_sync(self: Any, *args: Any, **kwargs: Any) -> Any:
        hidden = unfinished_generators(self)
        for row in hidden:
            del self.input_batch.generators[row]
        try:
            return bookkeeping(self, *args, **kwargs)
        finally:
            self.input_batch.generators.update(hidden)

    load = runner_class.load_model

    @wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        mend_drafter(self)

    runner_class.load_model = load_model
    setattr(_sample, _MARK, True)
    runner_class._sample = _sample
    runner_class._bookkeeping_sync = _bookkeeping_sync


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
    mend_runner(CPUModelRunner)
    mend_cpu_operators()


class WorkerExtension:
    """Named in vLLM's ``worker_extension_cls``: importing it is what reaches the worker's process."""


register()
