"""Who reads a tokenizer is not advised to install PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from harness.util.paths import REPOSITORY

WITHOUT_TORCH = """
import importlib.util as u
find = u.find_spec
u.find_spec = lambda name, *rest: None if name == "torch" else find(name, *rest)
"""
QUIET = (
    "from harness.util.quiet_transformers import load_transformers\nprint(load_transformers().AutoTokenizer.__name__)"
)


@pytest.mark.parametrize(("load", "advised"), [(QUIET, False), ("import transformers", True)])
def test_no_advice_to_install_pytorch(load, advised):
    environment = {k: v for k, v in os.environ.items() if k != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    said = "import os\nassert 'TRANSFORMERS_NO_ADVISORY_WARNINGS' not in os.environ"
    command = [sys.executable, "-c", f"{WITHOUT_TORCH}\n{load}\n{said}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment, check=True)
    assert ("PyTorch was not found" in done.stderr) is advised
    assert done.stdout == ("" if advised else "AutoTokenizer\n")
