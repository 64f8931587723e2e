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
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.request import Request

from nwor.config import NworConfig
from nwor.engine import interrupts
from nwor.engine.request_isolation.request_failures import RequestFailures
from nwor.engine.scheduler import NworAsyncScheduler, NworScheduler, NworScheduling, special_scheduler
from nwor.engine.stats.figures import snapshot


class _Reporting(RequestFailures):
    """Adds the figures to the steps of requests that a stop string may end."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._with_stop_strings: set[str] = set()

    def add_request(self, request: Request) -> None:
        """Take in a request."""
        super().add_request(request)
        sampling = request.sampling_params
        if sampling is not None and sampling.stop and request.spec_decode_metrics is not None:
            self._with_stop_strings.add(request.request_id)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._with_stop_strings.discard(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def figures_so_far(self, request: Request) -> RequestSpecDecodeMetrics:
        """Return a copy of a request's figures: another thread encodes it while the next step counts on."""
        assert request.spec_decode_metrics is not None
        return snapshot(request.spec_decode_metrics)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Take in one step's results and return the outputs for each front end, as vLLM does."""
        answers: dict[int, Any] = super().update_from_output(scheduler_output, model_runner_output)
        if not self._with_stop_strings:
            return answers
        for answer in answers.values():
            for output in answer.outputs:
                if output.request_id in self._with_stop_strings and output.spec_decode_metrics is None:
                    output.spec_decode_metrics = self.figures_so_far(self.requests[output.request_id])
        return answers


class ReportingScheduler(_Reporting):
    """For engines that wait for each step."""


class ReportingAsyncScheduler(_Reporting, AsyncScheduler):
    """For engines that schedule a step ahead."""


class _NworReporting(_Reporting, NworScheduling):
    """The same with NWOR's figures."""

    def figures_so_far(self, request: Request) -> RequestSpecDecodeMetrics:
        """Return a copy of a request's figures, the latest step's windows counted."""
        self.settle(request)
        return super().figures_so_far(request)


class NworReportingScheduler(_NworReporting, NworScheduler):
    """For engines that wait for each step, with NWOR."""


class NworReportingAsyncScheduler(_NworReporting, NworAsyncScheduler):
    """For engines that schedule a step ahead, with NWOR."""


def create_scheduler(*args: Any, **kwargs: Any) -> Scheduler:
    """Return the scheduler that vLLM would choose, with the reporting added, and NWOR's figures with NWOR.

    Args:
        args: what vLLM passes to its scheduler classes.
        kwargs: likewise; ``vllm_config`` decides between the two.

    """
    # Where VLLM_PLUGINS leaves the plugin out, the engine's process hears of it here.
    interrupts.leave_to_server()
    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    if special := special_scheduler(config):
        return special(*args, **kwargs)
    ahead = config.scheduler_config.async_scheduling
    if NworConfig.from_additional_config(config.additional_config) is not None:
        return (NworReportingAsyncScheduler if ahead else NworReportingScheduler)(*args, **kwargs)
    return (ReportingAsyncScheduler if ahead else ReportingScheduler)(*args, **kwargs)
