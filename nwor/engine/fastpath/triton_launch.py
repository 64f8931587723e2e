"""Launches of vLLM's own small Triton kernels, and of NWOR's one, with less Python before each.

A decode step of model runner V2 launches some fifteen Triton kernels of a microsecond each, and Triton's
`JITFunction.run` works the whole way from arguments to compiled kernel anew each time: it binds arguments,
describes each, turns the options into a string and looks that up. With a small model this is a sizable part
of a step, in which the GPU waits. Here the way is remembered: a kernel called again with arguments *of the
same kind* goes straight to the compiled kernel's launcher.

Same kind means: all that Triton's specialization looks at, or finer. For tensors that is the dtype and the
address modulo 16, for whole numbers the value 1, the value modulo 16 and the 32-bit range, for everything
else the value. Whatever does not fit (a first call, other argument types, a tensor of the host, a hook of a
profiler) is launched by Triton itself.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

logger = logging.getLogger("vllm.nwor.triton_launch")

#: Modules whose kernels are launched in every step.
PACKAGES = ("vllm.v1.worker.gpu.", "nwor.engine.fastpath.greedy_rejection")
#: Ways remembered for one kernel and one form of call; more means that some argument never repeats.
MOST_WAYS = 512

_INT32 = 0x7FFFFFFF
#: Types of constants and options that a kernel may be remembered by.
_PLAIN = frozenset({int, bool, float, str, type(None), torch.dtype})


def _kind(value: Any) -> str:
    """Return what an argument's value is described by; empty where Triton has to look at it."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if value is None:
        return "none"
    return {int: "int", bool: "bool", float: "float"}.get(type(value), "")


def _source(names: Sequence[str], kinds: Sequence[str], passed: Sequence[str]) -> str:
    """Return the source of a form's two functions.

    Args:
        names: parameters in the order of the call; "_" and a number for options such as num_warps.
        kinds: kind of each; "constant" where its value is part of the compiled kernel.
        passed: what the kernel's launcher takes, an expression for each parameter of its signature.

    """
    checks, key, whole = [], [], []
    for name, kind in zip(names, kinds, strict=True):
        if kind == "tensor":
            checks.append(f"{name}.is_cuda")
            key += [f"{name}.dtype", f"({name}_at := {name}.data_ptr()) & 15"]
        elif kind == "int":
            checks.append(f"{name}.__class__ is int")
            key.append(f"-1 if {name} == 1 else {name} & 15")
            whole.append(name)
        elif kind == "none":
            checks.append(f"{name} is None")
        elif kind == "float":
            checks.append(f"{name}.__class__ is float")
        else:  # True equals 1, but makes another kernel
            checks.append(f"{name}.__class__ is bool" if kind == "bool" else f"{name}.__class__ in plain")
            key += [name, f"{name}.__class__"]
    if whole:
        # Of numbers from -1 up: one more each, so that none hides the others in what they are together.
        checks.append(f"0 <= ({' | '.join(f'{name} + 1' for name in whole)}) <= {_INT32}")
    arguments = ", ".join(names)
    body = f"""
    try:
        if not ({" and ".join(checks) or "True"}):
            return None
        {{0}}
    except AttributeError:
        return None
"""
    key_text = "(" + "".join(f"{part}, " for part in ["device()", *key]) + ")"
    return (
        f"def key_of({arguments}):{body.format('return ' + key_text)}\n"
        f"def launch(grid, {arguments}):{body.format('way = ways.get(' + key_text + ')')}"
        f"""
    if way is None:
        return None
    kernel, run, function, packed = way
    run(grid[0], grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1,
        stream(device()), function, packed, None, None, None, {", ".join(passed)})
    return kernel
"""
    )


