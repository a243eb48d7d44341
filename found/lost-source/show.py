"""P/D by NIXL: one request to D whose kv_transfer_params lack a parameter ends D's engine.

    python found/lost-source/show.py

A pair without speculation; one prompt is handed over as it should be, then once more without ``remote_host``, by a
client that waits for five seconds. With a fresh pair the same without ``remote_block_ids``. Exit code 1: D ended; 0: it
refused the request or answered it; 2: cannot tell.
"""

import re
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
WAITS_S = 5


def show() -> Iterator[str]:
    words = prompt("copy-030-03")
    for lost in ("remote_host", "remote_block_ids"):
        with Servers({role: LINE.replace("{n}", str(n)) for n, role in enumerate(("prefill", "decode"))}) as servers:
            right = servers.hand_off(words, salt="whole", max_tokens=8).tokens
            print(f"all parameters: {right}")
            of_p = servers.complete("prefill", words, salt=lost, max_tokens=1, kv_transfer_params=KEPT)
            given = {name: value for name, value in of_p.whole["kv_transfer_params"].items() if name != lost}
            try:
                with servers.patience(WAITS_S):
                    found = servers.complete("decode", words, salt=lost, max_tokens=8, kv_transfer_params=given).tokens
                print(f"without {lost}: {found}")
            except RuntimeError as error:
                print(f"without {lost}: {error}")
            if servers.ends("decode"):
                words_of_log = re.findall(r"(?:KeyError|AssertionError)\b.*", servers.log("decode"))
                print(f"  D has ended: {words_of_log[0] if words_of_log else 'see decode.log'}", flush=True)
                yield f"a request without {lost} ended D's engine"


if __name__ == "__main__":
    main(show)
