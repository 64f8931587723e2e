"""A drafter that is no EAGLE head, from its folder to an answer's figures: the demo model drafts itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from server import demo
from tests.server_process import DEMO_MODEL, ServerProcess

pytestmark = pytest.mark.engine

TOKENS = 15
PROMPTS = ("def fibonacci(n):", "class Stack:\n    def __init__(self):\n", "import")


@pytest.mark.long
def test_a_draft_model_is_told_and_drafts(
    start_server: Callable[..., ServerProcess], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = Path(shutil.copytree(demo.model_path(), tmp_path_factory.mktemp("drafter") / "small"))
    server = start_server(
        *("--demo", "--draft", str(folder), "--num-speculative-tokens", str(TOKENS), "--dtype", "float32"),
        *("--per-request-spec-decode-metrics", "summary"),
    )
    told = f"drafts by draft_model from {folder}, told by weights of a whole model; {TOKENS} tokens a step"
    assert f"nwor-server: {told}\n" in server.log

    def ask(http: Any, prompt: str, **more: Any) -> dict[str, Any]:
        request = {
            "model": DEMO_MODEL,
            "prompt": prompt,
            "max_tokens": 64,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer: dict[str, Any] = http.post("/v1/completions", json=request | more).json()
        return answer

    with server.client() as http:
        for prompt in PROMPTS:
            answer = ask(http, prompt)
            plain = ask(http, prompt, vllm_xargs={"nwor_max_draft_tokens": 0})
            assert answer["choices"][0]["text"] == plain["choices"][0]["text"]
            figures, nwor = answer["metrics"]["speculative_decoding"], answer["metrics"]["nwor"]
            assert figures["num_spec_tokens"] == TOKENS
            # It drafts what it would say; only rounding could part the two.
            assert figures["num_accepted_draft_tokens"] >= figures["num_draft_tokens"] // 2 > TOKENS
            assert nwor["draft_tokens"] == nwor["accepted_tokens"] + nwor["rejected_tokens"]
            assert nwor["modes"] == ["stage"]
            assert plain["metrics"]["nwor"]["windows"] == 0
