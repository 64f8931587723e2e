"""Claim: with vLLM's FlashInfer backend windows are routed past the cache, and other rows to FlashInfer.

Coverage: vLLM's own builder and implementation on a CPU, with kernels of FlashInfer that attend in plain
torch (tests/flashinfer_stand_in.py): those of compute capability 10, XQA, and its own with plans. Rows and
cache of steps of windows alone, beside prompts, and after errors, beside those of a stock step; what is
built, and when; both orders of heads and tokens; what is refused.
Tolerance: of rows 1e-5, in float32; of the cache none. What FlashInfer computes is for a GPU to show.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout

from nwor import ops
from nwor.config import NworConfig
from nwor.engine.attention.attachment import staged_layer
from nwor.engine.attention.layer_context import LayerContext, parameters_of
from nwor.engine.attention.staged_attention import layer_cache_views, stock_attention
from nwor.engine.attention.step_metadata import StepMetadata, without_first
from nwor.engine.eligibility import Unsupported, check_flashinfer
from nwor.engine.window_manager import WindowManager
from nwor.modes import Mode
from nwor.windows.window import Window, group_layers
from tests.flashinfer_stand_in import WAYS, installed

HEADS, KV_HEADS, SIZE, BLOCK, PER_REQUEST = 4, 2, 64, 16, 3
#: Windows, the last of a short request without drafts; a prompt's chunk and a whole prompt.
LENGTHS, DRAFTS, CONTEXTS = [5, 4, 1, 7, 2], [4, 3, 0, 0, 0], [20, 33, 7, 9, 0]
LONGEST, WINDOWS, WINDOW_ROWS = 5, 3, 10
BLOCKS = len(LENGTHS) * PER_REQUEST + 1
REJECTED, REJECTED_ROWS = [2, 0, 0], [3, 4]


@pytest.fixture(params=WAYS)
def way(request: Any) -> str:
    return str(request.param)


@pytest.fixture
def modules(way: str) -> Iterator[Any]:
    with installed(way) as found:
        yield found


class Engine:
    """One layer of a target model in FlashInfer's attention, its builder, and a step.

    Args:
        modules: what `installed` gives.
        heads_first: whether the cache has its blocks head by head.
        requests: how many of the step's there are.
        v2: whether the model runner is V2.

    """

    def __init__(
        self, modules: Any, heads_first: bool = True, requests: int = len(LENGTHS), v2: bool = True
    ) -> None:
        self.stock, self.own, self.kernels = modules
        generator = torch.Generator().manual_seed(3)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.rows = rows = sum(LENGTHS[:requests])
        self.query, self.key, self.value = (randn(rows, count, SIZE) for count in (HEADS, KV_HEADS, KV_HEADS))
        cache = randn(BLOCKS, KV_HEADS, BLOCK, 2 * SIZE)
        if not heads_first:
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        self.before = cache
        table = torch.randperm(BLOCKS, generator=generator)[: requests * PER_REQUEST]
        table = table.view(requests, PER_REQUEST).int()
        places = [
            (request, CONTEXTS[request] + row)
            for request in range(requests)
            for row in range(LENGTHS[request])
        ]
        slots = [int(table[request, at // BLOCK]) * BLOCK + at % BLOCK for request, at in places]
        starts = torch.tensor([0, *LENGTHS[:requests]]).cumsum(0).int()
        lengths = torch.tensor(LENGTHS[:requests]) + torch.tensor(CONTEXTS[:requests])
        self.common = CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=lengths.int(),
            num_reqs=requests,
            num_actual_tokens=rows,
            max_query_len=max(LENGTHS[:requests]),
            max_seq_len=BLOCK * PER_REQUEST,
            block_table_tensor=table,
            slot_mapping=torch.tensor(slots),
            seq_lens_cpu_upper_bound=lengths.int() + 3,  # drafts that were rejected are not known yet
        )
        self.forward_context: dict[str, Any] = {}
        layout = KVCacheLayout.LBHNC if heads_first else KVCacheLayout.LBNHC
        self.config: Any = SimpleNamespace(
            cache_config=SimpleNamespace(get_resolved_kv_cache_layout=lambda: layout, cache_dtype="auto"),
            model_config=SimpleNamespace(
                max_model_len=BLOCK * PER_REQUEST,
                dtype=torch.float32,
                get_num_attention_heads=lambda _: HEADS,
            ),
            attention_config=SimpleNamespace(
                disable_flashinfer_q_quantization=False, use_trtllm_attention=None
            ),
            compilation_config=SimpleNamespace(
                cudagraph_mode=CUDAGraphMode.NONE,
                max_cudagraph_capture_size=None,
                static_forward_context=self.forward_context,
                pass_config=SimpleNamespace(fuse_attn_quant=False),
            ),
            scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=1,
                pipeline_parallel_size=1,
                cp_kv_cache_interleave_size=1,
                dcp_comm_backend="ag_rs",
                decode_context_parallel_size=1,
            ),
            speculative_config=SimpleNamespace(
                num_speculative_tokens=LONGEST - 1,
                enable_adaptive_verification=False,
                parallel_drafting=False,
            ),
            num_speculative_tokens=LONGEST - 1,
            use_v2_model_runner=v2,
        )
        self.manager = WindowManager(
            self.config, NworConfig.from_mapping({"mode": "stage"}), torch.device("cpu")
        )
        self.manager.state.token_bytes = 10
        self.layer = self.make_layer(self.own.NworFlashInferImpl)
        self.impl = self.layer.impl
        self.forward_context["layer.0"] = self.layer
        self.builder = self.make_builder(self.own.NworFlashInferMetadataBuilder)

    def make_layer(self, kind: Any) -> Any:
        """Return a layer with an implementation of a class, and a cache of its own."""
        one = torch.tensor(1.0)
        scales = dict.fromkeys(("_q_scale_float", "_k_scale_float", "_v_scale_float"), 1.0)
        scales |= dict.fromkeys(("_q_scale", "_k_scale", "_v_scale"), one)
        impl = kind(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, "auto")
        impl.dcp_world_size, impl.need_to_return_lse_for_decode = 1, False
        return SimpleNamespace(impl=impl, kv_cache=self.before.clone(), head_size=SIZE, **scales)

    def make_builder(self, kind: Any) -> Any:
        """Return a builder of a class, as vLLM makes it."""
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=KV_HEADS, head_size=SIZE, dtype=torch.float32)
        per_layer = {"layer.0": SimpleNamespace()}
        same = SimpleNamespace(
            sm_scale=SIZE**-0.5,
            window_left=-1,
            logits_soft_cap=None,
            has_sinks=False,
            has_same_window_lefts=True,
            has_same_all_params=True,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.stock, "get_per_layer_parameters", lambda *_: per_layer)
            patch.setattr(self.stock, "infer_global_hyperparameters", lambda _: same)
            return kind(spec, ["layer.0"], self.config, torch.device("cpu"))

    def bind(self) -> None:
        """Let the layer take part."""
        staged = staged_layer("layer.0", self.layer, layer_cache_views, torch.float32)
        self.manager.window = window = Window(group_layers([(0, staged)]))
        size = ops.verify_attention_workspace_size("cpu", HEADS, KV_HEADS, SIZE, LONGEST)
        workspace = torch.zeros(size, dtype=torch.uint8)
        parameters = parameters_of(self.layer, LONGEST)
        self.impl.nwor = LayerContext(window, self.manager.state, staged, parameters, workspace)

    def begin(self) -> None:
        """Open the window batch of the step."""
        count = self.common.num_reqs
        plan = self.manager.plan_step(list("abcde")[:count], LENGTHS[:count], DRAFTS[:count])
        self.manager.begin(plan, self.common.query_start_loc, self.common.slot_mapping[None])
        assert self.manager.window is not None
        assert self.manager.window.staging

    def run(self, metadata: Any, layer: Any = None) -> torch.Tensor:
        """Let a layer write its cache and attend."""
        layer = layer or self.layer
        output = torch.full((self.rows, HEADS, SIZE), torch.nan)
        layer.impl.do_kv_cache_update(layer, self.key, self.value, layer.kv_cache, self.common.slot_mapping)
        arguments = (layer, self.query, self.key, self.value, layer.kv_cache, metadata, output)
        assert layer.impl.forward(*arguments) is output
        return output

    def stock_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows and cache of the step in vLLM's own classes."""
        layer = self.make_layer(self.stock.FlashInferImpl)
        builder = self.make_builder(self.stock.FlashInferMetadataBuilder)
        output = self.run(builder.build(0, self.common), layer)
        assert not output.isnan().any()
        self.kernels.take()
        return output, layer.kv_cache

    def with_rows_of(self, cache: torch.Tensor, rows: Any) -> torch.Tensor:
        """Return a copy of a cache in which some rows' slots are as before the step."""
        copy, slots = cache.clone(), self.common.slot_mapping[rows]
        place = slots // BLOCK, slice(None), slots % BLOCK
        copy[place] = self.before[place]
        return copy


