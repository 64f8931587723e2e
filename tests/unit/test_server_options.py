"""Our flags, and what they turn into."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import demo, environment
from server.drafters import METHODS
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
    speculates,
    use_one_grammar_backend,
    use_reporting_scheduler,
)

DEFAULT_MODEL = "owner/default"


@pytest.fixture(autouse=True)
def _every_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a vLLM with every method, whichever is installed: 0.33 lacks some."""
    methods = tuple(settings["method"] for settings in METHODS.values())
    monkeypatch.setattr("vllm.config.speculative.SpeculativeMethod", Literal[methods])


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
        **dict.fromkeys(("tree_nodes", "tree_depth", "tree_width", "tree_kind", "tree_requests")),
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


@pytest.mark.parametrize(
    ("flags", "device", "sampled"),
    [
        ([], "cpu", True),
        ([], "cuda", False),
        (["--draft-sampling", "greedy"], "cpu", False),
        (["--draft-sampling", "sampled"], "cuda", True),
    ],
)
def test_drafts_are_sampled_on_cpus_or_when_asked(flags: list[str], device: str, sampled: bool) -> None:
    args = parse(MODEL, "--draft", DRAFT, "--num-speculative-tokens", "3", *flags)
    resolve_models(args, DEFAULT_MODEL, device)
    wanted = "probabilistic" if sampled else None
    assert args.speculative_config.get("draft_sample_method") == wanted


def test_some_drafts_cannot_be_sampled() -> None:
    args = parse(MODEL, "--speculative-method", "ngram", "--draft-sampling", "sampled")
    with pytest.raises(UsageError, match="no probabilities"):
        resolve_models(args, DEFAULT_MODEL, "cpu")
    args = parse(MODEL, "--draft-sampling", "sampled")
    with pytest.raises(UsageError, match="no draft"):
        resolve_models(args, DEFAULT_MODEL, "cpu")


def test_the_method_can_be_given() -> None:
    args = parse(MODEL, "--draft", DRAFT, "--speculative-method", "eagle")
    resolve_models(args, DEFAULT_MODEL)
    assert args.speculative_config["method"] == "eagle"
    assert args.speculative_config["num_speculative_tokens"] == 4


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu"])
def test_drafts_from_the_text_need_no_folder(method: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flags in ((MODEL,), ("--demo",)):
        args = parse(*flags, "--speculative-method", method)
        assert speculates(args)
        resolve_models(args, DEFAULT_MODEL)
        assert args.draft is None
        assert args.speculative_config == {"method": method, "num_speculative_tokens": 4}
        assert f"drafts by {method} from the text so far" in capsys.readouterr().err


def test_ngrams_on_a_gpu_need_one() -> None:
    args = parse(MODEL, "--speculative-method", "ngram_gpu")
    with pytest.raises(UsageError, match="needs a GPU"):
        resolve_models(args, DEFAULT_MODEL, "cpu")
    resolve_models(args, DEFAULT_MODEL, "cuda")
    assert args.speculative_config["method"] == "ngram_gpu"


def write(folder: Path, **config: Any) -> str:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def test_layers_of_the_models_own_need_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 3}
    model = write(tmp_path / "mimo", **mimo)
    args = parse(model, "--speculative-method", "mtp")
    resolve_models(args, DEFAULT_MODEL)
    assert args.speculative_config == {"method": "mtp", "num_speculative_tokens": 3}
    assert "drafts by mtp with layers of the model's own" in capsys.readouterr().err
    args = parse(model, "--speculative-method", "mtp", "--num-speculative-tokens", "6")
    resolve_models(args, DEFAULT_MODEL)
    assert args.speculative_config["num_speculative_tokens"] == 6
    args = parse(model, "--speculative-method", "mtp", "--num-speculative-tokens", "4")
    with pytest.raises(UsageError, match="or a multiple of it"):
        resolve_models(args, DEFAULT_MODEL)
    with pytest.raises(StartupError, match="no layers for drafting by mtp"):
        resolve_models(parse(MODEL, "--speculative-method", "mtp"), DEFAULT_MODEL)


TARGET = {"model_type": "llama", "vocab_size": 16, "hidden_size": 8}


