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


def gather_from_ranks(mine: Any, vllm_config: Any) -> list[Any]:
    """Return what each rank of this replica says; every one of them has to call this.

    Args:
        mine: what this one says; small, and able to be pickled.
        vllm_config: the engine's configuration.

    """
    said, parallel = [mine], vllm_config.parallel_config
    if parallel.tensor_parallel_size > 1:
        from vllm.distributed.parallel_state import get_tp_group

        group = get_tp_group()
        said = [None] * group.world_size
        torch.distributed.all_gather_object(said, mine, group=group.cpu_group)
    if parallel.pipeline_parallel_size > 1:
        said = [one for stage in PipelineStages.current().gather(said) for one in stage]
    return said
