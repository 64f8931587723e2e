"""Claim: a grammar compiles as in vLLM's backend, and one that compiles for long ends without ending others.

Reference: xgrammar's own compiler. The compiling processes are real. Tolerance: none.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import psutil
import pytest
import xgrammar
from transformers import AutoTokenizer

from nwor.engine.request_isolation.grammar_limit import GrammarError, LimitedCompiler
from server import demo
from tests.waiting import wait_until

#: Compiles for minutes: the optional parts may follow each other in very many ways.
SLOW = "root ::= " + " ".join(["[a-z0-9]?"] * 4000)
SCHEMA = json.dumps({"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]})


@pytest.fixture(scope="module")
def tokenizer() -> xgrammar.TokenizerInfo:
    return xgrammar.TokenizerInfo.from_huggingface(AutoTokenizer.from_pretrained(str(demo.model_path())))


@pytest.fixture(scope="module")
def compiler(tokenizer: xgrammar.TokenizerInfo) -> Iterator[LimitedCompiler]:
    made = LimitedCompiler(tokenizer, seconds=30, processes=1, cache_bytes=2**20)
    yield made
    made.close()


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if "grammar_compiler" in " ".join(child.cmdline())]


def test_a_grammar_is_what_the_compiler_makes_of_it(
    compiler: LimitedCompiler, tokenizer: xgrammar.TokenizerInfo
) -> None:
    settings = {"any_whitespace": False, "separators": (",", ":")}
    ours = compiler.compile_json_schema(SCHEMA, **settings)
    stock = xgrammar.GrammarCompiler(tokenizer).compile_json_schema(SCHEMA, **settings)
    assert ours.serialize_json() == stock.serialize_json()
    matcher = xgrammar.GrammarMatcher(ours)
    assert matcher.accept_string('{"a":"x"}')
    assert not xgrammar.GrammarMatcher(ours).accept_string('{"a":"z"}')
    assert compiler.compile_json_schema(SCHEMA, **settings) is ours


def test_wrong_grammars_are_told_in_the_compilers_words(compiler: LimitedCompiler) -> None:
    with pytest.raises(GrammarError, match="EBNF"):
        compiler.compile_grammar("root ::= (")
    assert compiler.compile_regex("[0-9]+") is not None


def test_a_grammar_that_takes_long_ends(compiler: LimitedCompiler) -> None:
    compiler.compile_regex("[0-9]")
    [first] = children()
    compiler._seconds = 0.5
    with pytest.raises(GrammarError, match=r"longer than 0.5 s.*--max-grammar-seconds"):
        compiler.compile_grammar(SLOW)
    assert not first.is_running()
    compiler._seconds = 30
    assert compiler.compile_regex("[a-z]") is not None


def test_the_cache_has_a_size(compiler: LimitedCompiler) -> None:
    compiler._room = 1
    assert compiler.compile_regex("[0-8]") is not compiler.compile_regex("[0-8]")


def test_closing_ends_what_compiles(compiler: LimitedCompiler) -> None:
    errors: list[Exception] = []

    def work() -> None:
        try:
            compiler.compile_grammar(SLOW)
        except GrammarError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    compiler.compile_regex("[0-9]")
    thread.start()
    wait_until(lambda: not compiler._free, 10, "it compiles")
    compiler.close()
    thread.join(10)
    assert "compiler ended" in str(errors[0])
    wait_until(lambda: not children(), 10, "no process is left")
