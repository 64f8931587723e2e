"""Claim: layers of vLLM's backends for AMD GPUs would route windows past the cache, and none is staged yet.

Coverage: vLLM's own implementations on a CPU, with kernels that attend in plain torch: rows and cache of a
step of windows and prompts beside those of a stock step. Which layouts and features are refused, and every
engine as long as there are no kernels for AMD GPUs. What vLLM's kernels there compute has run nowhere.
Tolerance: of rows 1e-5, in float32; of the cache none.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backend import CommonAttentionMetadata

try:
    from vllm.v1.attention.backends import (
        rocm_aiter_fa,
        rocm_aiter_unified_attn,
        rocm_attn,
        rocm_segmented_attn,
    )
except AssertionError as error:  # those of 0.33 ask for a GPU as they are imported
    pytest.skip(f"vLLM's modules for AMD GPUs want one: {error}", allow_module_level=True)
from vllm.v1.attention.ops.paged_attn import PagedAttention

from nwor import ops
from nwor.config import NworConfig
from nwor.engine.attention import rocm
from nwor.engine.attention.attachment import Attachment, check_cache, staged_layer
from nwor.engine.attention.layer_context import LayerContext, parameters_of
from nwor.engine.attention.staged_attention import layer_cache_views
from nwor.engine.attention.step_metadata import StepMetadata
from nwor.engine.eligibility import Unsupported, check_rocm
from nwor.engine.window_manager import WindowManager
from nwor.modes import Mode
from nwor.windows.window import Window, group_layers
from nwor.worker_state import WorkerState
from tests.flashinfer_stand_in import attend

HEADS, KV_HEADS, SIZE, BLOCK, BLOCKS, LONGEST = 4, 2, 64, 16, 8, 3
#: Two windows and a whole prompt.
LENGTHS, DRAFTS, CONTEXTS, WINDOW_ROWS, ROWS = [3, 2, 6], [2, 1, 0], [20, 9, 0], 5, 11
TABLE = torch.tensor([[3, 5], [1, 7], [2, 4]], dtype=torch.int32)
STARTS = torch.tensor([0, 3, 5, 11], dtype=torch.int32)
SEQ_LENS = torch.tensor([23, 11, 6], dtype=torch.int32)
SLOTS = torch.tensor(
    [
        int(TABLE[request, at // BLOCK]) * BLOCK + at % BLOCK
        for request, (length, context) in enumerate(zip(LENGTHS, CONTEXTS, strict=True))
        for at in range(context, context + length)
    ]
)
COMMON = CommonAttentionMetadata(
    query_start_loc=STARTS,
    query_start_loc_cpu=STARTS,
    seq_lens=SEQ_LENS,
    num_reqs=3,
    num_actual_tokens=ROWS,
    max_query_len=6,
    max_seq_len=32,
    block_table_tensor=TABLE,
    slot_mapping=SLOTS,
    seq_lens_cpu_upper_bound=SEQ_LENS,
)
SIDES_APART = (BLOCKS, 2, BLOCK, KV_HEADS * SIZE)
PACKED = (BLOCKS, KV_HEADS, BLOCK, 2 * SIZE)


def rows_of(starts: torch.Tensor) -> list[int]:
    return [stop - start for start, stop in pairwise(starts.tolist())]


def paged(q: Any, k: Any, v: Any, table: Any, starts: Any, lengths: Any, out: Any) -> None:
    blocks = table.tolist()
    assert starts[0] == 0
    attend(q, (k, v), False, blocks, rows_of(starts), lengths.tolist(), SIZE**-0.5, out)


def unified(**settings: Any) -> None:
    """Stand in for AITER's unified attention."""
    places = (settings[name] for name in ("block_table", "cu_seqlens_q", "seqused_k", "out"))
    paged(settings["q"], settings["k"], settings["v"], *places)


def segmented(**settings: Any) -> None:
    """Stand in for segmented attention, which is given new keys and values as well."""
    assert len(settings["query"]) == len(settings["key"]) == len(settings["value"])
    names = ("query", "key_cache", "value_cache", "block_table", "query_start_loc", "seq_lens", "output")
    paged(*(settings[name] for name in names))


def varlen(**settings: Any) -> None:
    """Stand in for AITER's attention of whole prompts: it reads new keys and values, and no cache."""
    q, k, v = settings["q"], settings["k"], settings["v"]
    for start, stop in pairwise(settings["cu_seqlens_q"].tolist()):
        sides = (k[start:stop][None], v[start:stop][None])
        rows = stop - start
        attend(q[start:stop], sides, False, [[0]], [rows], [rows], SIZE**-0.5, settings["out"][start:stop])


