"""Sampling from trees: a walk that goes wherever the target's own token leads.

The token at each row that is entered is the one that decoding without drafts would draw there: the most
likely one, or vLLM's noise by seed and position. So greedy and seeded answers are those of an engine without
speculation, and all others have its distribution: the tree is fixed before the noise is drawn.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.spec_decode.utils import unconditional_to_conditional_rates
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from nwor import ops
from nwor.engine.fastpath.greedy_rejection import DTYPES
from nwor.engine.trees.tables import TreeTables
from nwor.tree_shape import TreeShape


class TreeSampler(RejectionSampler):
    """Takes the place of the model runner's rejection sampler.

    Args:
        stock: the one that vLLM has made.
        tables: the rank's trees.
        refusing: returns float32 [at least 1], 0 where all windows of the open step attended as trees.
        rates: chance that the first nodes up to a depth are all accepted, where chance decides: for each
            choice or size of trees, or for all; empty for vLLM's own rates, which are also those of chains.

    """

    def __init__(
        self,
        stock: RejectionSampler,
        tables: TreeTables,
        refusing: Callable[[], torch.Tensor],
        rates: Sequence[Sequence[float]] = (),
    ) -> None:
        self.__dict__.update(vars(stock))
        self._tables = tables
        self._refusing = refusing
        self._slots: torch.Tensor | None = None
        self._tree_rates: torch.Tensor | None = vars(stock).get("synthetic_conditional_rates")
        if self._tree_rates is not None:
            self._tree_rates = self._rates_by_drafts(self._tree_rates, rates, tables.shape)
        self._rows = len(tables.path) * (tables.shape.nodes + 1)
        self._workspace = ops.make_argmax_workspace(self._rows, tables.path.device)

    @staticmethod
    def _rates_by_drafts(
        stock: torch.Tensor, rates: Sequence[Sequence[float]], shape: TreeShape
    ) -> torch.Tensor:
        """Return float32 [nodes + 1, depth], conditional: the rates of a window with so many draft tokens."""
        if not rates:
            return stock[: shape.depth].expand(shape.nodes + 1, -1).contiguous()
        known = shape.choices if len(rates) == len(shape.choices) else shape.sizes
        own = [
            [*unconditional_to_conditional_rates(list(one)), *[0.0] * (shape.depth - len(one))]
            for one in rates
        ]
        rows = [own[min(bisect_left(known, n), len(rates) - 1)] for n in range(shape.nodes + 1)]
        return stock.new_tensor(rows)

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray[Any, Any],
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray[Any, Any],
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return processed logits, sampled tokens and their number, as vLLM's method does."""
        states = self.sampler.sampling_states
        processed = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        targets = self._targets(processed, idx_mapping_np, expanded_idx_mapping, pos)
        synthetic = None
        if self.synthetic_conditional_rates is not None:
            assert self._tree_rates is not None
            synthetic = states.seeds.gpu, pos, self.synthetic_conditional_rates, self._tree_rates
        sampled, num_sampled = self._tables.walk(
            targets,
            verify_draft_sampled,
            cu_num_logits,
            idx_mapping,
            self._refusing(),
            synthetic,
        )
        self._slots = idx_mapping
        return processed, sampled, num_sampled

    def _targets(
        self,
        logits: torch.Tensor,
        idx_mapping_np: np.ndarray[Any, Any],
        expanded_idx_mapping: torch.Tensor,
        pos: torch.Tensor,
    ) -> torch.Tensor:
        """Return int64 [logits]: the token that decoding without drafts would draw at each row."""
        states = self.sampler.sampling_states
        # The host's own copy is the source of the device's; nothing waits here.
        if not states.temperature.np[idx_mapping_np].any():
            if logits.dtype not in DTYPES:
                logits = logits.float()
            targets = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
            ops.argmax_rows(logits, targets, self._workspace, validate=False)
            return targets
        return gumbel_sample(
            logits,
            expanded_idx_mapping,
            states.temperature.gpu,
            states.seeds.gpu,
            pos,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.sampler.use_fp64_gumbel,
        )

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray[Any, Any],
        max_num_logprobs: int,
    ) -> Any:
        """Return log-probabilities of the sampled tokens, from the rows that they were drawn at."""
        if max_num_logprobs != NO_LOGPROBS:
            assert self._slots is not None
            path = self._tables.path[self._slots]
            logits = logits[self._rows_on_path(path, cu_num_logits, logits.shape[0])]
        return super()._get_logprobs_tensors(
            sampled, num_sampled, logits, cu_num_logits, cu_num_logits_np, max_num_logprobs
        )

    def _rows_on_path(self, path: torch.Tensor, starts: torch.Tensor, rows: int) -> torch.Tensor:
        """Return int64 [rows]: for each place of a request's answer the row of logits that it came from.

        Places behind an answer's end name some row of the same request.
        """
        place = torch.arange(rows, device=starts.device)
        request = torch.searchsorted(starts[1:].contiguous(), place, right=True)
        first = starts[request].long()
        own = path[request, place - first].long()
        return torch.minimum(first + own, starts[request + 1].long() - 1)
