"""Claim: a launch by the short way starts the kernel that Triton would start, with the same arguments.

Coverage: random calls of kernels whose arguments are tensors of several dtypes and alignments, whole numbers
of all classes, floats, truth values, None, constants and options; profilers; tensors of the host.
Tolerance: none. Triton's own specialization of the same call says which kernel is right.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime.jit import create_function_from_signature  # noqa: E402

from nwor.engine.fastpath.triton_launch import MOST_WAYS, FastLaunch  # noqa: E402


class OnDevice(torch.Tensor):
    """A tensor of the host that says it is none, so that nothing here needs a GPU."""

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True


@triton.jit(do_not_specialize=["free"])
def _kernel(a, b, n, free, scale, flag, extra, BLOCK: tl.constexpr, MODE: tl.constexpr = 3):  # noqa: N803
    pass


class Compiled:
    """Stands for a compiled kernel: notes its launches."""

    function = "handle"
    packed_metadata = (1, 2, 3)

    def __init__(self, what: str) -> None:
        self.what = what
        self.launches: list[tuple[Any, ...]] = []

    def run(self, x: int, y: int, z: int, stream: int, function: str, packed: Any, *rest: Any) -> None:
        assert (stream, function, packed) == (70, self.function, self.packed_metadata)
        assert rest[:3] == (None, None, None)
        self.launches.append((x, y, z, *rest[3:]))


class Stock:
    """Stands for ``JITFunction.run``: Triton's own binder says which kernel a call means."""

    def __init__(self) -> None:
        backend = make_backend(GPUTarget("cuda", 90, 32))
        self._bind = create_function_from_signature(_kernel.signature, _kernel.params, backend)
        self.compiled: dict[str, Compiled] = {}
        self.calls = 0

    def which(self, *args: Any, **kwargs: Any) -> Compiled:
        _, specialization, options = self._bind(*args, **kwargs)
        what = str(specialization) + str(options)
        return self.compiled.setdefault(what, Compiled(what))

    def __call__(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Compiled:
        self.calls += 1
        return self.which(*args, **kwargs)


def _fast() -> tuple[FastLaunch, Stock, SimpleNamespace]:
    stock = Stock()
    hooks = SimpleNamespace(launch_enter_hook=SimpleNamespace(calls=[]), launch_exit_hook=None)
    kernel = SimpleNamespace(params=_kernel.params, pre_run_hooks=[], run=stock, __name__="kernel")
    fast = FastLaunch(kernel, SimpleNamespace(runtime=hooks), lambda: 7, lambda device: device * 10)
    return fast, stock, hooks


_MEMORY = torch.zeros(4096, dtype=torch.uint8)
_DTYPES = [torch.int32, torch.int64, torch.float32, torch.bfloat16]


def _tensor(dtype: torch.dtype, offset: int) -> torch.Tensor:
    start = -_MEMORY.data_ptr() % 64 + offset * dtype.itemsize
    return _MEMORY[start : start + 8 * dtype.itemsize].view(dtype).as_subclass(OnDevice)


_tensors = st.builds(_tensor, st.sampled_from(_DTYPES), st.integers(0, 8))
_numbers = st.one_of(
    st.integers(-40, 70), st.sampled_from([2**31 - 1, 2**31, 2**31 - 16, 2**40, -(2**31), -(2**40), -2])
)
_calls = st.fixed_dictionaries(
    {
        "a": _tensors,
        "b": st.one_of(_tensors, st.none()),
        "n": _numbers,
        "free": _numbers,
        "scale": st.sampled_from([0.0, 1.0, 0.5, float("inf")]),
        "flag": st.booleans(),
        "extra": st.one_of(st.none(), _numbers, st.booleans(), _tensors),
        "BLOCK": st.sampled_from([1, 16, 1024]),
        "MODE": st.sampled_from([0, 1, True, False, None]),
        "num_warps": st.sampled_from([1, 4]),
    }
)
_POSITIONAL = ("a", "b", "n", "free", "scale", "flag", "extra")


@settings(max_examples=60, deadline=None)
@given(st.lists(_calls, min_size=1, max_size=30), st.booleans(), st.booleans())
def test_the_kernel_and_its_arguments_are_those_of_triton(calls, mode_given, by_keyword):
    fast, stock, _ = _fast()
    for call in calls:
        kwargs = {name: call[name] for name in ("BLOCK", "num_warps")}
        if mode_given:
            kwargs["MODE"] = call["MODE"]
        args = [call[name] for name in _POSITIONAL]
        if by_keyword:
            kwargs["extra"] = args.pop()
        expected = stock.which(*args, **kwargs)
        for _ in range(2):
            before = len(expected.launches)
            assert fast(*args, grid=(3, 4), warmup=False, **kwargs) is expected
            if len(expected.launches) == before:
                continue  # Triton launched it
            x, y, z, *passed = expected.launches[-1]
            assert (x, y, z) == (3, 4, 1)
            whole = [call[name] for name in _POSITIONAL] + [call["BLOCK"]]
            whole.append(call["MODE"] if mode_given else 3)
            addresses = [v.data_ptr() if isinstance(v, torch.Tensor) else v for v in whole]
            assert passed == addresses
            assert [type(v) for v in passed] == [type(v) for v in addresses]


@pytest.mark.parametrize("name", [*_POSITIONAL, "BLOCK", "MODE", "num_warps"])
def test_one_changed_argument_makes_the_kernel_that_triton_makes(name):
    fast, stock, _ = _fast()
    tensors = [_tensor(dtype, offset) for dtype in _DTYPES for offset in range(9)]
    values = {
        "a": tensors,
        "b": [*tensors, None],
        "n": [0, 1, 2, 8, 24, 15, 16, 17, 33, -1, -16, 2**31 - 1, 2**31, 2**31 - 16, -(2**31)],
        "free": [0, 1, 16, 17, 2**31, -1],
        "scale": [0.0, 1.0, -1.0],
        "flag": [True, False],
        "extra": [None, 0, 1, 16, True, False, 1.0, tensors[0], tensors[1]],
        "BLOCK": [0, 1, 16, True, False, None],
        "MODE": [0, 1, 3, True, False, None],
        "num_warps": [1, 2, 4],
    }[name]
    base = dict(zip(_POSITIONAL, _args(), strict=True)) | {"BLOCK": 16, "MODE": 3, "num_warps": 4}
    for _ in range(2):
        for value in values:
            call = base | {name: value}
            args = [call.pop(key) for key in _POSITIONAL]
            assert fast(*args, grid=(2,), warmup=False, **call) is stock.which(*args, **call)


def _args(**changes: Any) -> list[Any]:
    call = dict.fromkeys(_POSITIONAL) | {
        "a": _tensor(torch.int32, 0),
        "b": _tensor(torch.int32, 4),
        "n": 64,
        "free": 5,
        "scale": 1.0,
        "flag": True,
    }
    return list((call | changes).values())


def test_a_call_repeated_goes_the_short_way():
    fast, stock, _ = _fast()
    for n in (64, 80, 96, 64):
        fast(*_args(n=n), grid=(2,), warmup=False, BLOCK=16)
    assert stock.calls == 1  # the first; 64, 80 and 96 are multiples of 16 alike
    assert fast.short == 3
    fast(*_args(n=65), grid=(2,), warmup=False, BLOCK=16)
    fast(*_args(n=1), grid=(2,), warmup=False, BLOCK=16)
    assert stock.calls == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"a": torch.zeros(4)},
        {"n": 2**31},
        {"n": -(2**40), "free": 2**40 - 1},
        {"n": torch.tensor(3)},
        {"flag": 1},
        {"scale": 2},
        {"b": "text"},
    ],
    ids=[
        "host tensor",
        "wide",
        "wide, -1 together",
        "tensor for a number",
        "number for a truth value",
        "int",
        "text",
    ],
)
def test_what_is_not_of_the_same_kind_goes_to_triton(changes):
    fast, stock, _ = _fast()
    fast(*_args(), grid=(2,), warmup=False, BLOCK=16)
    for _ in range(2):
        fast(*_args(), grid=(2,), warmup=False, BLOCK=16)
    assert stock.calls == 1
    stock.which = lambda *args, **kwargs: None  # type: ignore[method-assign]
    for _ in range(3):
        fast(*_args(**changes), grid=(2,), warmup=False, BLOCK=16)
    assert stock.calls == 4


