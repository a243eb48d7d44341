"""Train, export and describe the probe models from scratch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from harness.errors import EnvironmentFault
from harness.prompts import probe_task
from harness.util.files import write_json
from tools.probe_models import shapes


def build(root: Path, log: Any) -> dict[str, Any]:
    """Train everything from the recipe's seed and write checkpoints, tokenizer and ``recipe.json`` below ``root``.

    Raises EnvironmentFault without torch.
    """
    try:
        import torch

        from tools.probe_models import export, hybrid, train
    except ImportError as error:
        raise EnvironmentFault(
            f"expected torch to train the probe models, found none ({error}); install the extra `cpu` or `gpu`"
        ) from error
    recipe = train.Recipe()
    begun = time.monotonic()
    target, drafters, windowed = train.train_all(recipe, log)
    recurrent = hybrid.train(hybrid.Recipe(), log)
    drafters["hybrid-mtp"] = hybrid.train_drafter(recurrent, recipe, log)
    seconds = time.monotonic() - begun
    hashes = export.export_all(target, drafters, windowed, recurrent, root)
    description = {
        "recipe": recipe._asdict(),
        "shape": shapes.SHAPE._asdict(),
        "windowed": {"shape": shapes.WINDOWED._asdict(), "recipe": train.windowed(recipe)._asdict()},
        "hybrid": {"shape": shapes.HYBRID._asdict(), "recipe": hybrid.Recipe()._asdict()},
        "draft_tokens": shapes.DRAFT_TOKENS,
        "handicap_fraction": probe_task.HANDICAP_FRACTION,
        "command": "python -m tools.probe_models build",
        "torch": torch.__version__,
        "training_seconds": round(seconds),
        "weights_sha256": hashes,
        "weights_bytes": export.total_size(root),
    }
    write_json(root / probe_task.RECIPE_FILE, description)
    return description
