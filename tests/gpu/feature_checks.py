"""What test_features.py checks, an engine in hand: each feature in mode `stage`, against `off` there.

Every run is made three times: in `off`, in `stage`, and in `stage` with every cache slot watched, for which
the host waits for the device in every step.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from tests import pipeline_runs
from tests.gpu import near_ties

#: More than may run at once, so that prompts are read beside windows.
PROMPTS = [
    f"class Item{i}:\n    def method_{i}(self, a, b):\n        " + body * (1 + i % 3)
    for i, body in enumerate(
        ["return a + b", "for i in a:\n        b += i", "raise ValueError(a)", "x = {"] * 6
    )
]
NEW_TOKENS = 64
#: Blocks of the cache: room for the beginning of 16 requests, of 16 tokens a block, not for the end of all.
BLOCKS, BEGINNING, END = 160, 100, 260
#: Settings of the engine.
SETTINGS: dict[str, Any] = {
    "max_model_len": 512,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "block_size": 16,
    "num_gpu_blocks_override": BLOCKS,
    "enable_lora": True,
    "max_loras": 1,
    "max_lora_rank": 8,
    # Not the embedding, which the EAGLE head shares: vLLM would adapt the drafter's rows by the target's map.
    "lora_target_modules": ["q_proj", "v_proj"],
    # A small model may fill its budget with blanks between JSON's tokens.
    "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    # What tokens are chosen by, so that near-ties can be told also with penalties and grammars.
    "logprobs_mode": "processed_logprobs",
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["class", "function"]},
        "name": {"type": "string", "pattern": "^[a-z]{1,12}$"},
        "lines": {"type": "integer", "minimum": 0, "maximum": 999},
        "parameters": {"type": "array", "items": {"enum": ["a", "b", "self"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["kind", "name", "lines", "parameters"],
    "additionalProperties": False,
}
FORM = r"(yes|no): [0-9]{3}-[a-f]{8}"
#: How much farther outputs may differ where more than attention rounds otherwise: kernels of an adapter,
#: whose sums have no order, or keys and values that a window computed here, and a prompt there.
LOOSER = 1.5


@dataclass
class Seen:
    """A run in one mode.

    Attributes:
        outputs: vLLM's outputs.
        counts: what NWOR counted in it.

    """

    outputs: list[Any]
    counts: dict[str, Any]

    @property
    def tokens(self) -> list[tuple[int, ...]]:
        """The tokens of each output."""
        return [tuple(output.outputs[0].token_ids) for output in self.outputs]

    @property
    def acceptance(self) -> float:
        """The share of draft tokens that were accepted."""
        return float(self.counts["accepted_tokens"] / self.counts["draft_tokens"])


def sampling(**params: Any) -> Any:
    """Return sampling parameters: greedy and of full length, but for what is given."""
    from vllm import SamplingParams

    common = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 5}
    return SamplingParams(**{**common, **params})


def complete(
    llm: Any, params: Any = None, prompts: Sequence[Any] | None = None, lora: Any = None
) -> list[Any]:
    """Return vLLM's outputs for some prompts, by default for all, with parameters for all or one for each."""
    prompts = PROMPTS if prompts is None else prompts
    return llm.generate(prompts, params or sampling(), use_tqdm=False, lora_request=lora)


def check_rows(what: str, mode: str, counts: dict[str, Any], token_bytes: int, most: int, gone: int) -> None:
    """Check how many tokens' K/V a run committed, and how many it wrote directly.

    Args:
        what: the run, for messages.
        mode: `off` or `stage`.
        counts: of the engine's report.
        token_bytes: of one token in all layers.
        most: tokens that `stage` may have written directly.
        gone: windows that it did write directly. What they kept is not told apart, but each kept a token.

    """
    kept = counts["first_tokens"] + counts["accepted_tokens"]
    committed, left = divmod(counts["commit_bytes"], token_bytes)
    written, rest = divmod(counts["direct_bytes"], token_bytes)
    assert left == rest == 0, f"{what}: the bytes are not those of whole tokens: {counts}"
    if mode != "stage":
        drafted = counts["first_tokens"] + counts["draft_tokens"]
        assert (committed, written) == (0, drafted), f"{what}: not {drafted} tokens were written: {counts}"
        return
    assert gone <= written <= most, f"{what}: {gone} windows did not write {written} tokens"
    assert kept - written <= committed <= kept - gone, f"{what}: not {kept} tokens were kept: {counts}"


def observe(
    llm: Any,
    what: str,
    mode: str,
    run: Callable[[], list[Any]],
    *,
    watch: bool = False,
    shares: bool = False,
) -> Seen:
    """Make a run in a mode and check what holds of every one.

    Args:
        llm: the engine.
        what: what is run, for messages.
        mode: `off` or `stage`.
        run: the run; returns vLLM's outputs.
        watch: whether to look which cache slots each step changes.
        shares: whether requests may read blocks that the same step fills. Full graphs of model runner V1 go
            direct then.

    """
    what = f"{what} in {mode}{', watched' * watch}"
    pipeline_runs.drain(llm)
    llm.collective_rpc("nwor_set_mode", args=("stage",))  # forgets a fault of the run before
    for answer in llm.collective_rpc("nwor_set_mode", args=(mode,)):
        assert answer["new"] == mode, f"{what}: the mode in force is {answer['new']}"
    assert llm.reset_prefix_cache(), f"{what}: blocks of the run before are still in use"
    llm.collective_rpc("nwor_reset_stats")
    scheduler = pipeline_runs.core_of(llm).scheduler
    scheduler._nwor_logged.clear()
    slots: dict[str, int] | None = None
    if watch:
        llm.collective_rpc("probe_start", args=(shares,))
    try:
        outputs = run()
        pipeline_runs.drain(llm)
    finally:
        if watch:
            slots = llm.collective_rpc("probe_stop")[0]
    report = llm.collective_rpc("nwor_report")[0]
    counts = report["counts"]
    numbers = ("windows", "draft_tokens", "accepted_tokens", "commit_bytes", "direct_bytes", "stage_bytes")
    print(what, {name: counts[name] for name in numbers}, slots or "")
    assert report["fault"] is None, f"{what}: {report['fault']}"
    assert report["unsupported"] is None, f"{what}: nothing is staged: {report['unsupported']}"
    direct = dict(counts["direct_windows"])
    gone = 0
    if shares and not llm.llm_engine.vllm_config.use_v2_model_runner:
        gone = direct.pop("graph", 0)
        assert gone <= counts["windows"] / 50, f"{what}: {counts['direct_windows']}"
    assert direct == {}, f"{what}: windows written directly: {counts['direct_windows']}"
    assert counts["windows"] > 0, f"{what}: nothing was verified"
    assert counts["rejected_tokens"] > 0, f"{what}: no draft was rejected"
    drafts = llm.llm_engine.vllm_config.speculative_config.num_speculative_tokens
    check_rows(what, mode, counts, report["token_bytes"], gone * (1 + drafts), gone)
    if mode == "stage":
        assert report["self_checks"] > 0, f"{what}: the cache was never checked"
    if slots is not None:
        assert slots["stray"] == 0, f"{what}: {slots['stray']} slots changed that must not"
        assert slots["unwritten"] == 0, f"{what}: {slots['unwritten']} slots of kept tokens were not written"
        assert slots["wrong"] == 0, f"{what}: {slots['wrong']} slots do not hold what `off` writes"
        assert slots["direct"] <= gone, f"{what}: {slots['direct']} windows went direct, {gone} are counted"
        assert slots["rejected"] > 0, f"{what}: the probe saw no rejected token"
    assert scheduler._nwor_logged == set(), f"{what}: figures differ from vLLM's: {scheduler._nwor_logged}"
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == BLOCKS - 1, f"{what}: {free} of {BLOCKS - 1} blocks are free when all requests have ended"
    return Seen(outputs, counts)


def in_modes(llm: Any, what: str, run: Callable[[], list[Any]], *, shares: bool = False) -> dict[str, Seen]:
    """Make a run in `off`, in `stage` and in `stage` with every slot watched ("watched")."""
    return {
        "off": observe(llm, what, "off", run),
        "stage": observe(llm, what, "stage", run, shares=shares),
        "watched": observe(llm, what, "stage", run, watch=True, shares=shares),
    }


def compare(what: str, runs: dict[str, Seen], *, scale: float = 1.0, greedy: bool = True) -> None:
    """Check that both runs in `stage` part from that in `off` at near-ties only."""
    for name in ("stage", "watched"):
        outputs, expected = runs[name].outputs, runs["off"].outputs
        near_ties.check(f"{what}, {name}", outputs, expected, scale=scale, greedy=greedy)


def check_structured_outputs(llm: Any) -> None:
    """Outputs obey a JSON schema or a regular expression, requests of both kinds beside each other."""
    from vllm.sampling_params import StructuredOutputsParams

    kinds = [{"json": SCHEMA}, {"regex": FORM}]
    params = [
        sampling(structured_outputs=StructuredOutputsParams(**kinds[i % 2]), ignore_eos=False, max_tokens=96)
        for i in range(len(PROMPTS))
    ]
    runs = in_modes(llm, "structured outputs", lambda: complete(llm, params))
    for name, seen in runs.items():
        for index, output in enumerate(seen.outputs):
            choice = output.outputs[0]
            assert choice.finish_reason == "stop", f"{name}: output {index} does not end: {choice.text!r}"
            if index % 2:
                assert re.fullmatch(FORM, choice.text), f"{name}: output {index} is {choice.text!r}"
            else:
                jsonschema.validate(json.loads(choice.text), SCHEMA)
    compare("structured outputs", runs)


def check_lora(llm: Any, adapter: str) -> None:
    """Requests with an adapter and without run beside each other, and each has the model that it asks for."""
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("random", 1, adapter)
    mixed = [lora if i % 2 else None for i in range(len(PROMPTS))]
    runs = in_modes(llm, "LoRA", lambda: complete(llm, lora=mixed))
    compare("LoRA", runs, scale=LOOSER)
    base = observe(llm, "no adapter", "stage", lambda: complete(llm))
    plain = slice(None, None, 2)
    near_ties.check("beside adapters", runs["stage"].outputs[plain], base.outputs[plain], scale=LOOSER)
    changed = [ours != theirs for ours, theirs in zip(runs["stage"].tokens, base.tokens, strict=True)]
    assert all(changed[1::2]), f"LoRA: outputs of the base model in spite of the adapter: {changed[1::2]}"


def check_seeded(llm: Any) -> None:
    """A seed gives the same random tokens again, and those of `off` while both modes see the same context."""

    def seeded(first: int) -> list[Any]:
        penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.2, "top_k": 20}
        return [
            sampling(temperature=0.8, seed=first + i, **(penalties if i % 2 else {"top_p": 0.9}))
            for i in range(len(PROMPTS))
        ]

    runs = in_modes(llm, "seeded", lambda: complete(llm, seeded(100)))
    others = observe(llm, "other seeds", "stage", lambda: complete(llm, seeded(500)))
    assert runs["stage"].tokens == runs["watched"].tokens, "seeded: the same seeds give other tokens"
    # Logits are divided by the temperature, and a token more or less among those that top_p leaves moves the
    # others' log-probabilities by up to 0.11. After random tokens the model is less sure of what follows: on
    # a CPU in bfloat16 log-probabilities differ about twice as much as those of greedy outputs.
    compare("seeded", runs, scale=2.5, greedy=False)
    same = shared(runs["stage"].tokens, runs["off"].tokens)
    chance = shared(others.tokens, runs["stage"].tokens)
    print(f"seeded: {same:.2f} of the tokens before outputs part, {chance:.2f} with other seeds")
    assert same >= 0.25, f"seeded: outputs of `stage` and `off` share only {same:.2f} before they part"
    assert chance <= same / 2, f"seeded: outputs of other seeds share {chance:.2f}, of the same {same:.2f}"
    noise = 6 * (0.5 / runs["off"].counts["draft_tokens"]) ** 0.5
    rates = {name: seen.acceptance for name, seen in runs.items()}
    assert abs(rates["stage"] - rates["off"]) < noise, f"seeded: acceptance differs: {rates}"


