"""From a folder of conversations to drafters at rest, with what is recorded about them."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from harness.util.files import sha256_file, write_json
from tools.drafters import export, measure, texts
from tools.drafters.networks import MTP, DFlash, Drafter, Eagle3, tokens_of
from tools.drafters.target import Target
from tools.drafters.texts import Conversation
from tools.drafters.train import Recipe, Training, coverage, frequent, items, train, words_of

NAMES = ("eagle3", "mtp", "dflash")
Log = Callable[[str], None]


def make(name: str, target: Target, vocabulary: torch.Tensor) -> Drafter:
    if name == "eagle3":
        return Eagle3(target, vocabulary)
    return MTP(target) if name == "mtp" else DFlash(target)


def describe(conversations: Sequence[Conversation]) -> dict[str, Any]:
    """Return the counts of each part of the data: how much there is, and how much of it differs."""
    out = {}
    for part in ("train", "validation", "test"):
        mine = [c for c in conversations if c.part == part]
        answers = [tuple(c.ids[a:b].tolist()) for c in mine for a, b in c.spans]
        out[part] = {
            "conversations": len(mine),
            "distinct_conversations": len({c.turns for c in mine}),
            "distinct_first_questions": len({c.turns[0] for c in mine}),
            "topics": len({(c.kind, c.topic) for c in mine}),
            "answers": len(answers),
            "distinct_answers": len(set(answers)),
            "answer_tokens": sum(map(len, answers)),
        }
    return out


def train_one(
    name: str, target_folder: Path, data: Path, checkpoint: Path, seconds: float, log: Log, entry: float | None = None
) -> None:
    """Train a drafter and write ``checkpoint`` whenever its loss on held-out topics was the lowest so far.

    With ``entry``, go on from the checkpoint, at this share of the schedule; there may be more text than it has seen.
    """
    recipe = Recipe()
    torch.manual_seed(recipe.seed)
    target = Target(target_folder)
    conversations = texts.read(data)
    counts = describe(conversations)
    parts = {part: items(conversations, part) for part in ("train", "validation", "test")}
    del conversations
    size = recipe.vocabulary if name == "eagle3" else recipe.loss_words
    vocabulary = frequent(parts["train"], size, target.vocab)
    covered = {part: round(coverage(some, vocabulary), 4) for part, some in parts.items()}
    log(f"{counts['train']}, vocabulary covers {covered}")
    drafter = make(name, target, vocabulary)
    training = Training(drafter, target, recipe, words_of(vocabulary, target.vocab))
    begun, trained = time.monotonic(), 0
    runs = [{"seconds": seconds, "entry": entry}]
    if entry is not None:
        made = torch.load(checkpoint, weights_only=True)
        drafter.load_state_dict(revised(made["weights"], drafter.state_dict()))
        training.steps, trained = made["record"]["steps"], made["record"]["seconds"]
        training.entered_at, training.curve = training.steps, made["record"]["curve"]
        runs = [*made["record"]["runs"], *runs]

    def save() -> None:
        made = {
            "weights": training.best,
            "vocabulary": vocabulary,
            "record": {
                "data": counts,
                "vocabulary_covers": covered,
                "recipe": recipe._asdict(),
                "steps": training.steps,
                "seconds": trained + round(time.monotonic() - begun),
                "runs": runs,
                "curve": training.curve,
                "torch": str(torch.__version__),
            },
        }
        torch.save(made, checkpoint.with_suffix(".partial"))
        checkpoint.with_suffix(".partial").rename(checkpoint)

    chosen = random.Random(recipe.seed).sample(
        parts["validation"], min(recipe.validation_items, len(parts["validation"]))
    )
    train(training, parts["train"], chosen, seconds, save, log, entry or 0.0)


def revised(weights: dict[str, torch.Tensor], fresh: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return trained weights for the vocabulary of ``fresh``: words that a head did not have keep their fresh rows."""
    if "d2t" not in weights:
        return weights
    tokens, before = tokens_of(fresh["d2t"]), tokens_of(weights["d2t"])
    place = torch.searchsorted(before, tokens).clamp(max=len(before) - 1)
    known = before[place] == tokens
    head = fresh["lm_head.weight"].clone()
    head[known] = weights["lm_head.weight"][place[known]]
    return {**weights, "d2t": fresh["d2t"], "lm_head.weight": head}


def write_one(name: str, target: Target, checkpoint: Path, root: Path) -> dict[str, Any]:
    """Write a trained drafter at rest below ``root``; return its part of the recipe."""
    made = torch.load(checkpoint, weights_only=True)
    drafter = make(name, target, made["vocabulary"])
    drafter.load_state_dict(made["weights"])
    export.write(name, export.tensors_of(drafter), export.config_of(drafter, target), root / name)
    file = root / name / "model.gguf"
    return {**made["record"], "bytes": file.stat().st_size, "sha256": sha256_file(file)}


def forecast(target: Target, root: Path, data: Path, log: Log) -> dict[str, Any]:
    """Return steps and acceptance of the expanded drafters on the test questions and on held-out topics."""
    out: dict[str, Any] = {name: {} for name in NAMES}
    conversations = texts.read(data)
    drafters = [export.load(root / name, target) for name in NAMES]
    for part in ("test", "validation"):
        answers = [(i.ids[: i.start].tolist(), i.ids[i.start :].tolist()) for i in items(conversations, part)]
        for name, counts in zip(NAMES, measure.count(drafters, target, answers), strict=True):
            out[name][part] = {"answers": len(answers), **counts.summary()}
            log(f"{name}, {part}: {out[name][part]}")
    return out


def data_commands(data: Path) -> list[str]:
    """Return the commands that wrote the files of a folder of conversations."""
    shares = sorted({tuple(re.findall(r"\d+", file.stem)[:2]) for file in data.glob("seed*-shard*.pt")})
    return [
        f"python -m tools.drafters data --target T --data D --seed {seed} --shard {shard}" for seed, shard in shares
    ]


def train_commands(runs: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Return the commands that trained the drafters, those that went on from a checkpoint behind the first ones."""
    out = []
    for name, mine in runs.items():
        for run in mine:
            entry = "" if run["entry"] is None else f" --entry {run['entry']}"
            where = "--target T --data D --checkpoints C"
            out.append(f"python -m tools.drafters train {name} {where} --seconds {run['seconds']:.0f}{entry}")
    return out


def build(target_folder: Path, data: Path, checkpoints: Path, root: Path, log: Log) -> None:
    """Write all trained drafters at rest, ``recipe.json`` and ``quality.json`` below ``root``."""
    target = Target(target_folder)
    records = {name: write_one(name, target, checkpoints / f"{name}.pt", root) for name in NAMES}
    quality = forecast(target, root, data, log)
    curves = {name: record.pop("curve") for name, record in records.items()}
    runs = {name: record.pop("runs") for name, record in records.items()}
    commands = [
        *data_commands(data),
        *train_commands(runs),
        "python -m tools.drafters build --target T --data D --checkpoints C",
    ]
    generation = texts.Limits()._asdict()
    write_json(root / "recipe.json", {"commands": commands, "generation": generation, "drafters": records})
    write_json(root / "quality.json", {"forecast": quality, "curves": curves})
