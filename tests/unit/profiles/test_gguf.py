"""GGUF files as model folders: names, values, tokenizers; the cache; and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from harness.errors import EnvironmentFault, ModelUnavailableError, ProfileError
from harness.profiles import at_rest, converted
from harness.profiles.availability import localise, unavailable
from harness.profiles.gguf_file import GgufFile
from harness.profiles.gguf_llama import unpermuted, write_folder
from harness.profiles.load import load_profile, read_profile
from harness.profiles.model_reference import FolderAtRest, local_folder
from harness.util.files import model_hash, sha256_file
from tests.support import gguf_models
from tests.support.builders import extending
from tests.support.gguf_models import HEADS, HIDDEN, KV_HEADS, LAYERS, llama, llama_tensors


def quiet(_: str) -> None:
    """Say nothing."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kv-acceptance-harness" / "models"


def folder_from(tmp_path: Path, form: str = "qwen2", **changes) -> Path:
    llama(tmp_path / "m.gguf", **changes)
    out = tmp_path / f"{form}-folder"
    out.mkdir()
    write_folder(GgufFile(tmp_path / "m.gguf", "m.gguf"), form, out)
    return out


def rounded(name: str) -> torch.Tensor:
    values, kind = llama_tensors()[name]
    if kind is not None:
        values = gguf.dequantize(gguf.quants.quantize(values, kind), kind)
    return torch.from_numpy(values).to(torch.bfloat16)


# --- conversion -----------------------------------------------------------------------------------------------------


def test_values_are_dequantised_exactly_and_rounded_once(tmp_path):
    found = load_file(folder_from(tmp_path, "llama") / "model.safetensors")
    assert torch.equal(found["model.embed_tokens.weight"], rounded("token_embd.weight"))
    assert torch.equal(found["model.layers.1.mlp.down_proj.weight"], rounded("blk.1.ffn_down.weight"))
    assert torch.equal(found["model.layers.0.input_layernorm.weight"], rounded("blk.0.attn_norm.weight"))
    assert len(found) == 2 + 9 * LAYERS and {t.dtype for t in found.values()} == {torch.bfloat16}


def test_rows_of_queries_and_keys_are_put_back(tmp_path):
    found = load_file(folder_from(tmp_path) / "model.safetensors")
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        ours, stored = found[f"model.layers.0.self_attn.{part}_proj.weight"], rounded(f"blk.0.attn_{part}.weight")
        size = HIDDEN // HEADS
        for head in range(heads):
            for row in range(size):
                half, pair = divmod(row, size // 2)
                assert torch.equal(ours[head * size + row], stored[head * size + 2 * pair + half])


def test_putting_back_undoes_what_llama_cpp_does():
    weights = np.arange(48, dtype=np.float32).reshape(12, 4)
    # LlamaModel.permute of llama.cpp's convert_hf_to_gguf.py.
    stored = weights.reshape(3, 2, 2, 4).swapaxes(1, 2).reshape(weights.shape)
    assert (unpermuted(stored, 3) == weights).all()
    eight = np.arange(8, dtype=np.float32)[:, None]
    assert unpermuted(eight, 1).ravel().tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_two_forms(tmp_path):
    plain, twin = folder_from(tmp_path, "llama"), folder_from(tmp_path, "qwen2")
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (plain, twin))
    assert ours["architectures"] == ["LlamaForCausalLM"] and ours["attention_bias"] is False
    assert theirs["architectures"] == ["Qwen2ForCausalLM"] and theirs["num_nextn_predict_layers"] == 1
    assert ours["rms_norm_eps"] == 1e-5 and ours["rope_theta"] == 100000 and ours["tie_word_embeddings"]
    one, other = (load_file(f / "model.safetensors") for f in (plain, twin))
    more = other.keys() - one.keys()
    assert len(more) == 3 * LAYERS and all(k.endswith("_proj.bias") and not other[k].any() for k in more)
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_own_output_weights_are_kept(tmp_path):
    tensors = llama_tensors()
    tensors["output.weight"] = tensors["token_embd.weight"]
    folder = folder_from(tmp_path, tensors=tensors)
    assert "lm_head.weight" in load_file(folder / "model.safetensors")
    assert not json.loads((folder / "config.json").read_text())["tie_word_embeddings"]


