"""For tests on model runner V2: what requests find in the cache at the start of each step.

Keys and values of a token depend on nothing but the tokens up to it. So those of an engine without
speculation say what any other engine has to have there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from nwor.engine.attention.cpu import layer_cache_views
from nwor.engine.attention.target_layers import target_layers
from tests import pipeline_runs


@dataclass
class Contexts:
    """What has been read.

    Attributes:
        longest: of each request the tokens of its longest context, and [layers, 2, tokens, heads, size].
        compared: how many tokens were looked up in another engine's contexts.
        largest: the largest difference from there.
        wrong: what differed by more than rounding, or was not there.
        drafts: the first draft token of each window, by all tokens before it.

    """

    longest: dict[str, tuple[list[int], torch.Tensor]] = field(default_factory=dict)
    compared: int = 0
    largest: float = 0.0
    wrong: list[str] = field(default_factory=list)
    drafts: dict[tuple[int, ...], int] = field(default_factory=dict)


def runner_of(llm: Any) -> Any:
    """Return the model runner of an engine in this process."""
    return pipeline_runs.core_of(llm).model_executor.driver_worker.worker.model_runner


@contextmanager
def read(llm: Any, wanted: Contexts | None = None, tolerance: float = 0.0) -> Iterator[Contexts]:
    """Read each request's context before each of its steps.

    Args:
        llm: the engine.
        wanted: contexts of another engine, with those of the same requests among them; None to compare
            nothing.
        tolerance: by how much keys and values may differ.

    """
    runner, contexts = runner_of(llm), Contexts()
    layers = list(target_layers(runner).values())
    prepare = runner.prepare_attn

    def prepared(batch: Any) -> Any:
        result = prepare(batch)
        for row, index in enumerate(batch.idx_mapping_np.tolist()):
            length = int(runner.req_states.num_computed_tokens.gpu[index])
            tokens = runner.req_states.all_token_ids.gpu[index, :length].tolist()
            if length:
                found = _read(layers, result[0][0][row], length)
                contexts.longest[batch.req_ids[row]] = tokens, found
                if wanted is not None:
                    _compare(contexts, wanted, tokens, found, tolerance)
            drafts = batch.num_draft_tokens_per_req
            if drafts is not None and drafts[row]:
                start, end = batch.query_start_loc[row : row + 2].tolist()
                *certain, first = batch.input_ids[start : end - int(drafts[row]) + 1].tolist()
                contexts.drafts[*tokens, *certain] = first
        return result

    with mock.patch.object(runner, "prepare_attn", prepared):
        yield contexts


def _read(layers: list[Any], blocks: torch.Tensor, length: int) -> torch.Tensor:
    sides = []
    for layer in layers:
        for view in layer_cache_views(layer):
            places = torch.arange(length)
            sides.append(view[blocks[places // view.shape[1]].long(), places % view.shape[1]])
    return torch.stack(sides).unflatten(0, (len(layers), 2))


def _compare(
    contexts: Contexts, wanted: Contexts, tokens: list[int], found: torch.Tensor, tolerance: float
) -> None:
    best, length = None, 0
    for own, values in wanted.longest.values():
        both = min(len(own), len(tokens))
        if both > length and own[:both] == tokens[:both]:
            best, length = values, both
    # The step that ends a request has taken in no more than the token before its last; steps that were
    # scheduled ahead are of no consequence.
    if best is None:
        contexts.wrong.append(f"nobody else computed a context of {len(tokens)} tokens")
        return
    difference = float((best[:, :, :length] - found[:, :, :length]).abs().max())
    contexts.compared += length
    contexts.largest = max(contexts.largest, difference)
    if not difference <= tolerance:
        contexts.wrong.append(f"a context of {length} tokens differs by {difference}")
