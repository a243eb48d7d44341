"""CPU build: models with MLA and plain RoPE compute something else of a prompt than of the same tokens one by one.

    python found/plain-rope-of-latents/show.py

One server of a DeepSeek-V2 with random weights, made here, with plain RoPE, and one that differs in its positions alone
(YaRN). Each answers a prompt with eight tokens; then each of these is asked for alone, with those before it in the
prompt. Exit code 1: they are not the same with plain RoPE; 0: they are; 2: cannot tell.
"""

import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from servers import ROOT, Servers, main, prompt

SERVER = r"""
VLLM_CPU_OMP_THREADS_BIND=0 taskset -c 0 \
    vllm serve {model} --tokenizer models/probe/tokenizer --served-model-name target --port 8341 \
    --host 127.0.0.1 --dtype float32 --block-size 16 --max-model-len 416 --max-num-seqs 4 --enforce-eager
"""
PLAIN: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {**PLAIN, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 32}
YARN |= {"beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
TOKENS = 8


def make(folder: Path, positions: dict[str, Any]) -> None:
    """Write a model of three layers, whose latents have the only size that vLLM's operator for CPUs takes."""
    import torch
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    torch.manual_seed(0)
    config = DeepseekV2Config(
        vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=512, q_lora_rank=None, qk_rope_head_dim=64,
        qk_nope_head_dim=32, v_head_dim=32, head_dim=64, first_k_dense_replace=3, n_routed_experts=4,
        n_shared_experts=1, num_experts_per_tok=2, n_group=1, topk_group=1, max_position_embeddings=1024,
        rms_norm_eps=1e-6, bos_token_id=0, eos_token_id=1, pad_token_id=4, rope_parameters=positions,
    )  # fmt: skip
    model = DeepseekV2ForCausalLM(config).float()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                weights.normal_(0, 0.6 if "lm_head" in name or "embed" in name else 0.15)
    model.save_pretrained(folder)
    shutil.copy(ROOT / "models" / "probe" / "target" / "generation_config.json", folder)


def show() -> Iterator[str]:
    words = prompt("copy-117-22")
    for name, positions in {"plain RoPE": PLAIN, "YaRN": YARN}.items():
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder), positions)
            with Servers({"single": SERVER.format(model=folder)}) as servers:
                said = servers.complete("single", words, max_tokens=TOKENS, ignore_eos=True).tokens
                alone = [
                    servers.complete("single", [*words, *said[:n]], max_tokens=1, ignore_eos=True).tokens[0]
                    for n in range(TOKENS)
                ]
        print(f"{name}: {TOKENS} tokens {said}, each alone {alone}")
        if said != alone:
            yield f"{name}: {sum(a != b for a, b in zip(said, alone, strict=True))} of {TOKENS} tokens are other ones"


if __name__ == "__main__":
    main(show)
