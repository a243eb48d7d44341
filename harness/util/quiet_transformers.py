"""The library transformers without its advice to install PyTorch: tokenizers and configurations need none."""

from __future__ import annotations

import importlib
import os
from typing import Any

_VARIABLE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


def load_transformers() -> Any:
    """Import transformers, which takes seconds the first time. Raises ModuleNotFoundError when it is not installed."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        return importlib.import_module("transformers")
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before
