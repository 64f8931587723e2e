"""The engine's scheduler, telling the front end a request's acceptance figures before the request ends.

vLLM sends them with a request's last step. A request that a stop string ends has no such step: the front end
finds the string, answers, and only then tells the engine. So for requests with stop strings each step carries
the figures so far, and the answer has those of the step that the string came with.

Reached through vLLM's own setting ``scheduler_cls``, which takes the import path of anything that is called
like the class.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from nwor.config import NworConfig
from nwor.engine.figures import snapshot
from nwor.engine.scheduler import NworAsyncScheduler, NworScheduler


class _Reporting(Scheduler):
    """Adds the figures to the steps of requests that a stop string may end."""

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Take in one step's results and return the outputs for each front end, as vLLM does."""
        answers: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        for answer in answers.values():
            for output in answer.outputs:
                # Requests that ended here are gone from the table, and their figures are in place.
                request = self.requests.get(output.request_id)
                if request is None or output.spec_decode_metrics is not None:
                    continue
                figures, sampling = request.spec_decode_metrics, request.sampling_params
                if figures is not None and sampling is not None and sampling.stop:
                    # A copy: another thread encodes it while the next step counts on.
                    output.spec_decode_metrics = snapshot(figures)
        return answers


class ReportingScheduler(_Reporting):
    """For engines that wait for each step."""


class ReportingAsyncScheduler(_Reporting, AsyncScheduler):
    """For engines that schedule a step ahead."""


class NworReportingScheduler(_Reporting, NworScheduler):
    """For engines that wait for each step, with NWOR."""


class NworReportingAsyncScheduler(_Reporting, NworAsyncScheduler):
    """For engines that schedule a step ahead, with NWOR."""


def create_scheduler(*args: Any, **kwargs: Any) -> Scheduler:
    """Return the scheduler that vLLM would choose, with the reporting added, and NWOR's figures with NWOR.

    Args:
        args: what vLLM passes to its scheduler classes.
        kwargs: likewise; ``vllm_config`` decides between the two.

    """
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    ahead = config.scheduler_config.async_scheduling
    if NworConfig.from_additional_config(config.additional_config) is not None:
        return (NworReportingAsyncScheduler if ahead else NworReportingScheduler)(*args, **kwargs)
    return (ReportingAsyncScheduler if ahead else ReportingScheduler)(*args, **kwargs)
