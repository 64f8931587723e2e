"""Makes docs/works-with.md from records of :mod:`tests.architectures.run`, which lie beside it.

``python -m tests.architectures.works_with [RECORDS]``: with a file of records, those take the place of the
ones of the same models and device in docs/works-with.jsonl first.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[2] / "docs"
KEPT, PAGE = DOCS / "works-with.jsonl", DOCS / "works-with.md"

HEAD = """# Models that have been tried

Made by `python -m tests.architectures.works_with` from [works-with.jsonl](works-with.jsonl), the records
of `tests/architectures/test_modes.py`. Each model is tiny, with random weights. It answered the same prompts
in `off`, `stage`, `cow` and under plain vLLM: 3 to 200 tokens, in chunks, with prefix hits, together and
alone, greedy and seeded. *Equal* counts outputs with the same tokens in all four. *Control* counts greedy
outputs that change where commits write nothing. *Drafts* names the method and the draft tokens of a step.
Runner V2 is interpreted on a CPU and got three prompts.

*Staged* says that rejected tokens stayed out of the cache. *Direct* says that every window was written as
stock vLLM writes it, and names the [reason](vllm/fallbacks.md#reasons).
"""


#: What is said besides where records of a GPU are among them.
ON_GPUS = """
On a GPU models are in bfloat16, so that outputs may part at near-ties; records are those of
`tests/gpu/test_architectures.py`.
"""
TABLE = """
| Model | vLLM's class | Drafts | Windows | Equal | Accepted | Control | Tried on |
|---|---|---|---|---|---|---|---|
"""


def row(record: dict[str, Any]) -> str:
    """Return a record's line of the table."""
    direct, counts = record["direct"], record["counts"]["stage"]
    differing = max(sum(kinds.values()) for kinds in record["differing"].values())
    cells = (
        record["name"],
        f"`{record['architecture']}`",
        record["drafter"],
        "staged" if direct is None else f"direct: `{direct['reason']}`",
        f"{record['outputs'] - differing} of {record['outputs']}",
        f"{counts['accepted_tokens']} of {counts['draft_tokens']}",
        "" if record["control"] is None else f"{record['control']} of {record['prompts']}",
        record["tried_on"],
    )
    return f"| {' | '.join(cells)} |\n"


def page(records: Iterable[dict[str, Any]]) -> str:
    """Return the page's text; staged models come first."""
    ordered = sorted(
        records,
        key=lambda record: (record["direct"] is not None, record["name"].lower(), key_of(record)),
    )
    on_gpus = any(record.get("device", "CPU") != "CPU" for record in ordered)
    return HEAD + ON_GPUS * on_gpus + TABLE + "".join(map(row, ordered))


def key_of(record: dict[str, Any]) -> str:
    """Return what a record is known by: the model's name, and the device unless it is a CPU."""
    device = record.get("device", "CPU")
    return record["name"] if device == "CPU" else f"{record['name']} [{device}]"


def read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the records of a file by what they are known by, without those of models that did not run."""
    records = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    return {key_of(record): record for record in records if "errors" not in record}


def main() -> None:
    """Take records in and write the page."""
    records = read(KEPT)
    for name in sys.argv[1:]:
        records |= read(Path(name))
    lines = [json.dumps(records[name], sort_keys=True) + "\n" for name in sorted(records)]
    KEPT.write_text("".join(lines))
    PAGE.write_text(page(records.values()))


if __name__ == "__main__":
    main()
