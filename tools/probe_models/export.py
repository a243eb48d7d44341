"""Write trained probe weights in the checkpoint layouts that unmodified vLLM loads, and the tokenizer beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional as F
from transformers import Qwen3NextForCausalLM

from harness.prompts import probe_task
from harness.util.files import sha256_file, write_atomic, write_json
from tools.probe_models.networks import MTP, DFlash, Eagle3, HybridMTP, ModulesMTP, Target
from tools.probe_models.shapes import (
    DFLASH_TARGET_LAYERS,
    DRAFT_TOKENS,
    EAGLE3_AUX_LAYERS,
    HYBRID,
    MTP_MODULES,
    SHAPE,
    WINDOWED,
)

_CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for m in messages %}<|{{ m['role'] }}|> {{ m['content'] }} <|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
_COMMON: dict[str, Any] = {
    "vocab_size": probe_task.VOCAB_SIZE,
    "hidden_size": SHAPE.hidden,
    "intermediate_size": SHAPE.intermediate,
    "num_attention_heads": SHAPE.heads,
    "num_key_value_heads": SHAPE.heads,
    "head_dim": SHAPE.head_dim,
    "max_position_embeddings": SHAPE.max_positions,
    "rms_norm_eps": SHAPE.norm_eps,
    "rope_theta": SHAPE.rope_theta,
    "hidden_act": "silu",
    "bos_token_id": probe_task.BOS,
    "eos_token_id": probe_task.EOT,
    "pad_token_id": probe_task.PAD,
    "tie_word_embeddings": False,
    "dtype": "float32",
}


def _save(folder: Path, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write weights and config in the ``dtype`` that the config names; what it does not name is as in ``_COMMON``."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**_COMMON, **config}
    plain = {n: t.detach().to(getattr(torch, config["dtype"])).contiguous().clone() for n, t in tensors.items()}
    save_file(plain, str(folder / "model.safetensors"), metadata={"format": "pt"})
    write_json(folder / "config.json", config)


def write_tokenizer(folder: Path) -> None:
    """Write the WordLevel tokenizer and the chat template, in a folder with a config.json of its own.

    Next to a config.json of type qwen2, transformers 5 ignores the tokenizer class and pre-tokenizer of the files and
    forces Qwen2Tokenizer, which does not know the words; with one of type llama the tokenizer loads as written. Without
    any, vLLM 0.32 waits two seconds for one whenever it loads the tokenizer (``repo_utils.with_retry``).

    With special tokens on, the tokenizer adds <|bos|>, as Llama tokenizers do: a rendered chat prompt (which has one
    already) then gets a second, which the harness must be able to detect.
    """
    vocabulary = probe_task.vocabulary()
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(vocabulary)}, unk_token="<|pad|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in probe_task.SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", probe_task.BOS)]
    )
    tokenizer.decoder = decoders.Fuse()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|bos|>",
            "eos_token": "<|eot|>",
            "pad_token": "<|pad|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": SHAPE.max_positions,
        },
    )
    write_json(folder / "config.json", {"model_type": "llama"})
    write_atomic(folder / "chat_template.jinja", _CHAT_TEMPLATE)


def _write_target(target: Target, folder: Path, config: dict[str, Any]) -> None:
    """Write a target, whose embeddings are its head, too."""
    tensors = {f"model.{name}": t for name, t in target.state_dict().items()}
    if not config.get("tie_word_embeddings"):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    _save(folder, tensors, {"num_hidden_layers": SHAPE.target_layers, **config})
    write_json(folder / "generation_config.json", {"bos_token_id": probe_task.BOS, "eos_token_id": probe_task.EOT})


def export_target(target: Target, folder: Path) -> None:
    """Write the Qwen2ForCausalLM checkpoint that the drafters belong to."""
    # The embeddings are there twice, because vLLM's MTP drafter needs its own head. MiMoMTP reads the number of its
    # layers from the target's config, not from the drafter's.
    own = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1}
    _write_target(target, folder, own)


def export_windowed(target: Target, folder: Path) -> None:
    """Write the LlamaForCausalLM checkpoint with sliding windows and grouped-query attention."""
    (window,) = set(WINDOWED.windows) - {None}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_key_value_heads": WINDOWED.kv_heads,
        "attention_bias": WINDOWED.bias,
        "mlp_bias": False,
        "layer_types": ["sliding_attention" if w else "full_attention" for w in WINDOWED.windows],
        "sliding_window": window,
        "tie_word_embeddings": True,
    }
    _write_target(target, folder, config)


def export_hybrid(target: Qwen3NextForCausalLM, folder: Path) -> None:
    """Write the Qwen3NextForCausalLM checkpoint, which vLLM's CPU kernels take in bfloat16 alone."""
    tensors = {}
    for name, t in target.state_dict().items():
        if ".experts." not in name:
            tensors[name] = t
            continue
        # vLLM reads each matrix of each expert by itself.
        head, _, kind = name.rpartition(".")
        for index, expert in enumerate(t):
            parts = expert.chunk(2) if kind == "gate_up_proj" else (expert,)
            names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            tensors |= {f"{head}.{index}.{n}.weight": part for n, part in zip(names, parts, strict=True)}
    config = {k: v for k, v in target.config.to_diff_dict().items() if k != "transformers_version"}
    _save(folder, tensors, {**config, "architectures": ["Qwen3NextForCausalLM"], "dtype": "bfloat16"})
    write_json(folder / "generation_config.json", {"bos_token_id": probe_task.BOS, "eos_token_id": probe_task.EOT})


