"""Host time of NWOR's hooks in a decode step, piece by piece, on any machine: no GPU, no model, no engine.

The overrides of the runner, the graph manager and the scheduler run on stand-ins for vLLM's methods, which do
next to nothing, so what is measured is NWOR's own. A step verifies as many drafts for each request, as under
full CUDA graphs. Its slots are all skipped, so that a commit is its call alone. Each piece is the processor
time of one override's calls, on average, the cost of reading the clock taken off; a step is their sum. Steps
are 3.5 ms apart for whatever asks for the time of day. With ``--end-every N`` a request ends every N steps.

``python benchmarks/engine/host_micro.py [--modes off stage] [--requests 64] [--steps 4000] [--end-every 0]``
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.spec_decode.metrics import SpecDecodingStats
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager

import nwor.engine.scheduler
from nwor.config import NworConfig
from nwor.engine.cuda_graphs.v2 import NworCudaGraphManager
from nwor.engine.model_runner.v2 import NworRunnerV2
from nwor.engine.window_manager import WindowManager
from nwor.modes import Mode
from nwor.windows.window import StagedLayer, Window, group_layers

DRAFTS, LAYERS, HEADS, SIZE, BLOCK = 4, 32, 2, 16, 16
#: Tokens that each window gives: two accepted drafts and one more.
SAMPLED = 3
#: Seconds from one step to the next.
STEP = 0.0035


class StockRunner:
    """What NWOR's runner overrides of vLLM's."""

    is_last_pp_rank, use_pp = True, False
    output: Any = None
    prepared: Any = None

    def finish_requests(self, scheduler_output: Any) -> None:
        """Stand for vLLM's."""

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None:
        """Stand for vLLM's."""

    def prepare_attn(self, input_batch: Any) -> Any:
        """Return block tables and slots."""
        return self.prepared

    def postprocess_sampled(self, *args: Any) -> None:
        """Stand for vLLM's."""

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Return the step's output."""
        return self.output


class Runner(NworRunnerV2, StockRunner):
    """NWOR's runner on the stand-in."""


class Output:
    """Stands for vLLM's output of a step, its copy to the host done."""

    def __init__(self, result: Any, sampled: torch.Tensor) -> None:
        self.result = result
        self.num_sampled_tokens_np = sampled.numpy()

    def get_output(self) -> Any:
        """Return what goes to the scheduler."""
        return self.result


class StockScheduler:
    """What NWOR's scheduler overrides of vLLM's."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.running: list[Any] = []
        self.log_stats = True
        self.scheduled: Any = None
        self.ending: list[Any] = []
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(pipeline_parallel_size=1))
        self.parallel_config = self.vllm_config.parallel_config
        self.stats = SchedulerStats(spec_decoding_stats=SpecDecodingStats.new(DRAFTS))

    def schedule(self, throttle_prefills: bool = False) -> Any:
        """Return the step."""
        return self.scheduled

    def add_request(self, request: Any) -> None:
        """Take a request in."""
        self.requests[request.request_id] = request
        self.running.append(request)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, Any]:
        """Free the requests that end with this step, and make its statistics."""
        for request in self.ending:
            request.status = "ended"
            self._free_request(request)
            del self.requests[request.request_id]
            self.running.remove(request)
        return {0: self.make_stats(self.stats.spec_decoding_stats)}

    def make_stats(self, *args: Any, **kwargs: Any) -> SchedulerStats:
        """Return statistics; the object is the same each time."""
        return self.stats

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> None:
        pass


def scheduler() -> Any:
    """Return NWOR's scheduler with vLLM's methods, which it finds in the class itself, replaced."""
    for name in ("__init__", "schedule", "add_request", "update_from_output", "make_stats", "_free_request"):
        setattr(Scheduler, name, vars(StockScheduler)[name])
    return nwor.engine.scheduler.NworScheduling()


def make_window_manager(mode: Mode) -> WindowManager:
    """Return a rank with staged layers in the CPU's memory."""
    speculative = SimpleNamespace(num_speculative_tokens=DRAFTS)
    window_manager = WindowManager(
        SimpleNamespace(speculative_config=speculative), NworConfig(mode=mode), torch.device("cpu")
    )
    layers = []
    for number in range(LAYERS):
        cache = torch.zeros(4, HEADS, BLOCK, 2 * SIZE, dtype=torch.bfloat16)
        key_cache, value_cache = cache.transpose(1, 2).split(SIZE, dim=-1)
        layer = StagedLayer(
            name=f"layer{number}",
            kv_cache=cache,
            key_cache=key_cache,
            value_cache=value_cache,
            kv_cache_dtype="auto",
            k_scale=None,
            v_scale=None,
            source_dtype=torch.bfloat16,
            direct_write=lambda key, value, slots: None,
        )
        layers.append((0, layer))
    window_manager.window = Window(group_layers(layers))
    window_manager.state.token_bytes = window_manager.state.source_token_bytes = LAYERS * 2 * HEADS * SIZE * 2
    return window_manager


