"""Safetensors written without torch: rounding as torch does it, and files that the library reads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from harness.util.safetensors_file import Tensor, bfloat16, write_safetensors


def torchs(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def test_rounding_is_torchs():
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    # Ties above even and odd, and both sides of them.
    ends = np.array([0x7FFF, 0x8000, 0x8001, 0, 0xFFFF], np.uint32)
    ties = (rng.integers(0, 2**16, 2000, dtype=np.uint32)[:, None] << 16 | ends).ravel()
    values = np.concatenate([bits, ties]).view(np.float32)
    finite = values[np.isfinite(values)]
    assert (bfloat16(finite) == torchs(finite)).all()
    special = np.array([0.0, -0.0, np.inf, -np.inf, 3.4e38, -3.4e38, 1e-45], np.float32)
    assert (bfloat16(special) == torchs(special)).all()
    nan = bfloat16(np.array([np.nan, -np.nan], np.float32)).view(np.int16)
    assert torch.from_numpy(nan).view(torch.bfloat16).isnan().all()


def test_file_is_the_librarys_byte_for_byte(tmp_path):
    values = {
        "b": torch.arange(6, dtype=torch.float32).reshape(2, 3).to(torch.bfloat16),
        "a": torch.arange(3, dtype=torch.int64),
        "mask": torch.tensor([True, False, True]),
    }
    save_file(values, tmp_path / "theirs", metadata={"format": "pt"})

    def tensor(name: str, dtype: str, data: np.ndarray) -> Tensor:
        return Tensor(name, dtype, tuple(values[name].shape), lambda: data)

    ours = [
        tensor("mask", "BOOL", values["mask"].numpy()),
        tensor("b", "BF16", bfloat16(values["b"].float().numpy())),
        tensor("a", "I64", values["a"].numpy()),
    ]
    for name, order in (("ours", ours), ("again", ours[::-1])):
        write_safetensors(tmp_path / name, order)
        assert (tmp_path / name).read_bytes() == (tmp_path / "theirs").read_bytes()
    read = load_file(tmp_path / "ours")
    assert all(torch.equal(read[name], value) for name, value in values.items())
    with safe_open(tmp_path / "ours", "pt") as opened:
        assert opened.metadata() == {"format": "pt"}


def test_values_of_another_shape_are_refused(tmp_path):
    with pytest.raises(ValueError, match="expected 8 bytes, found 6"):
        write_safetensors(tmp_path / "x", [Tensor("x", "BF16", (4,), lambda: np.zeros(3, np.uint16))])