class _Form:
    """Calls of one kernel with the same number of positional arguments and the same keywords.

    Attributes:
        launch: launches and returns the compiled kernel; None, with nothing done, if the way is not known.
        key_of: the description of a call's arguments; None where Triton has to look at them.
        ways: compiled kernel, its launcher, its handle and its packed metadata by description.

    """

    def __init__(
        self,
        kernel: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        device: Callable[[], int],
        stream: Callable[[int], int],
    ) -> None:
        parameters = {parameter.name: parameter for parameter in kernel.params}
        order = list(parameters)
        called = order[: len(args)] + list(kwargs)
        names = [f"p_{name}" if name in parameters else f"option_{name}" for name in called]
        kinds = [
            "constant" if name not in parameters or parameters[name].is_constexpr else _kind(value)
            for name, value in zip(called, [*args, *kwargs.values()], strict=True)
        ]
        self.ways: dict[Any, tuple[Any, ...]] = {}
        self.launch: Callable[..., Any] = _never
        self.key_of: Callable[..., Any] = _never
        if "" in kinds or len(args) > len(order):
            return
        by_name = dict(zip(called, zip(names, kinds, strict=True), strict=True))
        space: dict[str, Any] = {"ways": self.ways, "device": device, "stream": stream, "plain": _PLAIN}
        passed = []
        for name, parameter in parameters.items():
            if name in by_name:
                local, kind = by_name[name]
                passed.append(f"{local}_at" if kind == "tensor" else local)
                continue
            if not parameter.has_default:
                return
            space[f"default_{name}"] = parameter.default
            passed.append(f"default_{name}")
        exec(compile(_source(names, kinds, passed), f"<launch of {kernel.__name__}>", "exec"), space)
        self.launch, self.key_of = space["launch"], space["key_of"]


def _never(*args: Any) -> None:
    return None


class FastLaunch:
    """Takes the place of one kernel's ``run``.

    Attributes:
        kernel: Triton's ``JITFunction``.
        short: launches that went the short way.

    """

    def __init__(
        self,
        kernel: Any,
        knobs: Any,
        device: Callable[[], int],
        stream: Callable[[int], int],
    ) -> None:
        self.kernel = kernel
        self.short = 0
        self._stock = kernel.run
        self._device, self._stream = device, stream
        self._forms: dict[tuple[Any, ...], _Form] = {}
        # Who wants to hear of launches: a profiler adds itself to Triton's hooks, or takes their place.
        self._runtime = runtime = knobs.runtime
        self._enter, self._leave = runtime.launch_enter_hook, runtime.launch_exit_hook
        self._listeners = [
            kernel.pre_run_hooks,
            *(
                hook if hook is None else getattr(hook, "calls", [hook])
                for hook in (self._enter, self._leave)
            ),
        ]

    def __call__(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Launch as ``JITFunction.run`` does, and return the compiled kernel."""
        runtime = self._runtime
        if (
            warmup
            or grid.__class__ is not tuple
            or runtime.launch_enter_hook is not self._enter
            or runtime.launch_exit_hook is not self._leave
            or any(self._listeners)
        ):
            return self._stock(*args, grid=grid, warmup=warmup, **kwargs)
        name = (len(args), *kwargs)
        form = self._forms.get(name)
        if form is None:
            form = self._forms[name] = _Form(self.kernel, args, kwargs, self._device, self._stream)
        compiled = form.launch(grid, *args, *kwargs.values())
        if compiled is not None:
            self.short += 1
            return compiled
        values = list(kwargs.values())
        compiled = self._stock(*args, grid=grid, warmup=warmup, **kwargs)
        key = form.key_of(*args, *values)
        if key is not None and compiled is not None:
            if len(form.ways) >= MOST_WAYS:
                form.ways.clear()
            form.ways[key] = (compiled, compiled.run, compiled.function, compiled.packed_metadata)
        return compiled


def _kernels() -> Iterator[Any]:
    """Yield the Triton kernels of the modules above, each once."""
    from triton.runtime.jit import JITFunction

    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if not name.startswith(PACKAGES):
            continue
        for value in list(vars(module).values()):
            if type(value) is JITFunction and id(value) not in seen:
                seen.add(id(value))
                yield value


def apply() -> int:
    """Shorten the launches of this process, once the model runner's modules are loaded.

    Returns:
        How many kernels it concerns, those of an earlier call included; 0, with a line in the log, where this
        Triton is not known.

    """
    try:
        from triton import knobs
        from triton.runtime.jit import JITFunction  # noqa: F401

        if knobs.runtime.interpret or knobs.runtime.debug:
            logger.info("Triton interprets or debugs: its launches stay as they are.")
            return 0
    except (ImportError, AttributeError) as error:
        logger.warning("NWOR does not know this Triton (%s): its launches stay as they are.", error)
        return 0
    count = 0
    for kernel in _kernels():
        if kernel.debug:
            continue
        count += 1
        if not isinstance(kernel.run, FastLaunch):
            kernel.run = FastLaunch(
                kernel, knobs, torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream
            )
    return count