def _padded(tensor: Tensor, rows: int, columns: int) -> Tensor:
    """Return a matrix with zeros behind its own rows and columns."""
    return F.pad(tensor, (0, columns - tensor.shape[1], 0, rows - tensor.shape[0]))


def export_hybrid_mtp(drafter: HybridMTP, target: Qwen3NextForCausalLM, folder: Path) -> None:
    """Write a Qwen3Next checkpoint with the MTP layer alone: vLLM takes embeddings and head from the target.

    It takes the shape of the layer from the target's config, too. So experts are padded to its width, its gate behind
    attention is half open for every token, and its shared expert adds nothing.
    """
    config = {k: v for k, v in target.config.to_diff_dict().items() if k != "transformers_version"}
    hidden, shared, wide = SHAPE.hidden, config["shared_expert_intermediate_size"], config["moe_intermediate_size"]
    # vLLM adds 1 to the weight of a norm.
    tensors = {name: t - 1 if "norm" in name else t for name, t in drafter.state_dict().items()}
    for name in tensors:
        if ".experts." in name:
            tensors[name] = _padded(tensors[name], *((hidden, wide) if "down" in name else (wide, hidden)))
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    queries = tensors[f"{attention}.q_proj.weight"].unflatten(0, (HYBRID.heads, -1))
    tensors[f"{attention}.q_proj.weight"] = torch.cat((queries, torch.zeros_like(queries)), 1).flatten(0, 1)
    tensors[f"{attention}.o_proj.weight"] = 2 * tensors[f"{attention}.o_proj.weight"]
    tensors[f"{mlp}.shared_expert_gate.weight"] = torch.zeros(1, hidden)
    tensors |= {f"{mlp}.shared_expert.{n}.weight": torch.zeros(shared, hidden) for n in ("gate_proj", "up_proj")}
    tensors[f"{mlp}.shared_expert.down_proj.weight"] = torch.zeros(hidden, shared)
    own = {"architectures": ["Qwen3NextForCausalLM"], "dtype": "bfloat16", "num_nextn_predict_layers": 1}
    _save(folder, {f"mtp.{name}": t for name, t in tensors.items()}, {**config, **own})


