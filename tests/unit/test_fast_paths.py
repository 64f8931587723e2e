"""Fast paths: each has a setting that turns it off, and a rank's report says which are in place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.engine.scheduler_rig import Setup, make_scheduler
from nwor.config import NworConfig
from nwor.engine.fastpath import greedy_sampling, h2d_cache, triton_launch
from nwor.engine.fastpath import worker as worker_paths
from nwor.engine.fastpath.copies import standing_aside
from nwor.engine.model_runner.common import NworRunner
from nwor.engine.scheduler import create_scheduler
from nwor.engine.stats.step_messages import fast_paths_of
from nwor.fast_paths import FAST_PATHS, NO_STEP_YET, OTHER_RUNNER
from nwor.modes import Mode
from nwor.worker_state import WorkerState

SETUP = Setup(requests=4, blocks=60, block_size=4, length=40, tokens=64, settings={})
#: The short ways step aside beside a release whose code they have not been compared with.
fast_scheduler = pytest.mark.skipif("scheduler" in standing_aside(), reason="another vLLM's scheduler")


def report(**settings: bool) -> dict[str, Any]:
    return WorkerState(NworConfig(**settings), Mode.OFF).report()["fast_paths"]


def test_every_path_is_there_once() -> None:
    said = report()
    for setting, paths in FAST_PATHS.items():
        assert said[setting]["active"] == []
        assert tuple(said[setting]["inactive"]) == paths
    assert said["fast_host"]["inactive"]["scheduler"] == NO_STEP_YET
    assert said["fast_sampling"]["inactive"]["drafting"] == OTHER_RUNNER


@pytest.mark.parametrize("setting", FAST_PATHS)
def test_what_is_turned_off_says_by_which_flag(setting: str) -> None:
    flag = "--no-" + setting.replace("_", "-")
    assert set(report(**{setting: False})[setting]["inactive"].values()) == {f"turned off by {flag}"}


def test_a_path_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(KeyError):
        WorkerState(NworConfig(), Mode.OFF).fast_paths.note({"other": None})


@pytest.fixture
def applied(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was put in place, by stand-ins."""
    calls: list[str] = []

    def stand_in(name: str, result: Any) -> Any:
        return lambda *args: calls.append(name) or result

    sampling = {"drafting": None, "verifying": "outputs are watermarked"}
    monkeypatch.setattr(greedy_sampling, "apply", stand_in("sampling", sampling))
    monkeypatch.setattr(h2d_cache, "apply", stand_in("inputs", None))
    monkeypatch.setattr(triton_launch, "apply", stand_in("launches", 0))
    return calls


def apply(mode: Mode, **settings: bool) -> dict[str, Any]:
    state = WorkerState(NworConfig(mode, **settings), mode)
    state.fast_paths.note(worker_paths.apply(state.config, None, None, 4, torch.device("cpu")))
    return state.report()["fast_paths"]


@pytest.mark.parametrize("mode", Mode)
def test_a_worker_puts_in_place_what_the_settings_say(mode: Mode, applied: list[str]) -> None:
    said = apply(mode)
    assert applied == ["sampling", "inputs", "launches"]
    assert said["fast_sampling"] == {
        "active": ["drafting"],
        "inactive": {"verifying": "outputs are watermarked"},
    }
    assert said["fast_host"]["active"] == ["inputs"]
    assert "Triton" in said["fast_host"]["inactive"]["launches"]
    applied.clear()
    apply(mode, fast_sampling=False)
    assert applied == ["inputs", "launches"]
    applied.clear()
    apply(mode, fast_host=False)
    assert applied == ["sampling"]
    applied.clear()
    apply(mode, fast_host=False, fast_sampling=False)
    assert applied == []


class _Stock:
    def execute_model(self, *args: Any, **kwargs: Any) -> None:
        return None


class _Runner(NworRunner, _Stock):  # type: ignore[misc]
    def __init__(self) -> None:
        self.nwor: Any = SimpleNamespace(state=WorkerState(NworConfig(), Mode.OFF))


