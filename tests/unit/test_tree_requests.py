"""Requests that have chains beside trees: each counted once, by reason; and the code that trees stand for.

Claim: the ledger names each method of vLLM's objects that trees exchange, and no other.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from nwor.config import NworConfig
from nwor.engine import ledger, patches, plugin
from nwor.engine.fastpath import stock
from nwor.engine.plugin import TESTED, vllm_version
from nwor.engine.trees import decoding, growth, known_sources, requirements
from nwor.engine.trees.decoding import TreeDecoding
from nwor.engine.trees.requirements import CHAIN_REASONS, needs_chain
from nwor.errors import ConfigError
from nwor.modes import Mode
from nwor.tree_shape import TreeKind, TreeShape
from nwor.worker_state import WorkerState

#: By reason, what is asked for.
ASKED: dict[str, Any] = {
    "penalties": [{"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}],
    "bad_words": [{"bad_words": ["no"]}],
    "structured_outputs": [{"structured_outputs": StructuredOutputsParams(regex="a+")}],
    "thinking_token_budget": [{"thinking_token_budget": 8}],
}


@pytest.mark.parametrize("reason", ASKED)
def test_what_vllms_kernels_know_as_chains_alone(reason: str) -> None:
    assert reason in CHAIN_REASONS
    for asked in ASKED[reason]:
        assert needs_chain(SamplingParams(**asked), custom_processors=False) == reason


def test_the_others_have_trees() -> None:
    assert needs_chain(None, custom_processors=False) is None
    plain = SamplingParams(temperature=0.7, top_p=0.9, top_k=20, seed=3, logprobs=2, stop=["."], min_tokens=2)
    assert needs_chain(plain, custom_processors=False) is None
    assert needs_chain(plain, custom_processors=True) == "logits_processors"
    assert {*ASKED, "logits_processors"} == set(CHAIN_REASONS)


class _Tables:
    candidates = None

    def __init__(self) -> None:
        self.linear: dict[int, bool] = {}
        self.shape = TreeShape.of(16)
        self.growing: set[str] = set()
        self.verifies_trees = False

    def set_linear(self, slot: int, linear: bool) -> None:
        self.linear[slot] = linear


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Trees of a rank whose sampler, drafter and layers are stand-ins."""
    monkeypatch.setattr(decoding, "TreeSampler", lambda *args: None)
    monkeypatch.setattr(decoding, "TreeDrafts", lambda *args: SimpleNamespace(growth=None))
    monkeypatch.setattr(decoding, "Agreement", lambda device: None)
    runner = SimpleNamespace(
        model_config=SimpleNamespace(logits_processors=None),
        rejection_sampler=None,
        speculator=None,
        device=torch.device("cpu"),
    )
    config = NworConfig.from_mapping({"tree": {"nodes": 8, "depth": 4}})
    made = TreeDecoding(runner, _Tables())  # type: ignore[arg-type]
    state = WorkerState(config, Mode.STAGE)
    windows: Any = SimpleNamespace(state=state, use_trees=lambda tables: None, window=object())
    made.attach(windows, runner)
    return SimpleNamespace(made=made, state=state)


def _add(trees: Any, name: str, slot: int, **asked: Any) -> None:
    trees.made.add([SimpleNamespace(req_id=name, sampling_params=SamplingParams(**asked))], {name: slot})


def test_each_request_is_counted_once_and_each_reason_logged_once(
    trees: Any, caplog: pytest.LogCaptureFixture
) -> None:
    facts = trees.state.facts
    with caplog.at_level(logging.INFO, decoding.logger.name):
        _add(trees, "warm-up", 0, presence_penalty=0.5)
        assert trees.made.tables.linear == {0: True}
        trees.state.serving = True
        assert trees.state.facts is facts
        _add(trees, "a", 0, presence_penalty=0.5)
        _add(trees, "b", 1)
        _add(trees, "c", 2, bad_words=["no"])
        _add(trees, "a", 3, presence_penalty=0.5)  # preempted, and back in another slot
    assert trees.made.tables.linear == {0: True, 1: False, 2: True, 3: True}
    assert trees.state.report()["tree"]["chain_requests"] == {"penalties": 1, "bad_words": 1}
    assert trees.state.facts.chain_requests == (("penalties", 1), ("bad_words", 1))
    trees.made.forget({"a", "b"})
    with caplog.at_level(logging.INFO, decoding.logger.name):
        _add(trees, "a", 0, presence_penalty=0.5)
    assert trees.made.chains == {"penalties": 2, "bad_words": 1}
    told = [record.getMessage() for record in caplog.records]
    assert [next(reason for reason in CHAIN_REASONS if reason in words) for words in told] == [
        "penalties",
        "bad_words",
    ]