def write(key: Any, value: Any, keys: Any, values: Any, slots: torch.Tensor, *_: Any) -> None:
    there = slots >= 0
    for rows, cache in ((key, keys), (value, values)):
        cache[slots[there] // BLOCK, slots[there] % BLOCK] = rows[: len(slots)][there]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rocm_aiter_unified_attn.ops, "reshape_and_cache_flash", write)
    monkeypatch.setattr(torch.ops._C_cache_ops, "reshape_and_cache_flash", write, raising=False)
    monkeypatch.setattr(rocm_segmented_attn, "triton_reshape_and_cache_flash", write)
    monkeypatch.setattr(rocm_segmented_attn, "segmented_attention", segmented)
    aiter = SimpleNamespace(is_shuffle_kv_cache_enabled=lambda: False, flash_attn_varlen_func=varlen)
    monkeypatch.setattr(rocm_aiter_fa, "rocm_aiter_ops", aiter)
    unified_module = SimpleNamespace(unified_attention=unified)
    monkeypatch.setitem(sys.modules, "aiter.ops.triton.unified_attention", unified_module)
    for name in ("aiter", "aiter.ops", "aiter.ops.triton"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())


def impl_of(kind: Any, **more: Any) -> Any:
    """Return an implementation as it is on an AMD GPU: made here, it would ask for one."""
    impl = object.__new__(kind)
    vars(impl).update(
        attn_type="decoder",
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=SIZE,
        scale=SIZE**-0.5,
        alibi_slopes=None,
        sliding_window=(-1, -1),
        kv_cache_dtype="auto",
        logits_soft_cap=0,
        kv_sharing_target_layer_name=None,
        sinks=None,
        fp8_dtype=torch.float8_e4m3fn,
        unified_attention=unified,
        _get_workspace=lambda _: None,
        _autotune_enabled=lambda: False,
        **more,
    )
    return impl


def simple_metadata() -> Any:
    return rocm_attn.RocmAttentionMetadata(ROWS, 6, STARTS, 32, SEQ_LENS, TABLE, SLOTS)


def aiter_builder(kind: Any, layer: Any) -> Any:
    builder = object.__new__(kind)
    context = SimpleNamespace(static_forward_context={"layer.0": layer})
    vars(builder).update(
        layer_names=["layer.0"],
        vllm_config=SimpleNamespace(compilation_config=context),
        reorder_batch_threshold=LONGEST,
        nwor_stock_threshold=LONGEST,
        scale=torch.ones(1),
        kv_sharing_workspace=None,
        aot_sliding_window=None,
        device=torch.device("cpu"),
    )
    return builder


def aiter_metadata(layer: Any) -> Any:
    own = isinstance(layer.impl, rocm.NworAiterFlashAttentionImpl)
    kind = (
        rocm.NworAiterFlashAttentionMetadataBuilder
        if own
        else rocm_aiter_fa.AiterFlashAttentionMetadataBuilder
    )
    metadata = aiter_builder(kind, layer).build(0, COMMON)
    assert (type(metadata) is StepMetadata) == own
    return metadata


CASES = {
    "unified": (
        rocm.NworRocmAiterUnifiedAttentionBackend,
        rocm_aiter_unified_attn.RocmAiterUnifiedAttentionImpl,
        PACKED,
        lambda _: simple_metadata(),
    ),
    "segmented": (
        rocm.NworRocmSegmentedAttentionBackend,
        rocm_segmented_attn.RocmSegmentedAttentionImpl,
        SIDES_APART,
        lambda _: simple_metadata(),
    ),
    "aiter": (
        rocm.NworAiterFlashAttentionBackend,
        rocm_aiter_fa.AiterFlashAttentionImpl,
        PACKED,
        aiter_metadata,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_staged_step_would_be_a_stock_step(case: str) -> None:
    backend, stock, shape, metadata_of = CASES[case]
    torch.manual_seed(4)
    before = torch.randn(shape)
    query, key, value = torch.randn(ROWS, HEADS, SIZE), *torch.randn(2, ROWS, KV_HEADS, SIZE)
    one = torch.tensor(1.0)

    def layer_of(kind: Any) -> Any:
        return SimpleNamespace(
            impl=impl_of(kind), kv_cache=before.clone(), head_size=SIZE, _k_scale=one, _v_scale=one
        )

    def run(layer: Any) -> torch.Tensor:
        output = torch.full_like(query, torch.nan)
        layer.impl.do_kv_cache_update(layer, key, value, layer.kv_cache, SLOTS)
        layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata_of(layer), output)
        return output

    plain = layer_of(stock)
    want = run(plain)
    assert not want.isnan().any()

    layer = layer_of(backend.get_impl_cls())
    views = backend.nwor_cache_views or layer_cache_views
    staged = staged_layer("layer.0", layer, views, torch.float32)
    check_cache(staged)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(num_speculative_tokens=LONGEST - 1),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        parallel_config=SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1),
    )
    manager = WindowManager(config, NworConfig.from_mapping({"mode": "stage"}), torch.device("cpu"))
    manager.state.token_bytes = 10
    manager.window = window = Window(group_layers([(0, staged)]))
    size = ops.verify_attention_workspace_size("cpu", HEADS, KV_HEADS, SIZE, LONGEST)
    workspace = torch.zeros(size, dtype=torch.uint8)
    layer.impl.nwor = LayerContext(window, manager.state, staged, parameters_of(layer, LONGEST), workspace)
    manager.begin(manager.plan_step(list("abc"), LENGTHS, DRAFTS), STARTS, SLOTS[None])
    seen = run(layer)
    assert manager.state.fault is None
    torch.testing.assert_close(seen, want, atol=1e-5, rtol=1e-5)
    assert torch.equal(seen[WINDOW_ROWS:], want[WINDOW_ROWS:])
    prompt = slice(WINDOW_ROWS, None)
    for cache, stocks in zip(views(layer), views(plain), strict=True):
        places = SLOTS // BLOCK, SLOTS % BLOCK
        assert torch.equal(cache[places][prompt], stocks[places][prompt])
        assert not (cache[places][:WINDOW_ROWS] == stocks[places][:WINDOW_ROWS]).any()
    manager.finish(torch.zeros(3, dtype=torch.int32))
    assert torch.equal(layer.kv_cache, plain.kv_cache)