def run(scheduler: Any, steps: int = 2) -> dict[str, Any]:
    """Return what a rank says of the scheduler's paths after some of its steps."""
    runner = _Runner()
    outputs = [scheduler.schedule() for _ in range(steps)]
    assert [fast_paths_of(output) is not None for output in outputs] == [True] + [False] * (steps - 1)
    runner.execute_model(outputs[0])
    runner.execute_model(scheduler_output=outputs[1])
    return runner.nwor.state.report()["fast_paths"]["fast_host"]


@fast_scheduler
def test_the_scheduler_tells_the_workers_with_its_first_step(tmp_path: Any) -> None:
    said = run(make_scheduler(tmp_path, SETUP, create_scheduler))
    assert said["active"] == ["scheduler", "scheduler_steps"]


@fast_scheduler
def test_the_scheduler_tells_what_it_leaves_to_vllm(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from nwor.engine.fastpath import scheduler as fast_scheduler

    monkeypatch.setattr(fast_scheduler, "_why_no_steps", lambda _: "there is a KV connector")
    said = run(make_scheduler(tmp_path, SETUP, create_scheduler))
    assert said["active"] == ["scheduler"]
    assert said["inactive"]["scheduler_steps"] == "there is a KV connector"
    monkeypatch.setattr(fast_scheduler, "why_not", lambda _: "check_stop is not vLLM's own")
    said = run(make_scheduler(tmp_path, SETUP, create_scheduler))
    assert said["active"] == []
    assert said["inactive"]["scheduler"] == "check_stop is not vLLM's own"


def test_the_gpu_runner_notes_what_it_put_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    from nwor.engine.model_runner import v2 as runner_v2
    from nwor.engine.model_runner import v2_gpu as runner_v2_gpu

    runner: Any = object.__new__(runner_v2_gpu.NworGPUModelRunnerV2)
    runner.nwor = SimpleNamespace(state=WorkerState(NworConfig(), Mode.OFF))
    runner.cudagraph_manager, runner.speculator, runner.rejection_sampler = object(), object(), object()
    runner.max_num_reqs, runner.device, runner.vllm_config = 4, torch.device("cpu"), object()
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(NworRunner, "initialize_kv_cache", lambda *args, **kwargs: None)
    monkeypatch.setattr(
        runner_v2_gpu.NworCudaGraphManager, "adopt", staticmethod(lambda manager, *_: manager)
    )
    monkeypatch.setattr(runner, "_nwor_mixed_descs", list)
    monkeypatch.setattr(runner, "_nwor_isolate_objects", lambda: None)
    monkeypatch.setattr(worker_paths, "apply", lambda *args: asked.append(args) or {"launches": None})
    made, answers = object(), ["the drafter takes embeddings", None]
    parts = SimpleNamespace(why_not=lambda *args: asked.append(args) or answers.pop(0))
    first_pass = type("FirstPass", (), {"why_not": parts.why_not, "__new__": lambda cls, *_: made})
    monkeypatch.setattr(runner_v2, "FirstPass", first_pass)
    monkeypatch.setattr(runner_v2, "draft_layers", lambda _: ["layer"])
    runner.initialize_kv_cache(None, is_profiling=True)
    assert asked == []
    runner.initialize_kv_cache(None)
    state = runner.nwor.state
    drafter = runner.speculator, ["layer"], runner.vllm_config
    assert asked == [drafter, (state.config, runner.speculator, runner.rejection_sampler, 4, runner.device)]
    said = state.report()["fast_paths"]
    assert said["fast_host"]["active"] == ["launches"]
    assert said["fast_drafting"]["inactive"] == {"first_pass": "the drafter takes embeddings"}
    assert runner._nwor_first_pass is None
    runner.initialize_kv_cache(None)
    assert state.report()["fast_paths"]["fast_drafting"]["active"] == ["first_pass"]
    assert runner._nwor_first_pass is made
