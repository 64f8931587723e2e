"""Claim: an engine that cannot have trees is refused with the reason; requests that need chains are known.

Coverage: each reason by itself, on configurations that are as they must be otherwise; both checks of an
engine; each parameter of a request.
"""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config.compilation import CUDAGraphMode

from nwor.config import DraftBounds, NworConfig
from nwor.engine.patches import choose_worker
from nwor.engine.trees import known_sources
from nwor.engine.trees.requirements import (
    CHAIN_REASONS,
    check_engine,
    most_requests,
    needs_chain,
    why_not,
)
from nwor.errors import ConfigError

TREE = {"nodes": 16, "depth": 6, "width": 4}


def _engine(tree: dict[str, Any] | None = None, **nwor: Any) -> Any:
    """Return a configuration that can have trees, in the shape of vLLM's."""
    return SimpleNamespace(
        use_v2_model_runner=True,
        speculative_config=SimpleNamespace(
            method="eagle3",
            num_speculative_tokens=16,
            num_speculative_tokens_per_batch_size=None,
            parallel_drafting=False,
            draft_sample_method="greedy",
            rejection_sample_method="standard",
            enable_adaptive_verification=False,
            draft_model_config=SimpleNamespace(use_mla=False, get_head_size=lambda: 64),
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            worker_cls="vllm.v1.worker.gpu_worker.Worker",
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=64, max_num_batched_tokens=2048, scheduler_cls=None),
        attention_config=SimpleNamespace(backend=None, flash_attn_version=None),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(cudagraph_mode=None, cudagraph_capture_sizes=None),
        model_config=SimpleNamespace(
            uses_mrope=False,
            uses_xdrope_dim=0,
            return_sampling_mask=False,
            enforce_eager=False,
            is_multimodal_model=False,
            enable_prompt_embeds=False,
            get_head_size=lambda: 128,
        ),
        watermark_config=None,
        additional_config={"nwor": {"tree": tree or TREE, **nwor}},
    )


def _config(engine: Any) -> NworConfig:
    config = NworConfig.from_additional_config(engine.additional_config)
    assert config is not None
    return config


def _set(engine: Any, path: str, value: Any) -> None:
    *owners, name = path.split(".")
    for owner in owners:
        engine = engine[owner] if isinstance(engine, dict) else getattr(engine, owner)
    if isinstance(engine, dict):
        engine[name] = value
    else:
        setattr(engine, name, value)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
@pytest.mark.parametrize("rejection", ["standard", "synthetic"])
@pytest.mark.parametrize("kind", ["grown", "comb"])
def test_an_engine_that_can_have_trees(method: str, rejection: str, kind: str) -> None:
    engine = _engine({**TREE, "kind": kind})
    engine.speculative_config.method = method
    engine.speculative_config.rejection_sample_method = rejection
    assert why_not(engine, _config(engine)) is None
    check_engine(engine, _config(engine))


def test_fields_that_a_version_of_vllm_lacks_refuse_nothing() -> None:
    engine = _engine()
    for name in ("parallel_drafting", "draft_sample_method", "enable_adaptive_verification"):
        delattr(engine.speculative_config, name)
    for name in ("uses_xdrope_dim", "return_sampling_mask"):
        delattr(engine.model_config, name)
    del engine.watermark_config
    assert why_not(engine, _config(engine)) is None


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("speculative_config", None, "without speculative decoding"),
        ("use_v2_model_runner", False, "model runner V2"),
        ("speculative_config.method", "mtp", "the drafter is 'mtp', and they are for eagle and eagle3"),
        ("speculative_config.method", "ngram", "the drafter is 'ngram'"),
        (
            "speculative_config.num_speculative_tokens",
            4,
            "num_speculative_tokens is 4, and a tree",
        ),
        ("speculative_config.parallel_drafting", True, "all tokens in one pass"),
        ("speculative_config.draft_sample_method", "probabilistic", "drafts are sampled"),
        ("speculative_config.rejection_sample_method", "block", "rejection_sample_method is 'block'"),
        ("speculative_config.enable_adaptive_verification", True, "adaptive verification"),
        ("parallel_config.pipeline_parallel_size", 2, "pipeline stages"),
        ("parallel_config.data_parallel_size", 2, "data parallelism"),
        ("scheduler_config.max_num_seqs", 513, r"2052 rows \(513 requests\)"),
        ("model_config.uses_mrope", True, "M-RoPE"),
        ("model_config.uses_xdrope_dim", 3, "M-RoPE"),
        ("model_config.return_sampling_mask", True, "sampling masks"),
        ("watermark_config", object(), "watermarked"),
    ],
)
def test_an_engine_that_cannot_is_refused(path: str, value: Any, reason: str) -> None:
    engine = _engine()
    _set(engine, path, value)
    whole = f"trees of draft tokens are not possible here: .*{reason}"
    with pytest.raises(ConfigError, match=whole):
        check_engine(engine, _config(engine))
    # An engine asks while its configuration is made, before anything of it is started.
    with pytest.raises(ConfigError, match=whole):
        choose_worker(engine)
    assert engine.parallel_config.worker_cls == "vllm.v1.worker.gpu_worker.Worker"


