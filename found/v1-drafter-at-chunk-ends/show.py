"""Chunked prefill and EAGLE3 or MTP: how many drafts are accepted depends on where a prompt was cut.

    python found/v1-drafter-at-chunk-ends/show.py

The same prompts on two servers, one after the other, which differ in --max-num-batched-tokens alone: one computes them
in two chunks, the other whole. Exit code 1: drafts or tokens differ; 0: they do not; 2: cannot tell.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from servers import Answer, Servers, main, prompt

SERVER = r"""
VLLM_CPU_OMP_THREADS_BIND=0 taskset -c 0 \
    vllm serve models/probe/target --tokenizer models/probe/tokenizer --served-model-name target --port 8340 \
    --host 127.0.0.1 --dtype float32 --block-size 32 --max-model-len 512 --max-num-seqs 4 --enforce-eager \
    --per-request-spec-decode-metrics detailed --max-num-batched-tokens {chunk} \
    --speculative-config '{"method": "eagle3", "model": "models/probe/eagle3", "num_speculative_tokens": 3}'
"""
NAMES = ("long-210", "long-222", "long-223", "long-224")


def answers(chunk: int) -> dict[str, Answer]:
    with Servers({"single": SERVER.replace("{chunk}", str(chunk))}) as servers:
        return {name: servers.complete("single", prompt(name)) for name in NAMES}


def show() -> Iterator[str]:
    whole, cut = answers(512), answers(192)
    for name in NAMES:
        print(f"{name}: accepted drafts per step (tokens {'equal' if whole[name].tokens == cut[name].tokens else '!'})")
        print(f"  whole      {whole[name].accepted}")
        print(f"  two chunks {cut[name].accepted}")
        if whole[name].accepted != cut[name].accepted:
            yield (
                f"{name}: {sum(whole[name].accepted)} drafts accepted where the prompt is computed whole, "
                f"{sum(cut[name].accepted)} where it is computed in chunks of 192"
            )


if __name__ == "__main__":
    main(show)