@pytest.mark.skipif(plugin.tested(vllm_version() or "") is None, reason="another vLLM")
def test_a_known_release_has_what_trees_stand_for() -> None:
    known_sources.check()
    assert max(map(len, known_sources.SOURCES.values())) <= len(TESTED)


@pytest.mark.parametrize("place", known_sources.SOURCES, ids=lambda place: place[1])
def test_other_code_of_vllms_ends_the_start(place: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = stock.found_digest
    monkeypatch.setattr(stock, "found_digest", lambda *asked: "another" if asked == place else found(*asked))
    config = SimpleNamespace(additional_config={"nwor": {"tree": {"nodes": 8}}})
    monkeypatch.setattr(requirements, "check_engine", lambda *args: None)
    with pytest.raises(ConfigError, match=f"stand for, {place[1]} is not the known one"):
        patches.choose_worker(config)


class _Stock:
    """An object of vLLM's with whatever is asked for; what is its own has been exchanged."""

    max_num_reqs, device = 2, torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return _Stock()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        return None


def _listed(module: str) -> set[str]:
    """Return the last names of what the ledger says that a module exchanges."""
    return {entry.target.rpartition(".")[2] for entry in ledger.OBJECT_LEDGER if entry.where == module}


@pytest.mark.parametrize("kind", TreeKind)
def test_the_ledger_names_what_trees_exchange(kind: TreeKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "draft_layers", lambda runner: [])
    monkeypatch.setattr(decoding, "Agreement", lambda device: None)
    monkeypatch.setattr(growth.draft_window, "attach", lambda *args: [])
    shape = TreeShape.of(8, 4, kind=kind)
    candidates = SimpleNamespace(window=12) if kind is TreeKind.GROWN else None
    first = torch.zeros(2, 9)
    tables: Any = SimpleNamespace(shape=shape, path=first, candidates=candidates, most_requests=2)
    runner, speculator = _Stock(), _Stock()
    given = {"model_config": SimpleNamespace(logits_processors=None), "speculator": speculator}
    vars(runner).update(given)
    made = TreeDecoding(runner, tables)
    state = WorkerState(NworConfig.from_mapping({"tree": shape.to_mapping()}), Mode.STAGE)
    windows: Any = SimpleNamespace(state=state, use_trees=lambda tables: None, window=object())
    made.attach(windows, runner)
    assert vars(speculator).keys() == _listed("nwor.engine.trees.speculator")
    assert vars(runner).keys() - given.keys() == {"rejection_sampler"}
    assert isinstance(runner.rejection_sampler, RejectionSampler)
    # Made anew, out of memory that sleeping may empty.
    assert tables.path.data_ptr() != first.data_ptr()
    # Of what the runner holds the ledger names the class.
    assert _listed("nwor.engine.trees.decoding") == {"RejectionSampler", "StructuredOutputsWorker"}


@pytest.mark.parametrize(
    ("rows", "tokens", "stride", "kept"), [(64, 24, None, 24), (64, 24, 17, 64), (8, 24, None, 8)]
)
def test_masks_of_a_grammar_have_the_rows_of_a_step(
    rows: int, tokens: int, stride: int | None, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoding, "mask_stride", lambda config: stride)
    worker = SimpleNamespace(
        logits_indices=torch.zeros(rows, dtype=torch.int32),
        grammar_bitmask=torch.zeros(rows, 3, dtype=torch.int32),
    )
    runner = SimpleNamespace(structured_outputs_worker=worker, max_num_tokens=tokens, vllm_config=None)
    decoding._shrink_bitmask(runner)
    assert worker.logits_indices.shape == (kept,)
    assert worker.grammar_bitmask.shape == (kept, 3)
    decoding._shrink_bitmask(SimpleNamespace())  # ranks that do not sample have none


def test_a_step_has_trees_where_a_request_of_it_was_drafted_one(trees: Any) -> None:
    made, tables = trees.made, trees.made.tables
    rows = dict.fromkeys("abc", 2)
    assert not made.begin("ab", rows)
    tables.growing.update("ab")
    assert made.begin("bc", rows)
    assert tables.verifies_trees
    # One that sits a step out keeps its tree.
    assert not made.begin("c", rows)
    assert not tables.verifies_trees
    assert made.begin("a", rows)
    made.forget({"a"})
    assert not made.begin("a", rows)
    assert tables.growing == {"b"}


def test_windows_longer_than_chains_are_attended_with_those_of_trees(trees: Any) -> None:
    """vLLM gives a new request as many places for draft tokens as there can be, before any are made."""
    made, longest = trees.made, 1 + trees.made.tables.shape.longest_chain
    assert not made.begin("a", {"a": longest, "prompt": 500})
    assert made.begin("ab", {"a": longest, "b": longest + 1})
