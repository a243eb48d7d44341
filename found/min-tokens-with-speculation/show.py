"""min_tokens with speculative decoding: an answer that reaches its smallest length within a step runs on.

    python found/min-tokens-with-speculation/show.py

One server, one prompt, asked twice: without min_tokens the model ends its answer with token n + 1, the end token. With
min_tokens = n the same answer is allowed. Exit code 1: it runs on; 0: it does not; 2: cannot tell.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from servers import Servers, main, prompt

SERVER = r"""
VLLM_CPU_OMP_THREADS_BIND=0 taskset -c 0 \
    vllm serve models/probe/target --tokenizer models/probe/tokenizer --served-model-name target --port 8340 \
    --host 127.0.0.1 --dtype float32 --block-size 32 --max-model-len 416 --max-num-seqs 4 --enforce-eager \
    --per-request-spec-decode-metrics detailed \
    --speculative-config '{"method": "eagle3", "model": "models/probe/eagle3", "num_speculative_tokens": 3}'
"""


def show() -> Iterator[str]:
    with Servers({"single": SERVER}) as servers:
        for name in ("copy-016-01", "copy-029-02", "copy-042-07", "copy-062-10"):
            words = prompt(name)
            right = servers.complete("single", words, max_tokens=80)
            least = len(right.tokens) - 1
            found = servers.complete("single", words, max_tokens=80, min_tokens=least)
            print(f"{name}: without min_tokens {len(right.tokens)} tokens, the last of them {right.tokens[-3:]}")
            print(f"  accepted drafts per step {right.accepted}")
            print(f"  with min_tokens={least}: {len(found.tokens)} tokens, from there on {found.tokens[least - 2 :]}")
            if found.tokens != right.tokens:
                yield f"{name}: min_tokens={least} changed an answer of {len(right.tokens)} tokens"


if __name__ == "__main__":
    main(show)