def test_a_part_has_nothing_of_the_whole_step() -> None:
    whole = CommonAttentionMetadata(
        query_start_loc=torch.tensor([0, 2, 3, 10]).int(),  # the device has left two drafts out
        query_start_loc_cpu=torch.tensor([0, 3, 5, 12]).int(),
        seq_lens=torch.tensor([9, 8, 7]).int(),
        num_reqs=3,
        num_actual_tokens=10,
        max_query_len=7,
        max_seq_len=9,
        block_table_tensor=torch.arange(6).view(3, 2).int(),
        slot_mapping=torch.arange(10),
        positions=torch.arange(20, 30),
        is_prefilling=torch.tensor([False, False, True]),
        seq_lens_cpu_upper_bound=torch.tensor([9, 9, 7]),
        causal=torch.tensor([True, True, False]),
        _num_computed_tokens_cache=torch.tensor([1, 2, 3]),
        _token_to_req_indices_cache=torch.zeros(10),
    )
    part = without_first(whole, 2, 3)
    assert part.query_start_loc.tolist() == part.query_start_loc_cpu.tolist() == [0, 7]
    assert (part.num_reqs, part.num_actual_tokens, part.max_query_len, part.max_seq_len) == (1, 7, 7, 9)
    assert (part.seq_lens.tolist(), part.seq_lens_cpu_upper_bound.tolist()) == ([7], [7])
    assert part.block_table_tensor.tolist() == [[4, 5]]
    assert part.slot_mapping.tolist() == list(range(3, 10))
    assert part.positions.tolist() == list(range(23, 30))
    assert (part.is_prefilling.tolist(), part.causal.tolist()) == ([True], [False])
    assert part.compute_num_computed_tokens().tolist() == [0]
    assert part._token_to_req_indices_cache is None
    assert whole.query_start_loc.tolist() == [0, 2, 3, 10]


