"""A vLLM plugin that adapts Triton's interpreter (3.9) to engines of which every kernel is interpreted, on the CPU.

It replaces the functions of ``triton.language`` before each launch of a kernel and puts them back after it, because
other kernels of a process may be compiled, copies what a kernel is given to the host and back to its device, looks for
overflows of whole numbers, which a compiled kernel does in debug mode alone, and describes each type and shape anew
that a value has: most of a step. And it refuses masks that are whole numbers, as those of grammars are, where compiled
kernels take them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

from triton.language import core
from triton.runtime import interpreter


class _Lasting:
    """A scope of replaced functions that is never left."""

    def restore(self) -> None:
        """Leave everything as it is."""


def _once(replace: Callable[[FunctionType], Any]) -> Callable[[FunctionType], _Lasting]:
    """Return the replacement of functions for a kernel, done once for all kernels that see the same modules."""
    done: set[frozenset[int]] = set()
    lasting = _Lasting()

    @functools.cache
    def replace_once(kernel: FunctionType) -> _Lasting:
        seen = frozenset(id(value) for value in kernel.__globals__.values() if isinstance(value, ModuleType))
        if seen not in done:
            replace(kernel)
            done.add(seen)
        return lasting

    return replace_once


def _of_booleans(write: Callable[..., Any]) -> Callable[..., Any]:
    def masked(self: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return write(self, pointers, value, mask, *args)

    return masked


def _by_name(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return the NumPy type of a Triton type, found once for all of one name."""
    known: dict[str, Any] = {}

    def found(of: Any) -> Any:
        if of.name not in known:
            known[of.name] = find(of)
        return known[of.name]

    return found


def _described_once(describe: Callable[..., None]) -> Callable[..., None]:
    """Return the constructor of block types, which share what follows from their elements and shape."""
    known: dict[tuple[type, str, tuple[int, ...]], tuple[Any, Any, str]] = {}

    def init(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
        sizes = tuple(size.value if isinstance(size, core.constexpr) else size for size in shape)
        key = type(element_ty), element_ty.name, sizes
        if key not in known:
            describe(self, element_ty, shape)
            known[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known[key]

    return init


def _shaped_once() -> Callable[..., None]:
    """Return the constructor of values, which share their shapes."""
    known: dict[int, tuple[Any, Any, Any]] = {}
    """By the identity of a type's shape: it, so that it lasts, the number of elements, and the shape of values."""

    def init(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        if id(shape) not in known:
            numel = core.constexpr(math.prod(shape))
            known[id(shape)] = shape, numel, core.tuple([core.constexpr(size) for size in shape])
        self.handle, self.type, self.dtype = handle, type, type.scalar
        _, self.numel, self.shape = known[id(shape)]

    return init


def _as_they_are(_launcher: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    return [*args], {**kwargs}


def register() -> None:
    """Adapt the interpreter. vLLM calls this in every process of an engine."""
    launcher, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    interpreter._patch_lang = _once(interpreter._patch_lang)
    launcher._init_args_hst = _as_they_are
    launcher._restore_args_dev = lambda *_: None
    builder.create_masked_store = _of_booleans(builder.create_masked_store)
    kernels = interpreter.interpreter_builder
    kernels.options = dataclasses.replace(kernels.options, sanitize_overflow=False)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    core.block_type.__init__ = _described_once(core.block_type.__init__)
    core.tensor.__init__ = _shaped_once()
    interpreter.tl.str_to_ty = functools.cache(interpreter.tl.str_to_ty)
    # It asks for the parameters of a kernel in each launch.
    parameters = functools.cache(inspect.getfullargspec)
    interpreter.inspect = SimpleNamespace(**{**vars(inspect), "getfullargspec": parameters})
