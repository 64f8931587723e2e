"""Sampled draft tokens of model runner V1: what they are drawn from, and that seeds hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nwor.engine.workarounds import sampled_drafts
from nwor.engine.workarounds.sampled_drafts import DraftGenerators, KeptProbabilities, sample

VOCABULARY = 12
LOGITS = torch.linspace(-1.0, 2.0, VOCABULARY).roll(5)


def settings(
    temperature: Sequence[float],
    top_k: Sequence[int] | None = None,
    top_p: Sequence[float] | None = None,
    generators: Mapping[int, torch.Generator] | None = None,
) -> Any:
    """Return what is read of vLLM's ``SamplingMetadata``."""
    return SimpleNamespace(
        temperature=torch.tensor(temperature),
        top_k=None if top_k is None else torch.tensor(top_k),
        top_p=None if top_p is None else torch.tensor(top_p),
        generators=dict(generators or {}),
        all_random=min(temperature) > 0,
        all_greedy=max(temperature) == 0,
    )


def expected(temperature: float, top_k: int = VOCABULARY, top_p: float = 1.0) -> list[float]:
    """Return the probabilities of LOGITS, one by one: the k likeliest, then as few as have p in all."""
    weights = [float(torch.tensor(value / temperature).exp()) for value in LOGITS.tolist()]
    order = sorted(range(VOCABULARY), key=lambda token: -weights[token])[:top_k]
    kept, total, whole = [], 0.0, sum(weights[token] for token in order)
    for token in order:
        if total >= top_p * whole:
            break
        kept.append(token)
        total += weights[token]
    return [weights[token] / total if token in kept else 0.0 for token in range(VOCABULARY)]


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 12, 1.0), (0.6, 12, 1.0), (1.0, 4, 1.0), (1.3, 12, 0.7), (0.8, 6, 0.8)],
)
def test_drafts_have_the_distribution_that_is_returned(temperature: float, top_k: int, top_p: float) -> None:
    torch.manual_seed(1)
    rows = 40_000
    metadata = settings([temperature] * rows, [top_k] * rows, [top_p] * rows)
    tokens, probabilities = sample(LOGITS.repeat(rows, 1), metadata, DraftGenerators(), False)
    wanted = torch.tensor(expected(temperature, top_k, top_p))
    assert torch.allclose(probabilities, wanted.expand(rows, -1), atol=1e-5)
    seen = torch.bincount(tokens, minlength=VOCABULARY).double()
    possible = wanted > 0
    assert seen[~possible].sum() == 0
    square = ((seen - rows * wanted)[possible] ** 2 / (rows * wanted[possible])).sum()
    # Chi-squared with at most 11 degrees of freedom is above 35 once in 4,000 times.
    assert square < 35


def test_logits_stay_as_they_are() -> None:
    logits = LOGITS.repeat(2, 1)
    sample(logits, settings([1.0, 0.5], [3, 3]), DraftGenerators(), False)
    assert torch.equal(logits, LOGITS.repeat(2, 1))


def test_greedy_requests_get_the_likeliest_token_beside_others() -> None:
    for _ in range(20):
        tokens, _ = sample(LOGITS.repeat(3, 1), settings([0.0, 1.0, 0.0]), DraftGenerators(), False)
        assert tokens[0] == tokens[2] == LOGITS.argmax()


def test_rows_of_a_request_follow_one_another() -> None:
    tokens, probabilities = sample(
        LOGITS.repeat(6, 1), settings([1.0, 1.0], [1, 12]), DraftGenerators(), False
    )
    assert (tokens[:3] == LOGITS.argmax()).all()
    assert (probabilities[:3] > 0).sum() == 3
    assert (probabilities[3:] > 0).all()


@pytest.mark.parametrize("each", [1, 4])
def test_a_seed_holds_beside_others(each: int) -> None:
    def drafts(place: int, requests: int) -> list[list[int]]:
        own, generators = torch.Generator().manual_seed(7), DraftGenerators()
        found = []
        for _ in range(3):  # steps
            for _ in range(4):  # passes of a window
                before = own.get_state()
                metadata = settings([1.0] * requests, generators={place: own})
                tokens, _ = sample(LOGITS.repeat(requests * each, 1), metadata, generators, False)
                assert torch.equal(own.get_state(), before)
                found.append(tokens[place * each : (place + 1) * each].tolist())
            torch.rand(1, generator=own)  # a token is sampled
        return found

    alone = drafts(0, 1)
    assert drafts(3, 5) == alone
    assert drafts(0, 2) == alone
    assert len({str(part) for part in alone}) > 3


