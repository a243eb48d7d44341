"""Reading of GGUF files with the package ``gguf``: metadata, and tensors as what safetensors holds.

Quantised tensors are dequantised to float32, exactly as the package does it, and rounded once to bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.errors import ProfileError
from harness.util.safetensors_file import Tensor, bfloat16

_INTEGERS = ("I8", "I16", "I32", "I64")
"""Types whose values are kept; GGUF and safetensors have the same names for them."""
_MASKS = frozenset({"t2d"})
"""Tensors of truth values, for which GGUF has no type: 0 and 1 as I8."""

Change = Callable[[NDArray[np.float32]], NDArray[np.float32]]


class GgufTensor(NamedTuple):
    """A tensor of a GGUF file, which stays on the disk until its values are asked for."""

    name: str
    kind: str
    """GGUF's name of its type: F32, Q8_0, …"""
    shape: tuple[int, ...]
    """In the order of numpy: the last one varies fastest."""
    stored: Any


class GgufFile:
    """An open GGUF file. ``what`` is what messages call it."""

    def __init__(self, path: Path, what: str) -> None:
        """Open it and read everything but values. Raises ProfileError when the file cannot be read as GGUF."""
        import gguf

        self.what = what
        try:
            self._reader = gguf.GGUFReader(path)
            self.tensors = {
                str(t.name): GgufTensor(
                    str(t.name), t.tensor_type.name, tuple(int(n) for n in reversed(t.shape.tolist())), t
                )
                for t in self._reader.tensors
            }
        except Exception as error:
            # The package raises whatever damaged bytes lead to.
            words = " ".join(f"{type(error).__name__} {error}".split())[:200]
            raise ProfileError(
                f"{what}: this GGUF file cannot be read ({words}); name another file, or get this one again"
            ) from None

    def get(self, key: str) -> Any:
        """Return a value of the metadata, or None."""
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    def need(self, key: str) -> Any:
        """Return a value of the metadata. Raises ProfileError when there is none."""
        value = self.get(key)
        if value is None:
            raise ProfileError(f"{self.what}: expected {key} in its metadata, found none; name another file")
        return value

    def as_tensor(self, found: GgufTensor, name: str, change: Change | None = None) -> Tensor:
        """Return a tensor under the name that it is to have: integers as they are, all else as bfloat16.

        ``change`` rearranges values without altering them. Raises ProfileError, at once or with the values, for a type
        that the package cannot dequantise.
        """
        if found.kind in _INTEGERS:
            is_mask = name in _MASKS
            return Tensor(name, "BOOL" if is_mask else found.kind, found.shape, lambda: self._integers(found, is_mask))

        def values() -> NDArray[np.uint16]:
            read = self._floats(found)
            return bfloat16(read if change is None else change(read))

        return Tensor(name, "BF16", found.shape, values)

    def _integers(self, found: GgufTensor, is_mask: bool) -> NDArray[Any]:
        data: NDArray[Any] = found.stored.data
        if not is_mask:
            return data
        if not np.isin(data, (0, 1)).all():
            raise ProfileError(
                f"{self.what}: expected 0 and 1 alone in {found.name}, which stands for truth values, found others; "
                "write the file again"
            )
        return data.astype(np.bool_)

    def _floats(self, found: GgufTensor) -> NDArray[np.float32]:
        import gguf

        try:
            values: NDArray[np.float32] = gguf.dequantize(found.stored.data, found.stored.tensor_type)
        except NotImplementedError:
            raise ProfileError(
                f"{self.what}: expected tensors of types that the package gguf can dequantise, found {found.kind} "
                f"({found.name}); name a file with another quantisation"
            ) from None
        return values.reshape(found.shape)
