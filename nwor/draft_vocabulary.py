"""Which tokens a drafter may draft: a table of the frequent ones, so that its head reads a part of its rows.

Drafts alone change: the target verifies them, so answers stay what they are. No torch, no vLLM.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nwor.errors import ConfigError

#: Draft methods whose head can draft of a part: one product of the drafter's own model for each token.
METHODS = ("eagle", "eagle3")
#: Keys of a table's file: tokens of the tokenizer, tokens counted, and the ids, most frequent first.
_VOCABULARY, _COUNTED, _IDS = "vocabulary", "counted", "ids"


@dataclass(frozen=True)
class VocabularyChoice:
    """What was asked for: the first ids of a table, or of the tokenizer.

    Attributes:
        path: the table's file; None for the tokenizer's own order, which BPE makes by frequency.
        most: how many ids; None for all of the table.

    """

    path: str | None
    most: int | None

    @classmethod
    def parse(cls, text: str) -> VocabularyChoice:
        """Return the choice that ``N``, ``FILE`` or ``FILE:N`` names.

        Raises:
            ConfigError: if it is empty, or N is 0.

        """
        match = re.fullmatch(r"(?:(?P<path>.+?):)?(?P<most>\d+)", text.strip(), re.DOTALL)
        path, most = (match["path"], int(match["most"])) if match else (text.strip() or None, None)
        if most == 0 or (path is None and most is None):
            raise ConfigError(
                f"{text!r} is no draft vocabulary: give a number of tokens, a table's file, or FILE:NUMBER"
            )
        return cls(path, most)

    def __str__(self) -> str:
        """Return the text that :meth:`parse` reads."""
        return ":".join(str(part) for part in (self.path, self.most) if part is not None)

    def ids(self, vocabulary: int) -> list[int]:
        """Return the chosen ids, ascending.

        Args:
            vocabulary: tokens that the drafter's head has.

        Raises:
            ConfigError: if the table cannot be read, or is another tokenizer's.

        """
        chosen = range(vocabulary) if self.path is None else read_table(Path(self.path), vocabulary)
        return sorted(chosen[: self.most])


def read_table(path: Path, vocabulary: int) -> list[int]:
    """Return a table's ids, most frequent first.

    Args:
        path: its file.
        vocabulary: tokens that the drafter's head has; tables of tokenizers with fewer fit, too, since heads
            are padded.

    Raises:
        ConfigError: if it cannot be read, is no table, or names tokens that the head has not.

    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        ids = [int(number) for number in content[_IDS]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"the draft vocabulary {str(path)!r} cannot be read ({error}): "
            "`nwor-server count-tokens` writes one"
        ) from error
    if not ids or len(set(ids)) < len(ids):
        raise ConfigError(f"the draft vocabulary {str(path)!r} is empty or names a token twice")
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise ConfigError(
            f"the draft vocabulary {str(path)!r} names tokens up to {max(ids)}, and the model has "
            f"{vocabulary}: count them with the model's own tokenizer"
        )
    return ids


def write_table(path: Path, ids: Sequence[int], vocabulary: int, counted: int) -> None:
    """Write a table.

    Args:
        path: its file.
        ids: most frequent first.
        vocabulary: tokens of the tokenizer.
        counted: how many tokens of text they were counted in.

    """
    content = {_VOCABULARY: vocabulary, _COUNTED: counted, _IDS: list(ids)}
    path.write_text(json.dumps(content) + "\n", encoding="utf-8")
