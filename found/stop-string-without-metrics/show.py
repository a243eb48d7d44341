"""A request that a stop string ends has no speculative-decoding metrics.

    python found/stop-string-without-metrics/show.py

One server with --per-request-spec-decode-metrics, one prompt, ended by a stop token and by the same word as a stop
string. Exit code 1: the second answer has no metrics; 0: it has; 2: cannot tell.
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
    words = prompt("copy-029-02")
    with Servers({"single": SERVER}) as servers:
        whole = servers.complete("single", words)
        stop = whole.text[4 * 12 : 4 * 13]  # Each word is a token of four letters.
        token = servers.complete("single", words, stop_token_ids=[whole.tokens[12]])
        string = servers.complete("single", words, stop=[stop])
    for said, answer in {"stop_token_ids": token, "stop": string}.items():
        reason = answer.whole["choices"][0]["finish_reason"]
        print(f"{said}: {len(answer.tokens)} tokens, finish_reason {reason}, metrics {answer.whole.get('metrics')}")
    if token.metrics is None:
        raise RuntimeError("no metrics for the request with a stop token either")
    if string.metrics is None:
        yield f"the request that the stop string {stop!r} ended has no metrics.speculative_decoding"


if __name__ == "__main__":
    main(show)
