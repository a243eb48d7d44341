"""A GGUF file of the Llama architecture as a folder for vLLM: weights, configs, tokenizer and chat template."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.errors import ProfileError
from harness.profiles.gguf_file import GgufFile
from harness.profiles.model_reference import Form
from harness.util.safetensors_file import Tensor, write_safetensors

_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHERS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.weight")
_CONTROL, _USER_DEFINED = 3, 4
"""Types of tokens that the text is searched for before it is split."""
_DIGITS: dict[str, Any] = {"type": "Digits", "individual_digits": True}
_BYTES: dict[str, Any] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "smollm": {"type": "Sequence", "pretokenizers": [_DIGITS, _BYTES]},
}
"""How a text is split before its pieces are, by ``tokenizer.ggml.pre``."""
_SPECIAL = (("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token"), ("unknown", "unk_token"))


class _Shape(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int

    @property
    def head(self) -> int:
        """Size of one head."""
        return self.hidden // self.heads


def converted_size(source: GgufFile) -> int:
    """Return about how many bytes the folder of a file has."""
    return sum(2 * math.prod(t.shape) for t in source.tensors.values()) + 50 * len(source.need(_TOKENS))


def write_folder(source: GgufFile, form: Form, folder: Path) -> None:
    """Write the model of a file into an empty folder; the same file gives the same bytes everywhere.

    Raises ProfileError for what it does not know how to convert, and OSError when the folder cannot be written.
    """
    _require_llama(source)
    shape = _shape(source)
    tensors = [*_tensors(source, shape), *(_zero_biases(shape) if form == "qwen2" else ())]
    config = _config(source, shape, form)
    tokenizer = _tokenizer(source)
    write_safetensors(folder / "model.safetensors", tensors)
    _write(folder / "config.json", json.dumps(config, indent=2))
    ids = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write(folder / "generation_config.json", json.dumps(ids))
    _write(folder / "tokenizer.json", json.dumps(tokenizer, ensure_ascii=False))
    settings = _tokenizer_settings(source)
    _write(folder / "tokenizer_config.json", json.dumps(settings, indent=2, ensure_ascii=False))
    if "chat_template" in settings:
        _write(folder / "chat_template.jinja", settings["chat_template"])


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode())


def _unfit(source: GgufFile, expected: str, found: object) -> ProfileError:
    return ProfileError(f"{source.what}: expected {expected}, found {found}; name another file")


def _require_llama(source: GgufFile) -> None:
    """Raise ProfileError for a file that is none of the Llama architecture, or has something that would be lost."""
    for key, expected in (("general.architecture", "llama"), ("tokenizer.ggml.model", "gpt2")):
        if (found := source.need(key)) != expected:
            raise _unfit(source, f"{key} {expected}", found)
    if (pre := source.need("tokenizer.ggml.pre")) not in _PRE_TOKENIZERS:
        raise _unfit(source, f"tokenizer.ggml.pre among {', '.join(_PRE_TOKENIZERS)}", pre)
    if source.get("tokenizer.ggml.add_bos_token"):
        raise _unfit(source, "a tokenizer that adds no token in front", "add_bos_token true")
    if (scaling := source.get("llama.rope.scaling.type")) not in (None, "none"):
        raise _unfit(source, "rotary positions without scaling", scaling)


def _shape(source: GgufFile) -> _Shape:
    heads = source.need("llama.attention.head_count")
    kv_heads = source.get("llama.attention.head_count_kv") or heads
    shape = _Shape(source.need("llama.block_count"), source.need("llama.embedding_length"), heads, kv_heads)
    rotated = source.get("llama.rope.dimension_count")
    if shape.hidden % heads or rotated not in (None, shape.head):
        raise _unfit(source, "heads that share the hidden size and are rotated as a whole", f"{shape}, {rotated}")
    return shape


def _tensors(source: GgufFile, shape: _Shape) -> Iterator[Tensor]:
    for found in source.tensors.values():
        if found.name in _OTHERS:
            yield source.as_tensor(found, _OTHERS[found.name])
            continue
        named = _IN_LAYER.fullmatch(found.name)
        if named is None or named[2] not in _LAYER:
            raise _unfit(source, "the tensors of a plain Llama model", found.name)
        heads = {"attn_q": shape.heads, "attn_k": shape.kv_heads}.get(named[2])
        change = None if heads is None else partial(unpermuted, heads=heads)
        yield source.as_tensor(found, f"model.layers.{named[1]}.{_LAYER[named[2]]}.weight", change)


def unpermuted(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Return projections of queries or keys [heads * size, hidden] with the halves of each head one after the other.

    llama.cpp rotates neighbours and stores the rows so: 0, half, 1, half + 1, … of each head.
    """
    rows = weights.shape[0]
    pairs = weights.reshape(heads, rows // heads // 2, 2, -1)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weights.shape)


def _zero_biases(shape: _Shape) -> Iterator[Tensor]:
    """Yield the biases that Qwen2 has and Llama has not."""
    for layer in range(shape.layers):
        for part, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            size = heads * shape.head
            zeros = partial(np.zeros, size, np.uint16)
            yield Tensor(f"model.layers.{layer}.self_attn.{part}_proj.bias", "BF16", (size,), zeros)


def _config(source: GgufFile, shape: _Shape, form: Form) -> dict[str, Any]:
    def number(key: str) -> float:
        # As it was before it was rounded to float32.
        return float(f"{source.need(key):.6g}")

    config = {
        "architectures": ["LlamaForCausalLM" if form == "llama" else "Qwen2ForCausalLM"],
        "model_type": form,
        "vocab_size": len(source.need(_TOKENS)),
        "hidden_size": shape.hidden,
        "intermediate_size": source.need("llama.feed_forward_length"),
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "max_position_embeddings": source.need("llama.context_length"),
        "rms_norm_eps": number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": number("llama.rope.freq_base"),
        "hidden_act": "silu",
        "bos_token_id": source.need("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.need("tokenizer.ggml.eos_token_id"),
        "pad_token_id": source.get("tokenizer.ggml.padding_token_id"),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "dtype": "bfloat16",
    }
    if form == "llama":
        return config | {"attention_bias": False, "mlp_bias": False}
    # A drafter by multi-token prediction takes the number of its layers from the target's config.
    return config | {"num_nextn_predict_layers": 1}


_TOKENS = "tokenizer.ggml.tokens"


def _tokenizer(source: GgufFile) -> dict[str, Any]:
    """Return ``tokenizer.json``: byte-level BPE."""
    tokens, kinds = source.need(_TOKENS), source.need("tokenizer.ggml.token_type")
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[source.need("tokenizer.ggml.pre")],
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in source.need("tokenizer.ggml.merges")],
        },
    }


def _tokenizer_settings(source: GgufFile) -> dict[str, Any]:
    """Return ``tokenizer_config.json``, with the chat template if there is one."""
    tokens = source.need(_TOKENS)
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": source.need("llama.context_length"),
    }
    for key, name in _SPECIAL:
        number = source.get(f"tokenizer.ggml.{key}_token_id")
        if number is not None:
            settings[name] = tokens[number]
    if template := source.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return settings
