"""Random weights of tiny models: a loader of vLLM's, in the place of the one that reads files.

The same model gets the same weights in every process. Matrices keep the size of what goes through them, so
that logits differ by token and by context and no dtype overflows.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch  # read when it is imported: how many threads it may have

FORMAT = "nwor_random"
#: Of attention sinks and other vectors that are added, and of the scales of norms about 1.
SPREAD = 0.3
#: Of embeddings.
EMBEDDED = 0.125


def fill(name: str, tensor: torch.Tensor) -> None:
    """Write random values into one parameter, in place.

    Args:
        name: of the parameter, from which its values follow.
        tensor: [...], floating point; anything else is left alone.

    """
    import torch

    if not tensor.is_floating_point():
        return
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = torch.randn(tensor.shape, generator=generator)
    if name.endswith((".A", ".A_log")):
        # How fast a recurrent layer's state decays: `A` is negative, the other's exponential is negated.
        values = -1.0 - values.abs() if name.endswith(".A") else SPREAD * values
    elif tensor.dim() > 1:
        # Less than what layers add, so that a model with tied embeddings says more than its last token.
        values *= EMBEDDED if "embed" in name or "wte" in name else 1.5 * tensor.shape[-1] ** -0.5
    elif "norm" in name or "ln_" in name:
        values = 1.0 + SPREAD * values if name.endswith("weight") else SPREAD * values
    else:
        values *= SPREAD
    tensor.data.copy_(values.to(tensor.dtype))


def register() -> None:
    """Offer the loader to the engines of this process, as ``load_format``."""
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    class RandomLoader(BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """There is nothing to download."""

        def load_weights(self, model: Any, model_config: Any) -> None:
            for name, parameter in model.named_parameters():
                fill(name, parameter)
            for module in model.modules():
                # DFlash joins weights once they are read, before vLLM packs them for the processor.
                if hasattr(module, "_build_fused_kv_buffers"):
                    module._build_fused_kv_buffers()

    register_model_loader(FORMAT)(RandomLoader)
