"""A worker extension for tests on the CPU: the cache probe, and what windows keep alive."""

from __future__ import annotations

from tests.copy_watch import CopyWatch
from tests.engine.cache_probe import CacheProbe


class CopyProbe(CopyWatch, CacheProbe):
    """Mixed into the worker by ``worker_extension_cls``."""
