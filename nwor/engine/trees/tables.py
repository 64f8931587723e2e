"""What one rank knows of its requests' trees, from the drafter's pass to the commit a step later."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from nwor.engine.step_plan import upload
from nwor.engine.trees import kernels
from nwor.engine.trees.growth_kernels import Candidates
from nwor.tree_shape import TreeKind, TreeShape


class TreeTables:
    """Trees by request slot, and the rows of the step that verifies them.

    Args:
        shape: the trees.
        max_num_reqs: slots.
        max_num_tokens: most rows of a step.
        device: where all of it lies.
        most_requests: of a batch that has trees; None for all slots.

    Attributes:
        shape: likewise.
        most_requests: likewise.
        row_masks: int64 [max_num_tokens], the ancestor mask of each row of the step's windows.
        source_rows: int32 [max_num_tokens]: the row whose keys and values each slot of the step gets at the
            commit; negative for none.
        path: int32 [max_num_reqs, nodes + 1], by slot: rows that walks have entered, within their windows.
        tokens: int64 [max_num_reqs, depth, width], candidates of a comb's passes, by place in the batch.
        logprobs: float32, likewise.
        candidates: those of a grown tree; None for combs.
        assumed: float32 [width], log-probabilities that stand for the drafter's, by rank; None but where
            chance decides what is accepted.
        growing: requests whose next windows may be trees; those of all others are chains.
        verifies_trees: whether a window of the step under way may be a tree.

    """

    def __init__(
        self,
        shape: TreeShape,
        max_num_reqs: int,
        max_num_tokens: int,
        device: torch.device,
        most_requests: int | None = None,
    ) -> None:
        self.shape = shape
        self.most_requests = max_num_reqs if most_requests is None else most_requests
        rows = shape.nodes + 1
        self._device = device
        self._rows = kernels.next_power_of_two(rows)

        def zeros(*size: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self._parents = zeros(max_num_reqs, rows, dtype=torch.int8)
        self._depths = zeros(max_num_reqs, rows, dtype=torch.int8)
        self._masks = zeros(max_num_reqs, rows, dtype=torch.int64)
        self._chains = zeros(max_num_reqs, dtype=torch.uint8)
        self._linear = zeros(max_num_reqs, dtype=torch.uint8)
        self._linear_np = np.zeros(max_num_reqs, dtype=np.uint8)
        self._linear_changed = False
        self.row_masks = zeros(max_num_tokens, dtype=torch.int64)
        self.source_rows = zeros(max_num_tokens, dtype=torch.int32)
        self.path = zeros(max_num_reqs, rows, dtype=torch.int32)
        self.candidates = None
        if shape.kind is TreeKind.GROWN:
            self.candidates = Candidates(shape, self.most_requests, device)
        self.tokens = zeros(max_num_reqs, shape.depth, shape.width, dtype=torch.int64)
        self.logprobs = zeros(max_num_reqs, shape.depth, shape.width, dtype=torch.float32)
        self.assumed: torch.Tensor | None = None
        self.growing: set[str] = set()
        self.verifies_trees = False

    def assume_probabilities(self) -> None:
        """Rank nodes as a trained drafter would, whose first choice is right three times in four.

        Weights of chance find all tokens about as likely, so their trees would be wide and flat.
        """
        ranks = torch.arange(self.shape.width, dtype=torch.float32, device=self._device)
        self.assumed = torch.log(torch.where(ranks == 0, 0.75, 0.12 * 0.45 ** (ranks - 1)))

    def set_linear(self, slot: int, linear: bool) -> None:
        """Note whether a request's windows have to be chains."""
        if bool(self._linear_np[slot]) != linear:
            self._linear_np[slot] = linear
            self._linear_changed = True

    def build(
        self,
        slots: torch.Tensor,
        draft_tokens: torch.Tensor,
        refusing: torch.Tensor,
        kept: int | None = None,
    ) -> None:
        """Rank what the drafter's passes have found and keep the likeliest nodes of each request.

        Args:
            slots: [requests], the slot of each request of the batch.
            draft_tokens: int64 [at least requests, nodes], written.
            refusing: float32 [at least 1]: all next windows have to be chains, unless it is 0.
            kept: nodes that the next windows have; None for all. Others may be left as they were.

        """
        if self._linear_changed:
            self._linear.copy_(upload(self._linear_np.tolist(), torch.uint8, self._device))
            self._linear_changed = False
        shape = self.shape
        if not len(slots):
            return
        if self.candidates is not None:
            tables = self._parents, self._depths, self._masks, self._chains
            self.candidates.select(slots, self._linear, draft_tokens, tables, refusing, kept)
            return
        kernels.build_comb_kernel[(len(slots),)](
            self.tokens,
            self.logprobs,
            slots,
            self._linear,
            draft_tokens,
            draft_tokens.stride(0),
            self._parents,
            self._depths,
            self._masks,
            self._chains,
            shape.nodes,
            refusing,
            DEPTH=shape.depth,
            WIDTH=shape.width,
            CANDIDATES=kernels.next_power_of_two(shape.depth * shape.width),
            num_warps=1,
        )

    def build_chains(self, slots: torch.Tensor) -> None:
        """Let each row of some requests' windows continue the row before.

        Args:
            slots: [requests].

        """
        if len(slots):
            kernels.build_chains_kernel[(len(slots),)](
                slots,
                self._parents,
                self._depths,
                self._masks,
                self._chains,
                self.shape.nodes,
                ROWS=self._rows,
                num_warps=1,
            )

    def place(self, batch: Any) -> None:
        """Give a step's windows their masks, and their rows the positions that their depths say.

        Args:
            batch: vLLM's ``InputBatch``; its slots of the cache are computed already, from the rows' order.

        """
        kernels.place_kernel[(batch.num_reqs,)](
            batch.idx_mapping,
            batch.query_start_loc,
            batch.cu_num_logits,
            self._depths,
            self._masks,
            self.shape.nodes,
            batch.positions,
            self.row_masks,
            batch.expanded_local_pos,
            ROWS=self._rows,
            num_warps=1,
        )

    def _rows_of(self, batch: Any) -> tuple[torch.Tensor, ...]:
        """Return [rows] five times, int64 and at the end bool, without a kernel of ours.

        Each row of the step, its request, where that begins, how many rows stand before the last certain
        token, and whether the request is a window.
        """
        starts, logits = batch.query_start_loc, batch.cu_num_logits
        row = torch.arange(batch.num_tokens, device=self._device)
        ends = starts[1 : batch.num_reqs + 1].contiguous()
        request = torch.searchsorted(ends, row.to(ends.dtype), right=True).clamp(max=batch.num_reqs - 1)
        start, length = starts[request].long(), (ends[request] - starts[request]).long()
        lead = length - (logits[request + 1] - logits[request]).long()
        return row, request, start, lead, length <= self.shape.nodes + 1

    def place_plainly(self, batch: Any) -> None:
        """Do as :meth:`place` by PyTorch's own kernels, where ours could not be launched.

        Args:
            batch: as above. What was placed already stays as it is.

        """
        row, request, start, lead, window = self._rows_of(batch)
        first_logit = batch.cu_num_logits[request].long()
        own, node = row - start, row - start - lead
        is_node = window & (node > 0)
        slot, place = batch.idx_mapping[request].long(), node.clamp(0, self.shape.nodes)
        depth, sees = self._depths[slot, place].long(), self._masks[slot, place]
        one = torch.ones_like(sees)
        before = (one << lead.clamp(0, 63)) - 1
        causal = (((one << own.clamp(0, 63)) - 1) << 1) | 1
        old = self.row_masks[: batch.num_tokens]
        masks = torch.where(is_node, (sees << lead.clamp(0, 63)) | before, causal)
        old.copy_(torch.where(window, masks, old))
        base = batch.positions[(start + lead).clamp(max=batch.num_tokens - 1)]
        old = batch.positions[: batch.num_tokens]
        old.copy_(torch.where(is_node, base + depth, old))
        batch.expanded_local_pos[(first_logit + node)[is_node]] = depth[is_node].to(torch.int32)

    def walk(
        self,
        targets: torch.Tensor,
        tokens: torch.Tensor,
        cu_num_logits: torch.Tensor,
        slots: torch.Tensor,
        refusing: torch.Tensor,
        synthetic: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Follow the target's own tokens through the windows of some requests.

        Args:
            targets: int64 [logits]: the target's token after each row.
            tokens: [logits]: the token of each row; negative where it must not be accepted.
            cu_num_logits: int32 [requests + 1]: where each request's rows begin.
            slots: [requests].
            refusing: float32 [at least 1]: 0 where all rows attended as their trees say. Else chains alone
                accept.
            synthetic: seeds by slot, positions of the rows, rates by depth of chains, and those of trees by
                draft tokens of a window and depth, where chance decides; None where tokens are compared.

        Returns:
            int64 [requests, nodes + 1] with each request's tokens, what follows them not written, and int32
            [requests] with their number.

        """
        requests, rows = len(slots), self.shape.nodes + 1
        sampled = torch.zeros(requests, rows, dtype=torch.int64, device=targets.device)
        num_sampled = torch.empty(requests, dtype=torch.int32, device=targets.device)
        seeds, positions, rates, tree_rates = synthetic or (None, None, None, None)
        kernels.walk_kernel[(requests,)](
            targets,
            tokens,
            cu_num_logits,
            slots,
            self._parents,
            self._chains,
            self.shape.nodes,
            refusing,
            sampled,
            num_sampled,
            self.path,
            seeds,
            positions,
            rates,
            tree_rates,
            DEPTH=self.shape.depth,
            ROWS=self._rows,
            SYNTHETIC=synthetic is not None,
            num_warps=1,
        )
        return sampled, num_sampled

    def settle(self, batch: Any, num_sampled: torch.Tensor) -> None:
        """Note which rows of the step are kept, in the order in which the cache gets them.

        Args:
            batch: vLLM's ``InputBatch``.
            num_sampled: int32 [requests], accepted drafts and one more; 0 within a prompt.

        """
        kernels.source_rows_kernel[(batch.num_reqs,)](
            batch.query_start_loc,
            batch.cu_num_logits,
            batch.idx_mapping,
            num_sampled,
            self.path,
            self.shape.nodes,
            self.source_rows,
            ROWS=self._rows,
            num_warps=1,
        )

    def settle_plainly(self, batch: Any, num_sampled: torch.Tensor) -> None:
        """Do as :meth:`settle` by PyTorch's own kernels, where ours could not be launched.

        Without these rows the cache would lack the keys and values of tokens that requests have got.

        Args:
            batch: as above.
            num_sampled: likewise.

        """
        row, request, start, lead, window = self._rows_of(batch)
        node = row - start - lead
        way = self.path[batch.idx_mapping[request].long(), node.clamp(0, self.shape.nodes)]
        source = torch.where(node < num_sampled[request], start + lead + way, -1)
        source = torch.where(node <= 0, row, source)
        old = self.source_rows[: batch.num_tokens]
        old.copy_(torch.where(window, source.to(torch.int32), old))

    def flatten(self, batch: Any, states: list[torch.Tensor]) -> None:
        """Put what the drafter reads of a step into the order of a chain, in place.

        Args:
            batch: vLLM's ``InputBatch``; its token ids and positions are changed.
            states: hidden states of the step's rows, [at least tokens, size] each.

        """
        kernels.flatten_inputs_kernel[(batch.num_reqs,)](
            batch.query_start_loc,
            batch.cu_num_logits,
            self.source_rows,
            batch.input_ids,
            batch.positions,
            self.shape.nodes,
            ROWS=self._rows,
            num_warps=1,
        )
        block = 1024
        for state in states:
            size = state.shape[-1]
            kernels.flatten_states_kernel[(batch.num_reqs, -(-size // block))](
                batch.query_start_loc,
                batch.cu_num_logits,
                self.source_rows,
                state,
                state.stride(0),
                size,
                self.shape.nodes,
                BLOCK=block,
            )
