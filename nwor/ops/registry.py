"""Loads the libraries on import, once per process, and tells torch's tracers what the ops return: nothing.

Every op writes into tensors that the caller gives and returns nothing, so their fake implementations are
empty.
"""

from __future__ import annotations

from typing import Any

import torch

from nwor.ops.library import OP_NAMES, Libraries

LIBRARIES = Libraries()


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


for _name in OP_NAMES:
    torch.library.register_fake(f"nwor::{_name}", _nothing)