@pytest.mark.parametrize(
    ("draft", "flags", "expected", "line"),
    [
        (
            {"model_type": "medusa", "num_heads": 2, "hidden_size": 8},
            (),
            {"method": "medusa", "num_speculative_tokens": 2},
            "drafts by medusa from DRAFT, told by model_type 'medusa'; 2 tokens a step",
        ),
        (
            {"architectures": ["DFlashDraftModel"], "block_size": 16, "vocab_size": 16, "hidden_size": 8},
            (),
            {"method": "dflash", "num_speculative_tokens": 15},
            "drafts by dflash from DRAFT, told by architecture 'DFlashDraftModel'; 15 tokens a step",
        ),
        (
            {"speculators_model_type": "peagle", "transformer_layer_config": TARGET},
            ("--num-speculative-tokens", "1"),
            {"method": "eagle3", "parallel_drafting": True, "num_speculative_tokens": 1},
            "drafts by peagle from DRAFT, told by speculators_model_type 'peagle'; 1 token a step",
        ),
        (
            {**TARGET, "num_hidden_layers": 3, "hidden_size": 4},
            (),
            {"method": "draft_model", "num_speculative_tokens": 4},
            "drafts by draft_model from DRAFT, told by num_hidden_layers 3; 4 tokens a step",
        ),
        (
            TARGET,
            ("--speculative-method", "pard"),
            {"method": "draft_model", "parallel_drafting": True, "num_speculative_tokens": 4},
            "drafts by pard from DRAFT, told by --speculative-method; 4 tokens a step",
        ),
    ],
)
def test_drafters_are_configured_by_what_their_folders_say(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    draft: dict[str, Any],
    flags: tuple[str, ...],
    expected: dict[str, Any],
    line: str,
) -> None:
    model, folder = write(tmp_path / "target", **TARGET), write(tmp_path / "draft", **draft)
    args = parse(model, "--draft", folder, *flags)
    resolve_models(args, DEFAULT_MODEL)
    assert args.speculative_config == {"model": folder, **expected}
    assert line in capsys.readouterr().err.replace(folder, "DRAFT")


def test_more_drafts_than_medusa_has_heads_are_refused(tmp_path: Path) -> None:
    draft = write(tmp_path / "draft", model_type="medusa", num_heads=2, hidden_size=8)
    args = parse(write(tmp_path / "target", **TARGET), "--draft", draft, "--num-speculative-tokens", "3")
    with pytest.raises(UsageError, match="at most --num-speculative-tokens 2"):
        resolve_models(args, DEFAULT_MODEL)


@pytest.mark.parametrize("word", ["eagle-1", "EAGLE3", "dflash", "dspark"])
def test_paths_by_which_vllm_would_take_another_method_are_refused(tmp_path: Path, word: str) -> None:
    model = write(tmp_path / "target", **TARGET)
    draft = write(tmp_path / word / "draft", **TARGET, num_hidden_layers=3)
    with pytest.raises(StartupError, match="rename the folder"):
        resolve_models(parse(model, "--draft", draft), DEFAULT_MODEL)
    resolve_models(parse(model, "--draft", draft, "--speculative-method", "eagle"), DEFAULT_MODEL)


def test_the_other_model_runner_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write(tmp_path / "target", **TARGET)
    medusa = write(tmp_path / "heads", model_type="medusa", num_heads=4, hidden_size=8)
    block = write(tmp_path / "block", **TARGET, architectures=["Qwen3DSparkModel"])
    for draft, refused, taken in ((medusa, "1", "0"), (block, "0", "1")):
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", refused)
        with pytest.raises(UsageError, match=f"drop VLLM_USE_V2_MODEL_RUNNER={refused}"):
            resolve_models(parse(model, "--draft", draft), DEFAULT_MODEL)
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", taken)
        resolve_models(parse(model, "--draft", draft), DEFAULT_MODEL)


def test_suffix_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    args = parse(MODEL, "--speculative-method", "suffix")
    monkeypatch.setattr("server.drafters.find_spec", lambda name: None)
    with pytest.raises(StartupError, match="pip install arctic-inference"):
        resolve_models(args, DEFAULT_MODEL)
    monkeypatch.setattr("server.drafters.find_spec", lambda name: name)
    resolve_models(args, DEFAULT_MODEL)
    assert args.speculative_config == {"method": "suffix", "num_speculative_tokens": 4}


def test_the_method_of_a_draft_elsewhere_must_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    with pytest.raises(StartupError, match="add --speculative-method eagle, eagle3"):
        resolve_models(parse(MODEL, "--draft", "owner/head"), DEFAULT_MODEL)
    args = parse(MODEL, "--draft", "owner/head", "--speculative-method", "eagle")
    resolve_models(args, DEFAULT_MODEL)
    assert args.speculative_config == {"method": "eagle", "model": "owner/head", "num_speculative_tokens": 4}


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
        (parse(MODEL, "--speculative-method", "ngram", spec_tokens=3), "--spec-tokens"),
        (parse(MODEL, "--draft", DRAFT, "--speculative-method", "ngram"), "without a --draft"),
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
    assert environ["VLLM_HTTP_TIMEOUT_KEEP_ALIVE"] == "75"
    online: dict[str, str] = {}
    environment.set_defaults(offline=False, environ=online)
    assert "HF_HUB_OFFLINE" not in online
