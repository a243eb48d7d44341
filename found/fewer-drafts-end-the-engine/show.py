"""CPU build, recurrent state and speculation: a step of fewer drafts than k after accepted ones ends the engine.

    python found/fewer-drafts-end-the-engine/show.py

One server, one request that reaches max_model_len, before which fewer than k drafts fit. Exit code 1: the engine ends;
0: it does not; 2: cannot tell.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from servers import Servers, main, prompt

SERVER = r"""
VLLM_CPU_OMP_THREADS_BIND=0 taskset -c 0 \
    vllm serve models/probe/hybrid --tokenizer models/probe/tokenizer --served-model-name target --port 8340 \
    --host 127.0.0.1 --dtype bfloat16 --block-size 32 --max-model-len {context} --max-num-seqs 4 --enforce-eager \
    --no-enable-prefix-caching --per-request-spec-decode-metrics detailed \
    --speculative-config '{"method": "mtp", "model": "models/probe/hybrid-mtp", "num_speculative_tokens": 3}'
"""
CONTEXT = 128


def show() -> Iterator[str]:
    words = prompt("copy-117-22")
    with Servers({"single": SERVER.replace("{context}", str(CONTEXT))}) as servers:
        for most in (4, CONTEXT - len(words), 4):
            try:
                answer = servers.complete("single", words, salt=f"{most}", max_tokens=most)
                print(f"max_tokens {most}: {answer.tokens}, accepted drafts per step {answer.accepted}")
            except RuntimeError as error:
                print(f"max_tokens {most}: {error}")
                yield f"a prompt of {len(words)} tokens, max_tokens {most}, max_model_len {CONTEXT}: no answer"
        lines = [line for line in servers.log("single").splitlines() if "RuntimeError:" in line]
        print(*dict.fromkeys(line[line.index("RuntimeError:") :] for line in lines[:4]), sep="\n")


if __name__ == "__main__":
    main(show)
