"""Which attention backends are extended where nobody names them, and which windows are then staged.

On compute capability 10 vLLM prefers FlashInfer. Its kernels there use instructions that ``verify_attention``
does not have: it runs its ``mma.sync`` kernels. On Hopper these read a 16-bit cache as fast as memory gives
it while a KV head has few query rows, and convert an fp8 cache no faster than that. Memory has since become
faster by more than these instructions have. So few rows and 16-bit caches are staged there, nothing else.
This is an estimate; nothing has been measured there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nwor.engine.eligibility import Unsupported

#: The setting that leaves the choice to this module.
AUTO = "auto"
#: Major compute capability of GPUs on which vLLM prefers FlashInfer.
FLASHINFER_FIRST = 10
#: Query rows of a window for a KV head, up to which ``mma.sync`` is taken on Hopper (16-bit, head size 128).
MOST_ROWS = 16


def resolved(names: Sequence[str], capability: tuple[int, int] | None) -> tuple[str, ...]:
    """Return the names of the backends that are extended.

    Args:
        names: the setting ``attention_backends``.
        capability: the GPU's compute capability; None where it has none.

    """
    chosen: list[str] = []
    for name in names:
        if name != AUTO:
            chosen.append(name)
            continue
        chosen.append("flash")
        if capability is not None and capability[0] == FLASHINFER_FIRST:
            chosen.append("flashinfer")
    return tuple(dict.fromkeys(chosen))


def check_worthwhile(
    name: str, layer: Any, backend: Any, names: Sequence[str], capability: tuple[int, int], longest: int
) -> None:
    """Check that staging is not expected to slow a layer down, where nobody asked for its backend.

    Args:
        name: of the layer.
        layer: its module.
        backend: its extended backend.
        names: the setting ``attention_backends``.
        capability: the GPU's compute capability.
        longest: rows of the longest window.

    Raises:
        Unsupported: stock attention is expected to be faster.

    """
    if backend.get_name() != "FLASHINFER" or "flashinfer" in names or capability[0] != FLASHINFER_FIRST:
        return
    impl = layer.impl
    rows = longest * (impl.num_heads // impl.num_kv_heads)
    if impl.kv_cache_dtype.startswith("fp8"):
        found = "an fp8 cache"
    elif rows > MOST_ROWS:
        found = f"windows of {rows} query rows for each KV head, more than {MOST_ROWS}"
    else:
        return
    raise Unsupported(
        "attention_backend",
        f"layer {name} has {found}: on this GPU FlashInfer is expected to be faster (an estimate); "
        "name flashinfer in attention_backends (--nwor-attention-backends) to stage them all the same",
    )
