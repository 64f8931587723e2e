"""Claim: with trees of draft tokens an engine answers as one without speculation, from the same cache.

Coverage: the demo model on the CPU in float32; grown trees and combs, greedy and seeded; one request and
several together, with prompts in chunks beside trees, prefix hits, trees cut short by the budget of a step
and by the end of the context, preemption, aborts, several answers to a prompt; trees for few requests, chains
for many; switches of the mode before each step; an error in each part; requests whose windows have to be
chains beside others; log-probabilities; frequencies of sampled tokens. Model runner V2, kernels interpreted.
Control: trees accept more than chains of their depth, and windows branch.
Tolerance: none for tokens and for the bytes that a step writes. Log-probabilities and what the cache holds
differ from those without speculation by 1e-4 at most: attention adds up in another order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from server import cpu_sampling
from tests import pipeline_runs
from tests.engine import contexts, engines, poison, tree_stand_ins
from tests.engine.breaking import MESSAGE
from tests.engine.runner import V2
from tests.engine.tree_runs import (
    CHANCES,
    MADE,
    SETTINGS,
    Plain,
    Requests,
    check_steps,
    drive,
    generate,
    params_of,
    prompt_of,
    tokens_of,
)

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not V2, reason="run by test_runner_v2.py: trees need runner V2"),
]
# Both engines sample with what the server mends.
assert cpu_sampling.KERNEL

GROWN = {"nodes": 16, "depth": 6, "width": 4, "kind": "grown"}
COMB = {"nodes": 8, "depth": 4, "width": 3, "kind": "comb"}
#: What adds breadth alone.
MORE = [
    {"nodes": 32, "depth": 6, "width": 8, "kind": "grown"},
    {"nodes": 8, "depth": 4, "width": 3, "kind": "grown"},
    {"nodes": 16, "depth": 4, "width": 4, "kind": "grown"},
    {"nodes": 32, "depth": 6, "width": 8, "kind": "comb"},
    {"nodes": 16, "depth": 6, "width": 4, "kind": "comb"},
    {"nodes": 63, "depth": 8, "width": 8, "kind": "comb"},
]


def _name(tree: dict[str, Any]) -> str:
    return f"{tree['kind']}-{tree['nodes']}-{tree['depth']}"


def _shapes(*shapes: dict[str, Any], more: Sequence[dict[str, Any]] = ()) -> Any:
    """Return a mark that runs a test with engines of some shapes; with ``more`` where slow tests run."""
    cases = [pytest.param(tree, id=_name(tree)) for tree in shapes]
    cases += [pytest.param(tree, id=_name(tree), marks=pytest.mark.slow) for tree in more]
    return pytest.mark.parametrize("engine", cases, indirect=True)


@pytest.fixture(scope="module")
def make_engine() -> Iterator[Callable[..., Any]]:
    with engines.one_at_a_time() as make, pytest.MonkeyPatch.context() as patch:
        # What stock vLLM cuts logits down with cannot be interpreted.
        patch.setattr("vllm.v1.sample.ops.topk_topp_sampler.HAS_TRITON", False)
        yield make


@pytest.fixture(scope="module")
def plain(make_engine: Callable[..., Any]) -> Plain:
    """What an engine without speculation answers, made once for all files of this process."""
    if MADE:
        return MADE[0]
    settings: dict[str, Any] = {
        **engines.PROBED,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 1024,
        "num_gpu_blocks_override": 256,
        "max_model_len": SETTINGS["max_model_len"],
        "speculative_config": None,
        "additional_config": {},
        # The probe is for workers of ours: what it is mixed into must not be their base.
        "worker_extension_cls": "",
    }
    found = Plain(make_engine(**settings))
    # Which attention an engine takes vLLM remembers for those that follow.
    from vllm.v1.attention.selector import _cached_get_attn_backend

    _cached_get_attn_backend.cache_clear()
    MADE.append(found)
    return found


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, make_engine: Callable[..., Any], plain: Plain) -> Iterator[Any]:
    """One engine for each shape, in mode ``stage`` as each test begins."""
    tree = request.param
    with pytest.MonkeyPatch.context() as patch:
        tree_stand_ins.install(patch.setattr)
        llm = make_engine(
            **SETTINGS,
            speculative_config=engines.eagle(tree["nodes"]),
            additional_config={"nwor": {"mode": "stage", "tree": tree, "self_check_interval": 2}},
        )
        assert llm.collective_rpc("runner_module")[0].startswith("nwor.engine.model_runner.v2")
        yield llm


def _report(llm: Any) -> dict[str, Any]:
    report: dict[str, Any] = llm.collective_rpc("nwor_report")[0]
    return report


def _tree_of(llm: Any) -> dict[str, Any]:
    tree: dict[str, Any] = llm.llm_engine.vllm_config.additional_config["nwor"]["tree"]
    return tree


def _begin(llm: Any, mode: str = "stage") -> dict[str, Any]:
    """Put a mode in force, forget all prompts and return the report."""
    llm.collective_rpc("nwor_set_mode", args=(mode,))
    pipeline_runs.drain(llm)
    assert llm.reset_prefix_cache()
    report = _report(llm)
    assert (report["mode"], report["fault"], report["unsupported"]) == (mode, None, None)
    return report


def _watch(
    llm: Any, plain: Plain, run: Callable[[], Any], mode: str = "stage", fault: str | None = None
) -> tuple[Any, dict[str, Any]]:
    """Return what requests give, and what was seen of their steps: all bytes were those that they must be.

    Args:
        llm: the engine.
        plain: what the other one has made.
        run: runs requests that the other one has had too.
        mode: the first one.
        fault: what raises within; None for nothing.

    """
    before = _begin(llm, mode)
    llm.collective_rpc("probe_start")
    try:
        with contexts.read(llm, plain.contexts, tolerance=1e-4) as read:
            result = run()
            pipeline_runs.drain(llm)
    finally:
        seen: dict[str, Any] = llm.collective_rpc("probe_stop")[0]
    assert seen["wrong"] == []
    assert read.wrong == []
    assert read.compared > 0
    report = _report(llm)
    counts, counted = report["counts"], before["counts"]
    if fault is None:
        assert report["fault"] is None
        assert counts["direct_windows"] == counted["direct_windows"]
    else:
        assert f"{MESSAGE}: {fault}" in report["fault"]
    assert not pipeline_runs.core_of(llm).scheduler._nwor_logged
    names = ("windows", "first_tokens", "draft_tokens", "accepted_tokens", "rejected_tokens", "commit_bytes")
    seen |= {name: counts[name] - counted[name] for name in names}
    seen |= {"checks": report["self_checks"] - before["self_checks"], "difference": read.largest}
    seen["drafts"] = read.drafts
    return result, seen


def _compare(llm: Any, plain: Plain, name: str, mode: str = "stage") -> dict[str, Any]:
    """Run a test's requests, compare their tokens, and return what was seen."""
    outputs, seen = _watch(llm, plain, lambda: generate(llm, plain.requests[name]), mode)
    assert tokens_of(outputs) == plain.tokens(name)
    return seen


