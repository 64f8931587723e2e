"""``verify_attention``: attention of uncommitted windows over their paged context and over themselves."""

from __future__ import annotations

from typing import Any

import torch

from nwor.ops import checks
from nwor.ops.registry import LIBRARIES

#: Longest window: bits in an ancestor mask.
MAX_WINDOW = 64

#: Head sizes that the CUDA kernels are compiled for; the CPU kernels take any.
CUDA_HEAD_SIZES = (64, 96, 128, 256)

_op = torch.ops.nwor.verify_attention.default


def verify_attention_workspace_size(
    device: torch.device | str,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    max_query_len: int,
) -> int:
    """Return the bytes of workspace that any call of :func:`verify_attention` within these limits needs.

    Constant for an engine's life: it depends on the device (its multiprocessors; on CPU torch's threads at
    the time of this call), never on a step's lengths or requests. Create it zero-filled once; layers and
    steps may share it as long as they run one after another.

    Args:
        device: where the attention runs.
        num_heads: query heads.
        num_kv_heads: KV heads.
        head_size: elements of a head.
        max_query_len: longest window, 1 to 64.

    Raises:
        TypeError, ValueError: if an argument is out of range; the message names it.
        LibraryError: if there is no library for the device.

    """
    device = torch.device(device)
    for name, value in (("num_heads", num_heads), ("head_size", head_size)):
        checks.integer(name, value, 1)
    checks.integer("num_kv_heads", num_kv_heads, 1, num_heads)
    checks.integer("max_query_len", max_query_len, 1, MAX_WINDOW)
    LIBRARIES.require(device)
    if device.type == "cpu":
        return LIBRARIES.cpu_workspace_size(torch.get_num_threads(), head_size)
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return LIBRARIES.cuda_workspace_size(sms, num_heads, num_kv_heads, head_size, max_query_len)


def verify_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    kv_cache_dtype: str = "auto",
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    sliding_window: int = -1,
    softcap: float = 0.0,
    sinks: torch.Tensor | None = None,
    ancestor_mask: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    validate: bool = True,
) -> None:
    """Attend from windows whose keys and values were not written to the cache; write ``output``.

    Row i of a window attends to the request's context in the paged cache and to the window's rows j <= i (or
    those that its ancestor mask names) in ``key`` and ``value``. The window's own slots in the cache are
    never read. With an fp8 cache the window's keys and values are quantized and dequantized on the fly, as if
    they had been written first, so the result equals that of the direct path. One launch on CUDA; nothing is
    allocated and no length is read on the host, so the call may be captured in a CUDA graph.

    Args:
        query: [T, Hq, D], of key's dtype or, where the cache is fp8, quantized to float8_e4m3fn; last
            dimension contiguous, as in all of query, key, value, output and lse. On CUDA D is 64, 96, 128 or
            256.
        key: [T, Hk, D], the window's keys straight from the forward pass: float16 or bfloat16 (on CPU also
            float32), which is the source dtype. Hq is a multiple of Hk.
        value: [T, Hk, D], of the source dtype, with strides of its own.
        key_cache: [num_blocks, block_size, Hk, D], a view with any strides. On CUDA the last dimension is
            contiguous and rows begin at multiples of 16 bytes.
        value_cache: same shape, strides of its own.
        block_table: int32 [>= B, max_blocks], the blocks of each request's context.
        query_start_loc: int32 [B + 1]; request i's window is rows query_start_loc[i] to query_start_loc[i +
            1]. Windows may be empty; rows beyond query_start_loc[B] are padding and left alone.
        seq_lens: int32 [>= B], context and window together. Ignored for an empty window.
        output: [T, Hq, D], of the source dtype, written; in memory of its own.
        workspace: uint8, at least :func:`verify_attention_workspace_size` bytes, zero-filled by its creator.
        scale: factor on the logits, positive.
        max_query_len: upper bound of the window lengths in this call, 1 to 64.
        kv_cache_dtype: "auto" (the source dtype), "fp8", "fp8_e4m3" or "fp8_e5m2" (caches uint8 or float8).
        k_scale: float32 with 1 or Hk elements; dequantized = stored * scale. None stands for 1.
        v_scale: likewise for values.
        q_scale: likewise for a float8_e4m3fn query, per KV head; None for any other query. The logits are
            scale * q_scale * k_scale * (stored query . stored key).
        sliding_window: tokens that a query sees, itself included; -1 for all. With an ancestor mask a row's
            position is its depth in the tree: context + bits set in its mask - 1.
        softcap: softcap * tanh(logit / softcap) on the scaled logits; 0 for none.
        sinks: [Hq], float32 or the source dtype: one more logit per head in the softmax's denominator, as in
            FlashAttention's learnable sink.
        ancestor_mask: int64 [T]; bit j of a row says whether it sees row j of its window. Bits from the
            window's length on must be 0: what a row sees that has others differs between CPU and CUDA. None
            is a causal chain.
        lse: float32 [Hq, T], written: natural log of the softmax's denominator, the sink included.
        plan: what :func:`~nwor.ops.attention_plan.plan_verify_attention` wrote for these lengths; None to
            find it out in this call. Of no use on a CPU.
        validate: False leaves out the checks of this function, for callers that made the same call before;
            those of the op itself remain.

    Raises:
        TypeError, ValueError: if an argument is wrong; the message names it, what it is and what is wanted.
        RuntimeError: on CPU also for lengths and block numbers that point outside their tensors, and for an
            output in another argument's memory.

    """
    if validate:
        arguments = (
            query,
            key,
            value,
            key_cache,
            value_cache,
            block_table,
            query_start_loc,
            seq_lens,
            output,
            workspace,
            scale,
            max_query_len,
            kv_cache_dtype,
            k_scale,
            v_scale,
            q_scale,
            sliding_window,
            softcap,
            sinks,
            ancestor_mask,
            lse,
            plan,
        )
        _check_once(arguments)
    _op(
        query,
        key,
        value,
        key_cache,
        value_cache,
        block_table,
        query_start_loc,
        seq_lens,
        output,
        workspace,
        lse,
        scale,
        max_query_len,
        kv_cache_dtype,
        k_scale,
        v_scale,
        sliding_window,
        softcap,
        sinks,
        ancestor_mask,
        plan,
        q_scale,
    )