@pytest.mark.parametrize("heads_first", [True, False], ids=["HND", "NHD"])
def test_a_staged_step_is_a_stock_step(modules: Any, way: str, heads_first: bool) -> None:
    if way == "trtllm-gen" and not heads_first:
        pytest.skip("vLLM takes HND on compute capability 10")
    engine = Engine(modules, heads_first)
    want, written = engine.stock_step()
    engine.bind()
    engine.begin()
    metadata = engine.builder.build(0, engine.common)
    assert engine.kernels.take() == []  # nothing is planned for windows
    seen = engine.run(metadata)
    prompts = ["plan prompts", "run prompts 9"] if way != "trtllm-gen" else ["trtllm prompts 9"]
    assert engine.kernels.take() == ["write 9", *prompts]
    assert engine.manager.state.fault is None
    torch.testing.assert_close(seen, want, atol=1e-5, rtol=1e-5)
    assert torch.equal(seen[WINDOW_ROWS:], want[WINDOW_ROWS:])
    assert torch.equal(engine.layer.kv_cache, engine.with_rows_of(written, slice(0, WINDOW_ROWS)))
    engine.manager.finish(torch.tensor(REJECTED, dtype=torch.int32))
    assert torch.equal(engine.layer.kv_cache, engine.with_rows_of(written, REJECTED_ROWS))


def test_nothing_is_built_for_a_step_of_windows_alone(modules: Any) -> None:
    engine = Engine(modules, requests=WINDOWS)
    want, written = engine.stock_step()
    engine.bind()
    engine.begin()
    seen = engine.run(engine.builder.build(0, engine.common))
    assert engine.kernels.take() == []
    torch.testing.assert_close(seen, want, atol=1e-5, rtol=1e-5)
    assert torch.equal(engine.layer.kv_cache, engine.before)
    engine.manager.finish(torch.tensor(REJECTED, dtype=torch.int32))
    assert torch.equal(engine.layer.kv_cache, engine.with_rows_of(written, REJECTED_ROWS))


def test_like_layers_share_what_was_planned(modules: Any, way: str) -> None:
    engine = Engine(modules)
    engine.bind()
    engine.begin()
    metadata = engine.builder.build(0, engine.common)
    want = engine.run(metadata)
    engine.kernels.take()
    output = torch.empty_like(want)
    engine.impl.forward(engine.layer, engine.query, None, None, engine.layer.kv_cache, metadata, output)
    assert engine.kernels.take() == ["trtllm prompts 9" if way == "trtllm-gen" else "run prompts 9"]
    assert torch.equal(output, want)


