"""What the benchmark does on the worker, by vLLM's own ``worker_extension_cls``: with NWOR and without."""

from __future__ import annotations

from typing import Any

import torch
from stopwatch import IdleWatch, Stopwatch, Watch


class WorkerTools:
    """Mixed into the worker's class."""

    model_runner: Any
    _bench_watch: Watch

    def bench_set_acceptance(self, rate: float) -> int:
        """Have each draft token accepted with chance ``rate``, given that those before it were.

        The rejection sampler reads its rates from a tensor on the device in every step, after the target
        model's CUDA graph and before the drafter's; filled in place, it counts from the next step on.

        Returns:
            The number of draft tokens of a step.

        Raises:
            RuntimeError: if the engine was not started with synthetic acceptance.

        """
        rates = getattr(self.model_runner.rejection_sampler, "synthetic_conditional_rates", None)
        if rates is None:
            raise RuntimeError("the engine does not sample with synthetic acceptance")
        with torch.inference_mode():
            rates.fill_(rate)
        return int(rates.numel())

    def bench_watch_busy(self) -> None:
        """Tell the thread's busy time from its waits for the device, from now on.

        The only wait of a step is for the event behind its results' copy to the host (``AsyncOutput``). The
        worker runs in the engine's process and thread, which makes it when it asks for the results.
        """
        watch = self._bench_watch = IdleWatch()
        watch.attach(torch.cuda.Event, "synchronize")

    def bench_watch_runner(self) -> None:
        """Time the model runner's two calls of a step as wholes, from now on."""
        watch = self._bench_watch = Stopwatch()
        runner = type(self.model_runner)
        watch.attach(runner, "execute_model")
        watch.attach(runner, "sample_tokens", ends_step=True)

    def bench_watch_hooks(self) -> None:
        """Time what NWOR adds to the model runner, without what it calls of vLLM's own, from now on."""
        from vllm.v1.worker.gpu.async_utils import AsyncOutput

        watch = self._bench_watch = Stopwatch()
        runner = type(self.model_runner)
        for name in ("execute_model", "finish_requests", "prepare_attn", "sample_tokens"):
            watch.attach(runner, name, stock=True)
        watch.attach(runner, "postprocess_sampled", stock=True)
        for name in ("update_requests", "prepare_inputs", "sample"):
            watch.attach_control(runner, name)
        watch.attach(type(self.model_runner.cudagraph_manager), "run_fullgraph", stock=True)
        # What runs once a step's results have come hangs on the output object itself.
        watch.attach_stock(AsyncOutput, "get_output")
        watch.attach_result(runner, "_nwor_account_on_arrival", "get_output")

    def bench_watch_label(self, label: str) -> None:
        """Count the steps that end from now on under ``label``."""
        self._bench_watch.label = label

    def bench_watch_stop(self) -> dict[str, dict[str, list[float]]]:
        """Stop timing and return by label, step by step, all that was seen."""
        self._bench_watch.detach()
        return self._bench_watch.seen()
