"""Drafters at rest: ``config.json`` as vLLM reads it, and ``model.gguf`` with matrices of 8 bit; their expansion."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from harness.util.files import write_json
from tools.drafters.networks import AUX, DFLASH_LAYERS, DRAFTS, MASK_TOKEN, MTP, DFlash, Drafter, Eagle3, tokens_of
from tools.drafters.target import Target

_BLOCK = 32
"""Numbers that share a scale in Q8_0."""
_SHARED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "hidden_act",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
_DESCRIPTIONS = {
    "eagle3": "EAGLE3 drafter of SmolLM2-135M-Instruct with a reduced vocabulary",
    "mtp": "One MTP layer (MiMo layout) for SmolLM2-135M-Instruct, without embeddings and head",
    "dflash": "DFlash drafter of SmolLM2-135M-Instruct, without embeddings and head",
}


def name_of(drafter: Drafter) -> str:
    """Return the method's name, which is that of the folder, too."""
    return {Eagle3: "eagle3", MTP: "mtp", DFlash: "dflash"}[type(drafter)]


def tensors_of(drafter: Drafter) -> dict[str, Tensor]:
    """Return the weights under the names of the checkpoint."""
    prefix = "model.mtp_layers.0." if isinstance(drafter, MTP) else ""
    return {prefix + name: tensor.detach() for name, tensor in drafter.state_dict().items()}


def config_of(drafter: Drafter, target: Target) -> dict[str, Any]:
    """Return the config with which vLLM builds the drafter."""
    shared = {key: target.config[key] for key in _SHARED}
    if isinstance(drafter, Eagle3):
        own: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "num_hidden_layers": 1,
            "draft_vocab_size": len(drafter.head()),
            "eagle_aux_hidden_state_layer_ids": list(AUX),
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX), "use_aux_hidden_state": True},
            "attention_bias": False,
            "mlp_bias": False,
        }
    elif isinstance(drafter, MTP):
        own = {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "qwen2",
            "num_hidden_layers": target.layer_count,
            "num_nextn_predict_layers": 1,
            "attention_bias": True,
        }
    else:
        own = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "num_hidden_layers": DFLASH_LAYERS,
            "block_size": DRAFTS + 1,
            "num_target_layers": target.layer_count,
            # vLLM counts layers here, so layer i is the stream behind i + 1 layers.
            "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [i - 1 for i in AUX]},
            "attention_bias": False,
        }
    return {**shared, **own, "tie_word_embeddings": False, "dtype": "bfloat16"}


def write(name: str, tensors: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path) -> None:
    """Write a drafter at rest: matrices as Q8_0 where their rows can be cut into blocks, everything else exactly."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", dict(config))
    writer = gguf.GGUFWriter(folder / "model.gguf", f"smollm2-{name}")
    writer.add_name(f"smollm2-135m-instruct-{name}")
    writer.add_license("apache-2.0")
    writer.add_description(_DESCRIPTIONS[name])
    for key, tensor in tensors.items():
        array = tensor.contiguous().numpy()
        if tensor.dim() > 1 and tensor.is_floating_point() and tensor.shape[-1] % _BLOCK == 0:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(key, gguf.quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a drafter at rest: floats as float32, exactly as stored, integers as they are."""
    out = {}
    for tensor in gguf.GGUFReader(folder / "model.gguf").tensors:
        if tensor.tensor_type in (gguf.GGMLQuantizationType.I64, gguf.GGMLQuantizationType.I32):
            out[tensor.name] = torch.from_numpy(np.array(tensor.data))
        else:
            out[tensor.name] = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
    return out


def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of the expanded form: floats rounded once to bfloat16."""
    return {n: t.to(torch.bfloat16) if t.is_floating_point() else t for n, t in tensors.items()}


def expand(folder: Path, out: Path) -> None:
    """Write the form that engines load: the same config, and the weights as bfloat16."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.json").write_text((folder / "config.json").read_text())
    save_file(rounded(read(folder)), str(out / "model.safetensors"), metadata={"format": "pt"})


def load(folder: Path, target: Target) -> Drafter:
    """Return the drafter that engines run: the expanded weights in float32."""
    tensors = {n: t.float() if t.is_floating_point() else t for n, t in rounded(read(folder)).items()}
    drafter: Drafter
    if "d2t" in tensors:
        drafter = Eagle3(target, tokens_of(tensors["d2t"]))
    else:
        drafter = DFlash(target) if "fc.weight" in tensors else MTP(target)
    drafter.load_state_dict({n.removeprefix("model.mtp_layers.0."): t for n, t in tensors.items()})
    return drafter