def test_tokenizer(tmp_path):
    # Two seconds, which every worker would pay while it collects.
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder_from(tmp_path))
    text = tokenizer.apply_chat_template([{"role": "user", "content": "ab a12"}], tokenize=False)
    assert text == "<|im_start|>ab a12<|im_end|>"
    assert tokenizer(text)["input_ids"] == [1, 8, 9, 5, 6, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.decode([8, 9, 5]) == "ab a1"


def test_same_file_gives_the_same_bytes(tmp_path):
    one = folder_from(tmp_path)
    (tmp_path / "second").mkdir()
    two = folder_from(tmp_path / "second")
    assert {p.name: p.read_bytes() for p in one.iterdir()} == {p.name: p.read_bytes() for p in two.iterdir()}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architecture": "gemma3"}, "expected general.architecture llama, found gemma3"),
        ({"tokenizer__ggml__model": "llama"}, "expected tokenizer.ggml.model gpt2, found llama"),
        ({"tokenizer__ggml__pre": "qwen2"}, "expected tokenizer.ggml.pre among smollm, found qwen2"),
        ({"tokenizer__ggml__add_bos_token": True}, "found add_bos_token true"),
        ({"llama__rope__scaling__type": "yarn"}, "without scaling, found yarn"),
        ({"llama__rope__dimension_count": 8}, "rotated as a whole"),
        ({"llama__block_count": None}, "expected llama.block_count in its metadata, found none"),
        ({"tensors": {**llama_tensors(), "rope_freqs.weight": (np.ones(8, np.float32), None)}}, "found rope_freqs"),
        ({"tensors": {**llama_tensors(), "output_norm.weight": (np.ones(64), None)}}, "can dequantise, found F64"),
    ],
)
def test_what_would_be_lost_is_refused(tmp_path, changes, words):
    with pytest.raises(ProfileError, match=rf"m\.gguf: .*{words}.*; name "):
        folder_from(tmp_path, **changes)


@pytest.mark.parametrize("cut", [0, 3, 100, 5000])
def test_damaged_files_are_told_in_a_sentence(tmp_path, cut):
    llama(tmp_path / "m.gguf")
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:cut])
    with pytest.raises(ProfileError, match="this GGUF file cannot be read"):
        GgufFile(tmp_path / "m.gguf", "m.gguf")
    (tmp_path / "m.gguf").write_text("no GGUF at all")
    with pytest.raises(ProfileError, match="GGUF magic invalid"):
        GgufFile(tmp_path / "m.gguf", "m.gguf")


# --- folders at rest ------------------------------------------------------------------------------------------------


def test_folder_is_expanded_with_its_values(tmp_path):
    folder = gguf_models.at_rest(tmp_path / "drafter")
    found = at_rest.expand(folder, quiet)
    read = load_file(found / "model.safetensors")
    assert read["d2t"].dtype is torch.int64 and read["d2t"].tolist() == [0, 7, 14, 21, 28]
    assert read["t2d"].dtype is torch.bool and read["t2d"].sum() == 5
    assert {read[k].dtype for k in ("midlayer.mlp.up_proj.weight", "norm.weight", "half.weight")} == {torch.bfloat16}
    assert read["midlayer.mlp.up_proj.weight"].shape == (8, 64)
    assert (found / "config.json").read_bytes() == (folder / "config.json").read_bytes()
    assert (found / "README.md").is_file() and not (found / "model.gguf").exists()


def test_folder_is_expanded_once_and_anew_after_a_change(tmp_path):
    folder, said = gguf_models.at_rest(tmp_path / "drafter"), []
    first = at_rest.expand(folder, said.append)
    assert at_rest.expand(folder, said.append) == first and len(said) == 1
    (folder / "config.json").write_text('{"architectures": ["Other"]}')
    assert at_rest.expanded(folder) is None
    assert at_rest.expand(folder, said.append) != first and len(said) == 2
    gguf_models.at_rest(folder, seed=1)
    assert at_rest.expanded(folder) is None


def test_identity_depends_on_no_path(tmp_path):
    one = at_rest.expand(gguf_models.at_rest(tmp_path / "one"), quiet)
    two = at_rest.expand(gguf_models.at_rest(tmp_path / "two"), quiet)
    plain = tmp_path / "plain"
    shutil.copytree(one, plain)
    assert one.name[4:] == two.name[4:] and model_hash(one) == model_hash(two) == model_hash(plain)


