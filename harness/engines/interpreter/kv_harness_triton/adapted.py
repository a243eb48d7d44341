"""A vLLM plugin that adapts Triton's interpreter (3.9) to engines of which every kernel is interpreted, on the CPU.

It replaces the functions of ``triton.language`` before each launch of a kernel and puts them back after it, because
other kernels of a process may be compiled, and copies what a kernel wrote back to its device: three tenths of a step.
And it refuses masks that are whole numbers, as those of grammars are, where compiled kernels take them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

from triton.runtime import interpreter


class _Lasting:
    """A scope of replaced functions that is never left."""

    def restore(self) -> None:
        """Leave everything as it is."""


def _once(replace: Callable[[FunctionType], Any]) -> Callable[[FunctionType], _Lasting]:
    """Return the replacement of functions for a kernel, done once for all kernels that see the same modules."""
    done: set[frozenset[int]] = set()

    def replace_once(kernel: FunctionType) -> _Lasting:
        seen = frozenset(id(value) for value in kernel.__globals__.values() if isinstance(value, ModuleType))
        if seen not in done:
            replace(kernel)
            done.add(seen)
        return _Lasting()

    return replace_once


def _of_booleans(write: Callable[..., Any]) -> Callable[..., Any]:
    def masked(self: Any, pointers: Any, value: Any, mask: Any, *args: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return write(self, pointers, value, mask, *args)

    return masked


def register() -> None:
    """Adapt the interpreter. vLLM calls this in every process of an engine."""
    launcher, builder = interpreter.GridExecutor, interpreter.InterpreterBuilder
    interpreter._patch_lang = _once(interpreter._patch_lang)
    launcher._restore_args_dev = lambda *_: None
    builder.create_masked_store = _of_booleans(builder.create_masked_store)