def test_profilers_and_warm_ups_are_served_by_triton():
    fast, stock, hooks = _fast()
    fast(*_args(), grid=(2,), warmup=False, BLOCK=16)
    fast(*_args(), grid=(2,), warmup=False, BLOCK=16)
    assert stock.calls == 1
    fast(*_args(), grid=(2,), warmup=True, BLOCK=16)
    fast(*_args(), grid=lambda meta: (2,), warmup=False, BLOCK=16)
    hooks.launch_enter_hook.calls.append(print)
    fast(*_args(), grid=(2,), warmup=False, BLOCK=16)
    hooks.launch_enter_hook.calls.clear()
    hooks.launch_exit_hook = print
    fast(*_args(), grid=(2,), warmup=False, BLOCK=16)
    assert stock.calls == 5
    hooks.launch_exit_hook = None
    fast.kernel.pre_run_hooks.append(print)
    fast(*_args(), grid=(2,), warmup=False, BLOCK=16)
    assert stock.calls == 6


def test_ways_are_bounded():
    fast, _, _ = _fast()
    for block in range(2 * MOST_WAYS + 3):
        fast(*_args(), grid=(2,), warmup=False, BLOCK=block)
    (form,) = fast._forms.values()
    assert len(form.ways) <= MOST_WAYS
