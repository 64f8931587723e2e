"""Inputs of a step that are what they were in the step before are not copied to the GPU again.

While the same requests decode, model runner V2 sends two small arrays anew in each step (which row of the
state each request has, and where its logits start): a pinned buffer, a copy into it, and a transfer for each.
Nothing writes to them on the device, so the tensors of the step before serve as well.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from nwor.engine.fastpath.stock import Sources, changed

logger = logging.getLogger("vllm.nwor.h2d_cache")

#: What is stood for, and what shows that nothing writes to the two arrays on the device.
INPUTS: Sources = {
    ("vllm.utils.torch_utils", "async_tensor_h2d"): ("1631ef2e73d210dd", "3ccfb4fa33ead3c8"),
    ("vllm.v1.worker.gpu.model_runner", "GPUModelRunner.prepare_inputs"): (
        "bdd97f12ca571c07",
        "acd917326a3288c6",
    ),
}


class H2DCache:
    """Takes the place of vLLM's ``async_tensor_h2d`` in the module of model runner V2.

    Attributes:
        stock: what it takes the place of.
        repeated: copies that were not made again.

    """

    def __init__(self, stock: Callable[..., torch.Tensor]) -> None:
        self.stock = stock
        self.repeated = 0
        # One entry for each number of requests: as many as the engine takes at once.
        self._known: dict[tuple[Any, ...], tuple[np.ndarray[Any, Any], torch.Tensor]] = {}

    def __call__(
        self,
        data: Any,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``data`` on the device, as vLLM's function does.

        Args:
            data: list, array or tensor on the host.
            device: where to.
            dtype: of the result; that of the data where None.
            out: a tensor to copy into; such copies are always made, since others write there too.

        """
        if out is not None or data.__class__ is not np.ndarray or data.ndim != 1:
            return self.stock(data, device=device, dtype=dtype, out=out)
        key = (data.dtype, dtype, device, data.shape[0])
        known = self._known.get(key)
        if known is not None and np.array_equal(known[0], data):
            self.repeated += 1
            return known[1]
        tensor = self.stock(data, device=device, dtype=dtype)
        self._known[key] = (data.copy(), tensor)
        return tensor


def apply() -> str | None:
    """Put it in place in this process, once.

    Returns:
        Why inputs are copied as vLLM does it, which the log says too; None where it is in place.

    """
    from vllm.v1.worker.gpu import model_runner

    if not isinstance(model_runner.async_tensor_h2d, H2DCache):
        reason = changed(INPUTS)
        if reason is not None:
            logger.warning("NWOR leaves the copies of inputs as vLLM does them: %s", reason)
            return reason
        model_runner.async_tensor_h2d = H2DCache(model_runner.async_tensor_h2d)  # type: ignore[assignment]
    return None