class Steps:
    """Decode steps, one like the other.

    Args:
        mode: the mode in force.
        requests: requests of the batch.
        end_every: steps after which a request ends and another takes its place; 0 for never.

    """

    def __init__(self, mode: Mode, requests: int, end_every: int) -> None:
        self.end_every, self.number, self.made = end_every, 0, 0
        self.tokens = requests * (1 + DRAFTS)
        self.window_manager = make_window_manager(mode)
        self.runner = Runner()
        self.runner.nwor = self.window_manager
        self.slots = torch.full((1, 8192), -1, dtype=torch.int64)
        self.starts = torch.full((1025,), self.tokens, dtype=torch.int32)
        self.starts[:requests] = torch.arange(0, self.tokens, 1 + DRAFTS)
        self.sampled = torch.full((requests,), SAMPLED, dtype=torch.int32)
        self.rejected = 1 + DRAFTS - self.sampled
        self.desc = BatchExecutionDescriptor(CUDAGraphMode.FULL, self.tokens, requests, 1 + DRAFTS)
        self.manager = self._manager()
        self.scheduler = scheduler()
        self.scheduler.stats.spec_decoding_stats.num_accepted_tokens = (SAMPLED - 1) * requests
        self.ids: list[str] = []
        for place in range(requests):
            self._start(place)
        self.seconds: dict[str, list[float]] = {}
        self.overhead = self._overhead()

    def _manager(self) -> Any:
        window = self.window_manager.window
        assert window is not None
        ModelCudaGraphManager.run_fullgraph = lambda self, desc: None
        source = torch.zeros(self.tokens, HEADS, SIZE, dtype=torch.bfloat16)
        manager = ModelCudaGraphManager.__new__(ModelCudaGraphManager)
        manager.graphs = {}
        manager = NworCudaGraphManager.adopt(manager, self.window_manager)
        manager.stage_graphs[self.desc] = source
        manager.stage._sources[self.desc] = window.captured(
            dict.fromkeys(window.layer_names, (source, source))
        )
        return manager

    def _start(self, place: int) -> None:
        self.made += 1
        name = f"cmpl-{self.made:032x}-0"
        request = SimpleNamespace(
            request_id=name,
            spec_decode_metrics=RequestSpecDecodeMetrics.new(DRAFTS),
            num_stale_output_tokens=0,
            drop_stale_output=False,
            num_preemptions=1,  # its figures are not compared with vLLM's, which stand still here
            status="running",
            is_finished=lambda: False,
        )
        self.scheduler.add_request(request)
        self.ids[place : place + 1] = [name]

    def _overhead(self) -> float:
        for _ in range(2000):
            self._timed("nothing", lambda: None)
        return statistics.fmean(self.seconds.pop("nothing"))

    def _timed(self, piece: str, hook: Callable[..., Any], *args: Any) -> Any:
        started = time.thread_time()
        result = hook(*args)
        self.seconds.setdefault(piece, []).append(time.thread_time() - started)
        return result

    def run(self) -> None:
        """Do one step."""
        self.number += 1
        runner, timed = self.runner, self._timed
        ids = list(self.ids)
        cached = SimpleNamespace(
            req_ids=ids, num_computed_tokens=[100] * len(ids), resumed_req_ids=set(), new_block_ids=[]
        )
        self.scheduler.scheduled = scheduled = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            finished_req_ids=set(),
            preempted_req_ids=None,
        )
        batch = SimpleNamespace(
            req_ids=ids,
            num_reqs=len(ids),
            num_tokens=self.tokens,
            num_scheduled_tokens=torch.full((len(ids),), 1 + DRAFTS, dtype=torch.int32).numpy(),
            num_draft_tokens=DRAFTS * len(ids),
            num_draft_tokens_per_req=torch.full((len(ids),), DRAFTS, dtype=torch.int32).numpy(),
            query_start_loc=self.starts[: len(ids) + 1],
        )
        runner.prepared = (), self.slots[:, : self.tokens]
        result = ModelRunnerOutput(req_ids=ids, req_id_to_index={}, sampled_token_ids=[])
        runner.output = Output(result, self.sampled.clone())
        timed("schedule", self.scheduler.schedule)
        timed("finish_requests", runner.finish_requests, scheduled)
        timed("execute_model", runner.execute_model, scheduled, None)
        timed("prepare_attn", runner.prepare_attn, batch)
        timed("run_fullgraph", self.manager.run_fullgraph, self.desc)
        timed("postprocess_sampled", runner.postprocess_sampled, None, None, None, self.rejected, None)
        output = timed("sample_tokens", runner.sample_tokens, None)
        result = timed("get_output", output.get_output)
        place = self.number % len(ids)
        ends = self.end_every and self.number % self.end_every == 0
        self.scheduler.ending = [self.scheduler.requests[ids[place]]] if ends else []
        timed("update_from_output", self.scheduler.update_from_output, scheduled, result)
        if ends:
            self._start(place)

    def summary(self) -> dict[str, float]:
        """Return the mean time of each piece in microseconds."""
        means = {
            piece: (statistics.fmean(seconds) - self.overhead) * 1e6
            for piece, seconds in self.seconds.items()
        }
        return {**means, "step": sum(means.values())}


def main() -> None:
    """Measure the modes and print a table of microseconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--modes", nargs="+", default=["off", "stage"])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--end-every", type=int, default=0, help="a request ends every so many steps")
    args = parser.parse_args()
    columns = {}
    for mode in args.modes:
        steps = Steps(Mode(mode), args.requests, args.end_every)
        clock = SimpleNamespace(monotonic=lambda steps=steps: steps.number * STEP)
        nwor.engine.scheduler.time = clock  # type: ignore[attr-defined]
        with torch.inference_mode():
            for _ in range(200):
                steps.run()
            steps.seconds.clear()
            for _ in range(args.steps):
                steps.run()
        columns[mode] = steps.summary()
        counts = steps.window_manager.state.counts
        assert counts.accepted_tokens == (SAMPLED - 1) * counts.windows > 0
        assert counts.outcomes == {"committed" if mode == "stage" else "direct": counts.windows}
        assert not steps.scheduler._nwor_logged
    print(f"{'microseconds':20}" + "".join(f"{mode:>10}" for mode in columns))
    for piece in next(iter(columns.values())):
        print(f"{piece:20}" + "".join(f"{column[piece]:10.2f}" for column in columns.values()))


if __name__ == "__main__":
    main()
