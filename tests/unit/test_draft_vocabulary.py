"""Claim: a draft vocabulary is read as it was written, and a drafter's head gives its tokens the same logits.

Coverage: what can be asked for and what is refused; the table that `count-tokens` writes of text. The head
against the whole one, with and without a vocabulary of its own, soft cap and scale; weights that change.
In an engine: tests/engine/test_draft_vocabulary_cpu.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from nwor.config import NworConfig
from nwor.draft_vocabulary import VocabularyChoice, read_table, write_table
from nwor.engine.draft_head import DraftHead, install
from nwor.errors import ConfigError
from server import demo, token_counts

VOCABULARY, HIDDEN = 40, 8


@pytest.mark.parametrize(
    ("text", "path", "most"),
    [
        ("100", None, 100),
        ("a/table.json", "a/table.json", None),
        ("a/table.json:64", "a/table.json", 64),
        ("a:b/table", "a:b/table", None),
    ],
)
def test_what_can_be_asked_for(text: str, path: str | None, most: int | None) -> None:
    choice = VocabularyChoice.parse(text)
    assert (choice.path, choice.most) == (path, most)
    assert VocabularyChoice.parse(str(choice)) == choice


@pytest.mark.parametrize("text", ["0", "", "  ", "table:0"])
def test_what_cannot(text: str) -> None:
    with pytest.raises(ConfigError, match="no draft vocabulary"):
        VocabularyChoice.parse(text)


def test_settings_keep_it() -> None:
    for given, kept in ((64, "64"), ("table:8", "table:8"), (None, None)):
        config = NworConfig.from_mapping({"draft_vocabulary": given})
        assert config.to_mapping()["draft_vocabulary"] == kept
        assert NworConfig.from_mapping(config.to_mapping()) == config
    for wrong in (True, 1.5, [1]):
        with pytest.raises(ConfigError, match="draft_vocabulary"):
            NworConfig.from_mapping({"draft_vocabulary": wrong})


def test_ids_of_a_table_and_of_the_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "table"
    write_table(path, [7, 3, 9], VOCABULARY, 100)
    assert read_table(path, VOCABULARY) == [7, 3, 9]
    assert VocabularyChoice(str(path), 2).ids(VOCABULARY) == [3, 7]
    assert VocabularyChoice(str(path), None).ids(VOCABULARY) == [3, 7, 9]
    assert VocabularyChoice(None, 4).ids(VOCABULARY) == [0, 1, 2, 3]
    with pytest.raises(ConfigError, match="up to 9, and the model has 9"):
        read_table(path, 9)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"ids": []}', '{"ids": [1, 1]}', '{"ids": ["x"]}'])
def test_tables_that_are_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "table"
    path.write_text(content)
    with pytest.raises(ConfigError, match="draft vocabulary"):
        read_table(path, VOCABULARY)


def test_a_table_is_counted_from_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(demo.model_path())
    text = "def f(x):\n    return x\n" * 30 + "class A:\n    pass\n"
    source, table = tmp_path / "text", tmp_path / "table"
    source.write_text(text)
    assert token_counts.main([str(demo.model_path()), str(source), "--out", str(table)]) == 0
    tokens = tokenizer.encode(text, add_special_tokens=False)
    ids = read_table(table, len(tokenizer))
    # What ends an answer stands in no text.
    assert ids[0] == tokenizer.eos_token_id
    assert set(ids[1:]) == set(tokens) - {ids[0]}
    counts = [tokens.count(token) for token in ids[1:]]
    assert counts == sorted(counts, reverse=True)
    assert json.loads(table.read_text())["counted"] == len(tokens)
    assert f"{len(tokens)} tokens" in capsys.readouterr().out


def test_text_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing")
    arguments = [str(demo.model_path()), missing, "--out", str(tmp_path / "table")]
    assert token_counts.main(arguments) == 1
    assert "missing cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "table").exists()


class Drafter(torch.nn.Module):
    """An EAGLE head's output layer."""

    def __init__(self, rows: int, soft_cap: float | None = None, scale: float = 1.0) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=VOCABULARY)
        self.lm_head = torch.nn.Linear(HIDDEN, rows, bias=False)
        self.lm_head.quant_method = UnquantizedEmbeddingMethod()
        self.lm_head.shard_indices = SimpleNamespace(org_vocab_start_index=0, org_vocab_end_index=rows)
        self.logits_processor = SimpleNamespace(soft_cap=soft_cap, scale=scale)

    def reference(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what vLLM makes of the whole head's logits."""
        settings = vars(self.logits_processor)
        with set_current_vllm_config(VllmConfig()):
            processor = LogitsProcessor(VOCABULARY, logits_as_input=True, **settings)
        logits = hidden @ self.lm_head.weight.detach().T
        return processor(self.lm_head, logits)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nwor.engine.draft_head.get_tensor_model_parallel_world_size", lambda: 1)


@pytest.mark.parametrize(("soft_cap", "scale"), [(None, 1.0), (2.0, 0.5)])
def test_the_head_gives_its_tokens_the_same_logits(soft_cap: float | None, scale: float) -> None:
    drafter = Drafter(VOCABULARY, soft_cap, scale)
    head = DraftHead(drafter, VocabularyChoice(None, 11))
    hidden = torch.randn(6, HIDDEN)
    wanted = drafter.reference(hidden)
    wanted[:, 11:] = -torch.inf
    torch.testing.assert_close(head.compute_logits(hidden), wanted)
    assert torch.equal(head.get_top_tokens(hidden), wanted.argmax(dim=1))
    with torch.no_grad():
        drafter.lm_head.weight.neg_()
    head.refresh()
    torch.testing.assert_close(head.compute_logits(hidden)[:, :11], drafter.reference(hidden)[:, :11])


def test_a_head_with_a_vocabulary_of_its_own(tmp_path: Path) -> None:
    drafter = Drafter(rows=10)
    # Row i drafts token 3 * i.
    drafter.draft_id_to_target_id = torch.nn.Parameter(2 * torch.arange(10), requires_grad=False)
    path = tmp_path / "table"
    write_table(path, [27, 4, 3, 9], VOCABULARY, 1)
    head = DraftHead(drafter, VocabularyChoice(str(path), None))
    hidden = torch.randn(6, HIDDEN)
    logits = head.compute_logits(hidden)
    assert head.size == 3
    assert logits.isfinite().any(dim=0).nonzero().flatten().tolist() == [3, 9, 27]
    torch.testing.assert_close(logits[:, [3, 9, 27]], drafter.reference(hidden)[:, [1, 3, 9]])
    assert set(head.get_top_tokens(hidden).tolist()) <= {3, 9, 27}
    write_table(path, [4], VOCABULARY, 1)
    with pytest.raises(ConfigError, match="no token"):
        DraftHead(drafter, VocabularyChoice(str(path), None))


def runner(method: str, model: Any) -> Any:
    return SimpleNamespace(
        speculative_config=SimpleNamespace(method=method), drafter=SimpleNamespace(model=model)
    )


def test_what_has_no_such_head_is_refused() -> None:
    choice = VocabularyChoice(None, 4)
    assert install(runner("ngram", None), None) is None
    with pytest.raises(ConfigError, match="ngram"):
        install(runner("ngram", None), choice)
    with pytest.raises(ConfigError, match="draft_model"):
        install(runner("draft_model", Drafter(VOCABULARY)), choice)
    with pytest.raises(ConfigError, match="Linear"):
        install(runner("eagle", torch.nn.Linear(2, 2)), choice)
    quantized = Drafter(VOCABULARY)
    quantized.lm_head.quant_method = object()
    with pytest.raises(ConfigError, match="quantized"):
        install(runner("eagle3", quantized), choice)
