"""What is read from model folders before an engine starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server import demo
from server.errors import StartupError
from server.models import check_draft, check_model, looks_like_path, read_config, read_shape


def write_model(folder: Path, **config: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("text", ["/models/llama", "./llama", "../llama", "~/llama", "a/b/c", "llama/"])
def test_paths_look_like_paths(text: str) -> None:
    assert looks_like_path(text)


@pytest.mark.parametrize("text", ["llama", "meta-llama/Llama-3.1-8B", "s3://bucket/a/b"])
def test_names_do_not_look_like_paths(text: str) -> None:
    assert not looks_like_path(text)


def test_the_demo_fits_itself() -> None:
    model, draft = str(demo.model_path()), str(demo.draft_path())
    check_model(model, "model")
    check_model(draft, "draft")
    check_draft(model, draft, demo.draft_method())


@pytest.mark.parametrize(
    ("target", "draft", "word"),
    [
        ({"vocab_size": 10, "hidden_size": 4}, {"vocab_size": 11, "hidden_size": 4}, "vocab_size is 11"),
        ({"vocab_size": 10, "hidden_size": 4}, {"vocab_size": 10, "hidden_size": 8}, "hidden_size is 8"),
        (
            {"text_config": {"vocab_size": 10, "hidden_size": 4}},
            {"vocab_size": 10, "hidden_size": 8},
            "the model's is 4",
        ),
        (
            {"vocab_size": 10, "hidden_size": 4},
            {"vocab_size": 10, "hidden_size": 4, "target_hidden_size": 16},
            "hidden_size is 16",
        ),
    ],
)
def test_drafts_that_do_not_fit(tmp_path: Path, target: dict, draft: dict, word: str) -> None:
    with pytest.raises(StartupError, match=word):
        check_draft(
            write_model(tmp_path / "target", **target), write_model(tmp_path / "draft", **draft), "eagle3"
        )


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ({"vocab_size": 10, "hidden_size": 4}, {"vocab_size": 10, "hidden_size": 4, "draft_vocab_size": 5}),
        ({"vocab_size": 10, "hidden_size": 4}, {"vocab_size": 10, "hidden_size": 2, "target_hidden_size": 4}),
        ({"vocab_size": 10, "hidden_size": 4}, {"model": {"vocab_size": 10, "hidden_size": 4}}),
        ({"vocab_size": 10}, {"hidden_size": 4}),
    ],
)
def test_drafts_that_fit(tmp_path: Path, target: dict, draft: dict) -> None:
    check_draft(
        write_model(tmp_path / "target", **target), write_model(tmp_path / "draft", **draft), "eagle3"
    )


def test_a_draft_model_needs_the_vocabulary_alone(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", vocab_size=10, hidden_size=8)
    draft = write_model(tmp_path / "draft", vocab_size=10, hidden_size=4)
    check_draft(target, draft, "draft_model")
    check_draft(target, draft, "pard")
    with pytest.raises(StartupError, match="hidden_size is 4"):
        check_draft(target, draft, "eagle")
    other = write_model(tmp_path / "other", vocab_size=11, hidden_size=8)
    with pytest.raises(StartupError, match="vocab_size is 11"):
        check_draft(target, other, "draft_model")


def test_medusa_heads_have_the_targets_vocabulary(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", vocab_size=10, hidden_size=8)
    check_draft(target, write_model(tmp_path / "draft", vocab_size=32000, hidden_size=8), "medusa")


def test_an_assistant_says_how_wide_its_target_is(tmp_path: Path) -> None:
    target = write_model(tmp_path / "target", text_config={"vocab_size": 10, "hidden_size": 8})
    config = {"model_type": "gemma4_assistant", "text_config": {"vocab_size": 10, "hidden_size": 4}}
    check_draft(target, write_model(tmp_path / "draft", backbone_hidden_size=8, **config), "mtp")
    with pytest.raises(StartupError, match="hidden_size is 16"):
        check_draft(target, write_model(tmp_path / "wide", backbone_hidden_size=16, **config), "mtp")


@pytest.mark.parametrize("text", ["", "[1, 2]", "{", "\x00"])
def test_configurations_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(StartupError, match=r"config\.json"):
        read_config(str(tmp_path))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
)


@given(
    st.dictionaries(
        st.sampled_from(["vocab_size", "hidden_size", "text_config", "architectures", "model"]), JSON
    ).filter(lambda config: isinstance(config.get("architectures"), list | None))
)
def test_any_configuration_gives_a_shape(config: dict[str, Any]) -> None:
    shape = read_shape(config)
    assert shape.vocab_size is None or isinstance(shape.vocab_size, int)
    assert all(isinstance(name, str) for name in shape.architectures)


def test_a_hub_name_passes_unless_offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    check_model("owner/some-model", "model")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(StartupError, match="HF_HUB_OFFLINE"):
        check_model("owner/some-model", "model")