def test_after_an_error_the_whole_step_is_planned_anew(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(modules)
    want, written = engine.stock_step()
    engine.bind()
    engine.begin()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("injected")

    monkeypatch.setattr(ops, "verify_attention", fail)
    seen = engine.run(engine.builder.build(0, engine.common))
    assert torch.equal(seen, want)
    assert torch.equal(engine.layer.kv_cache, written)
    assert "injected" in (engine.manager.state.fault or "")


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.STAGE])
def test_a_step_without_windows_is_stock(modules: Any, way: str, mode: Mode) -> None:
    engine = Engine(modules)
    want, written = engine.stock_step()
    engine.bind()
    engine.manager.state.mode = mode
    metadata = engine.builder.build(0, engine.common)
    planned = any(call.startswith("plan") for call in engine.kernels.take())
    assert planned == (mode is Mode.OFF and way != "trtllm-gen")
    assert torch.equal(engine.run(metadata), want)
    assert torch.equal(engine.layer.kv_cache, written)


def test_what_a_graph_may_replay_is_planned_before(modules: Any, way: str) -> None:
    engine = Engine(modules)
    engine.bind()
    build = engine.builder.build_stock
    built: list[Any] = []
    engine.builder.build_stock = lambda common: built.append(common) or build(common)
    engine.builder.build_for_cudagraph_capture(engine.common)
    assert built == [engine.common]
    engine.config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    single = CommonAttentionMetadata(
        query_start_loc=torch.arange(3).int(),
        query_start_loc_cpu=torch.arange(3).int(),
        seq_lens=torch.tensor([4, 20]).int(),
        num_reqs=2,
        num_actual_tokens=2,
        max_query_len=1,
        max_seq_len=48,
        block_table_tensor=engine.common.block_table_tensor[:2],
        slot_mapping=engine.common.slot_mapping[:2],
    )
    engine.kernels.take()
    engine.builder.build(0, engine.common)  # its requests have several lengths: no graph of vLLM's is theirs
    assert built[1:] == []
    engine.builder.build(0, single)
    assert built[1:] == ([single] if way == "native" else [])
    assert engine.kernels.take() == (["plan decodes"] if way == "native" else [])
    engine.config.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE
    engine.builder.build(0, single)
    assert engine.kernels.take() == []


def test_draft_layers_get_stock_metadata_and_the_block_table(modules: Any) -> None:
    engine = Engine(modules)
    metadata = engine.builder.build(0, engine.common)  # the layer is not bound
    assert type(metadata) is engine.stock.FlashInferMetadata
    assert metadata.block_table is engine.common.block_table_tensor
    engine.bind()
    assert type(engine.builder.build(0, engine.common)) is StepMetadata


def test_on_v1_windows_stand_first_and_decodes_are_stocks_own(modules: Any, way: str) -> None:
    engine = Engine(modules, v2=False)
    assert engine.builder.reorder_batch_threshold == LONGEST
    stock = engine.make_builder(engine.stock.FlashInferMetadataBuilder).build(0, engine.common)
    own = engine.builder.build(0, engine.common)
    assert (own.num_decodes, own.num_prefills) == (stock.num_decodes, stock.num_prefills)
    # XQA takes windows of several lengths as decodes, trtllm-gen those of the first one's.
    assert own.num_decodes == {"native": 0, "xqa": WINDOWS, "trtllm-gen": 1}[way]
    assert engine.builder.reorder_batch_threshold == LONGEST


def test_the_stock_writer_is_found_past_our_own(modules: Any) -> None:
    engine = Engine(modules)
    found = stock_attention(engine.impl).do_kv_cache_update.__func__
    assert found is engine.stock.FlashInferImpl.do_kv_cache_update


@pytest.mark.parametrize(("cache", "reason"), [("auto", None), ("fp8", None), ("nvfp4", "cache_format")])
def test_caches_of_four_bits_are_refused(modules: Any, cache: str, reason: str | None) -> None:
    engine = Engine(modules)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.stock, "_nvfp4_kv_on_fa2", lambda: True)
        engine.layer.impl = engine.own.NworFlashInferImpl(
            HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, cache
        )
    if reason is None:
        check_flashinfer("layer.0", engine.layer, engine.config)
        return
    with pytest.raises(Unsupported) as verdict:
        check_flashinfer("layer.0", engine.layer, engine.config)
    assert verdict.value.reason == reason


@pytest.mark.parametrize("cache", ["auto", "fp8"])
def test_a_quantized_output_is_refused_where_there_is_one(modules: Any, way: str, cache: str) -> None:
    engine = Engine(modules)
    engine.layer.impl = engine.own.NworFlashInferImpl(HEADS, SIZE, SIZE**-0.5, KV_HEADS, None, None, cache)
    engine.config.compilation_config.pass_config.fuse_attn_quant = True
    if way == "trtllm-gen" and cache == "fp8":
        with pytest.raises(Unsupported, match="fuse_attn_quant"):
            check_flashinfer("layer.0", engine.layer, engine.config)
        return
    check_flashinfer("layer.0", engine.layer, engine.config)
