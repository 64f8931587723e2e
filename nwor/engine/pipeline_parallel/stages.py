"""The pipeline stage that this rank belongs to, and what all stages have to agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class PipelineStages:
    """This rank among the pipeline stages of its engine.

    Attributes:
        count: stages.
        last: whether this rank belongs to the last one, which samples.
        group: torch's process group of one rank of each stage; None where there is one stage.

    """

    count: int = 1
    last: bool = True
    group: Any = None

    @classmethod
    def current(cls) -> PipelineStages:
        """Return the stages of the process's engine, once its process groups are made."""
        from vllm.distributed.parallel_state import get_pp_group

        group = get_pp_group()
        return cls(group.world_size, group.is_last_rank, group.cpu_group)

    def gather(self, mine: Any) -> list[Any]:
        """Return what each stage says, the first stage's first; every stage has to call this.

        Args:
            mine: what this one says; small, and able to be pickled.

        """
        if self.count == 1:
            return [mine]
        said: list[Any] = [None] * self.count
        torch.distributed.all_gather_object(said, mine, group=self.group)
        return said