#: Signatures of calls that passed the checks. The checks depend on nothing else, and an engine's layers and
#: steps share few signatures, so most calls cost one look-up.
_checked: set[tuple[Any, ...]] = set()
_MOST_SIGNATURES = 4096


def _signature(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return (
            argument.shape,
            argument.stride(),
            argument.dtype,
            argument.device,
            argument.data_ptr() % 16 if argument.is_cuda and argument.dim() == 4 else 0,
        )
    return (argument.__class__, argument)


def _check_once(arguments: tuple[Any, ...]) -> None:
    signature = tuple([_signature(argument) for argument in arguments])
    try:
        if signature in _checked:
            return
    except TypeError:  # an argument without a hash is wrong in any case; the checks say which
        signature = ()
    _check(*arguments)
    if len(_checked) >= _MOST_SIGNATURES:
        _checked.clear()
    _checked.add(signature)


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    output: torch.Tensor,
    workspace: torch.Tensor,
    scale: float,
    max_query_len: int,
    kv_cache_dtype: str,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    q_scale: torch.Tensor | None,
    sliding_window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    ancestor_mask: torch.Tensor | None,
    lse: torch.Tensor | None,
    plan: torch.Tensor | None,
) -> None:
    checks.tensor("query", query, dim=3)
    device = query.device
    LIBRARIES.require(device)
    on_cuda = device.type == "cuda"
    sources = checks.SOURCE_DTYPES[1:] if on_cuda else checks.SOURCE_DTYPES
    quantized = checks.query_dtype("query", query, sources, kv_cache_dtype)
    checks.last_contiguous("query", query)
    tokens, heads, head_size = query.shape
    if on_cuda and head_size not in CUDA_HEAD_SIZES:
        wanted = ", ".join(map(str, CUDA_HEAD_SIZES))
        raise ValueError(f"query: head size is {head_size}, wanted one of {wanted} on CUDA")
    checks.tensor("key", key, dim=3)
    kv_heads = key.shape[1]
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"query: shape is {list(query.shape)}, wanted heads in a multiple of key's {kv_heads}"
        )
    if heads == 0 or head_size == 0:
        raise ValueError(f"query: shape is {list(query.shape)}, wanted at least 1 head of at least 1 element")
    checks.dtype("key", key, sources if quantized else query.dtype)
    source = key.dtype
    for name, one, count in (("key", key, kv_heads), ("value", value, kv_heads), ("output", output, heads)):
        checks.tensor(name, one, dim=3)
        checks.shape(name, one, (tokens, count, head_size))
        checks.dtype(name, one, source)
        checks.device(name, one, device)
        checks.last_contiguous(name, one)
    checks.apart("output", output)

    cache_dtypes = checks.cache_dtype("kv_cache_dtype", kv_cache_dtype, source)
    checks.tensor("key_cache", key_cache, dim=4)
    num_blocks, block_size = key_cache.shape[:2]
    checks.integer("key_cache: block size", block_size, 1)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        checks.tensor(name, cache, dim=4)
        checks.shape(name, cache, (num_blocks, block_size, kv_heads, head_size))
        checks.dtype(name, cache, cache_dtypes)
        checks.device(name, cache, device)
        if on_cuda:
            check_cuda_cache(name, cache)

    checks.vector("query_start_loc", query_start_loc, torch.int32, device, at_least=1)
    batch = query_start_loc.shape[0] - 1
    checks.vector("seq_lens", seq_lens, torch.int32, device, at_least=batch)
    checks.tensor("block_table", block_table, dim=2)
    checks.dtype("block_table", block_table, torch.int32)
    checks.device("block_table", block_table, device)
    checks.last_contiguous("block_table", block_table)
    if block_table.shape[0] < batch:
        raise ValueError(f"block_table: shape is {list(block_table.shape)}, wanted at least {batch} rows")

    if checks.number("scale", scale) <= 0:
        raise ValueError(f"scale: is {scale}, wanted more than 0")
    checks.integer("max_query_len", max_query_len, 1, MAX_WINDOW)
    checks.sliding_window(sliding_window)
    checks.number("softcap", softcap, low=0.0)
    checks.scales("k_scale", k_scale, device, ((), (1,), (kv_heads,)))
    checks.scales("v_scale", v_scale, device, ((), (1,), (kv_heads,)))
    if q_scale is not None and not quantized:
        raise ValueError(
            f"q_scale: is given, wanted None for a query of {query.dtype} (only for a float8_e4m3fn query)"
        )
    checks.scales("q_scale", q_scale, device, ((), (1,), (kv_heads,)))
    if sinks is not None:
        checks.tensor("sinks", sinks)
        checks.dtype("sinks", sinks, (torch.float32, source))
        checks.vector("sinks", sinks, sinks.dtype, device, size=heads)
    if ancestor_mask is not None:
        checks.vector("ancestor_mask", ancestor_mask, torch.int64, device, size=tokens)
    if lse is not None:
        checks.tensor("lse", lse, dim=2)
        checks.dtype("lse", lse, torch.float32)
        checks.device("lse", lse, device)
        checks.shape("lse", lse, (heads, tokens))
        checks.last_contiguous("lse", lse)
        checks.apart("lse", lse)

    if plan is not None:
        checks.vector("plan", plan, torch.uint8, device, at_least=LIBRARIES.plan_size(device))

    needed = verify_attention_workspace_size(device, heads, kv_heads, head_size, max_query_len)
    # Fewer torch threads than at creation need less; the op uses as many as fit.
    least = LIBRARIES.cpu_workspace_size(1, head_size) if device.type == "cpu" else needed
    checks.vector("workspace", workspace, torch.uint8, device, at_least=least)


def check_cuda_cache(name: str, cache: torch.Tensor) -> None:
    """Check that the CUDA kernels can read a cache where it lies.

    Args:
        name: of the argument, for the message.
        cache: [num_blocks, block_size, num_kv_heads, head_size], a view of keys or of values.

    Raises:
        ValueError: if its strides or its address are not what they take.

    """
    checks.last_contiguous(name, cache)
    size = cache.element_size()
    for dim, what in ((0, "block"), (1, "token"), (2, "head")):
        if cache.shape[dim] > 1 and cache.stride(dim) * size % 16:
            raise ValueError(
                f"{name}: {what} stride is {cache.stride(dim) * size} bytes, wanted a multiple of 16 on CUDA"
            )
    if cache.data_ptr() % 16:
        raise ValueError(f"{name}: address is {cache.data_ptr():#x}, wanted a multiple of 16 on CUDA")
