"""What vLLM's Triton kernels of experts call of its module of CUDA kernels, in torch, where that is missing.

They stand in for routing, sorting and adding up, so that models with experts run where vLLM was installed
without the module. Nothing here waits for the device: all of it may stand in a CUDA graph.
"""

from __future__ import annotations

from typing import Any

import torch

#: The namespace of vLLM's operators.
NAMESPACE = "_moe_C"


def topk_softmax(
    weights: torch.Tensor,
    ids: torch.Tensor,
    token_expert_indices: torch.Tensor,
    gating: torch.Tensor,
    renormalize: bool,
    bias: torch.Tensor | None,
    is_padding: torch.Tensor | None,
) -> None:
    """Write the weights and ids of the likeliest experts of each row."""
    if bias is not None:
        raise NotImplementedError("experts chosen with a bias")
    values, chosen = gating.float().softmax(-1).topk(ids.shape[1], dim=-1)
    weights.copy_(values / values.sum(-1, keepdim=True) if renormalize else values)
    ids.copy_(chosen)


def moe_align_block_size(
    ids: torch.Tensor,
    num_experts: int,
    block_size: int,
    sorted_ids: torch.Tensor,
    expert_ids: torch.Tensor,
    num_tokens_post_pad: torch.Tensor,
    expert_map: torch.Tensor | None,
    scatter_idx: torch.Tensor | None,
) -> None:
    """Sort a batch's choices by expert, and pad those of each to whole blocks."""
    if expert_map is not None or scatter_idx is not None:
        raise NotImplementedError("experts of several ranks")
    flat = ids.flatten().long()
    experts = torch.arange(num_experts, device=ids.device)
    chosen = flat[None] == experts[:, None]  # [experts, choices]
    rank = (chosen.cumsum(1) - 1)[flat, torch.arange(len(flat), device=ids.device)]
    blocks = (chosen.sum(1) + block_size - 1) // block_size
    ends = blocks.cumsum(0)
    sorted_ids.fill_(len(flat))
    places = (ends - blocks)[flat] * block_size + rank
    sorted_ids[places] = torch.arange(len(flat), dtype=sorted_ids.dtype, device=ids.device)
    numbers = torch.arange(len(expert_ids), device=ids.device)
    owners = torch.searchsorted(ends, numbers, right=True).clamp(max=num_experts - 1)
    expert_ids.copy_(owners)
    num_tokens_post_pad.copy_(ends[-1:] * block_size)


def moe_sum(
    rows: torch.Tensor,
    output: torch.Tensor,
    ids: torch.Tensor | None,
    expert_map: torch.Tensor | None,
) -> None:
    """Add up the rows of each token's experts."""
    if expert_map is not None:
        raise NotImplementedError("experts of several ranks")
    output.copy_(rows.float().sum(1))


SCHEMAS: dict[Any, str] = {
    topk_softmax: "topk_softmax(Tensor! weights, Tensor! ids, Tensor! token_expert_indices, Tensor gating,"
    " bool renormalize, Tensor? bias, Tensor? is_padding) -> ()",
    moe_align_block_size: "moe_align_block_size(Tensor ids, int num_experts, int block_size,"
    " Tensor! sorted_ids, Tensor! expert_ids, Tensor! num_tokens_post_pad, Tensor? expert_map,"
    " Tensor? scatter_idx) -> ()",
    moe_sum: "moe_sum(Tensor rows, Tensor! output, Tensor? ids, Tensor? expert_map) -> ()",
}


_libraries: list[torch.library.Library] = []


def stand_in() -> None:
    """Define the operators where vLLM has none, for as long as this process lives."""
    if hasattr(getattr(torch.ops, NAMESPACE), "topk_softmax"):
        return
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    for function, schema in SCHEMAS.items():
        library.define(schema)
        library.impl(function.__name__, function, "CompositeExplicitAutograd")
    _libraries.append(library)
