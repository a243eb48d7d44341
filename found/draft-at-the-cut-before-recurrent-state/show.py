"""P/D by NIXL, recurrent state and an MTP drafter: the drafter's KV of the last token handed over is of another token.

    python found/draft-at-the-cut-before-recurrent-state/show.py

A pair. Two prompts of 163 tokens that differ in the last one: one ends with the token that P itself says next, the
other does not. Each is asked on D alone, which computes all of it, and after a hand-off from P. A plugin notes what D's
caches hold at the end: one sketch for each 16 tokens. The drafter's has to be the same but for rounding. Exit code 1:
it is not; 0: it is; 2: cannot tell.
"""

import base64
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from servers import Servers, main, prompt

LINE = r"""
VLLM_NIXL_SIDE_CHANNEL_PORT=564{n} VLLM_CPU_OMP_THREADS_BIND={n} TRITON_INTERPRET=1 TRITON_DEFAULT_BACKEND=cpu \
    PYTHONPATH=harness/engines/interpreter:harness/engines/witness KV_HARNESS_WITNESS={folder} \
    KV_HARNESS_WITNESS_NAME={role} taskset -c {n} \
    vllm serve models/probe/hybrid --tokenizer models/probe/tokenizer --served-model-name target --port 834{n} \
    --host 127.0.0.1 --dtype bfloat16 --block-size 32 --max-model-len 416 --max-num-seqs 4 --enforce-eager \
    --num-gpu-blocks-override 64 --per-request-spec-decode-metrics detailed \
    --speculative-config '{"method": "mtp", "model": "models/probe/hybrid-mtp", "num_speculative_tokens": 3}' \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu", "kv_connector_extra_config": {"num_threads": 0}}'
"""  # noqa: E501
LENGTH, CELL, SKETCH = 163, 16, 8
"""The last of the cells of 16 tokens has three tokens; the entry that P makes of its own next token is one of them."""
ROUNDING = 0.1


def sketches(folder: Path) -> list[np.ndarray]:
    """Return what D's drafter held of each prompt of that length: keys or values, cell, sketch."""
    (file,) = folder.glob("decode.*.jsonl")
    first, *rows = map(json.loads, file.read_text().splitlines())
    (group,) = [g for g in first["groups"] if any(drafter for _, drafter, _ in g["layers"])]
    (layer,) = [number for number, (_, drafter, _) in enumerate(group["layers"]) if drafter]
    out = []
    for row in rows:
        for noted in row.get("groups", ()) if row.get("moment") == "end" else ():
            counted = np.frombuffer(base64.b64decode(noted["counted"]), np.uint8)
            if noted["group"] == group["group"] and counted.sum() == LENGTH:
                numbers = np.frombuffer(base64.b64decode(noted["sketches"]), np.float16).astype(np.float32)
                out.append(numbers.reshape(len(group["layers"]), 2, -1, SKETCH)[layer])
    return out


def show() -> Iterator[str]:
    words = prompt("turn-175")
    said = words[:LENGTH]
    other = [*said[:-1], next(w for w in words[LENGTH:] if w != said[-1])]
    with tempfile.TemporaryDirectory() as place:
        lines = {
            role: LINE.replace("{n}", str(n)).replace("{role}", role).replace("{folder}", place)
            for n, role in enumerate(("prefill", "decode"))
        }
        with Servers(lines) as servers:
            own = servers.complete("prefill", said[:-1], salt="own", max_tokens=1).tokens
            print(f"the token that P says after {LENGTH - 1} tokens: {own[0]}")
            for number, ids in enumerate((said, other)):
                for answer in (
                    servers.complete("decode", ids, salt=f"{number} alone", max_tokens=8),
                    servers.hand_off(ids, salt=f"{number} handed over", max_tokens=8),
                ):
                    print(f"a prompt that ends with {ids[-1]}: {answer.tokens}, drafts {answer.accepted}")
                    # The engine tells its runner in the next step that a request is over.
                    servers.complete("decode", [0, 2, 100, 1, 3], salt=f"{number}", max_tokens=1)
        held = sketches(Path(place))
    if len(held) != 4:
        raise RuntimeError(f"expected notes of four requests, found {len(held)}")
    for ids, alone, handed in ((said, *held[:2]), (other, *held[2:])):
        apart = np.linalg.norm(handed - alone, axis=-1) / np.linalg.norm(alone, axis=-1)
        print(f"a prompt that ends with {ids[-1]}: the drafter's KV after the hand-off, distance over size")
        for kind, of_cells in zip(("keys", "values"), apart, strict=True):
            print(f"  {kind} by {CELL} tokens: {' '.join(f'{d:.0%}' for d in of_cells)}")
        if apart.max() > ROUNDING:
            yield f"a prompt that ends with {ids[-1]}: the drafter's KV is up to {apart.max():.0%} away"


if __name__ == "__main__":
    main(show)
