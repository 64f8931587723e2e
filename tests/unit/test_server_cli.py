"""The whole command line: vLLM's flags and ours through vLLM's own parser."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from server import cli, demo
from server.errors import UsageError
from server.options import GROUP


def test_vllms_flags_and_ours_are_accepted_together(free_port: int) -> None:
    args = cli.parse(
        ["--demo", "--port", str(free_port), "--max-model-len", "1k", "--max_num_seqs", "4", "--seed", "3",
         "--compilation-config.mode", "0", "--num-speculative-tokens", "2", "--drain-timeout", "7"]
    )  # fmt: skip
    assert args.max_model_len == 1000
    assert args.max_num_seqs == 4
    assert args.speculative_config["num_speculative_tokens"] == 2
    assert args.drain_timeout == 7.0
    assert args.per_request_spec_decode_metrics == "summary"


def test_a_configuration_file_may_name_the_model(tmp_path, free_port: int) -> None:
    (tmp_path / "serve.yaml").write_text(
        f"model: {demo.model_path()}\ndraft: {demo.draft_path()}\nport: {free_port}\n"
    )
    args = cli.parse(["--config", str(tmp_path / "serve.yaml")])
    assert args.model == str(demo.model_path())
    assert args.speculative_config["model"] == str(demo.draft_path())


def test_our_flags_stand_in_a_group_of_their_own() -> None:
    parser = cli.make_parser()
    groups = [group for group in parser._action_groups if group.title == GROUP]
    assert [action.dest for group in groups for action in group._group_actions] == [
        "demo",
        "draft",
        "num_speculative_tokens",
        "speculative_method",
        "draft_sampling",
        "drain_timeout",
        "max_body_size",
        "max_grammar_size",
        "no_stream_pacing",
    ]


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--demo", "--api-server-count", "0"], "leaves nobody to serve HTTP"),
        (["--demo", "--headless"], "vllm serve --headless"),
        (["--demo", "--grpc"], "--grpc is not supported"),
        (["--demo", "--shutdown-timeout", "5"], "--drain-timeout"),
        (["--demo", "--enable-auto-tool-choice"], "--tool-call-parser"),
        (["--demo", "--no-such-thing"], "unknown flag --no-such-thing"),
        (["--demo", "--port", "abc"], "--port"),
        (["--demo", "one", "two"], "unexpected argument"),
        (
            ["--demo", "--tree-nodes", "16", "--num-speculative-tokens", "4"],
            "both say how many tokens to draft",
        ),
        (["--demo", "--tree-nodes", "8", "--tree-depth", "9"], "the depth is 1 to the number of nodes"),
        (["--demo", "--tree-nodes", "many"], "--tree-nodes"),
        (
            [str(demo.model_path()), "--tree-nodes", "16"],
            "needs speculative decoding: add --draft, or drop --tree-nodes",
        ),
        ([], "no model given"),
    ],
)
def test_lines_that_cannot_be_served(flags: list[str], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        cli.parse(flags)


def test_trees_are_refused_with_model_runner_v1(monkeypatch: pytest.MonkeyPatch, free_port: int) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    with pytest.raises(UsageError, match="--tree-nodes needs vLLM's model runner V2"):
        cli.parse(["--demo", "--port", str(free_port), "--tree-nodes", "16"])
