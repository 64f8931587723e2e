"""What runs inside the engine's processes: the reporting scheduler and sampling parameters on a CPU."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

from nwor.config import CONFIG_KEY
from nwor.engine.workarounds import cpu_generators
from server import cpu_sampling, options, scheduler
from tests.cpu_build import needs_cpu_build


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0, 2.5])), min_size=1, max_size=8),
    st.sampled_from([torch.float32, torch.int32, torch.int64]),
)
def test_expand_repeats_each_value_for_its_tokens(
    requests: list[tuple[int, float]], dtype: torch.dtype
) -> None:
    values = torch.tensor([value for _, value in requests]).to(dtype)
    counts = torch.tensor([count for count, _ in requests])
    expected = [
        (1 if value == 0 else value)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True)
        for _ in range(count)
    ]
    output = torch.full((int(counts.sum()),), 99).to(dtype)
    cpu_sampling.expand(output, values, counts.cumsum(0).to(torch.int32), 0, 1)
    assert output.tolist() == expected
    assert output.dtype == dtype


@needs_cpu_build
def test_vllms_own_implementation_still_needs_replacing() -> None:
    """On the day that this fails, nwor/engine/workarounds/cpu_expand.py can go."""
    output = torch.full((3,), 99.0)
    vars(cpu_sampling.expand)["stock"](output, torch.tensor([0.5]), torch.tensor([3]), 0, 1)
    assert output.tolist() != [0.5] * 3


@needs_cpu_build
def test_a_second_engine_in_the_process_keeps_the_replacement() -> None:
    from vllm.platforms import current_platform
    from vllm.v1.sample import rejection_sampler

    current_platform.register_triton_kernel_overrides()  # as every worker does when it starts
    values, ends = torch.tensor([0.5, 0.0]), torch.tensor([2, 3])
    expanded = rejection_sampler.expand_batch_to_tokens(values, ends, 3, 0, 1)
    assert expanded.tolist() == [0.5, 0.5, 1.0]


def test_vllm_still_turns_cpu_generators_back() -> None:
    """On the day that this fails, ``mend_runner`` can go."""
    import inspect

    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    source = inspect.getsource(inspect.unwrap(GPUModelRunner._bookkeeping_sync))
    assert "set_offset(gen.get_offset() - 4)" in source
    with pytest.raises(RuntimeError):
        torch.Generator(device="cpu").get_offset()


def test_seeded_requests_are_mended_once_and_in_one_place() -> None:
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from nwor.engine.model_runner.v1_cpu import NworCPUModelRunnerV1

    generators = {0: torch.Generator().manual_seed(7), 1: torch.Generator().manual_seed(7)}
    seen = []

    class Runner:
        discard_request_mask = SimpleNamespace(np=np.array([False, True, True, True]))
        input_batch = SimpleNamespace(num_reqs=3, generators=generators)

        def _sample(self) -> list[float]:
            return [torch.rand(1, generator=generator).item() for generator in generators.values()]

        def _bookkeeping_sync(self) -> None:
            seen.append(dict(generators))

    for _ in range(2):
        cpu_generators.mend_runner(Runner)
    first, again = Runner()._sample(), Runner()._sample()
    # The second row's prompt is unfinished: its sample is dropped, so its generator must not have moved.
    assert again[1] == first[1] == first[0] != again[0]
    Runner()._bookkeeping_sync()
    assert [list(each) for each in seen] == [[0]]
    assert list(generators) == [0, 1]
    # NWOR's runner has no mend of its own beside that of the class that it builds on.
    assert CPUModelRunner in NworCPUModelRunnerV1.__mro__
    for name in ("_sample", "_bookkeeping_sync"):
        assert name not in vars(NworCPUModelRunnerV1)


def test_the_import_paths_lead_where_they_say() -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    assert resolve_obj_by_qualname(options.REPORTING_SCHEDULER) is scheduler.create_scheduler
    assert resolve_obj_by_qualname(options.CPU_SAMPLING) is cpu_sampling.WorkerExtension


@pytest.mark.parametrize(
    ("ahead", "settings", "expected"),
    [
        (True, {}, scheduler.ReportingAsyncScheduler),
        (False, {}, scheduler.ReportingScheduler),
        (True, {CONFIG_KEY: {"mode": "stage"}}, scheduler.NworReportingAsyncScheduler),
        (False, {CONFIG_KEY: {"mode": "stage"}}, scheduler.NworReportingScheduler),
    ],
)
def test_the_scheduler_is_the_one_that_vllm_would_choose(
    monkeypatch: pytest.MonkeyPatch, ahead: bool, settings: dict, expected: type
) -> None:
    monkeypatch.setattr(expected, "__init__", lambda self, **_: None)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(async_scheduling=ahead), additional_config=settings
    )
    assert type(scheduler.create_scheduler(vllm_config=config)) is expected
