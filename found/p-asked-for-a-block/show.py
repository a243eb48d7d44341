"""P/D by NIXL: P asked for more than one token hands over a block too many, and D reads each block one too late.

    python found/p-asked-for-a-block/show.py

A pair without speculation, a prompt of 96 tokens (three blocks of 32) and one of 117. Each is handed over twice: P is
asked for one token, as routers should, and for three. Exit code 1: an answer is wrong; 0: none is; 2: cannot tell.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from servers import KEPT, Servers, main, prompt

LINE = r"""
VLLM_NIXL_SIDE_CHANNEL_PORT=564{n} VLLM_CPU_OMP_THREADS_BIND={n} taskset -c {n} \
    vllm serve models/probe/target --tokenizer models/probe/tokenizer --served-model-name target --port 834{n} \
    --host 127.0.0.1 --dtype float32 --block-size 32 --max-model-len 416 --max-num-seqs 4 --enforce-eager \
    --num-gpu-blocks-override 64 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu", "kv_connector_extra_config": {"num_threads": 0}}'
"""  # noqa: E501
MOST = 24
"""Tokens of the answers."""


def show() -> Iterator[str]:
    with Servers({role: LINE.replace("{n}", str(n)) for n, role in enumerate(("prefill", "decode"))}) as servers:
        for name in ("copy-117-22", "copy-096-19"):
            words = prompt(name)
            alone = servers.complete("decode", words, salt=f"{name} alone", max_tokens=MOST).tokens
            print(f"{name}: D alone answers {alone[:8]} …")
            for asked in (1, 3):
                salt = f"{name} {asked}"
                of_p = servers.complete("prefill", words, salt, max_tokens=asked, kv_transfer_params=KEPT)
                given = of_p.whole["kv_transfer_params"]
                found = servers.complete("decode", words, salt, max_tokens=MOST, kv_transfer_params=given).tokens
                blocks = given["remote_block_ids"]
                print(f"  P asked for {asked}: hands over blocks {blocks}; D answers {found[:8]} …", flush=True)
                if found != alone:
                    wrong = sum(a != b for a, b in zip(found, alone, strict=False))
                    yield f"P asked for {asked} tokens: {wrong} of {len(alone)} tokens of D for {name} are wrong"


if __name__ == "__main__":
    main(show)
