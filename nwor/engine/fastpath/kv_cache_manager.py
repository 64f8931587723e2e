"""vLLM's KV cache manager, with a short way for the steps in which a request needs nothing of it.

A decode step of a request mostly finds every block in place, fills none and lets none go. Stock code arrives
at that answer through a dozen calls for each request and step; here it is seen from a few lengths. Whatever
is not plainly such a step goes to the stock methods.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SingleTypeKVCacheManager,
    SlidingWindowManager,
)
from vllm.v1.request import Request, RequestStatus

from nwor.engine.fastpath.stock import Sources, replaced_in

_MANAGER = "vllm.v1.core.kv_cache_manager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
_GROUP = "vllm.v1.core.single_type_kv_cache_manager"

#: What the short ways stand for.
BLOCKS: Sources = {
    (_MANAGER, "KVCacheManager.allocate_slots"): ("8c60d937fd9eb0c8",),
    (_MANAGER, "KVCacheManager.cache_blocks"): ("62ae87327fd28249",),
    (_MANAGER, "KVCacheManager.create_kv_cache_blocks"): ("300bc309b9a12709",),
    (_COORDINATOR, "KVCacheCoordinator.get_num_blocks_to_allocate"): ("4500949e3f03d550",),
    (_COORDINATOR, "KVCacheCoordinator.allocate_new_blocks"): ("2ceddac003607879",),
    (_COORDINATOR, "KVCacheCoordinator.cache_blocks"): ("8a801b2adf06ab1a", "e3e02a290b355aba"),
    (_COORDINATOR, "KVCacheCoordinator.get_num_cacheable_tokens"): ("d7221b47aebf9a46",),
    (_COORDINATOR, "HybridKVCacheCoordinator.get_num_cacheable_tokens"): ("4b00f5b368d98de1",),
    (_COORDINATOR, "KVCacheCoordinator.remove_skipped_blocks"): ("03a961e76820d666",),
    (_GROUP, "SingleTypeKVCacheManager.get_num_blocks_to_allocate"): ("f50d7c5b545195c3",),
    (_GROUP, "SingleTypeKVCacheManager.allocate_new_blocks"): ("b8edfbf2e1667228",),
    (_GROUP, "SingleTypeKVCacheManager.cache_blocks"): ("973ea9fec0745c95", "11b6adde36e893ec"),
    (_GROUP, "SingleTypeKVCacheManager.remove_skipped_blocks"): ("7bf0e2a87ec3ccd0",),
    (_GROUP, "FullAttentionManager.cache_blocks"): ("981125e4caafbec8",),
    (_GROUP, "SlidingWindowManager.get_num_skipped_tokens"): ("148ecb450daf8edc",),
}

_GROUPS = (FullAttentionManager, SlidingWindowManager)
_COORDINATORS = (UnitaryKVCacheCoordinator, HybridKVCacheCoordinator, KVCacheCoordinatorNoPrefixCache)


def why_not(manager: Any) -> str | None:
    """Return why a KV cache manager is not one that :class:`FastKVCacheManager` knows; None if it is."""
    if type(manager) is not KVCacheManager:
        return f"the KV cache manager is a {type(manager).__name__}"
    coordinator = manager.coordinator
    if type(coordinator) not in _COORDINATORS:
        return f"the KV cache coordinator is a {type(coordinator).__name__}"
    if not coordinator.single_type_managers:
        return "there is no KV cache"
    for group in coordinator.single_type_managers:
        if type(group) not in _GROUPS:
            return f"a group of layers has a {type(group).__name__}"
        if type(group.block_pool) is not BlockPool:
            return f"the block pool is a {type(group.block_pool).__name__}"
        if not group.enable_caching:
            continue
        if not group.kv_cache_spec.prefix_cacheable:
            return "a group of layers stays out of the prefix cache"
        # Such a group enters the prompt's unfinished last block, too.
        if type(group) is FullAttentionManager and group.block_size != group.block_pool.hash_block_size:
            return "blocks are hashed in parts"
    for kind in (KVCacheManager, KVCacheCoordinator, SingleTypeKVCacheManager, *_COORDINATORS, *_GROUPS):
        replaced = replaced_in(kind)
        if replaced is not None:
            return f"{replaced} is not vLLM's own"
    return None


class FastKVCacheManager(KVCacheManager):
    """Takes the place of the stock class; see :func:`make_fast`."""

    #: For each group: tokens a block, blocks by request, blocks by request that are in the prefix cache (None
    #: where there is none), requests with a block to copy, and for sliding windows the manager itself.
    _fast_groups: tuple[tuple[int, dict[str, Any], dict[str, int] | None, dict[str, Any], Any], ...]
    #: Whether every group attends to all tokens, and so keeps every block.
    _fast_dense: bool

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        **others: Any,
    ) -> KVCacheBlocks | None:
        """Give a request the blocks of a step; the stock method says what the arguments mean."""
        if (
            num_new_tokens > 0
            and new_computed_blocks is None
            and not num_new_computed_tokens
            and not others
            and request.status is RequestStatus.RUNNING
            and self.lacking(request, num_new_tokens, num_lookahead_tokens) is None
        ):
            return self.empty_kv_cache_blocks
        return super().allocate_slots(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            **others,
        )

    def lacking(self, request: Request, new_tokens: int, lookahead: int) -> int | None:
        """Return at most how many blocks the stock method would take for a running request.

        Args:
            request: the request.
            new_tokens: tokens of the step, more than 0.
            lookahead: slots for the drafter behind them.

        Returns:
            None where the stock method would change nothing at all and return its empty result; 0 where it
            takes no block, but enters one in the prefix cache or lets one go.

        """
        computed = request.num_computed_tokens
        end = computed + new_tokens
        slots = min(end + lookahead, self.max_model_len)
        final = min(end, len(request._all_token_ids))
        request_id = request.request_id
        lacking = 0
        nothing = computed <= self.max_model_len
        for block_size, blocks_of, cached_of, to_copy, window in self._fast_groups:
            blocks = blocks_of.get(request_id, ())
            missing = slots - len(blocks) * block_size
            if missing > 0:
                lacking += -(-missing // block_size)
                nothing = False
            if to_copy:
                lacking += 1
                nothing = False
            # The coordinator may let fewer tokens into the prefix cache, never more.
            if cached_of is not None and cached_of.get(request_id, 0) < final // block_size:
                nothing = False
            if window is not None:
                behind = window.get_num_skipped_tokens(max(0, computed - request.num_in_flight_tokens))
                skipped = min(behind // block_size, len(blocks))
                if skipped > 0 and blocks[skipped - 1] is not window._null_block:
                    nothing = False
        return None if nothing else lacking

    def take(self, request: Request, new_tokens: int, lookahead: int) -> KVCacheBlocks:
        """Do what ``allocate_slots`` does for a running request, once it is known that the blocks are there.

        Args:
            request: the request.
            new_tokens: tokens of the step.
            lookahead: slots for the drafter behind them.

        Returns:
            The blocks that the request got.

        """
        request_id, groups = request.request_id, self.coordinator.single_type_managers
        computed = request.num_computed_tokens
        end = computed + new_tokens
        slots = min(end + lookahead, self.max_model_len)
        if not self._fast_dense:
            self.coordinator.remove_skipped_blocks(
                request_id,
                max(0, computed - request.num_in_flight_tokens),
                num_prompt_tokens=request.num_prompt_tokens,
            )
        new_blocks = tuple([group.allocate_new_blocks(request_id, slots, end) for group in groups])
        self.cache_blocks(request, min(end, len(request._all_token_ids)))
        blocks: KVCacheBlocks = self.create_kv_cache_blocks(new_blocks)
        return blocks

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Enter a request's full blocks in the prefix cache, as the stock method does."""
        request_id = request.request_id
        for block_size, _, cached_of, _, _ in self._fast_groups:
            if cached_of is not None and cached_of.get(request_id, 0) < num_computed_tokens // block_size:
                break
        else:
            return
        if not self._fast_dense:
            super().cache_blocks(request, num_computed_tokens)
            return
        coordinator = self.coordinator
        for number, group in enumerate(coordinator.single_type_managers):
            group.cache_blocks(
                request,
                coordinator.get_num_cacheable_tokens(num_computed_tokens, number),
                retention_interval=coordinator.retention_interval,
                replay_boundaries=(),  # only sliding windows ask where a prompt may be taken up again
            )


def make_fast(manager: KVCacheManager) -> FastKVCacheManager:
    """Turn a stock KV cache manager into a fast one, in place.

    Args:
        manager: one for which :func:`why_not` has nothing to say.

    """
    manager.__class__ = FastKVCacheManager
    manager._fast_groups = tuple(
        (
            group.block_size,
            group.req_to_blocks,
            group.num_cached_block if group.enable_caching else None,
            group._partial_hit_reqs,
            group if type(group) is SlidingWindowManager else None,
        )
        for group in manager.coordinator.single_type_managers
    )
    manager._fast_dense = all(
        type(group) is FullAttentionManager for group in manager.coordinator.single_type_managers
    )
    return manager
