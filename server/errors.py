"""Exceptions of the server package; one tree, so that a caller can catch them all."""

from __future__ import annotations


class ServerError(Exception):
    """Base of every error that this package raises on purpose."""


class StartupError(ServerError):
    """The server cannot start; the message is one line that says what to do."""


class UsageError(StartupError):
    """The command line cannot be served as it stands; the message is one line that says what to do."""
