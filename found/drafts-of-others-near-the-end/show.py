"""A request near max_model_len takes the drafts of every other request in its steps.

    python found/drafts-of-others-near-the-end/show.py

One server. A prompt is asked alone, then while requests within k tokens of max_model_len run beside it. Tokens and
accepted drafts have to be the same. Exit code 1: they are not; 0: they are; 2: cannot tell.
"""

import sys
import threading
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from servers import Servers, main, prompt

SERVER = r"""
VLLM_CPU_OMP_THREADS_BIND=0 taskset -c 0 \
    vllm serve models/probe/target --tokenizer models/probe/tokenizer --served-model-name target --port 8340 \
    --host 127.0.0.1 --dtype float32 --block-size 32 --max-model-len 240 --max-num-seqs 4 --enforce-eager \
    --per-request-spec-decode-metrics detailed \
    --speculative-config '{"method": "eagle3", "model": "models/probe/eagle3", "num_speculative_tokens": 3}'
"""
LONG = 237
"""Tokens of the other requests: with k = 3, all of their steps are within k tokens of the end."""


def show() -> Iterator[str]:
    words, other = prompt("copy-096-19"), prompt("turn-192")
    with Servers({"single": SERVER}) as servers:
        alone = servers.complete("single", words, salt="alone", max_tokens=92)
        ended = threading.Event()

        def beside() -> None:
            number = 0
            while not ended.is_set():
                number += 1
                servers.complete("single", (other + other)[:LONG], salt=f"{number % 2}", max_tokens=3)

        thread = threading.Thread(target=beside)
        thread.start()
        try:
            found = servers.complete("single", words, salt="beside", max_tokens=92)
        finally:
            ended.set()
            thread.join()
    print(f"the same tokens: {alone.tokens == found.tokens}")
    print(f"accepted drafts per step, alone:  {alone.accepted}")
    print(f"accepted drafts per step, beside: {found.accepted}")
    if found.accepted != alone.accepted:
        yield (
            f"{sum(alone.accepted)} drafts accepted in {len(alone.accepted)} steps alone; beside requests of {LONG} "
            f"of 240 tokens {sum(found.accepted)} in {len(found.accepted)} steps"
        )


if __name__ == "__main__":
    main(show)
