"""Claim: the short ways of sampling are taken where they fit, leave all else to vLLM, and call nothing twice.

Coverage: speculators and samplers as vLLM makes them, with methods, sources or settings of somebody else's;
drafts of every kind; batches with and without requests that are not greedy. What the GPU computes is tested
in tests/engine/test_greedy_rejection_cpu.py and tests/gpu/test_greedy_sampling.py.
"""

from __future__ import annotations

import logging
from functools import wraps
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.spec_decode import rejection_sampler_utils
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from nwor.engine.fastpath import greedy_sampling
from nwor.engine.fastpath.greedy_sampling import FastDraft, FastVerify
from nwor.engine.ledger import FAST_PATH_LEDGER
from tests.drafting import Speculator, draft
from tests.greedy_batches import Case, make, make_sampler, verify

CPU = torch.device("cpu")


def in_place(speculator: Any, sampler: Any) -> list[str]:
    """Return which of the two ways were put in place."""
    return [what for what, why in greedy_sampling.apply(speculator, sampler, 5, CPU).items() if why is None]


def test_the_ledger_names_what_is_exchanged() -> None:
    targets = {entry.target for entry in FAST_PATH_LEDGER if "greedy_sampling" in entry.how}
    methods = {
        f"{owner.__module__}.{owner.__qualname__}.{name}"
        for owner, name in ((DraftModelSpeculator, "sample_draft"), (RejectionSampler, "_verify"))
    }
    assert targets == methods


def test_both_are_put_in_place_once_and_on_the_objects_alone() -> None:
    batch = make(Case(), CPU)
    speculator, sampler = Speculator(), make_sampler(batch, 4)
    for _ in range(2):
        assert greedy_sampling.apply(speculator, sampler, 5, CPU) == {"drafting": None, "verifying": None}
    for short in (speculator.sample_draft, sampler._verify):
        assert isinstance(short, FastDraft | FastVerify)
        assert not isinstance(short.stock, FastDraft | FastVerify)
    assert not isinstance(DraftModelSpeculator.sample_draft, FastDraft)
    assert not isinstance(Speculator().sample_draft, FastDraft)
    assert not isinstance(make_sampler(batch, 4)._verify, FastVerify)


def test_nothing_to_put_in_place(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, greedy_sampling.logger.name):
        assert in_place(None, None) == []
        assert in_place(object(), None) == []  # drafts by n-grams
    assert not caplog.records


class _OwnDraft(Speculator):
    def sample_draft(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


class _OwnSampler(RejectionSampler):
    pass


def test_methods_and_classes_of_somebody_else_stay(caplog: pytest.LogCaptureFixture) -> None:
    sampler: Any = make_sampler(make(Case(), CPU), 4)
    sampler.__class__ = _OwnSampler
    with caplog.at_level(logging.WARNING, greedy_sampling.logger.name):
        assert in_place(_OwnDraft(), sampler) == []
    assert [record.getMessage() for record in caplog.records] == [
        "NWOR leaves drafting as vLLM does it: _OwnDraft has a sample_draft of its own",
        "NWOR leaves verifying as vLLM does it: the rejection sampler is a _OwnSampler",
    ]


def test_watermarked_outputs_stay() -> None:
    sampler: Any = make_sampler(make(Case(), CPU), 4)
    sampler.watermark_key = 7
    assert greedy_sampling.why_not_verify(sampler) == "outputs are watermarked"


@pytest.mark.parametrize(
    ("owner", "name", "what"),
    [
        (DraftModelSpeculator, "sample_draft", "drafting"),
        (RejectionSampler, "_verify", "verifying"),
        (rejection_sampler_utils, "rejection_sample", "verifying"),
    ],
)
def test_what_somebody_replaced_goes_on_being_called(
    owner: Any, name: str, what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    original = getattr(owner, name)

    @wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, replacement)
    with caplog.at_level(logging.WARNING, greedy_sampling.logger.name):
        done = in_place(Speculator(), make_sampler(make(Case(), CPU), 4))
    assert {*done, what} == {"drafting", "verifying"}
    assert what not in done
    assert len(caplog.records) == 1
    assert name in caplog.records[0].getMessage()


@pytest.mark.parametrize("table", ["DRAFTING", "VERIFYING"])
def test_a_source_that_is_not_the_known_one(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    known = dict(getattr(greedy_sampling, table))
    name = next(iter(known))
    known[name] = ("0" * 16,)
    monkeypatch.setattr(greedy_sampling, table, known)
    done = in_place(Speculator(), make_sampler(make(Case(), CPU), 4))
    assert done == [["verifying"], ["drafting"]][table == "VERIFYING"]
    assert greedy_sampling.changed({(name[0], "gone"): ("",)}) == "gone is not the known one"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 6, 50])
def test_drafts_are_the_most_likely_tokens(rows: int, dtype: torch.dtype) -> None:
    """Other dtypes, and more rows than there is workspace for, are torch's."""
    speculator = Speculator()
    greedy_sampling.apply(speculator, None, 6, CPU)
    hidden = torch.randn(rows, 500).to(dtype)
    got = draft(speculator, hidden)
    assert got.dtype == torch.int64
    assert torch.equal(got, speculator.model.compute_logits(hidden).argmax(dim=-1))
    assert speculator.computed == 1
    assert speculator.predicted == 1
    short: Any = speculator.sample_draft
    assert short.short == (rows < 50 and dtype != torch.float64)


def test_other_ways_to_draft_are_left_to_vllm() -> None:
    speculator = Speculator()
    greedy_sampling.apply(speculator, None, 6, CPU)
    calls: list[tuple[Any, ...]] = []
    short: Any = speculator.sample_draft
    short.stock = lambda *args: calls.append(args) or torch.zeros(2)
    hidden, cache = torch.randn(2, 500), torch.zeros(6, 4, 490)
    draft(speculator, hidden, draft_logits=cache, spec_step_idx=3)
    speculator.use_local_argmax_reduction = True
    draft(speculator, hidden)
    assert [call[0] is hidden for call in calls] == [True, True]
    assert calls[0][-2:] == (cache, 3)
    assert short.short == speculator.computed == 0


@pytest.mark.parametrize("other", [None, 0.7, float("nan")])
def test_only_batches_of_greedy_requests_take_the_short_way(
    other: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = make(Case(), CPU)
    if other is not None:
        batch.temperature[batch.idx_mapping[-1].long()] = other
    sampler = make_sampler(batch, 4)
    ways: list[str] = []

    def way(name: str) -> Any:
        return lambda *args, **kwargs: ways.append(name) or (batch.pos, batch.pos)

    monkeypatch.setattr(greedy_sampling, "rejection_sample_greedy", way("short"))
    greedy_sampling.apply(None, sampler, 5, CPU)
    short: Any = sampler._verify
    short.stock = way("stock")
    verify(short, batch)
    assert ways == ["short" if other is None else "stock"]


def test_more_rows_than_there_is_workspace_for() -> None:
    batch = make(Case(requests=6), CPU)
    sampler = make_sampler(batch, 4)
    greedy_sampling.apply(None, sampler, 5, CPU)
    short: Any = sampler._verify
    short.stock = lambda *args: "stock"
    assert verify(short, batch) == "stock"  # type: ignore[comparison-overlap]
