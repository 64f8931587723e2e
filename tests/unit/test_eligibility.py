"""The table of reasons in the documentation is the one in the code."""

import contextlib
import importlib
import pkgutil
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from nwor.engine.eligibility import REASONS, Unsupported, check_engine, check_graphs, check_impl, check_layer

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "vllm" / "fallbacks.md"


def test_documented_reasons_are_the_reasons():
    rows = re.findall(r"^\| `(\w+)` \| (start|step) \| (.+) \|$", DOCUMENT.read_text(), re.MULTILINE)
    assert {name: (when, text) for name, when, text in rows} == {
        name: (reason.when, reason.text) for name, reason in REASONS.items()
    }


def _config(**changes):
    parallel = {
        "pipeline_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "use_ubatching": False,
    }
    model = {"use_mla": False, "is_encoder_decoder": False, "is_mm_prefix_lm": False}
    top = {
        "kv_transfer_config": None,
        "speculative_config": SimpleNamespace(num_speculative_tokens=4),
        "use_v2_model_runner": False,
        "device_config": SimpleNamespace(device_type="cpu"),
    }
    for part in (parallel, model, top):
        part.update({key: value for key, value in changes.items() if key in part})
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel), model_config=SimpleNamespace(**model), **top
    )


def test_plain_engine_passes():
    check_engine(_config(), 64)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_pipeline_stages_pass_on_model_runner_v2(device):
    config = SimpleNamespace(device_type=device)
    check_engine(_config(pipeline_parallel_size=2, use_v2_model_runner=True, device_config=config), 64)


@pytest.mark.parametrize("images", [True, False])
def test_a_multimodal_model_is_staged_where_text_alone_is_served(images):
    """vLLM's own word: it says that tokens see one another in both directions only where images may come."""
    pytest.importorskip("vllm.config")
    convertors = importlib.import_module("vllm.transformers_utils.model_arch_config_convertor")
    hf_config = SimpleNamespace(model_type="gemma3")
    convertor = convertors.ModelArchConfigConvertorBase(hf_config, hf_config)
    config = _config(is_mm_prefix_lm=convertor.is_mm_prefix_lm(supports_multimodal=images))
    if not images:
        check_engine(config, 64)
        return
    with pytest.raises(Unsupported, match="--language-model-only") as verdict:
        check_engine(config, 64)
    assert verdict.value.reason == "attention_feature"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"speculative_config": None}, "no_speculation"),
        ({"speculative_config": SimpleNamespace(num_speculative_tokens=64)}, "window_too_long"),
        ({"use_mla": True}, "mla"),
        ({"is_encoder_decoder": True}, "encoder_decoder"),
        ({"kv_transfer_config": object()}, "kv_connector"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel"),
        (
            {"pipeline_parallel_size": 2, "device_config": SimpleNamespace(device_type="cuda")},
            "pipeline_parallel",
        ),
        ({"decode_context_parallel_size": 2}, "context_parallel"),
        ({"prefill_context_parallel_size": 2}, "context_parallel"),
        ({"use_ubatching": True}, "micro_batching"),
        ({"is_mm_prefix_lm": True}, "attention_feature"),
    ],
)
def test_each_engine_reason(change, reason):
    with pytest.raises(Unsupported) as verdict:
        check_engine(_config(**change), 64)
    assert verdict.value.reason == reason


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"alibi_slopes": [1.0]}, "attention_feature"),
        ({"kv_sharing_target_layer_name": "layers.0"}, "kv_sharing"),
        ({"attn_type": "encoder_only"}, "attention_feature"),
    ],
)
def test_each_layer_reason(change, reason):
    impl = {"alibi_slopes": None, "kv_sharing_target_layer_name": None, "attn_type": "decoder"} | change
    with pytest.raises(Unsupported) as verdict:
        check_impl("layer", SimpleNamespace(**impl))
    assert verdict.value.reason == reason


class _Builder:
    pass


class _Impl:
    alibi_slopes = None
    kv_sharing_target_layer_name = None


def _backend(impl=_Impl, builder=_Builder):
    return SimpleNamespace(get_impl_cls=lambda: impl, get_builder_cls=lambda: builder)


def _layer(kind, impl=_Impl, builder=_Builder):
    layer = kind.__new__(kind)
    for name, value in (("impl", impl()), ("attn_backend", _backend(impl, builder))):
        object.__setattr__(layer, name, value)
    return layer


def test_plain_attention_passes():
    from vllm.model_executor.layers.attention import Attention

    check_layer("layers.0", _layer(Attention), _backend())


def test_every_kind_of_attention_that_vllm_derives_is_refused():
    import vllm.model_executor.layers.attention as package
    from vllm.model_executor.layers.attention import Attention

    for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        with contextlib.suppress(ImportError):  # some need packages of a GPU's
            importlib.import_module(module.name)
    derived = Attention.__subclasses__()
    assert {"ChunkedLocalAttention", "RSWAAttention"} <= {kind.__name__ for kind in derived}
    for kind in derived:
        with pytest.raises(Unsupported, match=kind.__name__) as verdict:
            check_layer("layers.0", _layer(kind), _backend())
        assert verdict.value.reason == "attention_feature"


class _Wrapped(_Builder):
    pass


class _Other(_Impl):
    pass


@pytest.mark.parametrize(
    ("change", "reason", "words"),
    [
        ({"builder": _Wrapped}, "attention_feature", "has metadata from _Wrapped"),
        ({"impl": _Other}, "attention_backend", "uses _Other"),
    ],
)
def test_a_backend_that_is_wrapped_or_another_is_refused(change, reason, words):
    from vllm.model_executor.layers.attention import Attention

    with pytest.raises(Unsupported, match=words) as verdict:
        check_layer("layers.0", _layer(Attention, **change), _backend())
    assert verdict.value.reason == reason


def test_batch_invariance_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(Unsupported) as verdict:
        check_engine(_config(), 64)
    assert verdict.value.reason == "batch_invariance"


def test_recurrent_layers_and_other_kinds_of_cache_are_refused():
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    for base, reason in ((MambaBase, "state_space"), (AttentionLayerBase, "attention_backend")):
        kind = type("Kind", (base,), dict.fromkeys(base.__abstractmethods__))
        with pytest.raises(Unsupported, match="Kind") as verdict:
            check_layer("layers.0", kind.__new__(kind), _backend())
        assert verdict.value.reason == reason


def _compilation(piecewise=True, update_is_split=True):
    return SimpleNamespace(
        cudagraph_mode=SimpleNamespace(has_piecewise_cudagraphs=lambda: piecewise),
        mode=SimpleNamespace(name="VLLM_COMPILE"),
        use_inductor_graph_partition=False,
        splitting_ops_contain_attention=lambda: True,
        splitting_ops_contain_kv_cache_update=lambda: update_is_split,
    )


def test_graphs_that_hold_the_update_are_refused(monkeypatch):
    check_graphs(_compilation())
    check_graphs(_compilation(piecewise=False, update_is_split=False))
    with pytest.raises(Unsupported) as verdict:
        check_graphs(_compilation(update_is_split=False))
    assert verdict.value.reason == "piecewise_update"
    monkeypatch.setattr("vllm.compilation.breakable_cudagraph.is_breakable_cudagraph_enabled", lambda: True)
    with pytest.raises(Unsupported, match="breakable"):
        check_graphs(_compilation())
