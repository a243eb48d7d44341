"""``python -m tools.drafters``: train the drafters of SmolLM2-135M-Instruct."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from harness.cli.app import main

app = typer.Typer(name="drafters", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
ROOT = Path(__file__).parents[2] / "models" / "smollm2"
TESTS = ROOT / "test-questions.jsonl"
TargetOption = Annotated[Path, typer.Option("--target", help="Folder of the target (Qwen2 form).")]
DataOption = Annotated[Path, typer.Option("--data", help="Folder of the target's answers and streams.")]

CheckpointsOption = Annotated[Path, typer.Option("--checkpoints", help="Folder of trained weights.")]


@app.callback()
def commands() -> None:
    """The drafters of a small chat model, trained on text that it writes itself."""


def test_questions() -> list[str]:
    return [json.loads(line)["prompt"] for line in TESTS.read_text().splitlines()]


@app.command("data")
def data_command(
    target: TargetOption,
    data: DataOption,
    shard: Annotated[int, typer.Option(help="Which of two shares of the questions to ask.")] = 0,
    seconds: Annotated[float, typer.Option(help="When to stop.")] = 1200,
    seed: Annotated[
        int, typer.Option(help="1 asks the held-out topics and the test questions, too; others do not.")
    ] = 1,
) -> None:
    """Let the target answer questions, and keep its streams. Run it twice side by side, once per shard.

    Another seed asks about the same topics in other words, and adds its answers to the folder.
    """
    import torch

    from tools.drafters.questions import Question, questions
    from tools.drafters.target import Target
    from tools.drafters.texts import Limits, Prompts, Writer, write

    torch.set_num_threads(1)
    tests = test_questions()
    apart: list[tuple[str, Question]] = []
    if seed == 1 and shard == 0:
        apart = [("test", Question("test", text, (text,))) for text in tests]
    elif seed == 1:
        apart = [("validation", q) for q in questions(seed, tests, True)[:80]]
    asked = [*apart, *(("train", q) for q in questions(seed, tests, False)[shard::2])]
    limits = Limits(seed=2 * seed + shard - 1)
    with torch.inference_mode():
        writer = Writer(Target(target), Prompts(target / "tokenizer.json"), iter(asked), limits)
        write(writer, data, f"seed{seed}-shard{shard}", seconds, typer.echo)


@app.command("train")
def train_command(
    name: Annotated[str, typer.Argument(help="eagle3, mtp or dflash.")],
    target: TargetOption,
    data: DataOption,
    checkpoints: CheckpointsOption,
    seconds: Annotated[float, typer.Option(help="How long to train.")] = 1000,
    threads: int = 1,
    entry: Annotated[
        float | None, typer.Option(help="Go on from the checkpoint, at this share of the schedule (0 to 1).")
    ] = None,
) -> None:
    """Train one drafter; its best weights so far are in the folder of checkpoints."""
    import torch

    from tools.drafters.build import train_one

    torch.set_num_threads(threads)
    checkpoints.mkdir(parents=True, exist_ok=True)
    train_one(
        name, target, data, checkpoints / f"{name}.pt", seconds, lambda line: typer.echo(f"{name}: {line}"), entry
    )


@app.command("build")
def build_command(
    target: TargetOption,
    data: DataOption,
    checkpoints: CheckpointsOption,
    out: Annotated[Path, typer.Option("--out", help="Folder to write to. Default: the shipped weights.")] = ROOT,
) -> None:
    """Write the trained drafters at rest, their recipe and the forecast of their quality."""
    from tools.drafters.build import build

    build(target, data, checkpoints, out, typer.echo)


@app.command("measure")
def measure_command(
    drafter: Annotated[Path, typer.Argument(help="Folder with config.json and model.gguf.")],
    answers: Annotated[Path, typer.Argument(help="JSON lines with prompt_ids and answer_ids.")],
    target: TargetOption,
) -> None:
    """Print what an engine will count with this drafter while it writes these answers."""
    from tools.drafters import export, measure
    from tools.drafters.target import Target

    loaded = Target(target)
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    pairs = [(row["prompt_ids"], row["answer_ids"]) for row in rows]
    typer.echo(json.dumps(measure.count([export.load(drafter, loaded)], loaded, pairs)[0].summary()))


@app.command("expand")
def expand_command(drafter: Path, out: Path) -> None:
    """Write a drafter in the form that engines load."""
    from tools.drafters.export import expand

    expand(drafter, out)


if __name__ == "__main__":
    main(app)
