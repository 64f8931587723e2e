"""A worker extension for tests with several ranks and trees: as for ranks, and a part of one may break."""

from __future__ import annotations

from tests.engine.breaking import Breaking
from tests.gpu.rank_probe import RankProbe


class TreeRankProbe(Breaking, RankProbe):
    """Mixed into the worker by ``worker_extension_cls``."""
