"""NWOR's flags: what they make of ``additional_config``, and which contradictions are refused."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import pytest
from vllm import triton_utils

from nwor.config import NworConfig
from nwor.engine import plugin
from nwor.modes import Mode
from nwor.tree_shape import TreeShape
from server.errors import UsageError
from server.nwor_options import Secret, add_nwor_options, resolve_nwor


def resolve(
    *words: str,
    speculates: bool = True,
    additional: dict[str, Any] | None = None,
    keys: Any = None,
    method: str = "eagle3",
    device: str = "cuda",
) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_nwor_options(parser)
    args = parser.parse_args(list(words))
    args.additional_config = additional
    args.api_key = keys
    args.port, args.uds = 8000, None
    args.speculative_config = {"method": method}
    resolve_nwor(args, speculates, device)
    return args


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NWOR_ADMIN_API_KEY", "NWOR_DISABLE", "VLLM_API_KEY", "VLLM_USE_V2_MODEL_RUNNER"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugin, "register", lambda: None)


def config(args: argparse.Namespace) -> NworConfig | None:
    return NworConfig.from_additional_config(args.additional_config)


def test_an_engine_that_speculates_has_nwor_in_mode_stage() -> None:
    assert config(resolve()) == NworConfig(mode=Mode.STAGE)
    assert config(resolve(speculates=False)) is None
    assert config(resolve("--no-nwor")) is None


def test_flags_are_the_settings_and_keep_other_configuration() -> None:
    args = resolve(
        *("--nwor-mode", "off", "--nwor-modes", "off, stage", "--nwor-self-check-interval", "9"),
        *("--nwor-mixed-graph-rows", "512"),
        additional={"other": 1},
    )
    assert config(args) == NworConfig(Mode.OFF, (Mode.OFF, Mode.STAGE), 9, 512)
    assert args.additional_config["other"] == 1


@pytest.mark.parametrize("mode", [*Mode, None])
def test_fast_paths_are_turned_off_in_every_mode(mode: Mode | None) -> None:
    words = () if mode is None else ("--nwor-mode", mode.value)
    both = config(resolve(*words))
    host = config(resolve(*words, "--no-fast-host"))
    sampling = config(resolve(*words, "--no-fast-sampling"))
    assert both is not None
    assert host == replace(both, fast_host=False)
    assert sampling == replace(both, fast_sampling=False)
    assert both == NworConfig(mode or Mode.STAGE)


def test_attention_backends_are_named_by_a_flag() -> None:
    chosen = config(resolve("--nwor-attention-backends", "flash, triton"))
    assert chosen == replace(NworConfig(), attention_backends=("flash", "triton"))


def test_additional_config_alone_is_taken_as_it_is() -> None:
    given = {"nwor": {"mode": "cow"}}
    assert resolve(additional=given).additional_config == given
    assert resolve(additional=given, speculates=False).additional_config == given


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["--nwor-mode", "off"], {"additional": {"nwor": {}}}, "both set NWOR"),
        (["--no-nwor"], {"additional": {"nwor": {}}}, "leaves NWOR out"),
        (["--no-nwor", "--nwor-mode", "off"], {}, "leaves NWOR out"),
        (["--nwor-mode", "off"], {"speculates": False}, "--draft"),
        (["--no-fast-host"], {"speculates": False}, "--no-fast-host needs speculative"),
        (["--no-nwor", "--no-fast-sampling"], {}, "--no-fast-sampling sets it"),
        (["--no-fast-host"], {"additional": {"nwor": {}}}, "--no-fast-host and --additional-config"),
        (["--nwor-modes", "off,warp"], {}, "off, stage, cow"),
        (["--nwor-modes", " , "], {}, "at least one mode"),
        (["--nwor-mode", "cow", "--nwor-modes", "off"], {}, "not among the enabled"),
        (["--nwor-self-check-interval", "-1"], {}, "0 or more"),
        (["--nwor-mixed-graph-rows", "-1"], {}, "0 or more"),
        (["--nwor-attention-backends", "flex"], {}, "knows auto, flash, triton"),
        (["--draft-vocabulary", "0"], {}, "no draft vocabulary"),
        (["--draft-vocabulary", "/no/such/table"], {}, "cannot be read"),
        (["--draft-vocabulary", "9"], {"method": "ngram"}, "for EAGLE heads, and drafts are by ngram"),
        ([], {"additional": {"nwor": {"speed": 1}}}, "unknown NWOR setting"),
        (["--admin-api-key", "  "], {}, "empty"),
        (["--admin-api-key", "same"], {"keys": ["other", "same"]}, "also a user's"),
        (["--admin-api-key", "same"], {"keys": "same"}, "also a user's"),
    ],
)
def test_contradictions_are_refused(words: list[str], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(*words, **options)


#: A tree by a flag and by vLLM's, with the words that name them.
TREES: list[tuple[tuple[str, ...], dict[str, Any] | None, str]] = [
    (("--tree-nodes", "16"), None, "--tree-nodes"),
    ((), {"nwor": {"tree": {"nodes": 16}}}, "'tree' of --additional-config"),
]


@pytest.mark.parametrize(("words", "additional", "name"), TREES)
def test_trees_are_refused_where_vllm_takes_model_runner_v1(
    words: tuple[str, ...], additional: dict[str, Any] | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def asked(device: str) -> NworConfig | None:
        return config(resolve(*words, additional=additional, device=device))

    monkeypatch.setattr(triton_utils, "HAS_TRITON", False)
    with pytest.raises(
        UsageError, match=f"{name} needs .* a Triton for CPUs.*: serve on a GPU, or drop {name}"
    ):
        asked("cpu")
    monkeypatch.setattr(triton_utils, "HAS_TRITON", True)
    for device in ("cpu", "cuda"):
        found = asked(device)
        assert found is not None
        assert found.tree == TreeShape.of(16)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    for device in ("cpu", "cuda"):
        with pytest.raises(
            UsageError, match=f"{name} needs .*: drop VLLM_USE_V2_MODEL_RUNNER=0, or drop {name}"
        ):
            asked(device)


def test_chains_need_no_model_runner_v2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_utils, "HAS_TRITON", False)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert config(resolve(device="cpu")) == NworConfig(mode=Mode.STAGE)


def test_nwor_disable_leaves_it_out_and_contradicts_aloud(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NWOR_DISABLE", "1")
    assert config(resolve()) is None
    assert "NWOR_DISABLE" in capsys.readouterr().err
    for words, additional in ((["--nwor-mode", "stage"], None), ([], {"nwor": {}})):
        with pytest.raises(UsageError, match="NWOR_DISABLE"):
            resolve(*words, additional=additional)


def test_the_admin_key_comes_from_flag_or_environment_and_does_not_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert resolve().admin_api_key is None
    monkeypatch.setenv("NWOR_ADMIN_API_KEY", "from-environment")
    assert resolve().admin_api_key == "from-environment"
    args = resolve("--admin-api-key", "from-flag")
    assert args.admin_api_key == "from-flag"
    assert isinstance(args.admin_api_key, Secret)
    assert "from-flag" not in repr(args)
    monkeypatch.setenv("VLLM_API_KEY", "from-flag")
    with pytest.raises(UsageError, match="also a user's"):
        resolve("--admin-api-key", "from-flag")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--admin-port", "8001", "--admin-uds", "/run/x"), "drop one of them"),
        (("--admin-host", "0.0.0.0"), "add it"),
        (("--admin-port", "8000"), "the server's own --port"),
        (("--admin-port", "8001"), "needs a key"),
        (("--admin-uds", "/run/x"), "needs a key"),
    ],
)
def test_admin_addresses_that_cannot_be_served(words: tuple[str, ...], says: str) -> None:
    key = () if says == "needs a key" else ("--admin-api-key", "secret")
    with pytest.raises(UsageError, match=says):
        resolve(*words, *key)


def test_an_admin_port_with_a_key_is_taken() -> None:
    args = resolve("--admin-port", "8001", "--admin-api-key", "secret")
    assert (args.admin_port, args.admin_uds) == (8001, None)
