"""Our flags, and what they turn into."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import demo, environment
from server.errors import StartupError, UsageError
from server.options import (
    CPU_KV_CACHE_BYTES,
    CPU_SAMPLING,
    DEMO_NAME,
    REPORTING_SCHEDULER,
    add_server_options,
    apply_device_defaults,
    check_device,
    parse_count,
    parse_seconds,
    parse_size,
    resolve_models,
    use_one_grammar_backend,
    use_reporting_scheduler,
)

DEFAULT_MODEL = "owner/default"


def parse(*flags: str, **vllm: Any) -> argparse.Namespace:
    """Our parser, with the attributes of vLLM's that ours read."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model_tag", nargs="?")
    add_server_options(parser)
    args = parser.parse_args(list(flags))
    defaults = {
        "model": DEFAULT_MODEL,
        "served_model_name": None,
        "kv_cache_memory_bytes": None,
        "speculative_config": None,
        "spec_method": None,
        "spec_model": None,
        "spec_tokens": None,
        "scheduler_cls": None,
        "worker_extension_cls": "",
        "enforce_eager": False,
        "per_request_spec_decode_metrics": "summary",
        "no_nwor": False,
        "additional_config": None,
        "dtype": "auto",
    }
    for name, value in {**defaults, **vllm}.items():
        setattr(args, name, value)
    return args


MODEL, DRAFT = str(demo.model_path()), str(demo.draft_path())


def test_a_draft_configures_speculation_without_json() -> None:
    args = parse(MODEL, "--draft", DRAFT, "--num-speculative-tokens", "3")
    resolve_models(args, DEFAULT_MODEL)
    assert args.model == MODEL
    method = demo.draft_method()
    assert args.speculative_config == {"method": method, "model": DRAFT, "num_speculative_tokens": 3}


def test_the_method_can_be_given() -> None:
    args = parse(MODEL, "--draft", DRAFT, "--speculative-method", "eagle")
    resolve_models(args, DEFAULT_MODEL)
    assert args.speculative_config["method"] == "eagle"
    assert args.speculative_config["num_speculative_tokens"] == 4


def test_without_a_draft_nothing_is_configured() -> None:
    args = parse(MODEL)
    resolve_models(args, DEFAULT_MODEL)
    use_reporting_scheduler(args)
    apply_device_defaults(args, "cpu", enforce_eager_given=False)
    assert args.speculative_config is None
    assert args.scheduler_cls is None
    # vLLM does not start an engine that is asked for figures of a speculation that it has not.
    assert args.per_request_spec_decode_metrics == "none"


@pytest.mark.parametrize(
    ("chosen", "mode", "expected"),
    [("auto", "auto", "xgrammar"), ("guidance", "auto", "guidance"), ("auto", "mistral", "auto")],
)
def test_one_backend_serves_all_grammars(chosen: str, mode: str, expected: str) -> None:
    config = SimpleNamespace(backend=chosen)
    args = parse(MODEL, structured_outputs_config=config, tokenizer_mode=mode)
    use_one_grammar_backend(args)
    assert config.backend == expected


def test_the_demo_names_model_draft_and_memory() -> None:
    args = parse("--demo")
    resolve_models(args, DEFAULT_MODEL)
    assert (args.model, args.draft) == (MODEL, DRAFT)
    assert args.served_model_name == [DEMO_NAME]
    assert args.speculative_config["method"] == demo.draft_method()
    assert args.kv_cache_memory_bytes is not None


def test_the_demo_takes_vllms_own_speculation() -> None:
    own = {"method": "ngram", "num_speculative_tokens": 2}
    args = parse("--demo", speculative_config=own)
    resolve_models(args, DEFAULT_MODEL)
    assert args.speculative_config == own
    assert args.draft is None


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (parse(), "no model given"),
        (parse("--demo", MODEL), "drop --demo"),
        (parse("--demo", model="owner/other"), "drop --demo"),
        (parse(MODEL, "--num-speculative-tokens", "2"), "add --draft"),
        (parse(MODEL, "--speculative-method", "eagle"), "add --draft"),
        (parse(MODEL, "--draft", DRAFT, speculative_config={"method": "ngram"}), "--speculative-config"),
        (parse(MODEL, "--draft", DRAFT, spec_tokens=3), "--spec-tokens"),
    ],
)
def test_flags_that_contradict_each_other(args: argparse.Namespace, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        resolve_models(args, DEFAULT_MODEL)


def test_the_schedulers_report_is_on_unless_the_user_says_otherwise() -> None:
    def chosen(**vllm: Any) -> str | None:
        args = parse(MODEL, "--draft", DRAFT, **vllm)
        use_reporting_scheduler(args)
        return args.scheduler_cls

    assert chosen() == REPORTING_SCHEDULER
    assert chosen(scheduler_cls="mine.Scheduler") == "mine.Scheduler"
    assert chosen(per_request_spec_decode_metrics="none") is None


def test_defaults_on_a_cpu() -> None:
    args = parse(MODEL, "--draft", DRAFT)
    apply_device_defaults(args, "cpu", enforce_eager_given=False)
    assert args.kv_cache_memory_bytes == CPU_KV_CACHE_BYTES
    assert args.worker_extension_cls == CPU_SAMPLING
    assert args.enforce_eager is False


@pytest.mark.parametrize(("given", "eager"), [(False, True), (True, False)])
def test_the_demo_is_eager_on_a_cpu_unless_told_otherwise(given: bool, eager: bool) -> None:
    args = parse("--demo")
    apply_device_defaults(args, "cpu", enforce_eager_given=given)
    assert args.enforce_eager is eager


def test_a_gpu_keeps_vllms_defaults() -> None:
    args = parse("--demo")
    apply_device_defaults(args, "cuda", enforce_eager_given=False)
    assert args.enforce_eager is False
    assert args.kv_cache_memory_bytes is None
    assert args.worker_extension_cls == ""


def test_no_device_is_refused() -> None:
    check_device("cpu")
    with pytest.raises(StartupError, match="no usable device"):
        check_device("")


@given(
    st.integers(1, 10**6),
    st.sampled_from([("", 1), ("K", 1000), ("Mi", 2**20), ("gi", 2**30), ("MB", 10**6)]),
)
def test_sizes(number: int, unit: tuple[str, int]) -> None:
    assert parse_size(f"{number}{unit[0]}") == number * unit[1]


@pytest.mark.parametrize("parser", [parse_size, parse_count, parse_seconds])
@given(text=st.text(max_size=6).filter(lambda text: not any(c.isdecimal() for c in text)))
def test_what_is_no_number_is_refused(parser: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parser(text)


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        (parse_size, "0"),
        (parse_count, "0"),
        (parse_count, "-1"),
        (parse_seconds, "-1"),
        (parse_seconds, "nan"),
        (parse_seconds, "inf"),
    ],
)
def test_numbers_out_of_range_are_refused(parser: Any, text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        parser(text)


def test_the_environment_keeps_what_the_user_set() -> None:
    environ = {"HF_HUB_OFFLINE": "0"}
    environment.set_defaults(offline=True, environ=environ)
    assert environ["HF_HUB_OFFLINE"] == "0"
    assert environ["VLLM_NO_USAGE_STATS"] == environ["DO_NOT_TRACK"] == "1"
    online: dict[str, str] = {}
    environment.set_defaults(offline=False, environ=online)
    assert "HF_HUB_OFFLINE" not in online
