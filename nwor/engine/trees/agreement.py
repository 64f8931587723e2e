"""Whether all ranks of tensor parallelism attend a step's trees as such, known on the device alone.

A rank that writes its windows directly attends their rows as chains: of a tree its share of row 0 alone is
right. All ranks have to know in the step itself, or they would accept what other ranks reject.
"""

from __future__ import annotations

import torch
from vllm.distributed.parallel_state import get_tp_group

#: vLLM's own all-reduce kernel takes no less than 16 bytes.
_ELEMENTS = 4


class Agreement:
    """Adds up over the ranks how many of them refuse.

    Args:
        device: of the rank.

    """

    def __init__(self, device: torch.device) -> None:
        self._none = torch.zeros(_ELEMENTS, dtype=torch.float32, device=device)
        self._one = torch.ones(_ELEMENTS, dtype=torch.float32, device=device)
        self._group = get_tp_group()

    @property
    def alone(self) -> bool:
        """Whether there are no other ranks."""
        return bool(self._group.world_size == 1)

    def refusing(self, own: bool) -> torch.Tensor:
        """Return float32 [4], each the number of ranks that refuse; all ranks ask at the same moment.

        Args:
            own: whether this one does.

        """
        mine = self._one if own else self._none
        if self.alone:
            return mine
        refusing: torch.Tensor = self._group.all_reduce(mine.clone())
        return refusing
