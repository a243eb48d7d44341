"""``harness prompts``: the options of building prompt sets. What they do is in ``harness.cli.prompt_sets``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli import completion
from harness.cli.help import HelpfulGroup
from harness.errors import UsageError

prompts_app = typer.Typer(cls=HelpfulGroup, no_args_is_help=True, help="Prompt sets.")

_NATURAL = "Natural prompts"
_KINDS = ("copy", "echo", "natural")


# Without a callback, typer makes the only command of a group the group itself.
@prompts_app.callback()
def _group() -> None:
    """Prompt sets."""


@prompts_app.command("build")
def build(
    context: typer.Context,
    kind: Annotated[
        str,
        typer.Option(
            "--kind",
            metavar="copy|echo|natural",
            help="'copy' for the probe models; for real instruct models 'echo' (words to repeat) or 'natural' "
            "(questions that people asked).",
        ),
    ] = "copy",
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            "--tokenizer",
            metavar="DIR",
            help="Folder with tokenizer and chat template; needed for 'echo' and 'natural'.",
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write. Default: prompts/probe.jsonl.")
    ] = None,
    block_size: Annotated[
        list[int] | None,
        typer.Option(
            min=8, metavar="N", help="KV block size of the strata. Repeatable: one set then covers all. Default: 32."
        ),
    ] = None,
    lookahead: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Lookahead of a method (DFlash: k + 1). Repeatable: natural prompts fill a stratum for each, the "
            "other kinds only for the largest. Default: 4.",
        ),
    ] = None,
    max_blocks: Annotated[
        int,
        typer.Option(
            min=1, max=64, metavar="N", help="Maximum number of whole blocks in a prompt (of the largest block size)."
        ),
    ] = 5,
    seed: Annotated[int, typer.Option(metavar="N", help="Seed for choosing words, texts and held-out halves.")] = 7,
    per_length: Annotated[
        int,
        typer.Option(
            min=1,
            max=200,
            metavar="N",
            help="copy, echo: prompts per length; `harness plan` says how many an effect size needs.",
        ),
    ] = 1,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Add as many again for the second stage of the normal tier.")
    ] = False,
    per_stratum: Annotated[
        int | None,
        typer.Option(
            "--per-stratum",
            metavar="N",
            rich_help_panel=_NATURAL,
            min=1,
            max=5000,
            help="Prompts per stratum and block size. Default: 8.",
        ),
    ] = None,
    for_profile: Annotated[
        str | None,
        typer.Option(
            "--for-profile",
            metavar="PROFILE",
            autocompletion=completion.profiles,
            help="Use the tokenizer, block size and lookahead of this profile; alone, build the sets of its recipes.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="With recipes: rebuild sets that already exist.")
    ] = False,
    effect: Annotated[
        float | None,
        typer.Option(
            "--effect",
            metavar="POINTS",
            rich_help_panel=_NATURAL,
            min=0.01,
            max=100,
            help="With --for-profile: build as many prompts as this effect size (percentage points) needs.",
        ),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file", rich_help_panel=_NATURAL, help="A .jsonl or .parquet file of texts, instead of the hub."
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset", rich_help_panel=_NATURAL, help="Dataset on the hub. Default: HuggingFaceH4/mt_bench_prompts."
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", rich_help_panel=_NATURAL, help="Configuration of the dataset.")
    ] = None,
    split: Annotated[str, typer.Option("--split", rich_help_panel=_NATURAL, help="Split of the dataset.")] = "train",
    column: Annotated[
        str,
        typer.Option(
            "--column", rich_help_panel=_NATURAL, help="Column with a text, turns or messages; the first turn is used."
        ),
    ] = "prompt",
    revision: Annotated[
        str, typer.Option("--revision", rich_help_panel=_NATURAL, help="Commit, tag or branch of the dataset.")
    ] = "main",
    day: Annotated[
        str | None,
        typer.Option(
            "--date",
            metavar="YYYY-MM-DD",
            rich_help_panel=_NATURAL,
            help="The date for chat templates that contain one.",
        ),
    ] = None,
) -> None:
    """Build a prompt set on and around block boundaries, and show how many prompts each stratum has."""
    from harness.cli import prompt_sets
    from harness.prompts.model import build_probe_prompts, write_prompts
    from harness.prompts.probe_task import WEIGHTS
    from harness.util.paths import REPOSITORY

    if kind not in _KINDS:
        raise UsageError(f"--kind {kind!r}: expected {', '.join(_KINDS)}")
    if for_profile is not None and tokenizer is None and out is None:
        parts = prompt_sets.parts_with_recipes(for_profile)
        if parts:
            _require_alone(context, for_profile)
            raise typer.Exit(prompt_sets.build_recipes(parts, file, overwrite))
    profile = prompt_sets.profile_without_prompts(for_profile) if for_profile is not None else None
    layout = prompt_sets.layout_of(block_size, lookahead, profile)._replace(
        max_blocks=max_blocks, seed=seed, per_length=per_length, held_out=held_out
    )
    folder = tokenizer or (profile.tokenizer_folder if profile is not None else None)
    dropped: dict[str, int] = {}
    if kind == "copy":
        path = out or REPOSITORY / "prompts" / "probe.jsonl"
        prompts = build_probe_prompts(folder or WEIGHTS / "tokenizer", layout)
    else:
        if folder is None or out is None:
            raise UsageError(
                f"--kind {kind}: expected --tokenizer DIR (or --for-profile) and --out FILE, found one of them missing"
            )
        if not (folder / "tokenizer_config.json").is_file():
            raise UsageError(f"--tokenizer {folder}: expected a folder with tokenizer_config.json, found none")
        path = out
        if kind == "echo":
            from harness.prompts.echo import build_echo_prompts

            prompts = build_echo_prompts(folder, layout)
        else:
            from harness.prompts.padded import build_natural_prompts

            count = prompt_sets.count_per_stratum(per_stratum, for_profile, effect)
            read_day = prompt_sets.parse_day(day)
            texts = prompt_sets.texts_of(file, dataset, config, split, column, revision)
            prompts, dropped = build_natural_prompts(folder, texts, layout, count, read_day)
            prompt_sets.print_shortages(prompts, count)
    write_prompts(prompts, path)
    prompt_sets.print_coverage(prompts)
    for reason, number in dropped.items():
        typer.echo(f"{number} texts left out: {reason}")
    typer.echo(f"{len(prompts.prompts)} prompts: {path}")


def _require_alone(context: typer.Context, profile: str) -> None:
    """Raise UsageError for options that building from a recipe would ignore."""
    used = {"for_profile", "file", "overwrite"}
    given = [n for n in context.params if str(context.get_parameter_source(n)).endswith("COMMANDLINE")]
    if ignored := [f"--{n.replace('_', '-')}" for n in given if n not in used]:
        raise UsageError(
            f"--for-profile {profile}: expected its recipes (workload.recipe) to determine the prompts, found "
            f"{', '.join(ignored)} too; change the recipe, or build one set with --out FILE"
        )
