"""P/D by NIXL with recurrent state: where D has the attention blocks but not the state, it computes the whole prompt.

    python found/state-not-fetched/show.py

A pair. A prompt of 161 tokens (blocks of 32) is handed over, other requests use up some of D's blocks, and it is
handed over again. D has to fetch what it lacks. Exit code 1: it fetched nothing, and computed the prompt; 0: it always
fetched; 2: cannot tell.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from servers import Servers, main, prompt

LINE = r"""
VLLM_NIXL_SIDE_CHANNEL_PORT=564{n} VLLM_CPU_OMP_THREADS_BIND={n} taskset -c {n} \
    vllm serve models/probe/hybrid --tokenizer models/probe/tokenizer --served-model-name target --port 834{n} \
    --host 127.0.0.1 --dtype bfloat16 --block-size 32 --max-model-len 416 --max-num-seqs 4 --enforce-eager \
    --num-gpu-blocks-override 64 \
    --kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu", "kv_connector_extra_config": {"num_threads": 0}}'
"""  # noqa: E501
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


def show() -> Iterator[str]:
    subject, filler = prompt("copy-161-34"), prompt("copy-042-07")
    with Servers({role: LINE.replace("{n}", str(n)) for n, role in enumerate(("prefill", "decode"))}) as servers:

        def sources() -> list[int]:
            told = [servers.count("decode", "vllm:prompt_tokens_by_source_total", s) for s in SOURCES]
            return list(map(int, told))

        def handed(salt: str) -> list[int]:
            """Return by source how many tokens of the prompt D had."""
            before = sources()
            servers.hand_off(subject, salt=salt, max_tokens=4)
            return [now - then for now, then in zip(sources(), before, strict=True)]

        print(f"of a prompt of {len(subject)} tokens D had, by {', '.join(SOURCES)}:")
        for between in range(12, 26):
            first = handed(f"{between}")
            for number in range(between):
                servers.complete("decode", filler, salt=f"{between} {number}", max_tokens=1)
            again = handed(f"{between}")
            print(f"  at first {first}, after {between} other requests {again}", flush=True)
            if again[0] > 1:
                yield f"after {between} other requests D computed {again[0]} tokens of a prompt that P held for it"
                return


if __name__ == "__main__":
    main(show)
