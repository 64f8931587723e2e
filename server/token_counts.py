"""``nwor-server count-tokens``: the table of frequent tokens that ``--draft-vocabulary`` takes."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nwor.draft_vocabulary import write_table
from server.errors import StartupError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMMAND = "count-tokens"
#: Characters that are tokenized at once, in whole lines.
_PIECE = 1 << 20


def count(tokenizer: PreTrainedTokenizerBase, texts: Iterator[str]) -> Counter[int]:
    """Return how often each token occurs.

    Args:
        tokenizer: of the model that drafts are for.
        texts: pieces of text.

    """
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(tokenizer.encode(text, add_special_tokens=False, verbose=False))
    return counts


def rank(counts: Counter[int], first: Sequence[int]) -> list[int]:
    """Return ids by falling count, and by id where counts are equal.

    Args:
        counts: of each id.
        first: ids that come before all others, as those that end an answer: no text holds them.

    """
    others = sorted(counts.keys() - set(first), key=lambda token: (-counts[token], token))
    return [*dict.fromkeys(first), *others]


def pieces(paths: Sequence[Path]) -> Iterator[str]:
    """Yield the text of files in pieces of whole lines; ``-`` is standard input.

    Raises:
        StartupError: if a file cannot be read.

    """
    for path in paths:
        try:
            source = sys.stdin if str(path) == "-" else path.open(encoding="utf-8", errors="replace")
            with source:
                while lines := source.readlines(_PIECE):
                    yield "".join(lines)
        except OSError as error:
            raise StartupError(f"{path} cannot be read: {error.strerror}") from error


def main(argv: Sequence[str]) -> int:
    """Count tokens and write a table.

    Args:
        argv: the command line behind ``count-tokens``.

    Returns:
        The exit code: 1 where there is no tokenizer or no text.

    """
    parser = argparse.ArgumentParser(
        prog=f"nwor-server {COMMAND}",
        description="Count the tokens of text and write a table for --draft-vocabulary. Take text as the "
        "server's users write and get.",
    )
    parser.add_argument("model", help="Folder or Hugging Face id whose tokenizer counts.")
    parser.add_argument("text", type=Path, nargs="+", help="Text files; - reads standard input.")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="Where to write the table.")
    args = parser.parse_args(argv)
    try:
        tokenizer = _load(args.model)
        counts = count(tokenizer, pieces(args.text))
    except StartupError as error:
        print(f"nwor-server: error: {error}", file=sys.stderr, flush=True)
        return 1
    ids = rank(counts, [token for token in (tokenizer.eos_token_id,) if token is not None])
    total = counts.total()
    write_table(args.out, ids, len(tokenizer), total)
    print(f"{total} tokens, {len(ids)} different ones of {len(tokenizer)}: {args.out}")
    for size in (1_000, 2_000, 4_000, 8_000, 16_000, 32_000, 64_000):
        if total and size < len(ids):
            share = sum(counts[token] for token in ids[:size]) / total
            print(f"  the first {size} are {100 * share:.1f} % of the text")
    return 0


def _load(model: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise StartupError(f"no tokenizer for {model!r}: {' '.join(str(error).split())[:300]}") from error
