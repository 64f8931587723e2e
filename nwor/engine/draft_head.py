"""A drafter's head with the rows of its draft vocabulary alone.

For one token the head of an EAGLE drafter reads more than the rest of it: 128k rows, of which few are ever
drafted. Each rank of tensor parallelism keeps all chosen rows, so that nothing is gathered either.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed import get_tensor_model_parallel_world_size, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from nwor.draft_vocabulary import METHODS, VocabularyChoice
from nwor.errors import ConfigError

logger = logging.getLogger("vllm.nwor.draft_head")


class DraftHead:
    """Takes the place of a drafter's ``compute_logits`` and ``get_top_tokens``.

    Args:
        model: the drafter's model.
        choice: the tokens that it may draft.

    Attributes:
        vocabulary: tokens of the model.
        size: tokens that may be drafted.

    Raises:
        ConfigError: if the table does not fit, or no part of the head can be taken.

    """

    def __init__(self, model: Any, choice: VocabularyChoice) -> None:
        if not hasattr(model, "lm_head") or not hasattr(model, "logits_processor"):
            raise ConfigError(f"no part of the head of {type(model).__name__} can be taken")
        self._model = model
        self._processor = model.logits_processor
        self.vocabulary = int(model.config.vocab_size)
        rows, targets = _rows(model, choice.ids(self.vocabulary))
        self._rows, self._targets = rows, targets
        self.size = len(rows)
        self._weight = _gather(model.lm_head, rows)

    def refresh(self) -> None:
        """Read the rows again: the head's weights have changed."""
        self._weight.copy_(_gather(self._model.lm_head, self._rows))

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return logits of all tokens, minus infinity for those that may not be drafted.

        Args:
            hidden_states: [tokens, hidden_size].

        """
        logits = self._logits(hidden_states)
        every = logits.new_full((logits.shape[0], self.vocabulary), float("-inf"))
        return every.index_copy_(1, self._targets, logits)

    def get_top_tokens(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return int64 [tokens], the most likely ones.

        Args:
            hidden_states: [tokens, hidden_size].

        """
        return self._targets[self._logits(hidden_states).argmax(dim=-1)]

    def _logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = torch.nn.functional.linear(hidden_states.to(self._weight.dtype), self._weight)
        if self._processor.soft_cap is not None:
            logits = torch.tanh(logits / self._processor.soft_cap) * self._processor.soft_cap
        return logits if self._processor.scale == 1.0 else logits * self._processor.scale


def _rows(model: Any, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int64 [size] twice: rows of the head, ascending, and the token of each."""
    device = next(model.parameters()).device
    chosen = torch.tensor(ids, device=device)
    offsets = getattr(model, "draft_id_to_target_id", None)
    if offsets is None:
        return chosen, chosen
    # The head has a vocabulary of its own already: of that, what was chosen.
    tokens = torch.arange(len(offsets), device=device) + offsets.to(device)
    rows = torch.isin(tokens, chosen).nonzero().squeeze(1)
    if not len(rows):
        raise ConfigError("no token of the draft vocabulary is among those that the drafter has")
    return rows, tokens[rows]


def _gather(head: Any, rows: torch.Tensor) -> torch.Tensor:
    """Return [size, hidden_size], rows of a head whose shards the ranks of tensor parallelism hold."""
    if not isinstance(head.quant_method, UnquantizedEmbeddingMethod) or head.weight.dim() != 2:
        raise ConfigError("the head that the drafter reads is quantized, so no part of it can be taken")
    shard = head.shard_indices
    start, end = shard.org_vocab_start_index, shard.org_vocab_end_index
    own = (rows >= start) & (rows < end)
    weight = head.weight.new_zeros(len(rows), head.weight.shape[1])
    weight[own] = head.weight.detach()[rows[own] - start]
    if get_tensor_model_parallel_world_size() > 1:
        weight = tensor_model_parallel_all_reduce(weight)
    return weight


def drafter_model(runner: Any) -> Any:
    """Return the model of a runner's drafter, V1's or V2's, without wrappers; None where it has none."""
    for owner in (getattr(runner, "drafter", None), getattr(runner, "speculator", None)):
        model = getattr(owner, "model", None)
        if model is not None:
            while not isinstance(model, torch.nn.Module) and hasattr(model, "unwrap"):
                model = model.unwrap()
            return model
    return None


def install(runner: Any, choice: VocabularyChoice | None) -> DraftHead | None:
    """Have a runner's drafter draft of a vocabulary alone, once its weights are loaded.

    Raises:
        ConfigError: if it cannot.

    """
    if choice is None:
        return None
    method = runner.speculative_config.method if runner.speculative_config is not None else None
    model = drafter_model(runner)
    if method not in METHODS or model is None:
        raise ConfigError(f"a draft vocabulary is for drafters of EAGLE's kinds, not {method!r}: drop it")
    head = DraftHead(model, choice)
    model.compute_logits, model.get_top_tokens = head.compute_logits, head.get_top_tokens
    logger.info("Drafts are of %d tokens, of %d that the model has", head.size, head.vocabulary)
    return head
