"""Exceptions of the package; one tree, so that a caller can catch them all."""

from __future__ import annotations


class NworError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(NworError, ValueError):
    """A setting is unknown, of the wrong type or out of range."""


class WindowStateError(NworError, RuntimeError):
    """A window operation was called out of order (begin, stage, then commit or abort)."""


class UnsupportedError(NworError):
    """Something that NWOR cannot stage; carries the reason under which it is counted.

    Attributes:
        reason: the key under which the fall-back is counted.

    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail
