"""``--num-speculative-tokens`` and ``--tree-nodes``: numbers, bounds, shapes, and where they cannot be."""

from __future__ import annotations

import argparse
import re
from typing import Any

import pytest

from nwor.config import DEFAULT_DRAFT_TOKENS, DraftBounds, NworConfig
from nwor.engine import plugin
from nwor.tree_shape import TreeShape
from server import demo, draft_tokens, options
from server.errors import UsageError
from server.nwor_options import add_nwor_options, resolve_nwor
from server.options import add_server_options, resolve_models

MODEL, DRAFT = str(demo.model_path()), str(demo.draft_path())


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NWOR_ADMIN_API_KEY", "NWOR_DISABLE", "VLLM_API_KEY", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugin, "register", lambda: None)


def settle(*flags: str, device: str = "cuda", **vllm: Any) -> argparse.Namespace:
    """Our flags, settled as the command line settles them, with the attributes of vLLM's that ours read."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?")
    add_server_options(parser)
    add_nwor_options(parser)
    args = parser.parse_args([MODEL, "--draft", DRAFT, *flags])
    defaults: dict[str, Any] = {
        **dict.fromkeys(("speculative_config", "spec_method", "spec_model", "spec_tokens", "uds", "api_key")),
        **{"model": "owner/default", "data_parallel_size": 1, "pipeline_parallel_size": 1, "port": 8000},
        **{"additional_config": None, "scheduler_cls": None, "max_num_seqs": None},
    }
    for name, value in {**defaults, **vllm}.items():
        setattr(args, name, value)
    resolve_models(args, "owner/default", device)
    resolve_nwor(args, speculates=True)
    return args


def chosen(args: argparse.Namespace) -> DraftBounds | None:
    config = NworConfig.from_additional_config(args.additional_config)
    return None if config is None else config.draft_tokens


def test_windows_fit_requests_where_the_number_is_chosen() -> None:
    for flags, fits in (((), False), (("--fit-windows",), True)):
        args = settle("--num-speculative-tokens", "auto", *flags)
        config = NworConfig.from_additional_config(args.additional_config)
        assert config is not None
        assert config.fit_windows == fits
    with pytest.raises(UsageError, match="add --num-speculative-tokens auto"):
        settle("--num-speculative-tokens", "4", "--fit-windows")


def test_a_number_fixes_it() -> None:
    args = settle("--num-speculative-tokens", "6")
    assert args.speculative_config["num_speculative_tokens"] == 6
    assert "num_speculative_tokens_per_batch_size" not in args.speculative_config
    assert chosen(args) is None


@pytest.mark.parametrize(
    ("word", "bounds"),
    [("auto", DraftBounds()), ("auto:1-6", DraftBounds(1, 6)), ("auto:0-2", DraftBounds(0, 2))],
)
def test_auto_gives_vllm_a_schedule_and_the_engine_its_bounds(word: str, bounds: DraftBounds) -> None:
    args = settle("--num-speculative-tokens", word, tensor_parallel_size=2)
    assert args.speculative_config["num_speculative_tokens"] == bounds.most
    schedule = args.speculative_config["num_speculative_tokens_per_batch_size"]
    assert schedule == [list(entry) for entry in bounds.schedule]
    assert chosen(args) == bounds


def test_vllm_takes_the_schedule() -> None:
    from vllm.v1.spec_decode.dynamic.utils import build_dynamic_sd_schedule_lookup

    args = settle("--num-speculative-tokens", "auto:1-6")
    schedule = args.speculative_config["num_speculative_tokens_per_batch_size"]
    lookup = build_dynamic_sd_schedule_lookup(schedule, 16, 6)
    assert set(lookup[2:]) == {DraftBounds(1, 6).fixed}


@pytest.mark.parametrize(
    "word", ["0", "-1", "many", "", "auto:", "auto:8", "auto:8-1", "auto:0-0", "auto:1-64", "automatic"]
)
def test_other_words_are_refused(word: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        draft_tokens.parse(word)


NOWHERE = [
    (("--no-nwor",), {}, "drop it, or give a number"),
    (("--nwor-modes", "off,cow", "--nwor-mode", "off"), {}, "add stage to --nwor-modes"),
    ((), {"additional_config": {"nwor": {"modes": ["off"], "mode": "off"}}}, "add stage to --nwor-modes"),
    ((), {"data_parallel_size": 2}, "data parallelism"),
    ((), {"pipeline_parallel_size": 2}, "pipeline stages"),
    ((), {"scheduler_cls": "my.Scheduler"}, "--scheduler-cls"),
]


@pytest.mark.parametrize(("flags", "vllm", "word"), NOWHERE)
def test_auto_is_refused_where_it_cannot_be(flags: tuple[str, ...], vllm: Any, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        settle("--num-speculative-tokens", "auto", *flags, **vllm)
    settle("--num-speculative-tokens", "4", *flags, **vllm)


def test_auto_is_refused_with_model_runner_v1_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(UsageError, match="drop VLLM_USE_V2_MODEL_RUNNER=0"):
        settle("--num-speculative-tokens", "auto")
    assert chosen(settle("--num-speculative-tokens", "auto", device="cpu")) == DraftBounds()


def test_auto_is_refused_without_nwor_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NWOR_DISABLE", "1")
    with pytest.raises(UsageError, match="NWOR_DISABLE is set"):
        settle("--num-speculative-tokens", "auto")


def test_auto_needs_a_method_with_steps_of_other_lengths() -> None:
    args = argparse.Namespace(no_nwor=False, additional_config=None)
    for method in ("medusa", "peagle", "ngram", "draft_model", "mtp", "dflash"):
        assert f"'{method}'" in (draft_tokens.why_not_auto(args, method, "cuda") or "")


def test_bounds_in_additional_config_are_taken() -> None:
    args = settle(additional_config={"nwor": {"draft_tokens": "auto:1-3"}})
    assert chosen(args) == DraftBounds(1, 3)
    assert args.speculative_config["num_speculative_tokens"] == 3
    with pytest.raises(UsageError, match="drop one of them"):
        settle(
            *("--num-speculative-tokens", "auto"), additional_config={"nwor": {"draft_tokens": "auto:1-3"}}
        )


def test_auto_beside_nwors_settings_in_additional_config_is_refused() -> None:
    with pytest.raises(UsageError, match='"draft_tokens": "auto:0-8"'):
        settle("--num-speculative-tokens", "auto", additional_config={"nwor": {"mode": "stage"}})


def test_the_fixed_number_stands_in_for_a_default_of_auto(capsys: pytest.CaptureFixture[str]) -> None:
    assert chosen(settle("--draft-sampling", "sampled")) == DraftBounds()
    assert "; up to 8 tokens a step" in capsys.readouterr().err
    for flags, vllm, _ in NOWHERE:
        args = settle(*flags, **vllm)
        assert args.speculative_config["num_speculative_tokens"] == DEFAULT_DRAFT_TOKENS
        assert "num_speculative_tokens_per_batch_size" not in args.speculative_config
        assert chosen(args) is None
        why, told = capsys.readouterr().err.splitlines()
        assert "4 draft tokens in each step, not auto" in why
        assert told.endswith("; 4 tokens a step")


@pytest.mark.parametrize("flags", [(), ("--num-speculative-tokens", "auto")])
def test_trees_are_among_what_the_engine_chooses_by_default(
    flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    args = settle(*flags)
    config = NworConfig.from_additional_config(args.additional_config)
    assert config is not None
    assert (config.tree, config.tree_required) == (TreeShape.of(60, 8), False)
    assert config.draft_tokens is not None
    assert config.draft_tokens.candidates == (0, 1, 2, 3, 4, 6, 8, 13, 14, 15, 29, 30, 31, 58, 59, 60)
    assert args.speculative_config["num_speculative_tokens"] == 60
    assert args.speculative_config["num_speculative_tokens_per_batch_size"] == [[1, 1, 0], [2, 2, 4]]
    assert "; up to 8 tokens, or a tree of up to 60 a step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "vllm"),
    [
        (("--num-speculative-tokens", "auto:0-8"), {}),
        (("--num-speculative-tokens", "5"), {}),
        (("--draft-sampling", "sampled"), {}),
        ((), {"enable_lora": True}),
        (("--num-speculative-tokens", "auto"), {"tensor_parallel_size": 2}),
        *[(flags, vllm) for flags, vllm, _ in NOWHERE],
    ],
)
def test_where_all_windows_are_chains_by_default(flags: tuple[str, ...], vllm: dict[str, Any]) -> None:
    config = NworConfig.from_additional_config(settle(*flags, **vllm).additional_config)
    assert config is None or config.tree is None


def test_trees_that_are_asked_for_are_required() -> None:
    config = NworConfig.from_additional_config(settle("--tree-nodes", "16").additional_config)
    assert config is not None
    assert config.tree_required


@pytest.mark.parametrize(("device", "vllm"), [("cpu", {}), ("cuda", {"tensor_parallel_size": 2})])
def test_the_default_is_a_number_elsewhere(device: str, vllm: dict[str, Any]) -> None:
    args = settle(device=device, **vllm)
    assert args.speculative_config["num_speculative_tokens"] == options.DEFAULT_SPECULATIVE_TOKENS
    assert chosen(args) is None


@pytest.mark.parametrize(
    ("flags", "shape"),
    [
        (("--tree-nodes", "16"), TreeShape.of(16)),
        (("--tree-nodes", "4"), TreeShape.of(4, 4)),
        (("--tree-nodes", "12", "--tree-depth", "5"), TreeShape.of(12, 5)),
        (
            ("--tree-nodes", "32", "--tree-depth", "6", "--tree-width", "8", "--tree-kind", "comb"),
            TreeShape.of(32, 6, 8, "comb"),
        ),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_tree_has_as_many_draft_tokens_as_nodes(
    flags: tuple[str, ...], shape: TreeShape, device: str
) -> None:
    args = settle(*flags, device=device)
    assert args.speculative_config["num_speculative_tokens"] == shape.nodes
    assert args.speculative_config["num_speculative_tokens_per_batch_size"][0][::2] == [1, shape.nodes]
    assert "draft_sample_method" not in args.speculative_config  # drafts are sampled on CPUs otherwise
    assert args.additional_config["nwor"]["tree"] == shape.to_mapping()
    config = NworConfig.from_additional_config(args.additional_config)
    assert config is not None
    assert (config.tree, config.draft_tokens) == (shape, None)


@pytest.mark.parametrize(
    ("flags", "most", "by_requests"),
    [
        # 16 nodes are 17 rows a request: 11 requests have 187.
        ((), None, [[1, 11, 16], [12, 48, 4], [49, 1 << 16, 2]]),
        ((), 32, [[1, 11, 16], [12, 32, 4]]),
        ((), 8, [[1, 8, 16]]),
        (("--tree-requests", "2"), 8, [[1, 2, 16], [3, 8, 4]]),
        (("--tree-depth", "3"), None, [[1, 11, 16], [12, 48, 3], [49, 1 << 16, 2]]),
    ],
)
def test_few_requests_have_trees_and_more_have_chains(
    flags: tuple[str, ...], most: int | None, by_requests: list[list[int]]
) -> None:
    args = settle("--tree-nodes", "16", *flags, max_num_seqs=most)
    assert args.speculative_config["num_speculative_tokens_per_batch_size"] == by_requests


def test_the_engine_chooses_among_none_chains_and_trees() -> None:
    for given in ("auto", "auto:0-16"):
        args = settle("--tree-nodes", "16", "--tree-depth", "5", "--num-speculative-tokens", given)
        assert args.speculative_config["num_speculative_tokens"] == 16
        assert args.speculative_config["num_speculative_tokens_per_batch_size"] == [[1, 1, 0], [2, 2, 4]]
        bounds = chosen(args)
        assert bounds is not None
        assert bounds.candidates == (0, 1, 2, 3, 4, 5, 14, 15, 16)


def test_a_choice_in_additional_config_is_taken() -> None:
    nwor = {"tree": {"nodes": 12, "depth": 4}, "draft_tokens": "auto"}
    args = settle(additional_config={"nwor": nwor})
    assert args.speculative_config["num_speculative_tokens"] == 12
    assert args.speculative_config["num_speculative_tokens_per_batch_size"] == [[1, 1, 0], [2, 2, 4]]


def test_a_tree_in_additional_config_is_taken() -> None:
    tree = {"nodes": 12, "depth": 4}
    args = settle(additional_config={"nwor": {"tree": tree}}, device="cpu")
    assert args.speculative_config["num_speculative_tokens"] == 12
    assert "draft_sample_method" not in args.speculative_config
    assert args.additional_config == {"nwor": {"tree": tree}}


def test_trees_that_are_not_required_are_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.triton_utils.HAS_TRITON", False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    nwor = {"tree": {"nodes": 16, "depth": 6}, "tree_required": False}
    args = settle("--num-speculative-tokens", "16", additional_config={"nwor": nwor}, device="cpu")
    for device in ("cpu", "cuda"):
        resolve_nwor(args, speculates=True, device_type=device)
        assert args.additional_config == {"nwor": nwor}
        required = {"nwor": nwor | {"tree_required": True}}
        with pytest.raises(UsageError, match="model runner V2"):
            resolve_nwor(
                argparse.Namespace(**vars(args) | {"additional_config": required}), True, device_type=device
            )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--tree-nodes", "16", "--num-speculative-tokens", "4"), "both say how many tokens to draft"),
        (
            ("--tree-nodes", "16", "--num-speculative-tokens", "auto:0-7"),
            "--num-speculative-tokens: draft tokens auto:0-7",
        ),
        (
            ("--tree-nodes", "16", "--num-speculative-tokens", "auto", "--tree-requests", "4"),
            "both say when windows are trees",
        ),
        (("--tree-nodes", "16", "--draft-sampling", "sampled"), "drop --draft-sampling sampled"),
        (
            ("--tree-nodes", "16", "--speculative-method", "medusa"),
            "for EAGLE heads, and drafts are by medusa",
        ),
        (("--tree-nodes", "16", "--no-nwor"), "--no-nwor leaves NWOR out, --tree-nodes sets it"),
        (
            ("--tree-nodes", "16", "--nwor-modes", "off,cow", "--nwor-mode", "off"),
            "add stage to --nwor-modes",
        ),
        (("--tree-nodes", "8", "--tree-depth", "9"), "the depth is 1 to the number of nodes"),
        (("--tree-nodes", "64"), "a tree of 64 nodes: 2 to 63 are possible"),
        (("--tree-nodes", "1"), "a tree of 1 nodes: 2 to 63 are possible"),
        (("--tree-nodes", "16", "--tree-depth", "2", "--tree-width", "2"), "make it wider or deeper"),
        (("--tree-nodes", "16", "--tree-width", "0"), "candidates"),
        (("--tree-depth", "4"), "--tree-depth says what trees are like that --tree-nodes asks for"),
        (("--tree-width", "4"), "--tree-width says what trees are like that --tree-nodes asks for"),
        (("--tree-requests", "4"), "--tree-requests says what trees are like that --tree-nodes asks for"),
        (("--tree-nodes", "16", "--tree-requests", "0"), "give 1 or more"),
        (("--tree-kind", "comb"), "--tree-kind says what trees are like that --tree-nodes asks for"),
    ],
)
def test_trees_are_refused_where_they_cannot_be(flags: tuple[str, ...], words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(words)):
        settle(*flags)


def test_trees_beside_other_settings_of_nwor_are_refused() -> None:
    with pytest.raises(UsageError, match="--tree-nodes and --additional-config both set NWOR"):
        settle("--tree-nodes", "16", additional_config={"nwor": {"mode": "stage"}})
    with pytest.raises(UsageError, match="must be an object such as"):
        settle(additional_config={"nwor": {"tree": 16}})
