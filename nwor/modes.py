"""The three ways a verify step may treat the KV cache."""

from __future__ import annotations

from enum import StrEnum

from nwor.errors import ConfigError


class Mode(StrEnum):
    """How the tokens of a window reach the paged cache.

    Attributes:
        OFF: stock behaviour; every token is written inside the forward pass.
        STAGE: the window stays outside the cache; the accepted tokens are committed after sampling.
        COW: copy-on-write; the draft slots' bytes are logged, all tokens are written directly, and the slots
            of rejected tokens are restored. Costs more writes than ``OFF``, works with any attention kernel.

    """

    OFF = "off"
    STAGE = "stage"
    COW = "cow"

    @classmethod
    def parse(cls, text: object) -> Mode:
        """Return the mode named by ``text``.

        Raises:
            ConfigError: if ``text`` names no mode; the message lists those there are.

        """
        try:
            return cls(str(text).strip().lower())
        except ValueError:
            names = ", ".join(mode.value for mode in cls)
            raise ConfigError(f"unknown NWOR mode {text!r}: use one of {names}") from None