def test_keys_that_are_packed_for_amds_kernels_have_no_strides() -> None:
    """Of ROCM_ATTN: a view of its keys as tokens of heads would have to be a copy."""
    keys, values = PagedAttention.split_kv_cache(
        torch.zeros(2, *SIDES_APART[:1], *SIDES_APART[2:]), KV_HEADS, SIZE
    )
    assert keys.shape == (BLOCKS, KV_HEADS, SIZE // 4, BLOCK, 4)
    with pytest.raises(RuntimeError, match="view size"):
        keys.permute(0, 3, 1, 2, 4).view(BLOCKS, BLOCK, KV_HEADS, SIZE)
    tokens = values.permute(0, 3, 1, 2)
    layer: Any = SimpleNamespace(name="layers.0", key_cache=tokens, value_cache=tokens)
    with pytest.raises(Unsupported, match="last dimension"):
        check_cache(layer)


@pytest.mark.parametrize("shape", [(BLOCKS, 4, BLOCK, 2 * SIZE), (BLOCKS, 2, BLOCK, SIZE)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    impl = SimpleNamespace(num_kv_heads=KV_HEADS)
    layer = SimpleNamespace(impl=impl, kv_cache=torch.zeros(shape), head_size=SIZE)
    with pytest.raises(Unsupported) as verdict:
        rocm.sides_apart(layer)
    assert verdict.value.reason == "cache_format"


@pytest.mark.parametrize(
    ("fusion", "shuffled", "cache", "fnuz", "reason"),
    [
        (None, False, "auto", True, None),
        (None, False, "fp8", False, None),
        (None, False, "fp8", True, "cache_format"),
        (None, True, "auto", False, "cache_format"),
        ("fuse_rope_kvcache", False, "auto", False, "attention_feature"),
        ("fuse_qk_norm_rope_kvcache", False, "auto", False, "attention_feature"),
        ("fuse_attn_quant", False, "auto", False, "attention_feature"),
    ],
)
def test_what_no_kernel_would_take_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    fusion: str | None,
    shuffled: bool,
    cache: str,
    fnuz: bool,
    reason: str | None,
) -> None:
    from vllm import _aiter_ops, platforms

    monkeypatch.setattr(
        _aiter_ops, "rocm_aiter_ops", SimpleNamespace(is_shuffle_kv_cache_enabled=lambda: shuffled)
    )
    monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_fp8_fnuz=lambda: fnuz))
    layer = SimpleNamespace(impl=impl_of(rocm.NworRocmAiterUnifiedAttentionImpl))
    layer.impl.kv_cache_dtype = cache
    passes = SimpleNamespace(**({fusion: True} if fusion else {}))
    config = SimpleNamespace(compilation_config=SimpleNamespace(pass_config=passes))
    if reason is None:
        check_rocm("layer.0", layer, config)
        return
    with pytest.raises(Unsupported) as verdict:
        check_rocm("layer.0", layer, config)
    assert verdict.value.reason == reason


def test_without_kernels_for_amd_gpus_nothing_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    state = WorkerState(NworConfig.from_mapping({"mode": "stage"}), Mode.STAGE)
    attachment = Attachment(SimpleNamespace(), torch.device("cuda"), state, LONGEST)
    with pytest.raises(Unsupported, match="AMD") as verdict:
        attachment.layer_contexts({"layer.0": SimpleNamespace()}, {"layer.0": 0}, layer_cache_views, ())
    assert verdict.value.reason == "attention_backend"
