"""The probe of engine tests for workers in processes of their own: slow kernels of trees have stand-ins."""

from __future__ import annotations

from tests.engine.cache_probe import CacheProbe
from tests.engine.tree_stand_ins import install

# vLLM imports this in the worker, whose class it mixes the probe into.
install()


class TreeProbe(CacheProbe):
    """Mixed into workers by ``worker_extension_cls``."""
