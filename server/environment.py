"""Defaults of the environment variables that vLLM reads: set before it is imported, never over the user's."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

#: Nothing is reported to anyone unless the user asks for it.
NO_REPORTING = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}

#: The engine runs in processes of its own; ``fork`` of a process with threads is not safe.
PROCESS_START = {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}

#: vLLM closes a connection that rests for 5 s, just when clients and proxies use it again: requests get lost.
CONNECTIONS = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75"}

#: For models that lie in folders: no look-up on the Hugging Face Hub.
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def set_defaults(*, offline: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Fill in what the user has not set.

    Args:
        offline: whether every model is a local folder, so that no hub needs to be asked.
        environ: the environment to change.

    """
    defaults = NO_REPORTING | PROCESS_START | CONNECTIONS | (OFFLINE if offline else {})
    for name, value in defaults.items():
        environ.setdefault(name, value)