@_shapes(GROWN, COMB, more=MORE)
@pytest.mark.parametrize("sampling", ["greedy", "seeded"])
def test_tokens_and_cache(engine: Any, plain: Plain, sampling: str) -> None:
    seen = _compare(engine, plain, sampling)
    assert seen["accepted"] > 0
    # Slots get what was accepted and nothing else.
    kept = seen["first_tokens"] + seen["accepted_tokens"]
    assert seen["commit_bytes"] == kept * _report(engine)["token_bytes"]
    if _tree_of(engine) not in (GROWN, COMB):
        return
    # Of these shapes it is known what few requests meet.
    assert seen["rejected"] > seen["accepted"]
    assert seen["branched"] > 0
    assert seen["checks"] > 0
    if sampling == "greedy":
        assert seen["mixed"] > 0
        assert seen["cut"] > 0 or _tree_of(engine) == COMB


@_shapes(more=[GROWN, COMB, *MORE])
def test_many_requests(engine: Any, plain: Plain) -> None:
    assert len(plain.requests["many"]) == 200
    assert _compare(engine, plain, "many")["branched"] > 100


@_shapes(COMB, more=[GROWN])
@pytest.mark.parametrize("name", ["several", "trees"])
def test_parameters(engine: Any, plain: Plain, name: str) -> None:
    seen = _compare(engine, plain, name)
    assert seen["chains"] == 0
    assert seen["branched"] > 0


@_shapes(GROWN, more=[COMB, *MORE])
@pytest.mark.parametrize("name", ["end", "long"])
def test_limits(engine: Any, plain: Plain, name: str) -> None:
    before = pipeline_runs.counter(engine, "vllm:num_preemptions")
    seen = _compare(engine, plain, name)
    assert seen["chains"] == 0
    if name == "end":
        assert seen["cut"] > 0
        ends = [len(prompt["prompt_token_ids"]) for prompt, _ in plain.requests[name]]
        assert [n + len(made) for n, made in zip(ends, plain.tokens(name), strict=True)] == [192, 192]
    if name == "long" and _tree_of(engine) == GROWN:
        assert pipeline_runs.counter(engine, "vllm:num_preemptions") > before


