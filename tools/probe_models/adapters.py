"""Train the LoRA adapters of the probe's target: each leaves out words of a prompt that the target repeats.

They change keys and values alone, so that the KV of a prompt says which adapter computed it: with another one's KV, the
answer has the other one's words.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from harness.prompts import probe_task
from harness.util.files import sha256_file, write_json
from tools.probe_models.networks import H, Target
from tools.probe_models.shapes import SHAPE
from tools.probe_models.train import Log, sample_batch, warm_cosine

MODULES = ("k_proj", "v_proj")
_FIRST_WORDS, _GROWTH, _LEARNT = 10, 1, 0.95
"""Words of the longest prompts at first, by how many they grow, and the share of right tokens from which they do."""


class AdapterRecipe(NamedTuple):
    """Everything that determines the weights of adapters; recorded with them."""

    seed: int = 20
    threads: int = 1
    rank: int = 8
    steps: int = 900
    peak_lr: float = 6e-3
    max_words: int = 225


class LowRank(nn.Module):
    """A projection of the target with a product of two small matrices added to it."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / H**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + F.linear(F.linear(x, self.down), self.up)
        return out


def shipped_target(root: Path) -> Target:
    """Return the target that was trained and written below ``root``."""
    target = Target()
    weights = load_file(str(root / "target" / "model.safetensors"))
    target.load_state_dict({n.removeprefix("model."): t for n, t in weights.items() if n.startswith("model.")})
    target.requires_grad_(False)
    return target


def _adapted(target: Target, rank: int) -> dict[str, LowRank]:
    """Put untrained adapters into a target; return them by the names of their projections."""
    added: dict[str, LowRank] = {}
    for number, layer in enumerate(target.layers):
        for name in MODULES:
            adapted = LowRank(getattr(layer.self_attn, name), rank)
            setattr(layer.self_attn, name, adapted)
            added[f"model.layers.{number}.self_attn.{name}"] = adapted
    return added


def conversations(adapter: str, batch: int, words: int) -> Tensor:
    """Return token ids of conversations as the target with an adapter has them."""
    ids = sample_batch(batch, words)[:, : words + probe_task.PROMPT_OVERHEAD]
    answers = [probe_task.expected_output(row, adapter) for row in ids.tolist()]
    return torch.cat((ids, torch.tensor(answers)), dim=1)


def train(adapter: str, root: Path, recipe: AdapterRecipe, log: Log) -> Mapping[str, LowRank]:
    """Train one adapter of the target below ``root``."""
    torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed + probe_task.ADAPTERS.index(adapter))
    target = shipped_target(root)
    added = _adapted(target, recipe.rank)
    params = [p for one in added.values() for p in (one.down, one.up)]
    optimizer = torch.optim.AdamW(params, lr=recipe.peak_lr, betas=(0.9, 0.98), weight_decay=0.0)
    start, longest = time.monotonic(), _FIRST_WORDS
    for step in range(recipe.steps):
        shortest = 4 if torch.rand(()) < 0.65 else max(4, longest * 2 // 3)
        words = int(torch.randint(shortest, longest + 1, ()))
        ids = conversations(adapter, max(4, 900 // words), words)
        logits = target.logits(target.streams(ids)[-1][:, words + probe_task.PROMPT_OVERHEAD - 1 : -1])
        labels = ids[:, words + probe_task.PROMPT_OVERHEAD :]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        for group in optimizer.param_groups:
            group["lr"] = recipe.peak_lr * warm_cosine(step, recipe.steps, 50, 0.6, 0.01)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        right = (logits.argmax(-1) == labels).float().mean().item()
        # Prompts grow as it learns: with longer ones from the beginning it learns nothing.
        longest = min(recipe.max_words, longest + _GROWTH) if right > _LEARNT else longest
        if step % 100 == 0 or step == recipe.steps - 1:
            log(
                f"{adapter} {step}/{recipe.steps} loss {loss.item():.5f} right {right:.4f} words {words} "
                f"t {time.monotonic() - start:.0f}s"
            )
    return added


def export(added: Mapping[str, LowRank], recipe: AdapterRecipe, folder: Path) -> None:
    """Write an adapter in the layout of PEFT, which vLLM loads."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.{n}.lora_A.weight": one.down.detach().contiguous() for n, one in added.items()}
    tensors |= {f"base_model.model.{n}.lora_B.weight": one.up.detach().contiguous() for n, one in added.items()}
    save_file(tensors, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": recipe.rank,
        "lora_alpha": recipe.rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(MODULES),
        "base_model_name_or_path": "target",
    }
    write_json(folder / "adapter_config.json", config)


def build(root: Path, log: Log) -> dict[str, Any]:
    """Train and write all adapters of the target below ``root``, and how they were made."""
    recipe, begun = AdapterRecipe(), time.monotonic()
    hashes = {}
    for adapter in probe_task.ADAPTERS:
        folder = root / probe_task.adapter_folder(adapter)
        export(train(adapter, root, recipe, log), recipe, folder)
        hashes[adapter] = sha256_file(folder / "adapter_model.safetensors")
    description = described(recipe, root, hashes, round(time.monotonic() - begun))
    write_json(root / probe_task.ADAPTERS_RECIPE, description)
    return description


def described(recipe: AdapterRecipe, root: Path, hashes: Mapping[str, str], seconds: int) -> dict[str, Any]:
    """Return how adapters were made, to be recorded beside the weights."""
    return {
        "recipe": recipe._asdict(),
        "modules": list(MODULES),
        "layers": SHAPE.target_layers,
        "words": {"first": _FIRST_WORDS, "growth": _GROWTH, "learnt": _LEARNT},
        "command": "python -m tools.probe_models adapters",
        "torch": torch.__version__,
        "training_seconds": seconds,
        "target_sha256": sha256_file(root / "target" / "model.safetensors"),
        "weights_sha256": dict(hashes),
    }
