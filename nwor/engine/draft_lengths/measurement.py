"""What steps cost, measured at start-up with requests of the worker's own, in the graphs that serving uses.

Requests of random text are verified and drafted for, as the scheduler would have it, and then removed. Nobody
reads their results: nothing of them is counted. Follows vLLM's own warm-up (``vllm.v1.worker.gpu.warmup``),
which hands the runner steps of its making likewise.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from math import inf, isfinite
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from nwor.config import DraftBounds
from nwor.draft_costs import StepCosts
from nwor.engine.draft_lengths.step_clock import StepClock

logger = logging.getLogger("vllm.nwor.draft_lengths")

#: Numbers of requests that are measured, up to the engine's most.
REQUESTS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
REQUESTS_CPU = (1, 4, 16, 64)
#: Rows of the prompts that are measured alone.
ROWS = (16, 64, 128, 256, 512, 1024, 2048)
ROWS_CPU = (16, 64, 256)
#: Steps before a measurement, and those that are measured in a row. vLLM's runner has room for the inputs of
#: two steps that are under way, and the host launches these before the device begins the first.
SETTLE, STEPS = 1, 2
#: Most rows of chains together: an H200 gains by longer ones only where nearly all of them are accepted.
MOST_CHAIN_ROWS = 1024
#: How often all is measured, one time after the other: the shortest time of each counts. Whatever else the
#: device does makes steps longer, and may take a second.
TIMES = 2
#: Passes of the drafter from which the time of one follows, at most, unless all chains are longer.
MOST_PASSES = 8
_CONTEXT = 16
#: Tokens that requests may grow by where there is room: enough for chains of all numbers.
_ROOM = 160


class NoRoomError(Exception):
    """The engine is too small for the measurement."""


class _Requests:
    """Requests of the measurement, and the steps that they go through."""

    def __init__(self, worker: Any, blocks_of: Any) -> None:
        self._worker, self._blocks_of = worker, blocks_of
        self._groups = [group.kv_cache_spec for group in worker.model_runner.kv_cache_config.kv_cache_groups]
        self._names: list[str] = []
        self._computed = 0
        self._number = 0

    def run(self, output: SchedulerOutput) -> None:
        """Run one step."""
        self._worker.execute_model(output)
        self._worker.sample_tokens(None)

    def begin(self, count: int, prompt: int, room: int, drafts: int) -> None:
        """Add requests in one step or several; those before are removed.

        Args:
            count: how many.
            prompt: tokens of each.
            room: tokens that each may grow by.
            drafts: draft tokens that the last step makes for each.

        """
        finished, self._names = set(self._names), []
        most = self._worker.model_runner.max_num_tokens // prompt
        block = 1
        for start in range(0, count, most):
            new = []
            for _ in range(min(most, count - start)):
                ids: list[list[int]] = []
                for spec in self._groups:
                    size = self._blocks_of(prompt + room, spec)
                    ids.append(list(range(block, block + size)))
                    block += size
                self._number += 1
                tokens = [(7 * self._number + place) % 97 for place in range(prompt)]
                new.append(
                    NewRequestData(
                        req_id=f"nwor-cost-{self._number}",
                        prompt_token_ids=tokens,
                        mm_features=[],
                        sampling_params=SamplingParams(temperature=0.0, max_tokens=1 << 20, ignore_eos=True),
                        pooling_params=None,
                        block_ids=tuple(ids),
                        num_computed_tokens=0,
                        lora_request=None,
                        prefill_token_ids=tokens,
                    )
                )
            output = SchedulerOutput.make_empty()
            output.scheduled_new_reqs = new
            output.num_scheduled_tokens = {one.req_id: prompt for one in new}
            output.total_num_scheduled_tokens = prompt * len(new)
            output.num_spec_tokens_to_schedule = drafts
            output.finished_req_ids, finished = finished, set()
            self.run(output)
            self._names += [one.req_id for one in new]
        self._computed = prompt

    def blocks(self, count: int, tokens: int) -> int:
        """Return the blocks that so many requests of so many tokens take."""
        return count * sum(self._blocks_of(tokens, spec) for spec in self._groups)

    def step(self, drafts: int, then: int) -> None:
        """Verify ``drafts`` tokens of each request, and make ``then`` new ones."""
        cached = CachedRequestData.make_empty()
        cached.req_ids = self._names
        cached.num_computed_tokens = [self._computed] * len(self._names)
        cached.num_output_tokens = [1] * len(self._names)
        cached.new_block_ids = [None] * len(self._names)
        output = SchedulerOutput.make_empty()
        output.scheduled_cached_reqs = cached
        output.num_scheduled_tokens = dict.fromkeys(self._names, 1 + drafts)
        output.total_num_scheduled_tokens = (1 + drafts) * len(self._names)
        if drafts:
            output.scheduled_spec_decode_tokens = {name: [-1] * drafts for name in self._names}
        output.num_spec_tokens_to_schedule = then
        self.run(output)
        self._computed += 1 + drafts

    def end(self) -> None:
        """Remove all requests."""
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = set(self._names)
        self._worker.execute_model(output)
        self._names = []


def measure(worker: Any, bounds: DraftBounds, fits: bool = False) -> StepCosts:
    """Return what this engine's steps cost; every rank of it has to do so at the same time.

    Args:
        worker: vLLM's worker, on model runner V2, its graphs captured.
        bounds: the draft tokens to measure.
        fits: whether windows may be fitted to requests, for which the time of a pass has to be known.

    Raises:
        NoRoomError: if a sequence or the cache has no room for a single request; on all ranks alike.

    """
    from vllm.v1.worker.gpu.warmup import _warmup_block_counter

    runner = worker.model_runner
    cpu = runner.device.type == "cpu"
    began = time.perf_counter()
    requests = _Requests(worker, _warmup_block_counter(runner))
    clock = StepClock(runner.device, runner.parallel_config.tensor_parallel_size == 1)
    numbers = bounds.candidates
    blocks = runner.kv_cache_config.num_blocks - 1
    fitting = [
        drafts
        for drafts in numbers
        if sum(_sequence_of(drafts)) <= runner.max_model_len
        and _sequence_of(drafts)[0] <= runner.max_num_tokens
        and requests.blocks(1, sum(_sequence_of(drafts))) <= blocks
    ]
    if not fitting:
        raise NoRoomError(
            f"sequences of {runner.max_model_len} tokens, {runner.max_num_tokens} in a step, {blocks} blocks "
            f"have no room for the measurement's, of {sum(_sequence_of(numbers[0]))} tokens"
        )
    prompt, room = _sequence_of(fitting[-1])
    wider = min(_ROOM, runner.max_model_len - prompt)
    if requests.blocks(1, prompt + wider) <= blocks:
        room = max(room, wider)
    counts = [
        count
        for count in sorted({*(REQUESTS_CPU if cpu else REQUESTS), *_largest_batches(bounds)})
        if count <= runner.max_num_reqs
        and count * (1 + numbers[0]) <= runner.max_num_tokens
        and requests.blocks(count, prompt + room) <= blocks
    ]
    rows = [
        size
        for size in (ROWS_CPU if cpu else ROWS)
        if size <= min(runner.max_num_tokens, runner.max_model_len - 1)
        and requests.blocks(1, size + 1) <= blocks
    ]

    derived = _derived(bounds)

    def windows(count: int) -> list[float]:
        row, before, left = [], numbers[0], 0
        for drafts in numbers:
            if (
                drafts in derived
                or drafts not in fitting
                or count * (1 + drafts) > runner.max_num_tokens
                or not _is_candidate(bounds, count, drafts)
            ):
                row.append(inf)
                continue
            needed = _sequence_of(drafts)[1]
            if left < needed:
                requests.begin(count, prompt, room, drafts)
                before, left = drafts, room
            left -= needed
            requests.step(before, drafts)
            for _ in range(SETTLE):
                requests.step(drafts, drafts)
            row.append(clock.seconds(partial(requests.step, drafts, drafts), STEPS))
            before = drafts
        return row

    chains = [k for k in fitting if bounds.tree is None or not bounds.tree.is_tree(k)]
    most_passes = max((k for k in chains if k <= MOST_PASSES), default=min(chains, default=0))

    def passes(count: int) -> tuple[float, float]:
        """Return the seconds of steps that verify nothing, with one pass of the drafter and with most."""
        if most_passes < 2:
            return 0.0, 0.0
        found = []
        for drafts in (1, most_passes):
            requests.begin(count, prompt, room, 0)
            for _ in range(1 + SETTLE):
                requests.step(0, drafts)
            found.append(clock.seconds(partial(requests.step, 0, drafts), STEPS))
        return found[0], found[1]

    def prompts(size: int) -> float:
        requests.begin(1, size, 1, 0)
        return clock.seconds(partial(requests.begin, 1, size, 1, 0), STEPS)

    runner.kv_connector.set_disabled(True)
    try:
        tables, lines, turns = [], [], []
        for _ in range(TIMES):
            tables.append([windows(count) for count in counts])
            lines.append([prompts(size) for size in rows])
            if fits:
                turns.append([passes(count) for count in counts])
        table = [
            with_shallow_trees(bounds, [min(cell) for cell in zip(*same, strict=True)])
            for same in zip(*tables, strict=True)
        ]
        row_seconds = [min(same) for same in zip(*lines, strict=True)]
        requests.end()
    finally:
        runner.kv_connector.set_disabled(False)
    took = time.perf_counter() - began
    logger.info("measured what steps cost with %s draft tokens in %.1f s", _listed(numbers), took)
    columns = sum(bounds.tree is None or not bounds.tree.is_tree(drafts) for drafts in numbers)
    return StepCosts(
        tuple(counts),
        numbers,
        without_spikes(table, columns),
        tuple(rows),
        tuple(_least_behind(row_seconds)),
        tuple(
            max(0.0, min(most for _, most in same) - min(one for one, _ in same)) / max(most_passes - 1, 1)
            for same in zip(*turns, strict=True)
        ),
    )


def _sequence_of(drafts: int) -> tuple[int, int]:
    """Return the prompt that a measurement of so many draft tokens begins with, and what it grows by."""
    return drafts + _CONTEXT, (SETTLE + STEPS + 1) * (1 + drafts)


def _largest_batches(bounds: DraftBounds) -> set[int]:
    """Return the most requests for which trees of each size may be chosen."""
    return set() if bounds.tree is None else {bounds.tree.most_requests(k) for k in bounds.tree.sizes}


def _derived(bounds: DraftBounds) -> dict[int, tuple[int, int, int]]:
    """Return the candidates that are not measured, each with three that say what it costs.

    These are the shallow trees but for the smallest: the deepest of the size, and the smallest size's deepest
    and equally shallow one. Passes take about as long, whatever nodes are kept in the end.
    """
    tree, numbers = bounds.tree, set(bounds.candidates)
    if tree is None:
        return {}
    found: dict[int, tuple[int, int, int]] = {}
    for drafts in sorted(numbers & set(tree.choices) - set(tree.sizes)):
        size = tree.size_of(drafts)
        for least in tree.sizes:
            if least < size and numbers >= {size, least, least - (size - drafts)}:
                found[drafts] = size, least, least - (size - drafts)
                break
    return found


def with_shallow_trees(bounds: DraftBounds, row: Sequence[float]) -> list[float]:
    """Return seconds with those of the trees that were not measured.

    Args:
        bounds: the draft tokens.
        row: seconds of each candidate; those that were not measured are replaced.

    """
    numbers = bounds.candidates
    by_number = dict(zip(numbers, row, strict=True))
    for drafts, (deepest, least, shallow) in _derived(bounds).items():
        cost = by_number[deepest] - (by_number[least] - by_number[shallow])
        by_number[drafts] = max(cost, by_number[shallow]) if isfinite(cost) else inf
    return [by_number[drafts] for drafts in numbers]


def _is_candidate(bounds: DraftBounds, requests: int, drafts: int) -> bool:
    tree = bounds.tree
    if tree is not None and tree.is_tree(drafts):
        return requests <= tree.most_requests(drafts)
    return requests * (1 + drafts) <= MOST_CHAIN_ROWS or drafts == min(bounds.candidates)


def without_spikes(table: Sequence[Sequence[float]], chains: int) -> tuple[tuple[float, ...], ...]:
    """Return a table of seconds in which more requests, and longer chains, never take less time.

    What a measurement has too much is taken away where more work was measured to take less.

    Args:
        table: [requests][drafts], both ascending.
        chains: how many of the columns are those of chains; they come first.

    """
    rows = [[*_least_behind(row[:chains]), *row[chains:]] for row in table]
    columns = [_least_behind(column) for column in zip(*rows, strict=True)]
    return tuple(zip(*columns, strict=True))


def _least_behind(values: Sequence[float]) -> list[float]:
    """Return for each value the least of it and those behind it."""
    return list(accumulate(reversed(values), min))[::-1]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