def test_modes_that_hold_no_trees() -> None:
    engine = _engine(mode="off", modes=["off", "cow"])
    with pytest.raises(ConfigError, match="mode 'stage' is not enabled"):
        check_engine(engine, _config(engine))


def test_an_engine_that_chooses_among_trees_and_chains() -> None:
    engine = _engine(draft_tokens="auto")
    config = _config(engine)
    engine.speculative_config.num_speculative_tokens_per_batch_size = config.draft_tokens.schedule
    assert why_not(engine, config) is None


def test_shorter_chains_for_larger_batches_are_possible() -> None:
    engine = _engine()
    engine.speculative_config.num_speculative_tokens_per_batch_size = [(1, 4, 16), (5, 16, 6), (17, 64, 2)]
    assert why_not(engine, _config(engine)) is None


def test_the_passes_of_a_comb_are_as_narrow_as_chains() -> None:
    for kind, possible in (("comb", True), ("grown", False)):
        engine = _engine({**TREE, "kind": kind})
        engine.scheduler_config.max_num_seqs = 2048
        assert (why_not(engine, _config(engine)) is None) == possible


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({}, None),
        ({"temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 1, "logprobs": 5, "n": 3}, None),
        ({"min_tokens": 4, "stop_token_ids": [3], "allowed_token_ids": [1, 2]}, None),
        ({"presence_penalty": 0.1}, "penalties"),
        ({"frequency_penalty": -0.1}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"bad_words": ["no"]}, "bad_words"),
        ({"thinking_token_budget": 0}, "thinking_token_budget"),
    ],
)
def test_requests_that_need_chains(params: dict[str, Any], reason: str | None) -> None:
    from vllm import SamplingParams

    assert needs_chain(SamplingParams(**params), False) == reason
    assert reason is None or reason in CHAIN_REASONS
    # Processors of the user's own see a window as vLLM passes it.
    assert needs_chain(SamplingParams(**params), True) == (reason or "logits_processors")


def test_structured_outputs_need_chains_and_pooling_none() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[a-z]"))
    assert needs_chain(params, False) == "structured_outputs"
    assert needs_chain(None, True) is None


