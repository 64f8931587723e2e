"""Triton's interpreter, without what it does again at each operation and what nobody reads.

It gives what Triton's own gives, in half the time. Import this where ``TRITON_INTERPRET`` is set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import triton.language as tl
from triton import backends
from triton.runtime import interpreter


class _ActiveDriver:
    @staticmethod
    def is_active() -> bool:
        return True


def _with_boolean_mask(operation: Callable[..., Any], position: int) -> Callable[..., Any]:
    def call(self: Any, *arguments: Any) -> Any:
        mask = arguments[position]
        mask.data = (mask.data & 1).astype(bool)
        return operation(self, *arguments)

    return call


class _Stays:
    """Stands in for what would take the interpreter's functions out of Triton's language again."""

    @staticmethod
    def restore() -> None:
        pass


def _patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], type[_Stays]]:
    """Return the interpreter's ``_patch_lang`` for a process that does nothing but interpret.

    At each launch, and at each call within a kernel, the interpreter exchanges all members of Triton's
    language. They are the same each time, and took a quarter of the time of a test.
    """
    patched: list[Any] = []

    def patch_lang(function: Any) -> type[_Stays]:
        if not patched:
            # It exchanges what a function sees of the language.
            patched.append(patch(SimpleNamespace(__globals__={"tl": tl, "core": tl.core})))
        return _Stays

    return patch_lang


def _remembered(np_dtype: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the interpreter's ``_get_np_dtype`` with a memory: it builds its whole table at each call."""
    found: dict[str, Any] = {}

    def get(dtype: Any) -> Any:
        name = dtype.name
        if name not in found:
            found[name] = np_dtype(dtype)
        return found[name]

    return get


def _begin_tensor(begin: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of Triton's tensors, where those of a shape share what says so."""
    shapes: dict[Any, tuple[Any, Any]] = {}

    def begin_tensor(self: Any, handle: Any, type: Any) -> None:
        shape = tuple(type.shape.values) if type.is_block() else None
        if shape not in shapes:
            begin(self, handle, type)
            shapes[shape] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[shape]

    return begin_tensor


def _same_first(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """Return a comparison of types that need not compare one with itself."""
    return lambda self, other: self is other or equal(self, other)


def _known_blocks(with_element: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return ``block_type.with_element_ty`` with a memory."""
    found: dict[Any, Any] = {}

    def with_element_ty(self: Any, scalar: Any) -> Any:
        key = (scalar.name, *self.shape.values)
        if key not in found:
            found[key] = with_element(self, scalar)
        return found[key]

    return with_element_ty


def _alike_stay(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``broadcast_impl_value`` that first looks whether shapes are the same."""

    def broadcast_impl_value(self: Any, left: Any, right: Any) -> Any:
        one, other = left.type, right.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return left, right
        return broadcast(self, left, right)

    return broadcast_impl_value


def _same_stay(check: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ``binary_op_type_checking_impl`` that leaves numbers of one type and shape as they are."""

    def binary_op_type_checking_impl(
        self: Any,
        left: Any,
        right: Any,
        left_pointer: bool = False,
        right_pointer: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if (
            not div_or_mod
            and type(left) is type(right) is tl.tensor
            and left.type.name == right.type.name
            and not left.dtype.is_ptr()
        ):
            return left, right
        return check(self, left, right, left_pointer, right_pointer, arithmetic_check, div_or_mod)

    return binary_op_type_checking_impl


def _exchange(package: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Do as the interpreter's ``_patch_attr``, with one call less at each operation."""
    operation = getattr(member, "__wrapped__", member)
    semantic = interpreter.interpreter_semantic

    def interpreted(*arguments: Any, **named: Any) -> Any:
        named["_semantic"] = semantic
        return operation(*arguments, **named)

    scope.set_attr(package, name, interpreted)


def _known_results(computation_type: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``computation_type_impl``, which type two operands are computed in, with a memory."""
    found: dict[Any, Any] = {}

    def computation_type_impl(
        self: Any, left: Any, left_scalar: bool, right: Any, right_scalar: bool, division: bool
    ) -> Any:
        key = left.name, left_scalar, right.name, right_scalar, division
        if key not in found:
            found[key] = computation_type(self, left, left_scalar, right, right_scalar, division)
        return found[key]

    return computation_type_impl


def install() -> None:
    """Let this process interpret Triton's kernels, and vLLM find a backend for CPUs."""
    backends.backends["cpu"] = backends.Backend(compiler=None, driver=_ActiveDriver)
    # The interpreter keeps a truth value computed from wider integers as such, and then refuses it as a mask.
    builder = interpreter.InterpreterBuilder
    builder.create_masked_store = _with_boolean_mask(builder.create_masked_store, 2)
    builder.create_masked_load = _with_boolean_mask(builder.create_masked_load, 1)
    # Without "debug", whether an integer overflowed is computed for an assertion that is never made.
    options = interpreter.interpreter_builder.options
    assert not options.debug
    interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
    interpreter._patch_attr = _exchange
    interpreter._patch_lang = _patch_once(interpreter._patch_lang)
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
    tl.tensor.__init__ = _begin_tensor(tl.tensor.__init__)
    tl.dtype.__eq__ = _same_first(tl.dtype.__eq__)
    tl.block_type.with_element_ty = _known_blocks(tl.block_type.with_element_ty)
    # What the interpreter takes for a type of its own is that type.
    tl.block_type.to_ir = lambda self, builder: self.with_element_ty(self.element_ty.to_ir(builder))
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = _alike_stay(semantic.broadcast_impl_value)
    semantic.computation_type_impl = _known_results(semantic.computation_type_impl)
    semantic.binary_op_type_checking_impl = _same_stay(semantic.binary_op_type_checking_impl)
