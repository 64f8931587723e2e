"""Defaults of the environment variables that vLLM reads: set before it is imported, never over the user's."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

#: Nothing is reported to anyone unless the user asks for it.
NO_REPORTING = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

#: The engine runs in processes of its own; ``fork`` of a process with threads is not safe.
PROCESS_START = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}

#: For models that lie in folders: no look-up on the Hugging Face Hub.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def set_defaults(*, offline: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Fill in what the user has not set.

    Args:
        offline: whether every model is a local folder, so that no hub needs to be asked.
        environ: the environment to change.

    """
    for name, value in {**NO_REPORTING, **PROCESS_START, **(OFFLINE if offline else {})}.items():
        environ.setdefault(name, value)