#: By the bounds: where the engine chooses, trees have 512 rows together at most.
ROWS = {"auto:0-16": r"128 rows \(32 requests\)", None: r"256 rows \(64 requests\)"}


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ("use_v2_model_runner", False, "model runner V2"),
        ("model_config.uses_mrope", True, "M-RoPE"),
        ("scheduler_config.max_num_batched_tokens", 96, ROWS),
        ("attention_config.backend", SimpleNamespace(name="TRITON_ATTN"), "attention backend TRITON_ATTN"),
        ("attention_config.backend", "FLASHINFER", "attention backend FLASHINFER"),
        ("attention_config.flash_attn_version", 2, "FlashAttention 3"),
        ("speculative_config.draft_model_config.use_mla", True, "MLA"),
        ("speculative_config.draft_model_config.get_head_size", lambda: 80, "heads of size 80"),
        ("cache_config.cache_dtype", "fp8_e5m2", "fp8_e5m2"),
        ("compilation_config.cudagraph_mode", CUDAGraphMode.PIECEWISE, "full CUDA graphs are off"),
        ("model_config.enforce_eager", True, "full CUDA graphs are off"),
        ("model_config.is_multimodal_model", True, "embeddings"),
        ("additional_config.nwor.mixed_graph_rows", 0, "mixed_graph_rows is 0"),
        ("additional_config.nwor.attention_backends", ["triton"], "not among the attention backends"),
        ("capability", (10, 0), "this one has 10.0"),
        ("capability", (8, 0), "this one has 8.0"),
    ],
)
@pytest.mark.parametrize("bounds", ["auto:0-16", None])
def test_where_trees_are_not_required_chains_are_drafted(
    bounds: str | None,
    path: str,
    value: Any,
    reason: str | dict[str | None, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability

    monkeypatch.setattr(known_sources, "check", lambda: None)
    capability = [(9, 0)]
    monkeypatch.setattr(
        type(current_platform),
        "get_device_capability",
        classmethod(lambda *_: DeviceCapability(*capability[0])),
    )
    engine = _engine(tree_required=False, draft_tokens=bounds)
    choose_worker(engine)
    assert engine.speculative_config.num_speculative_tokens == 16
    assert _config(engine).tree is not None
    assert not caplog.records

    engine = _engine(tree_required=False, draft_tokens=bounds)
    if path == "capability":
        capability[0] = value
    else:
        _set(engine, path, value)
    choose_worker(engine)
    config, speculative = _config(engine), engine.speculative_config
    assert config.tree is None
    told = [record.getMessage() for record in caplog.records]
    reason = reason if isinstance(reason, str) else reason[bounds]
    assert len(told) == 1 and re.search(f"^Draft tokens are chains: trees .*{reason}", told[0])  # noqa: PT018
    if bounds is None:
        assert speculative.num_speculative_tokens == 6
    else:
        assert config.draft_tokens == DraftBounds()
        assert speculative.num_speculative_tokens == 8
        assert speculative.num_speculative_tokens_per_batch_size == DraftBounds().schedule
    choose_worker(engine)  # once more, for a copy of the configuration
    assert len(caplog.records) == 1


def test_bounds_stay_where_trees_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(tree_required=False, draft_tokens="auto:2-16")
    engine.use_v2_model_runner = False
    choose_worker(engine)
    assert _config(engine).draft_tokens == DraftBounds(2, 8)


@pytest.mark.parametrize(
    ("settings", "by_requests", "sizes", "most"),
    [
        # Trees of 16 nodes have 512 rows with 30 requests, which run in a graph of 32.
        ({"draft_tokens": "auto"}, [(1, 1, 0), (2, 2, 4)], None, 32),
        ({"draft_tokens": "auto"}, [(1, 1, 0), (2, 2, 4)], [1, 2, 4, 8, 16, 48, 72], 48),
        ({"draft_tokens": "auto"}, [(1, 1, 0), (2, 2, 4)], [1, 2, 4, 8], 30),
        ({}, None, None, 1024),
        ({}, [(1, 11, 16), (12, 48, 4), (49, 1024, 2)], None, 16),
        # vLLM goes on with what an entry says up to the next one.
        ({}, [(1, 11, 16), (20, 48, 4)], None, 24),
        ({}, [(1, 11, 4), (12, 20, 16)], None, 1024),
    ],
)
def test_the_largest_batch_that_has_trees(
    settings: dict[str, Any], by_requests: Any, sizes: list[int] | None, most: int
) -> None:
    engine = _engine(**settings)
    engine.scheduler_config.max_num_seqs = 1024
    engine.compilation_config.cudagraph_capture_sizes = sizes
    engine.speculative_config.num_speculative_tokens_per_batch_size = by_requests
    assert most_requests(engine, _config(engine)) == most
    engine.scheduler_config.max_num_seqs = 5
    assert most_requests(engine, _config(engine)) == 5
