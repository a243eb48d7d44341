"""Writing of safetensors without torch: tensor by tensor, with bytes that depend on names and values alone."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SIZES = {"BF16": 2, "BOOL": 1, "I8": 1, "I16": 2, "I32": 4, "I64": 8}
"""Bytes of a value, by the names that safetensors has for types."""
_NAN = np.uint16(0x7FC0)


class Tensor(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: str
    """A key of ``SIZES``."""
    shape: tuple[int, ...]
    values: Callable[[], NDArray[Any]]
    """Returns its values in C order, with bytes as in the file; called once, when they are written."""

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * SIZES[self.dtype]


def bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of float32 values as bfloat16, rounded to the nearest, ties to even, as torch does it."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded = ((bits + ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)) >> np.uint32(16)).astype(np.uint16)
    nan = np.isnan(values)
    if nan.any():
        rounded[nan] = _NAN
    return rounded


def write_safetensors(path: Path, tensors: Iterable[Tensor]) -> None:
    """Write tensors into a new file, in the order of the safetensors library: larger types first, then by name.

    Raises OSError when the file cannot be written, and ValueError when values do not have the shape that was said.
    """
    ordered = sorted(tensors, key=lambda t: (-SIZES[t.dtype], t.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.size],
        }
        at += tensor.size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as stream:
        stream.write(len(text).to_bytes(8, "little"))
        stream.write(text)
        for tensor in ordered:
            data = np.ascontiguousarray(tensor.values())
            if data.nbytes != tensor.size:
                raise ValueError(f"{tensor.name}: expected {tensor.size} bytes, found {data.nbytes}")
            stream.write(data.tobytes())
