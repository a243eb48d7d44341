"""``harness probe build``: train, export and describe the probe models, from nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from harness.errors import EnvironmentFault
from harness.files import write_json
from harness.probe import spec

WEIGHTS = Path(__file__).resolve().parent / "weights"
RECIPE_FILE = "recipe.json"


def build(root: Path, log: Any) -> dict[str, Any]:
    """Train everything from seed and write checkpoints, tokenizer and ``recipe.json`` below ``root``.

    Raises EnvironmentFault without torch.
    """
    try:
        import torch

        from harness.probe import export, train
    except ImportError as error:
        raise EnvironmentFault(
            f"expected torch to train the probe models, found none ({error}); install the extra `cpu` or `gpu`"
        ) from error
    recipe = train.Recipe()
    begun = time.monotonic()
    target, drafters = train.train_all(recipe, log)
    seconds = time.monotonic() - begun
    hashes = export.export_all(target, drafters, root)
    description = {
        "recipe": recipe._asdict(),
        "shape": spec.SHAPE._asdict(),
        "draft_tokens": spec.DRAFT_TOKENS,
        "handicap_fraction": spec.HANDICAP_FRACTION,
        "command": "harness probe build",
        "torch": torch.__version__,
        "training_seconds": round(seconds),
        "weights_sha256": hashes,
        "weights_bytes": export.total_size(root),
    }
    write_json(root / RECIPE_FILE, description)
    return description
