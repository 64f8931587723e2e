"""Claim: with a draft vocabulary only its tokens are drafted, and answers stay what they are.

Coverage: the demo model with its head in mode `stage`, greedy, against the same engine without a vocabulary;
what the drafter proposes. Sampled tokens are other draws of the same distribution, since drafts take part in
the draw. Runner V1; V2 by hand.
Control: the vocabulary leaves out tokens that are answered, so fewer drafts are accepted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine import engines
from tests.engine.runner import V2

pytestmark = pytest.mark.engine

ALLOWED = 700
PROMPTS = ["def add(a, b):\n    return", "import os\n\n\nclass Path:\n", "for i in range(10):\n", "x = {"]


def answers(llm: Any) -> tuple[list[tuple[int, ...]], int]:
    """Return the tokens of all prompts, and how many drafts were accepted."""
    from vllm import SamplingParams

    before = llm.collective_rpc("nwor_report")[0]["counts"]["accepted_tokens"]
    params = SamplingParams(temperature=0.0, max_tokens=8 if V2 else 40, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    tokens = [tuple(output.outputs[0].token_ids) for output in outputs]
    return tokens, llm.collective_rpc("nwor_report")[0]["counts"]["accepted_tokens"] - before


def test_only_its_tokens_are_drafted_and_answers_stay() -> None:
    found: dict[str | None, tuple[list[tuple[int, ...]], int]] = {}
    with engines.one_at_a_time() as make:
        for vocabulary in (None, str(ALLOWED)):
            settings = {"mode": "stage", "draft_vocabulary": vocabulary}
            llm = make(
                additional_config={"nwor": settings},
                worker_extension_cls="tests.engine.test_draft_vocabulary_cpu.Drafted",
            )
            llm.collective_rpc("watch_drafts")
            found[vocabulary] = answers(llm)
            told = {"tokens": ALLOWED, "of": 4096} if vocabulary else None
            assert llm.collective_rpc("nwor_report")[0]["draft_vocabulary"] == told
            drafted = llm.collective_rpc("drafted")[0]
            assert drafted
            assert (max(drafted) < ALLOWED) == (vocabulary is not None)
    tokens, accepted = found[None]
    assert max(map(max, tokens)) >= ALLOWED
    assert found[str(ALLOWED)][0] == tokens
    assert 0 < found[str(ALLOWED)][1] < accepted


def test_a_table_that_is_not_there_ends_the_start(tmp_path: Path) -> None:
    settings = {"mode": "stage", "draft_vocabulary": str(tmp_path / "missing")}
    with engines.one_at_a_time() as make, pytest.raises(Exception, match="cannot be read"):
        make(additional_config={"nwor": settings})


class Drafted:
    """Named in vLLM's ``worker_extension_cls``: keeps the tokens that the drafter proposes."""

    model_runner: Any

    def watch_drafts(self) -> None:
        """Begin to keep them."""
        self._drafted: set[int] = set()
        owner = self.model_runner.speculator if V2 else self.model_runner.drafter
        propose = owner.propose

        def kept(*args: Any, **kwargs: Any) -> Any:
            drafts = propose(*args, **kwargs)
            self._drafted.update(drafts.flatten().tolist())
            return drafts

        owner.propose = kept

    def drafted(self) -> set[int]:
        """Return them."""
        return self._drafted