def check_several_answers(llm: Any) -> None:
    """Answers to one prompt are drawn each for itself, and again with the same seed."""

    def answers() -> list[Any]:
        params = [sampling(temperature=0.8, n=3, seed=100 + i) for i in range(len(PROMPTS))]
        return complete(llm, params)

    runs = in_modes(llm, "several answers", answers, shares=True)
    tokens = {
        name: [[tuple(choice.token_ids) for choice in output.outputs] for output in seen.outputs]
        for name, seen in runs.items()
    }
    assert tokens["stage"] == tokens["watched"], "several answers: the same seeds give other tokens"
    for name, found in tokens.items():
        assert {len(choices) for choices in found} == {3}, name
        apart = [len(set(choices)) == 3 for choices in found]
        assert sum(apart) > len(apart) / 2, f"{name}: answers to one prompt are alike: {apart}"


def shared(one: Sequence[tuple[int, ...]], other: Sequence[tuple[int, ...]]) -> float:
    """Return which share of outputs' tokens comes before they part."""
    common = 0
    for ours, theirs in zip(one, other, strict=True):
        pairs = list(zip(ours, theirs, strict=False))
        common += next((i for i, (mine, yours) in enumerate(pairs) if mine != yours), len(pairs))
    return common / sum(map(len, one))


def check_penalties(llm: Any) -> None:
    """Penalties, words that must not come, and stop tokens, which must not come early."""
    plain = observe(llm, "no penalties", "stage", lambda: complete(llm))
    encode = llm.get_tokenizer().encode
    banned = {tuple(encode(word, add_special_tokens=False)) for word in ("self", " self")}
    assert any(contain(plain.tokens, word) for word in banned), "penalties: the model never says `self`"
    often = Counter(token for tokens in plain.tokens for token in tokens).most_common(4)
    stops = {token for token, _ in often}
    # No more than 2: model runner V1 counts drafts as tokens before they are accepted, in every mode, and so
    # may let a stop token come too early.
    fewest = 2
    kinds: list[dict[str, Any]] = [
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"presence_penalty": 0.5, "stop_token_ids": list(stops), "min_tokens": fewest},
    ]
    params = [sampling(bad_words=[" self"], **kinds[i % 2]) for i in range(len(PROMPTS))]
    runs = in_modes(llm, "penalties", lambda: complete(llm, params))
    for name, seen in runs.items():
        assert not any(contain(seen.tokens, word) for word in banned), f"{name}: a banned word came"
        stopped = [tokens for tokens in seen.tokens[1::2] if tokens[-1] in stops]
        assert stopped, f"{name}: no output ends with a stop token"
        for tokens in seen.tokens[1::2]:
            assert len(tokens) >= fewest, f"{name}: an output ends after {len(tokens)} tokens"
            assert stops.isdisjoint(tokens[:-1]), f"{name}: an output goes on after a stop token"
        full = {len(tokens) for tokens in seen.tokens[::2]}
        assert full == {NEW_TOKENS}, f"{name}: outputs without stop tokens have {full} tokens"
    changed = [ours != theirs for ours, theirs in zip(runs["stage"].tokens, plain.tokens, strict=True)]
    assert all(changed[::2]), "penalties: they change nothing"
    compare("penalties", runs, scale=1.3)