@_shapes(GROWN)
def test_prefix_hits(engine: Any, plain: Plain) -> None:
    requests = plain.requests["end"][:1]
    before = pipeline_runs.counter(engine, "vllm:prefix_cache_hits")
    outputs, _ = _watch(engine, plain, lambda: generate(engine, requests) + generate(engine, requests))
    assert tokens_of(outputs) == plain.tokens("end")[:1] * 2
    assert pipeline_runs.counter(engine, "vllm:prefix_cache_hits") > before


@_shapes(GROWN)
def test_the_kernels_themselves(engine: Any, plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing stands in for them; once, since that takes long."""
    from nwor.engine.trees.top_tokens import top_tokens

    monkeypatch.setattr("nwor.engine.trees.growth.top_tokens", top_tokens)
    outputs, seen = _watch(engine, plain, lambda: generate(engine, plain.requests["greedy"][:1]))
    assert tokens_of(outputs) == plain.tokens("greedy")[:1]
    assert seen["accepted"] > 0


@_shapes(COMB, more=[GROWN])
def test_aborts_and_preemption_of_all(engine: Any, plain: Plain) -> None:
    requests = plain.requests["greedy"]
    preemptions = pipeline_runs.counter(engine, "vllm:num_preemptions")

    def before_step(step: int) -> None:
        if step in (3, 5):
            engine.llm_engine.abort_request([str((step - 3) // 2)])
            prompt, own = requests[3]
            engine.llm_engine.add_request(f"again {step}", prompt, params_of(own))
        if step == 7:
            assert engine.reset_prefix_cache(reset_running_requests=True)

    done, seen = _watch(engine, plain, lambda: drive(engine, requests, before_step))
    expected = plain.tokens("greedy")
    assert done == {
        **{str(index): expected[index] for index in (2, 3, 4)},
        "again 3": expected[3],
        "again 5": expected[3],
    }
    assert seen["branched"] > 0
    assert pipeline_runs.counter(engine, "vllm:num_preemptions") > preemptions


#: Takes each of the six ways from a mode to another, and ends where it began.
WALK = ["off", "stage", "cow", "off", "cow", "stage"]


@_shapes(COMB, more=[GROWN])
@pytest.mark.parametrize(
    ("shift", "period"),
    [(1, 1)]
    + [pytest.param(s, p, marks=pytest.mark.slow) for p in (1, 2) for s in range(6) if (s, p) != (1, 1)],
)
def test_switches(engine: Any, plain: Plain, shift: int, period: int) -> None:
    def before_step(step: int) -> None:
        mode = WALK[(step // period + shift) % len(WALK)]
        engine.collective_rpc("nwor_set_mode", args=(mode,))

    requests = plain.requests["greedy"]
    done, seen = _watch(engine, plain, lambda: drive(engine, requests, before_step))
    assert done == {str(index): tokens for index, tokens in enumerate(plain.tokens("greedy"))}
    assert seen["accepted"] > 0


#: What raises, and in which of the steps with windows.
FAULTS = [
    *(("plan", 1), ("place", 1), ("after place", 2), ("begin", 2), ("after begin", 2), ("stage", 2)),
    *(("after stage", 1), ("attend", 2), ("after attend", 2), ("split", 0), ("commit", 2), ("launch", 1)),
    *(("after commit", 2), ("timing", 2), ("settle", 2), ("after settle", 1)),
]
#: Where all is committed when something fails, so that no window counts as written directly.
COMMITTED = ("after commit", "timing", "settle", "after settle")


@_shapes(COMB, more=[GROWN])
@pytest.mark.parametrize(("where", "steps"), FAULTS)
def test_a_fault_costs_nothing(engine: Any, plain: Plain, where: str, steps: int) -> None:
    requests = plain.requests["greedy"]
    chosen = [0, 4]

    def run() -> list[Any]:
        engine.collective_rpc("break_once", args=(where, steps))
        return generate(engine, [requests[index] for index in chosen])

    outputs, seen = _watch(engine, plain, run, fault=where)
    assert engine.collective_rpc("was_broken")[0] == where
    assert tokens_of(outputs) == [plain.tokens("greedy")[index] for index in chosen]
    assert _report(engine)["mode"] == "off"
    assert seen["failed"] > 0
    assert seen["direct"] == (0 if where in COMMITTED else seen["failed"])


@_shapes(COMB, more=[GROWN])
def test_a_request_fails_alone(engine: Any, plain: Plain) -> None:
    poisoned = (prompt_of(3), {"bad_words": [" self"], "max_tokens": 6})
    requests = [*plain.requests["greedy"][:2], poisoned]
    with poison.sampling():
        outputs, seen = _watch(engine, plain, lambda: generate(engine, requests))
    assert tokens_of(outputs)[:2] == plain.tokens("greedy")[:2]
    assert outputs[2].outputs[0].finish_reason == "error"
    assert seen["branched"] > 0


@_shapes(GROWN, COMB)
def test_a_drafter_that_fails_costs_drafts_alone(engine: Any, plain: Plain) -> None:
    """Also where the draft tokens that stand in for its own are what the target says."""
    tables = contexts.runner_of(engine)._nwor_trees.tables
    for table in (tables._parents, tables._depths, tables._masks, tables._chains):
        table.zero_()  # as in an engine that has just started
    with poison.drafting(contexts.runner_of(engine)):
        outputs, _ = _watch(engine, plain, lambda: generate(engine, plain.requests["one token"]))
    assert tokens_of(outputs) == plain.tokens("one token")
    assert _compare(engine, plain, "long")["accepted"] > 0


@_shapes(COMB, more=[GROWN])
def test_requests_that_need_chains(engine: Any, plain: Plain) -> None:
    seen = _compare(engine, plain, "chains")
    assert seen["chains"] > 0
    assert seen["branched"] > 0


@_shapes(COMB, more=[GROWN])
def test_logprobs(engine: Any, plain: Plain) -> None:
    outputs, seen = _watch(engine, plain, lambda: generate(engine, plain.requests["logprobs"]))
    assert tokens_of(outputs) == plain.tokens("logprobs")
    assert seen["branched"] > 0
    for output, other in zip(outputs, plain.outputs["logprobs"], strict=True):
        ours, theirs = output.outputs[0].logprobs or [], other.outputs[0].logprobs or []
        for here, there in zip(ours, theirs, strict=True):
            assert {k: v.logprob for k, v in here.items()} == pytest.approx(
                {k: v.logprob for k, v in there.items()}, abs=1e-4
            )


@_shapes(GROWN, more=[COMB])
def test_trees_accept_more_than_chains(engine: Any, plain: Plain) -> None:
    """In mode ``off`` windows are the chains that the same drafter finds in as many passes."""
    requests, rates, drafts = plain.requests["greedy"][:2], [], []
    for mode in ("stage", "off"):
        outputs, seen = _watch(engine, plain, lambda: generate(engine, requests), mode)
        assert tokens_of(outputs) == plain.tokens("greedy")[:2]
        assert (seen["branched"] > 0) == (mode == "stage")
        rates.append(seen["accepted"] / seen["windows"])
        drafts.append(seen["drafts"])
    print(f"accepted a window: trees {rates[0]:.2f}, chains {rates[1]:.2f}")
    assert rates[0] > 1.1 * rates[1]
    # Whichever way tokens were accepted, the drafter goes on from the same states.
    both = drafts[0].keys() & drafts[1].keys()
    assert len(both) > len(requests)
    assert {way: drafts[0][way] for way in both} == {way: drafts[1][way] for way in both}


@_shapes(more=[COMB, GROWN])
def test_sampled_tokens_are_as_frequent_as_likely(engine: Any, plain: Plain) -> None:
    """The second token is drawn at the root of a tree, the third at a node where the second was drafted.

    The p-value of Pearson's test is above one in a thousand; seeds are fixed. Without an engine:
    ``tests/unit/test_tree_sampling.py``.
    """
    samples = 300
    _begin(engine)
    before = _report(engine)["counts"]
    own = {"temperature": 1.0, "top_k": 2, "max_tokens": 3}
    requests: Requests = [(CHANCES, {**own, "seed": 1000 + i}) for i in range(samples)]
    seen = Counter(tokens_of(generate(engine, requests)))
    assert _report(engine)["counts"]["accepted_tokens"] - before["accepted_tokens"] > samples // 4
    assert sum(plain.chances.values()) == pytest.approx(1.0)
    assert seen.keys() <= plain.chances.keys()
    # Cells that are rarely met count as one.
    wanted = {way: samples * chance for way, chance in plain.chances.items()}
    rare = [way for way, number in wanted.items() if number < 5]
    cells = [(wanted[way], seen[way]) for way in wanted if way not in rare]
    if rare:
        cells.append((sum(wanted[way] for way in rare), sum(seen[way] for way in rare)))
    assert len(cells) > 2
    statistic = sum((found - number) ** 2 / number for number, found in cells)
    p_value = torch.special.gammaincc(torch.tensor((len(cells) - 1) / 2), torch.tensor(statistic / 2))
    assert p_value > 1e-3, sorted(cells)


@pytest.mark.parametrize(
    ("tree", "by_requests"),
    [
        (COMB, [[1, 3, 8], [4, 4, 3]]),
        (
            {"nodes": 32, "depth": 6, "width": 8, "kind": "grown"},
            [[1, 1, 32], [2, 2, 16], [3, 3, 9], [4, 5, 4]],
        ),
        ({"nodes": 16, "depth": 6, "width": 4, "kind": "comb"}, [[1, 2, 16], [3, 3, 7], [4, 5, 6]]),
    ],
    ids=["comb", "grown-parts", "comb-parts"],
)
def test_trees_for_few_requests_and_less_for_many(
    tree: dict[str, Any], by_requests: list[list[int]], make_engine: Callable[..., Any], plain: Plain
) -> None:
    """Few requests have whole trees, more have parts of them, or chains; some come while others run."""
    speculation = engines.eagle(tree["nodes"])
    speculation["num_speculative_tokens_per_batch_size"] = by_requests
    requests = plain.requests["greedy"]

    with pytest.MonkeyPatch.context() as patch:
        tree_stand_ins.install(patch.setattr)
        llm = make_engine(
            **SETTINGS,
            speculative_config=speculation,
            additional_config={"nwor": {"mode": "stage", "tree": tree, "self_check_interval": 2}},
        )

        def before_step(step: int) -> None:
            if step == 1:
                for index in (2, 3, 4):
                    prompt, own = requests[index]
                    llm.llm_engine.add_request(str(index), prompt, params_of(own))

        done, seen = _watch(llm, plain, lambda: drive(llm, requests[:2], before_step))
    assert done == {str(index): tokens for index, tokens in enumerate(plain.tokens("greedy"))}
    assert seen["branched"] > 0
    # Nodes have no slots: the drafter writes ahead what its passes add.
    assert pipeline_runs.core_of(llm).scheduler.num_lookahead_tokens == tree["depth"]
    # Windows with fewer draft tokens than nodes are chains, or parts of trees.
    assert (seen["chains"] if tree is COMB else seen["cut"] - seen["chains"]) > 0


@pytest.mark.parametrize("tree", [{"nodes": 8, "depth": 5, "width": 3}, COMB], ids=["grown", "comb"])
def test_where_chance_accepts_trees_are_as_deep_as_a_trained_drafters(
    tree: dict[str, Any], make_engine: Callable[..., Any], plain: Plain
) -> None:
    """Else rates of deep levels would say nothing: this drafter's own trees are flat."""
    speculation = engines.eagle(tree["nodes"])
    speculation["rejection_sample_method"] = "synthetic"
    speculation["synthetic_acceptance_rates"] = [0.0] * tree["nodes"]
    nwor = {"mode": "stage", "tree": tree, "tree_acceptance_rates": [1.0] * tree["depth"]}
    with pytest.MonkeyPatch.context() as patch:
        tree_stand_ins.install(patch.setattr)
        llm = make_engine(**SETTINGS, speculative_config=speculation, additional_config={"nwor": nwor})
        before = _begin(llm)["counts"]
        generate(llm, plain.requests["greedy"][:2])
        counts = _report(llm)["counts"]
    windows, accepted = (counts[name] - before[name] for name in ("windows", "accepted_tokens"))
    # A request's last window may have no room for all.
    assert 0.8 * tree["depth"] * windows < accepted <= tree["depth"] * windows


@_shapes(GROWN)
def test_what_is_no_number_does_not_stay_in_the_drafters_windows(
    engine: Any, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One step's overflow, or what memory held at the start, would spoil the drafts of all that follow."""
    growth = contexts.runner_of(engine)._nwor_trees._drafts.growth
    assert growth._windows
    for window in growth._windows:
        window._key.fill_(float("nan"))
        window._value.fill_(float("nan"))
        window._output.fill_(float("nan"))
    _begin(engine)
    lengths = check_steps(engine, plain.requests["greedy"][0][0], GROWN["depth"], GROWN, monkeypatch)
    assert lengths[GROWN["nodes"]] > 2


@_shapes(GROWN, COMB, more=MORE)
def test_each_step_is_that_of_an_independent_decoder(
    engine: Any, plain: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which nodes a tree has, and how far each step comes."""
    tree = _tree_of(engine)
    _begin(engine)
    lengths = check_steps(engine, plain.requests["greedy"][0][0], tree["depth"], tree, monkeypatch)
    assert lengths[tree["nodes"]] > 2
