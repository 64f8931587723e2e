"""Requests by seed: lengths, prompts, arrivals. The same seed gives the same load in every arm."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.serving.plan import Lengths

#: Words that prompts are made of begin here: the first ones are special.
FIRST_WORD = 8
#: Prefixes that prompts share.
PREFIXES = 4


@dataclass(frozen=True)
class Wanted:
    """One request as it will be sent.

    Attributes:
        prompt: token ids.
        answer: tokens to generate.
        seed: seeds the sampler, and so the synthetic acceptance.
        hard: whether hardly a draft will be accepted: random words, sampled at temperature 1.

    """

    prompt: list[int]
    answer: int
    seed: int
    hard: bool = False


@dataclass(frozen=True)
class Recipe:
    """What a load's requests are made from.

    Attributes:
        lengths: of prompts and answers.
        vocabulary: words of the model.
        seed: of lengths, arrivals and acceptance: the same in all arms of a round.
        salt: of the words: different in each arm, so that no arm finds another's prompts in a prefix cache.
        shared: share of the prompts that begin with a common prefix.
        texts: token ids of real text to cut prompts from, the same in all arms, since what a head gets right
            depends on them; empty for random words.
        hard: share of hard requests among those with texts; the same words in all arms.

    """

    lengths: Lengths
    vocabulary: int
    seed: str
    salt: str = ""
    shared: float = 0.0
    texts: Sequence[int] = ()
    hard: float = 0.0


def _length(source: random.Random, median: int, sigma: float, least: int, most: int) -> int:
    return min(most, max(least, round(median * source.lognormvariate(0.0, sigma))))


def requests(recipe: Recipe, count: int, early: int = 0) -> list[Wanted]:
    """Return a load's requests.

    Args:
        recipe: what to make them from.
        count: how many.
        early: so many at the start get a part of their answer only. Clients that begin together then do not
            end together, as in a loop that has run for long.

    """
    lengths, words = recipe.lengths, random.Random(f"words {recipe.seed} {recipe.salt}")
    source, places = random.Random(f"lengths {recipe.seed}"), random.Random(f"places {recipe.seed}")
    kinds = random.Random(f"kinds {recipe.seed}")
    vocabulary = range(FIRST_WORD, recipe.vocabulary)
    common = [
        words.choices(vocabulary, k=lengths.most_prompt) for _ in range(PREFIXES if recipe.shared else 0)
    ]
    result = []
    for index in range(count):
        prompt = _length(source, lengths.prompt, lengths.prompt_sigma, lengths.least, lengths.most_prompt)
        answer = _length(source, lengths.answer, lengths.answer_sigma, lengths.least, lengths.most_answer)
        part, chosen, which = source.random(), source.random(), source.randrange(PREFIXES)
        seed = source.randrange(2**31)
        if index < early:
            answer = max(lengths.least, round(answer * part))
        hard = bool(recipe.texts) and kinds.random() < recipe.hard
        if hard:
            ids = kinds.choices(vocabulary, k=prompt)
        elif recipe.texts:
            start = places.randrange(max(1, len(recipe.texts) - prompt))
            ids = list(recipe.texts[start : start + prompt])
        elif chosen < recipe.shared:
            # Half a median prompt is common; what is behind it is the request's own.
            head = common[which][: min(lengths.prompt // 2, prompt - 1)]
            ids = head + words.choices(vocabulary, k=prompt - len(head))
        else:
            ids = words.choices(vocabulary, k=prompt)
        result.append(Wanted(ids, answer, seed, hard))
    return result


def arrivals(seed: str, rate: float, count: int) -> list[float]:
    """Return when requests arrive, in seconds from the start: a Poisson process."""
    source = random.Random(f"arrivals {seed}")
    result, now = [], 0.0
    for _ in range(count):
        now += source.expovariate(rate)
        result.append(now)
    return result


def body(wanted: Wanted, model: str, temperature: float) -> bytes:
    """Return the JSON body of a request to /v1/completions.

    Args:
        wanted: the request.
        model: its name.
        temperature: of requests that are not hard.

    """
    content: dict[str, Any] = {
        "model": model,
        "prompt": wanted.prompt,
        "max_tokens": wanted.answer,
        "temperature": 1.0 if wanted.hard else temperature,
        "seed": wanted.seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(content, separators=(",", ":")).encode()