def contain(outputs: Sequence[tuple[int, ...]], word: tuple[int, ...]) -> bool:
    """Return whether some output has the tokens of a word in a row."""
    return any(
        tokens[i : i + len(word)] == word for tokens in outputs for i in range(len(tokens) - len(word) + 1)
    )


def check_prefix_hits(llm: Any) -> None:
    """Later requests read from the prefix cache what windows have committed, also while they still run."""
    firsts: list[Any] = []

    def turns() -> list[Any]:
        firsts[:] = complete(llm, prompts=PROMPTS[:8])
        second = [[*first.prompt_token_ids, *first.outputs[0].token_ids] for first in firsts]
        return complete(llm, prompts=[{"prompt_token_ids": ids} for ids in second])

    for watch in (False, True):
        hits = observe(llm, "second turns", "stage", turns, watch=watch).outputs
        for index, (first, hit) in enumerate(zip(firsts, hits, strict=True)):
            prompt, cached = len(first.prompt_token_ids), hit.num_cached_tokens
            assert cached > prompt, (
                f"turn {index}: {cached} tokens from the cache, {prompt} of the first prompt"
            )
        again = [{"prompt_token_ids": hit.prompt_token_ids} for hit in hits]
        fresh = observe(llm, "second turns anew", "off", lambda again=again: complete(llm, prompts=again))
        assert not any(output.num_cached_tokens for output in fresh.outputs), "the prefix cache was not empty"
        near_ties.check("second turns", hits, fresh.outputs, scale=LOOSER)

    block = llm.llm_engine.vllm_config.cache_config.block_size
    start = llm.get_tokenizer().encode(PROMPTS[0] * 8)[: 3 * block - 5]

    def meanwhile() -> list[Any]:
        with pipeline_runs.outputs(llm) as outputs:
            pipeline_runs.prefix_hits(llm, start, sampling, tokens=100, pause=False)
        hits = [output.num_cached_tokens for output in outputs.values()]
        assert max(hits) > len(start), f"no request read what another was making: {hits}"
        return [outputs["parent"]]

    compare("prefix hits meanwhile", in_modes(llm, "prefix hits meanwhile", meanwhile))


def check_preemption(llm: Any) -> None:
    """Requests lose their blocks while others verify, and go on where they were."""
    encode = llm.get_tokenizer().encode
    prompts = [{"prompt_token_ids": encode(prompt * 20)[:BEGINNING]} for prompt in PROMPTS[:16]]

    def run() -> list[Any]:
        before = pipeline_runs.counter(llm, "vllm:num_preemptions")
        outputs = complete(llm, sampling(max_tokens=END - BEGINNING), prompts)
        assert pipeline_runs.counter(llm, "vllm:num_preemptions") > before, "nothing was preempted"
        return outputs

    runs = in_modes(llm, "preemption", run)
    for name, seen in runs.items():
        lengths = {len(tokens) for tokens in seen.tokens}
        assert lengths == {END - BEGINNING}, f"{name}: outputs have {lengths} tokens"
    compare("preemption", runs, scale=LOOSER)


def check_aborts(llm: Any) -> None:
    """Three requests are aborted amid their windows and started anew; others go on as if nothing had been."""
    plain = observe(llm, "no aborts", "off", lambda: complete(llm))

    def run() -> list[Any]:
        with pipeline_runs.statistics(llm) as stats, pipeline_runs.outputs(llm) as outputs:
            pipeline_runs.aborts(llm, PROMPTS, sampling)
            pipeline_runs.drain(llm)
        told = [stat.nwor for stat in stats if getattr(stat, "nwor", None) is not None]
        assert sum(figures.aborted_windows for figures in told) > 0, "no aborted request had verified"
        # The first three were started anew under 100 more.
        return [outputs[str(index + 100 * (index < 3))] for index in range(len(PROMPTS))]

    for name, seen in in_modes(llm, "aborts", run).items():
        near_ties.check(f"aborts, {name}", seen.outputs, plain.outputs)
