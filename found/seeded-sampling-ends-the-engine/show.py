"""CPU build: one seeded request whose prompt is computed in chunks ends the engine.

    python found/seeded-sampling-ends-the-engine/show.py

One server, no speculation, a prompt of 117 tokens with steps of at most 64. Greedy it is answered; with a temperature
and a seed the engine ends. Exit code 1: it does; 0: it does not; 2: cannot tell.
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
    --max-num-batched-tokens 64
"""


def show() -> Iterator[str]:
    words = prompt("copy-117-22")
    with Servers({"single": SERVER}) as servers:
        for said, fields in {
            "greedy": {},
            "temperature 1, no seed": {"temperature": 1.0},
            "temperature 1, seed 7": {"temperature": 1.0, "seed": 7},
            "greedy again": {},
        }.items():
            try:
                answer = servers.complete("single", words, salt=said, max_tokens=8, **fields)
                print(f"{said}: {answer.tokens}")
            except RuntimeError as error:
                print(f"{said}: {error}")
                yield f"{said}: no answer"
        lines = [line for line in servers.log("single").splitlines() if "RuntimeError:" in line]
        print(*dict.fromkeys(line[line.index("RuntimeError:") :] for line in lines[:4]), sep="\n")


if __name__ == "__main__":
    main(show)
