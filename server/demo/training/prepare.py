"""Turn the corpus into token streams, chat samples and held-out prompts."""

import hashlib
import json
import multiprocessing
import random
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from server.demo.training import corpus as corpora
from server.demo.training import tokenizer as tok

PROMPTS = 128
_VALIDATION_SHARE = 0.01


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "replace")).digest()[:6], "big")


def function_samples(text: str) -> list[str]:
    """A file's documented functions: half as chat exchanges, half as bare code, by a hash of the code."""
    samples = []
    for ask, answer in corpora.chat_pairs(text):
        code = answer.removeprefix("```python\n").removesuffix("\n```")
        samples.append(tok.chat_text(ask, answer) if _number(code) % 2 else code + "\n" + tok.EOS)
    return samples


def _cut(tokenizer: Tokenizer, text: str, tokens: int) -> str | None:
    """The whole lines within the first ``tokens`` tokens; None where less than half of them would remain."""
    encoding = tokenizer.encode(text, add_special_tokens=False)
    if len(encoding.ids) < tokens + 64:
        return None
    head = text[: encoding.offsets[tokens][0]]
    head = head[: head.rfind("\n") + 1]
    return head if len(tokenizer.encode(head, add_special_tokens=False).ids) >= tokens // 2 else None


def held_out_prompts(
    tokenizer: Tokenizer, folder: Path, modules: list[str], count: int
) -> list[dict[str, Any]]:
    """Beginnings of held-out files and of their functions, module by module in turn.

    A file's beginning has at most 200 to 300 tokens, a function's at most 100 to 220, by a hash of its text;
    both end with a line. At least 64 tokens of the original follow each of them.
    """
    queues: list[list[dict[str, Any]]] = []
    for module in modules:
        text = (folder / f"{module}.py").read_text(encoding="utf-8").expandtabs(4)
        pieces = [("file", module, text, 200 + _number(text) % 101)]
        for node, code in sorted(corpora.functions(text), key=lambda item: _number(item[1])):
            pieces.append(("function", f"{module}.{node.name}", code, 100 + _number(code) % 121))
        queue = []
        for kind, name, source, tokens in pieces:
            prompt = _cut(tokenizer, source, tokens)
            if prompt is not None:
                queue.append({"module": module, "name": name, "kind": kind, "prompt": prompt})
        queues.append(queue)
    chosen: list[dict[str, Any]] = []
    while len(chosen) < count and any(queues):
        for queue in queues:
            if queue and len(chosen) < count:
                chosen.append(queue.pop(0))
    return chosen


def _stream(tokenizer: Tokenizer, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of all texts, each between BOS and EOS, as one int16 tensor; int64 offsets of their starts."""
    eos = tokenizer.token_to_id(tok.EOS)
    pieces, starts, at = [], [], 0
    for begin in range(0, len(texts), 4096):
        for encoding in tokenizer.encode_batch_fast(texts[begin : begin + 4096]):
            ids = encoding.ids if encoding.ids[-1] == eos else [*encoding.ids, eos]
            pieces.append(torch.tensor(ids, dtype=torch.int16))
            starts.append(at)
            at += len(ids)
    return torch.cat(pieces), torch.tensor(starts, dtype=torch.int64)


def prepare(
    work: Path, vocab_size: int, cap_characters: int, total_characters: int, seed: int, workers: int
) -> None:
    """Write ``tokenizer.json``, ``data.pt``, ``prompts.jsonl`` and ``corpus.json`` into ``work``.

    Args:
        cap_characters, total_characters: as in ``corpus.collect``.
        seed: shuffles the documents.
        workers: processes that parse source for function samples.
    """
    rng = random.Random(seed)
    corpus, held_out = corpora.collect(cap_characters, total_characters)
    print(f"corpus: {len(corpus.sources)} files, {corpus.kept_out} kept out", flush=True)
    sample = rng.sample(corpus.sources, len(corpus.sources))
    tokenizer = tok.train(_up_to((s.text for s in sample), 40_000_000), vocab_size)
    tokenizer.save(str(work / "tokenizer.json"), pretty=False)
    print("tokenizer trained", flush=True)

    with multiprocessing.get_context("fork").Pool(workers) as pool:
        samples = [s for found in pool.imap(function_samples, (s.text for s in sample), 64) for s in found]
    rng.shuffle(samples)
    folder = corpora.stdlib_folder()
    validation = [s.text for s in sample if _number(s.path) % 1000 < 1000 * _VALIDATION_SHARE]
    training = [s for s in sample if _number(s.path) % 1000 >= 1000 * _VALIDATION_SHARE]
    # The standard library's style is what the demo is asked for, so its files go in twice.
    texts = [s.text for s in training] + [s.text for s in training if s.package == "cpython"] + samples
    rng.shuffle(texts)
    tokens, starts = _stream(tokenizer, texts)
    held = [(folder / f"{m}.py").read_text(encoding="utf-8").expandtabs(4) for m in held_out]
    data = {
        "train": tokens,
        "train_starts": starts,
        "validation": _stream(tokenizer, validation)[0],
        "held_out": _stream(tokenizer, held)[0],
    }
    torch.save(data, work / "data.pt")
    prompts = held_out_prompts(tokenizer, folder, held_out, PROMPTS)
    (work / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts), encoding="utf-8")
    per_token = sum(len(t) for t in texts) / tokens.numel()
    for package in corpus.packages.values():
        package.tokens = round(package.characters / per_token)
    summary = {
        "held_out_modules": held_out,
        "files": len(corpus.sources),
        "files_kept_out": corpus.kept_out,
        "function_samples": len(samples),
        "characters_per_token": round(per_token, 3),
        "tokens": {name: data[name].numel() for name in ("train", "validation", "held_out")},
        "prompts": len(prompts),
        "packages": [asdict(p) for p in corpus.packages.values()],
    }
    (work / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    print({k: v for k, v in summary.items() if k != "packages"}, flush=True)


def _up_to(texts: Iterable[str], characters: int) -> Iterable[str]:
    for text in texts:
        if characters <= 0:
            return
        characters -= len(text)
        yield text
