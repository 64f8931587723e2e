"""Which of vLLM's model runners the tests of this folder run on: V1, or V2 where NWOR_TEST_RUNNER is "v2".

Import this before vLLM. Runner V2 is written in Triton, and vLLM takes it on a CPU where Triton has a backend
for CPUs, which is a build of its own. Here Triton's interpreter stands in for that: it runs the same kernels
over the same tensors, a program at a time. Only ``is_active`` of the backend is ever asked.

Run as a program, this is pytest. Processes that vLLM starts import the program of their parent again, so they
run V2 too: ``NWOR_TEST_RUNNER=v2 python -m tests.engine.runner tests/engine/test_pipeline_parallel.py``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "NWOR_TEST_RUNNER"
V2 = os.environ.get(VARIABLE) == "v2"
_NAME = "tests.engine.runner"
#: Whether processes that vLLM starts run V2 too.
INHERITED = V2 and getattr(getattr(sys.modules["__main__"], "__spec__", None), "name", "") == _NAME


class _ActiveDriver:
    @staticmethod
    def is_active() -> bool:
        return True


def _interpret_triton() -> None:
    # Both are read when the modules in question are imported, also in processes that this one starts.
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from triton import backends
    from triton.runtime import interpreter

    backends.backends["cpu"] = backends.Backend(compiler=None, driver=_ActiveDriver)
    # The interpreter keeps a truth value computed from wider integers as such, and then refuses it as a mask.
    builder = interpreter.InterpreterBuilder
    builder.create_masked_store = _with_boolean_mask(builder.create_masked_store, 2)
    builder.create_masked_load = _with_boolean_mask(builder.create_masked_load, 1)


def _with_boolean_mask(operation: Callable[..., Any], position: int) -> Callable[..., Any]:
    def call(self: Any, *arguments: Any) -> Any:
        mask = arguments[position]
        mask.data = (mask.data & 1).astype(bool)
        return operation(self, *arguments)

    return call


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


if V2:
    _interpret_triton()

if __name__ == "__main__":
    import pytest

    sys.exit(pytest.main())
