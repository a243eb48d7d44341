"""Notes of KV caches that were never there, for fake engines: equal for equal tokens. They prove nothing of engines."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness.history.layout import WITNESS
from harness.history.records import Observation
from harness.history.witness import CELL

TARGET, DRAFTER = ["model.layers.0.self_attn.attn", False, 1], ["model.layers.1.self_attn.attn", True, 1]


def note(folder: Path, o: Observation, speculative: bool) -> None:
    """Append to a run what the engines of each leg held of the prompt at the end of the request."""
    layers = [TARGET, DRAFTER] if speculative else [TARGET]
    for leg in o.legs:
        path = folder / WITNESS / f"{o.cell}.{leg.role}.1.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [] if path.exists() else [_header(layers)]
        rows.append(_end(f"cmpl-{leg.request_id}-0-0a1b2c3d", o.sent_ids, layers))
        with path.open("a") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)


def _header(layers: list[list]) -> dict:
    group = {"group": 0, "block_size": 32, "layers": layers}
    return {"witness": 1, "rank": 0, "ranks": 1, "groups": [group], "unseen": {}}


def _end(request: str, tokens: Sequence[int], layers: list[list]) -> dict:
    cells = -(-len(tokens) // CELL)
    names = [hashlib.sha256(f"{layer} {tokens[: c * CELL + CELL]}".encode()) for layer in layers for c in range(cells)]
    digests = np.array([int.from_bytes(name.digest()[:8]) for name in names], "<u8").reshape(len(layers), 1, cells, 1)
    marks = np.array([hash((token, i)) & 0xFFFFFFFF for i, token in enumerate(tokens)], "<u4")
    marks = np.pad(marks, (0, cells * CELL - len(tokens)))
    group = {
        "group": 0,
        "counted": _text((np.arange(cells * CELL) < len(tokens)).astype("u1")),
        "digests": _text(np.repeat(digests, 2, axis=1)),
        "sketches": _text(np.ones((len(layers), 2, cells, 8), "<f2")),
        "marks": [_text(marks), _text(marks)],
    }
    prompt = hashlib.sha256(",".join(map(str, tokens)).encode()).hexdigest()[:16]
    return {"request": request, "prompt": prompt, "moment": "end", "groups": [group]}


def _text(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()
