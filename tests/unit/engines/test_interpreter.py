"""The adaptations of Triton's interpreter, in a process of their own: they last."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.engines.command import INTERPRETER

_KERNELS = """
import torch
import triton
import triton.language as tl


@triton.jit
def _shifted(x, by):
    return x + by


@triton.jit
def _kernel(out, given, wide, count, by: tl.constexpr, SIZE: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, SIZE)
    mask = at < count
    found = tl.load(given + row * count + at, mask=mask, other=0)
    table = tl.arange(0, 2)[:, None] * SIZE + at[None, :]
    tl.store(wide + row * 2 * SIZE + table, table.to(tl.int64) + tl.max(found))
    tl.store(out + row * count + at, _shifted(found.to(tl.float32), by) * 2, mask=mask)


def _run():
    given = torch.arange(21, dtype=torch.int32).reshape(3, 7) * 100_000_000
    out, wide = torch.zeros(3, 7), torch.zeros((3, 2, 8), dtype=torch.int64)
    for _ in range(2):
        _kernel[(3,)](out, given, wide, 7, by=1.5, SIZE=8)
    expected = (given.to(torch.float32) + 1.5) * 2
    assert torch.equal(out, expected), out
    assert torch.equal(wide, torch.arange(16).reshape(2, 8) + given.max(1).values.to(torch.int64)[:, None, None]), wide
"""


def test_kernels_compute_the_same_when_the_interpreter_is_adapted(tmp_path: Path) -> None:
    (tmp_path / "kernels.py").write_text(_KERNELS)
    lines = "import kernels; kernels._run(); from kv_harness_triton import adapted; adapted.register(); kernels._run()"
    path = os.pathsep.join([str(tmp_path), str(INTERPRETER)])
    env = {**os.environ, "TRITON_INTERPRET": "1", "TRITON_DEFAULT_BACKEND": "cpu", "PYTHONPATH": path}
    done = subprocess.run([sys.executable, "-c", lines], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
