"""OpenAI-compatible HTTP server around vLLM's AsyncLLM, with EAGLE speculative decoding.

Importing this package imports neither torch nor vLLM; ``create_app`` is loaded when it is asked for.
"""

from typing import Any

from nwor.version import __version__

__all__ = ["__version__", "create_app"]


def __getattr__(name: str) -> Any:
    if name == "create_app":
        from server.app import create_app

        return create_app
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