def test_passes_of_a_prompts_chunks_leave_the_first_window_as_it_is() -> None:
    def first(chunks: int) -> list[int]:
        own, generators = torch.Generator().manual_seed(7), DraftGenerators()
        for _ in range(chunks):
            sample(LOGITS.repeat(1, 1), settings([1.0], generators={0: own}), generators, False)
        torch.rand(1, generator=own)  # the prompt's first token
        found: list[int] = []
        for _ in range(8):
            found += sample(LOGITS.repeat(1, 1), settings([1.0], generators={0: own}), generators, False)[
                0
            ].tolist()
        return found

    assert first(0) == first(3)


def test_the_drafters_method_is_exchanged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    monkeypatch.setattr(
        SpecDecodeBaseProposer, "_sample_from_logits", SpecDecodeBaseProposer._sample_from_logits
    )
    sampled_drafts.mend()
    mended = SpecDecodeBaseProposer._sample_from_logits
    sampled_drafts.mend()
    assert SpecDecodeBaseProposer._sample_from_logits is mended
    drafter: Any = SimpleNamespace(_enable_probabilistic_draft_probs=True, use_fp64_gumbel=False)
    tokens, probabilities = mended(drafter, LOGITS.repeat(2, 1), settings([1.0, 1.0], [1, 1]))
    assert tokens.tolist() == [LOGITS.argmax()] * 2
    assert probabilities is not None
    assert (probabilities > 0).sum() == 2
    drafter._enable_probabilistic_draft_probs = False
    tokens, probabilities = mended(drafter, LOGITS.repeat(2, 1), settings([1.0, 1.0]))
    assert probabilities is None


def runner_of(batch: Sequence[str], drawn: Mapping[str, torch.Tensor] | None, known: str = "abcd") -> Any:
    """Return what is read of a runner.

    Args:
        batch: the requests of the step.
        drawn: by request, [drafts, vocabulary] of the last pass; None where that drew nothing.
        known: the requests that have not ended.

    """
    return SimpleNamespace(
        input_batch=SimpleNamespace(req_ids=list(batch)),
        requests=dict.fromkeys(known),
        _draft_probs=None if drawn is None else torch.stack(list(drawn.values())),
        _draft_prob_req_ids=None if drawn is None else list(drawn),
    )


def windows(*drafts: Sequence[int]) -> Any:
    """Return what is read of ``SpecDecodeMetadata``."""
    tokens = [token for part in drafts for token in part]
    return SimpleNamespace(
        num_draft_tokens=[len(part) for part in drafts], draft_token_ids=torch.tensor(tokens)
    )


def test_drafts_of_a_request_that_sits_steps_out_keep_their_probabilities() -> None:
    rows = {name: torch.rand(2, VOCABULARY) for name in "abc"}
    kept = KeptProbabilities()
    kept.begin_step(runner_of("abc", None))
    # b sits two steps out, in which other passes draw.
    kept.begin_step(runner_of("ac", rows))
    assert set(kept.rows) == {"b"}
    kept.begin_step(runner_of("ac", {"a": torch.rand(2, VOCABULARY), "c": torch.rand(2, VOCABULARY)}))
    last = {"a": torch.rand(2, VOCABULARY), "c": torch.rand(2, VOCABULARY)}
    runner = runner_of("cab", last)
    kept.begin_step(runner)
    found = kept.of(runner, windows([3, 4], [], [5]))
    assert torch.equal(found, torch.cat([last["c"], rows["b"][:1]]))
    # Asked again within the step, the same; after it, forgotten.
    assert torch.equal(kept.of(runner, windows([3, 4], [], [5])), found)
    kept.begin_step(runner_of("abc", None))
    assert kept.rows == {}


def test_drafts_that_were_not_drawn_are_certain_each_request_for_itself() -> None:
    rows = {"b": torch.rand(2, VOCABULARY)}
    kept = KeptProbabilities()
    kept.begin_step(runner_of("ab", None))
    runner = runner_of("ab", rows)
    kept.begin_step(runner)
    found = kept.of(runner, windows([7, -1], [1, 2]))
    assert found[0].tolist() == [float(token == 7) for token in range(VOCABULARY)]
    assert torch.equal(found[2:], rows["b"])


def test_a_request_that_has_ended_is_forgotten() -> None:
    kept = KeptProbabilities()
    kept.begin_step(runner_of("ab", None))
    kept.begin_step(runner_of("a", {name: torch.rand(2, VOCABULARY) for name in "ab"}, known="a"))
    assert kept.rows == {}
