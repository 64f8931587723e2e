"""A batch of requests on an engine in this process, stepped by hand."""

from __future__ import annotations

import itertools
import time
from types import TracebackType
from typing import Any

from grid import prompt

#: Steps after the first tokens that are not measured: the step ahead was launched beside the prompts.
SETTLE_STEPS = 4
#: More than the steps that can be under way when a batch is aborted.
_DRAIN_STEPS = 16

_numbers = itertools.count()


class Batch:
    """Requests that decode together, from the step in which the last of them has its first token.

    Each request has a seed of its own, and vLLM draws the synthetic acceptance from the seed and the
    position. So every run of a cell accepts the same tokens in the same steps, in every mode and process.

    Args:
        engine: vLLM's ``LLMEngine`` with its core in this process.
        context: tokens of each prompt.
        batch: requests.
        max_len: the engine's longest sequence in tokens; no request may get that far.

    """

    def __init__(self, engine: Any, context: int, batch: int, max_len: int) -> None:
        self.engine = engine
        self.context = context
        self.batch = batch
        self.max_tokens = max_len - context
        self._ids: list[str] = []

    def __enter__(self) -> Batch:
        """Add the requests and step until all of them have tokens."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        try:
            for index in range(self.batch):
                params = SamplingParams(
                    temperature=0.0,
                    seed=index,
                    max_tokens=self.max_tokens,
                    ignore_eos=True,
                    detokenize=False,
                    output_kind=RequestOutputKind.DELTA,
                )
                name = f"{self.context}-{index}-{next(_numbers)}"
                self.engine.add_request(name, {"prompt_token_ids": prompt(self.context, index)}, params)
                self._ids.append(name)
            waiting = set(self._ids)
            while waiting:
                waiting -= {output.request_id for output in self._step()}
            for _ in range(SETTLE_STEPS):
                self.advance()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Abort the requests; their blocks stay in the prefix cache."""
        self._end()

    def advance(self) -> int:
        """Wait for the next step's results and return how many tokens they hold.

        Raises:
            RuntimeError: if a request is missing or has finished, so that this is no step of the whole batch.

        """
        outputs: list[Any] = []
        while not outputs:
            outputs = self._step()
        if len(outputs) != self.batch or any(output.finished for output in outputs):
            raise RuntimeError(f"a step had results of {len(outputs)} requests, of {self.batch} that decode")
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    def run(self, steps: int) -> tuple[float, int]:
        """Return the seconds that the next ``steps`` steps take and the tokens that they bring.

        The clock is read when a step's results have come, at both ends: the seconds are those between the
        results before the first of the steps and the results of the last. That the next step is launched
        before a step's results come shifts both ends alike.
        """
        started = time.perf_counter()
        tokens = sum(self.advance() for _ in range(steps))
        return time.perf_counter() - started, tokens

    def _step(self) -> list[Any]:
        """Return one step's results; empty where a step was only launched ahead."""
        if not self.engine.has_unfinished_requests():
            raise RuntimeError("the requests ended before their time")
        outputs: list[Any] = self.engine.step()
        return outputs

    def _end(self) -> None:
        """Abort what is left and take in the steps that are still under way."""
        self.engine.abort_request(self._ids)
        self._ids = []
        core = self.engine.engine_core.engine_core
        for _ in range(_DRAIN_STEPS):
            if not core.batch_queue and not core.scheduler.has_requests():
                return
            self.engine.step()
        raise RuntimeError("steps were still under way after their requests had been aborted")
