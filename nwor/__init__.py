"""No-write-on-reject (NWOR): speculative verification whose rejected tokens never reach the KV cache."""

from nwor.version import __version__

__all__ = ["__version__"]
