"""The sizes of the graphs of mixed steps: by rows, and by the requests that each takes."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor

#: Rows between two graphs' sizes, by the rows up to which that holds. Above about 150 rows an 8B model's
#: products take time in proportion to their rows, so padding costs; vLLM's own graphs pad to 8 rows, and to
#: 16 above 256.
STEPS = ((256, 8), (512, 16), (1024, 32), (2048, 64), (1 << 30, 128))
#: A graph takes a request for every two rows, since only requests that do not speculate have one; of so many
#: rows or fewer it takes as many as rows.
LEAST_REQUESTS = 16
#: As STEPS, of steps with trees. Those are for few requests, and up to about 150 rows padding costs nothing.
TREE_STEPS = ((256, 16), (1024, 64), (2048, 128), (1 << 30, 512))
#: Rows of graphs that take more requests than are likely. Without them a step of many requests that do not
#: speculate, beside few that do, would be padded until its requests fit.
WIDE_SIZES = (64, 128, 192, 256, 384, 512, 768, 1024, 1536)
#: Rows of the largest graph where nobody sets them, at least and at most.
LEAST_LARGEST, MOST_LARGEST = 2048, 8192
#: What an H100 or H200 computes a second in products of many rows. What their hosts take for a layer that is
#: launched from Python: 0.6 to 1.2 ms were seen.
FLOPS_A_SECOND, HOST_SECONDS_A_LAYER = 6e14, 1e-3
#: Requests up to which `verify_attention` has a kernel for few work tiles, at 8 KV heads on 132 processors.
FEW_TREES = 16


def graph_sizes(most_rows: int, steps: Sequence[tuple[int, int]] | None = None) -> list[int]:
    """Return the rows of each graph, ascending; the last are those of the largest step.

    Args:
        most_rows: rows of the largest step that is to run in a graph. Below the smallest size there is none.
        steps: as :data:`STEPS`, which stand where none are given.

    """
    sizes: list[int] = []
    size = 0
    while True:
        size += next(step for limit, step in steps or STEPS if size < limit)
        if size > most_rows:
            break
        sizes.append(size)
    # Where many prompts wait, nearly every step has as many rows as it may have.
    return sizes if not sizes or sizes[-1] == most_rows else [*sizes, most_rows]


def largest_size(parameters: int, layers: int) -> int:
    """Return the rows of the largest graph where nobody sets them.

    Up to so many rows the device waits for a host that launches a step piece by piece. With more, and with
    large models, a graph saves nothing, and its padding costs.

    Args:
        parameters: elements of the model's weights.
        layers: of the model.

    """
    rows = int(layers * HOST_SECONDS_A_LAYER * FLOPS_A_SECOND / (2 * max(parameters, 1)))
    return min(max(rows // 128 * 128, LEAST_LARGEST), MOST_LARGEST)


def descriptors(
    most_rows: int, most_requests: int, loras: Sequence[int], tree_rows: int | None = None
) -> list[BatchExecutionDescriptor]:
    """Return what vLLM names the graphs by, the largest first.

    A graph's kernels are chosen for as many requests as it takes, and read the lengths of all of them. So it
    takes no more than are likely beside each other in so many rows. Some sizes have a second graph, which
    takes more; the largest takes any.

    Args:
        most_rows: rows of the largest mixed step that is to run in a graph.
        most_requests: requests of the largest batch.
        loras: numbers of active adapters that graphs are captured for.
        tree_rows: rows of the smallest window that is a tree, for steps with trees; None for others.

    """
    sizes = graph_sizes(most_rows)
    largest = max(sizes, default=0)
    if tree_rows is not None:
        sizes = sorted({*graph_sizes(largest, TREE_STEPS), largest} & set(sizes))

    def requests(size: int) -> set[int]:
        if size == largest:
            return {min(size, most_requests)}
        chains = max(size // 2, min(size, LEAST_REQUESTS))
        if tree_rows is None:
            counts = {chains, size} if size in WIDE_SIZES else {chains}
        else:
            trees = max(size // tree_rows, min(size // 8, FEW_TREES), 1)
            counts = {trees, chains} if size in WIDE_SIZES else {trees}
        return {min(count, most_requests) for count in counts}

    return [
        BatchExecutionDescriptor(
            cg_mode=CUDAGraphMode.FULL, num_tokens=size, num_reqs=taken, num_active_loras=count
        )
        for size in reversed(sizes)
        for taken in sorted(requests(size), reverse=True)
        for count in loras
    ]