def test_truth_values_other_than_0_and_1_are_refused(tmp_path, cache):
    folder = gguf_models.at_rest(tmp_path / "drafter")
    gguf_models.write_gguf(folder / "model.gguf", {"t2d": (np.array([0, 2], np.int8), None)}, "eagle3")
    with pytest.raises(ProfileError, match=r"model\.gguf: expected 0 and 1 alone in t2d"):
        at_rest.expand(folder, quiet)
    assert not [p for p in cache.iterdir() if p.is_dir()]


def test_profile_with_a_folder_at_rest_is_planned_without_it(tmp_path):
    folder = gguf_models.at_rest(tmp_path / "drafter")
    source = extending(tmp_path, methods=[{"kind": "none"}, {"kind": "eagle3", "drafter": "drafter"}])
    drafter = load_profile(source).methods[1].drafter
    assert isinstance(drafter, FolderAtRest)
    assert "run `harness models --profile" in unavailable(load_profile(source))["eagle3"]
    with pytest.raises(ModelUnavailableError, match="has to be expanded in the cache"):
        local_folder(drafter, "drafter")
    expanded = at_rest.expand(folder, quiet)
    profile = load_profile(source)
    assert profile.methods[1].drafter == expanded and unavailable(profile) == {}
    found = profile.model_dump(mode="json")["sources"]["eagle3"]
    assert found == {"gguf": "drafter", "sha256": sha256_file(folder / "model.gguf"), "converter": converted.CONVERTER}


def test_profiles_with_plain_folders_are_not_touched():
    written = read_profile("cpu")
    assert localise(written) is written


# --- the cache ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["cut", "gone", "no manifest", "bad manifest"])
def test_damaged_entry_is_made_anew(tmp_path, harm):
    folder = gguf_models.at_rest(tmp_path / "drafter")
    found = at_rest.expand(folder, quiet)
    before = (found / "model.safetensors").read_bytes()
    if harm == "cut":
        (found / "model.safetensors").resolve().write_bytes(before[:-1])
    elif harm == "gone":
        (found / "config.json").unlink()
    elif harm == "no manifest":
        (found / converted.MANIFEST).unlink()
    else:
        (found / converted.MANIFEST).write_text("{")
    assert at_rest.expanded(folder) is None
    assert at_rest.expand(folder, quiet) == found and (found / "model.safetensors").read_bytes() == before


def test_changed_contents_are_found_by_their_hash(tmp_path):
    found = at_rest.expand(gguf_models.at_rest(tmp_path / "drafter"), quiet)
    assert converted.damaged(found) == []
    weights = (found / "model.safetensors").resolve()
    weights.write_bytes(b"x" + weights.read_bytes()[1:])
    assert converted.damaged(found) == ["model.safetensors"]


def test_what_a_killed_process_left_is_removed(tmp_path, cache):
    folder = gguf_models.at_rest(tmp_path / "drafter")
    left = cache / f".making-{at_rest._name(folder)}-dead"
    (left / "model").mkdir(parents=True)
    at_rest.expand(folder, quiet)
    assert not left.exists()


def test_cache_that_cannot_be_written(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(EnvironmentFault, match="set XDG_CACHE_HOME to a writable folder"):
        at_rest.expand(gguf_models.at_rest(tmp_path / "drafter"), quiet)


def test_disk_without_room(tmp_path, monkeypatch):
    monkeypatch.setattr(converted, "free", lambda: 10)
    with pytest.raises(EnvironmentFault, match=r"expected \d+ MB of free disk at .*; make room, or set XDG_CACHE_HOME"):
        at_rest.expand(gguf_models.at_rest(tmp_path / "drafter"), quiet)


def test_without_the_package_gguf(tmp_path, monkeypatch):
    monkeypatch.setattr(converted, "is_installed", lambda name: name != "gguf")
    with pytest.raises(EnvironmentFault, match=r"\(gguf among them\).*kv-acceptance-harness\[run\]"):
        at_rest.expand(gguf_models.at_rest(tmp_path / "drafter"), quiet)