def export_eagle3(drafter: Eagle3, folder: Path, changes: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Write a LlamaForCausalLMEagle3 checkpoint whose config has these ``changes``."""
    outer = ("fc.", "norm.", "lm_head.")
    tensors = {n if n.startswith(outer) else f"midlayer.{n}": t for n, t in drafter.state_dict().items()}
    layers = list(EAGLE3_AUX_LAYERS)
    _save(
        folder,
        tensors,
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": probe_task.VOCAB_SIZE,
            "eagle_aux_hidden_state_layer_ids": layers,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True},
            **changes,
        },
    )


def export_dflash(drafter: DFlash, folder: Path) -> None:
    _save(
        folder,
        drafter.state_dict(),
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": SHAPE.dflash_layers,
            "block_size": DRAFT_TOKENS + 1,
            "num_target_layers": SHAPE.target_layers,
            "dflash_config": {
                "mask_token_id": probe_task.MASK,
                "target_layer_ids": list(DFLASH_TARGET_LAYERS),
            },
        },
    )


def export_mtp(drafter: MTP, target: Target, folder: Path) -> None:
    """Write a MiMo checkpoint with the MTP layer and the target's embeddings."""
    tensors = {"model.mtp_layers.0." + name.removeprefix("mtp_block."): t for name, t in drafter.state_dict().items()}
    embedding = target.state_dict()["embed_tokens.weight"]
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    _save(
        folder,
        tensors,
        {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            "num_hidden_layers": SHAPE.target_layers,
            "num_nextn_predict_layers": 1,
            "attention_bias": True,
        },
    )


def export_modules(drafter: ModulesMTP, folder: Path) -> None:
    """Write an EXAONE-MoE checkpoint with the MTP modules alone: vLLM takes embeddings and head from the target.

    It also takes from the target's config what such a model has in one, which ``engine.hf_overrides`` of the profile
    puts there. The weights are rounded, for half of the size.
    """
    tensors = {f"mtp.{name}": t for name, t in drafter.state_dict().items()}
    own = {
        "architectures": ["ExaoneMoEForCausalLM"],
        "model_type": "exaone_moe",
        "num_hidden_layers": SHAPE.target_layers,
        "num_nextn_predict_layers": MTP_MODULES,
        "layer_types": ["full_attention"] * SHAPE.target_layers,
        "mlp_layer_types": ["dense"] * SHAPE.target_layers,
        "dtype": "bfloat16",
    }
    _save(folder, tensors, own)


def export_all(
    target: Target, drafters: dict[str, Any], windowed: Target, hybrid: Qwen3NextForCausalLM, root: Path
) -> dict[str, str]:
    """Write every checkpoint below ``root``; return the SHA-256 of each weight file by folder name."""
    write_tokenizer(root / "tokenizer")
    export_target(target, root / "target")
    export_windowed(windowed, root / "windowed")
    export_hybrid(hybrid, root / "hybrid")
    export_eagle3(drafters["eagle3"], root / "eagle3")
    # Rounded, for half of the size.
    grouped = {"num_key_value_heads": WINDOWED.kv_heads, "dtype": "bfloat16"}
    export_eagle3(drafters["windowed-eagle3"], root / "windowed-eagle3", grouped)
    export_dflash(drafters["dflash"], root / "dflash")
    export_mtp(drafters["mtp"], target, root / "mtp")
    export_modules(drafters["mtp3"], root / "mtp3")
    export_hybrid_mtp(drafters["hybrid-mtp"], hybrid, root / "hybrid-mtp")
    names = ("target", "eagle3", "dflash", "mtp", "mtp3", "windowed", "windowed-eagle3", "hybrid", "hybrid-mtp")
    return {name: sha256_file(root / name / "model.safetensors") for name in names}


def total_size(root: Path) -> int:
    """Bytes of all weight files below ``root``."""
    return sum(p.stat().st_size for p in root.rglob("*.safetensors"))
