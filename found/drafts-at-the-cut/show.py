"""P/D by NIXL with an MTP drafter of several modules: the drafts in the last step of each answer lose one.

    python found/drafts-at-the-cut/show.py

A pair. Each prompt is asked on D alone, which computes all of it, and after a hand-off from P. Tokens and accepted
drafts have to be the same. Exit code 1: they are not; 0: they are; 2: cannot tell.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from servers import Servers, main, prompt

LINE = r"""
VLLM_NIXL_SIDE_CHANNEL_PORT=564{n} VLLM_CPU_OMP_THREADS_BIND={n} VLLM_USE_V2_MODEL_RUNNER=1 TRITON_INTERPRET=1 \
    TRITON_DEFAULT_BACKEND=cpu PYTHONPATH=harness/engines/interpreter taskset -c {n} \
    vllm serve models/probe/target --tokenizer models/probe/tokenizer --served-model-name target --port 834{n} \
    --host 127.0.0.1 --dtype float32 --block-size 32 --max-model-len 416 --max-num-seqs 4 --enforce-eager \
    --num-gpu-blocks-override 64 --per-request-spec-decode-metrics detailed \
    --hf-overrides '{"layer_types": ["full_attention", "full_attention", "full_attention"], "mlp_layer_types": ["dense", "dense", "dense"], "num_nextn_predict_layers": 3}' \
    --speculative-config '{"method": "mtp", "model": "models/probe/mtp3", "num_speculative_tokens": 3}' \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu", "kv_connector_extra_config": {"num_threads": 0}}'
"""  # noqa: E501
NAMES = ("copy-032-05", "copy-062-10", "copy-097-20", "copy-117-22")


def show() -> Iterator[str]:
    with Servers({role: LINE.replace("{n}", str(n)) for n, role in enumerate(("prefill", "decode"))}) as servers:
        moved = servers.count("decode", "vllm:nixl_bytes_transferred_sum")
        for name in NAMES:
            alone = servers.complete("decode", prompt(name), salt="alone")
            handed = servers.hand_off(prompt(name), salt="handed over")
            print(f"{name}: accepted drafts per step (tokens {'equal' if alone.tokens == handed.tokens else '!'})")
            print(f"  D alone        {alone.accepted}")
            print(f"  after hand-off {handed.accepted}")
            if handed.accepted != alone.accepted:
                yield f"{name}: {sum(alone.accepted)} drafts accepted on D alone, {sum(handed.accepted)} handed over"
        if servers.count("decode", "vllm:nixl_bytes_transferred_sum") == moved:
            raise RuntimeError("no KV moved")


if __name__ == "__main__":
    main(show)
