"""Which of vLLM's model runners the tests of this folder run on: V1, or what NWOR_TEST_RUNNER names.

That is "v2", or "v1-ahead": V1 with steps scheduled ahead, as on a GPU. Import this before vLLM.

Steps scheduled ahead take streams and events of CUDA, which copy to the host what the device has made.
Objects that do nothing stand in for them: what would be the device's memory is the host's, and each operation
has ended when its call returns. What is left is the order of the calls, and which may know which counts.

Runner V2 is written in Triton, and vLLM takes it on a CPU where Triton has a backend
for CPUs, which is a build of its own. Here Triton's interpreter stands in for that: it runs the same kernels
over the same tensors, a program at a time. Only ``is_active`` of the backend is ever asked.

Run as a program, this is pytest. Processes that vLLM starts import the program of their parent again, so they
run V2 too: ``NWOR_TEST_RUNNER=v2 python -m tests.engine.runner tests/engine/test_pipeline_parallel.py``.
"""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import Any

import torch

VARIABLE = "NWOR_TEST_RUNNER"
V2 = os.environ.get(VARIABLE) == "v2"
#: Whether steps are scheduled ahead.
AHEAD = V2 or os.environ.get(VARIABLE) == "v1-ahead"
_NAME = "tests.engine.runner"
#: Whether processes that vLLM starts run V2 too.
INHERITED = V2 and getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "") == _NAME


def _interpret_triton() -> None:
    # Both are read when the modules in question are imported, also in processes that this one starts.
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from tests.engine import interpreter

    interpreter.install()


def schedule_asynchronously() -> None:
    """Let engines of this process schedule a step ahead, as they do on a GPU; vLLM does not on a CPU."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    original = platform.check_and_update_config
    if getattr(original, "ahead", False):
        return

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        original(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    check_and_update_config.ahead = True  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(check_and_update_config)


def sized(full: int, ahead: int, interpreted: int = 0) -> int:
    """Return how much a test takes of something on this runner.

    Plain V1 takes all of it, at the least cost. Other runners take as much as reaches what is theirs alone.

    Args:
        full: on plain V1.
        ahead: on V1 with steps scheduled ahead.
        interpreted: on V2, where sampling a token takes many times as long; 0 where V2 does not run the test.

    """
    return interpreted if V2 else ahead if AHEAD else full


class _NoStream:
    """Stands in for a stream and for an event."""

    device = torch.device("cpu")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def _done(self, *args: Any) -> None:
        pass

    record = synchronize = wait = wait_stream = wait_event = _done


def _stand_in_for_streams() -> None:
    torch.Event = _NoStream  # type: ignore[assignment,misc]
    torch.cuda.Event = torch.cuda.Stream = _NoStream  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda *args: _NoStream()  # type: ignore[assignment,return-value]
    torch.cuda.stream = lambda stream: nullcontext()  # type: ignore[assignment]


if V2:
    _interpret_triton()
elif AHEAD:
    _stand_in_for_streams()

if __name__ == "__main__":
    import pytest

    sys.exit(pytest.main())
