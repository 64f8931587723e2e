"""Claim: through the engine, the bundled head accepts what the training code computes, and enough of it.

Coverage: the bundled model on the CPU in float32, greedy, four draft tokens, 32 held-out prompts of 64 new
tokens each.
Tolerance: 1% of drafts and accepted tokens; engine and training code round differently, and a tie may fall
either way.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from server import demo
from server.demo.training.acceptance import greedy_acceptance
from server.demo.training.export import load_head, load_target
from server.demo.training.generate import greedy_after
from server.demo.training.model import Target, TargetShape

pytestmark = pytest.mark.engine

ROOT = Path(__file__).resolve().parents[2]
ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
model, draft, method, prompts = json.loads(sys.argv[1])
engine = LLM(
    model, dtype="float32", enforce_eager=True, max_model_len=1024, disable_log_stats=False, max_num_seqs=16,
    speculative_config={"model": draft, "method": method, "num_speculative_tokens": 4},
)
outputs = engine.generate(
    [{"prompt_token_ids": p} for p in prompts], SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
)
values = {m.name: m.value for m in engine.get_metrics() if hasattr(m, "value")}
counts = [int(values[f"vllm:spec_decode_num_{name}"]) for name in ("drafts", "accepted_tokens")]
print("COUNTED", json.dumps([*counts, [list(o.outputs[0].token_ids) for o in outputs]]))
"""


def test_engine_accepts_what_the_training_code_computes() -> None:
    lines = (ROOT / "benchmarks" / "acceptance" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    tokenizer = AutoTokenizer.from_pretrained(str(demo.model_path()))
    prompts = [tokenizer(json.loads(line)["prompt"])["input_ids"] for line in lines[:32]]
    target = Target(TargetShape())
    load_target(target, demo.model_path())
    target.requires_grad_(False)
    arguments = json.dumps([str(demo.model_path()), str(demo.draft_path()), demo.draft_method(), prompts])
    run = subprocess.run(
        [sys.executable, "-c", ENGINE, arguments],
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
             "VLLM_ENABLE_V1_MULTIPROCESSING": "0"},
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-4000:]
    line = next(x for x in run.stdout.splitlines() if x.startswith("COUNTED"))
    drafts, accepted, generated = json.loads(line.removeprefix("COUNTED"))

    texts = [prompt + new for prompt, new in zip(prompts, generated, strict=True)]
    # The last verify step may look up to four tokens past the last one that is returned.
    ids, lengths = greedy_after(target, texts, 5)
    logits = target(ids)
    greedy = [
        logits[i, len(prompt) - 1 : len(text) - 1].argmax(-1).tolist() == generated[i]
        for i, (prompt, text) in enumerate(zip(prompts, texts, strict=True))
    ]
    assert sum(greedy) >= len(prompts) - 1
    expected = greedy_acceptance(target, load_head(demo.draft_path()), ids, lengths - 64, 64, 4)
    assert accepted == pytest.approx(expected.accepted, rel=0.01)
    assert drafts == pytest.approx(expected.drafts, rel=0.01)
    assert 1 + accepted / drafts >= 2.5
