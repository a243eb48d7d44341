"""``harness prompts``: building prompt sets."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from harness.errors import UsageError

if TYPE_CHECKING:
    from harness.config import Profile
    from harness.natural import Built
    from harness.prompts import Layout, PromptSet, SizedStratum
    from harness.texts import Texts

prompts_app = typer.Typer(no_args_is_help=True, help="Prompt sets.")

_KINDS = ("copy", "echo", "natural")
_BLOCK_SIZE, _LOOKAHEAD = 32, 4


# A group of one command would otherwise be the command itself.
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
            help="'copy' for the probe models; for real instruct models 'echo' (words to repeat) or 'natural' "
            "(questions that people asked).",
        ),
    ] = "copy",
    tokenizer: Annotated[
        Path | None,
        typer.Option("--tokenizer", help="Folder with tokenizer and chat template; needed for 'echo' and 'natural'."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="File to write. Default: prompts/probe.jsonl.")] = None,
    block_size: Annotated[
        list[int] | None,
        typer.Option(
            min=8, help="KV block size that the strata refer to. Repeatable: one set then covers all. Default: 32."
        ),
    ] = None,
    lookahead: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Lookahead of a method (DFlash: k + 1). Repeatable: natural prompts fill the stratum of each, the "
            "others that of the largest. Default: 4.",
        ),
    ] = None,
    max_blocks: Annotated[
        int, typer.Option(min=1, max=64, help="Most whole blocks of a prompt (of the largest block size).")
    ] = 5,
    seed: Annotated[int, typer.Option(help="Seed of the choice of words, texts and halves.")] = 7,
    per_length: Annotated[
        int,
        typer.Option(
            min=1,
            max=200,
            help="copy, echo: prompts per length; `harness plan` says how many a wanted effect needs.",
        ),
    ] = 1,
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Add as many again for the second stage of the normal tier.")
    ] = False,
    per_stratum: Annotated[
        int | None,
        typer.Option("--per-stratum", min=1, max=5000, help="natural: prompts per stratum and block size. Default: 8."),
    ] = None,
    for_profile: Annotated[
        str | None,
        typer.Option(
            "--for-profile",
            help="Take tokenizer, block size and lookahead of this profile; alone, build the sets of its recipes.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Build the sets of recipes anew that are there already.")
    ] = False,
    effect: Annotated[
        float | None,
        typer.Option(
            "--effect",
            min=0.01,
            max=100,
            help="natural, with --for-profile: as many prompts as a change of so many points needs.",
        ),
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", help="natural: a .jsonl or .parquet file of texts, without a hub.")
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", help="natural: data set of the hub. Default: HuggingFaceH4/mt_bench_prompts."),
    ] = None,
    config: Annotated[str | None, typer.Option("--config", help="natural: configuration of the data set.")] = None,
    split: Annotated[str, typer.Option("--split", help="natural: split of the data set.")] = "train",
    column: Annotated[
        str, typer.Option("--column", help="natural: column with a text, turns or messages; the first turn is taken.")
    ] = "prompt",
    revision: Annotated[
        str, typer.Option("--revision", help="natural: commit, tag or branch of the data set.")
    ] = "main",
    day: Annotated[
        str | None,
        typer.Option("--date", metavar="YYYY-MM-DD", help="natural: the day that templates with a date in them say."),
    ] = None,
) -> None:
    """Write a prompt set on and around block boundaries, and show how many prompts each stratum has."""
    from harness.prompts import write_prompts

    if kind not in _KINDS:
        raise UsageError(f"--kind {kind!r}: expected {', '.join(_KINDS)}")
    if for_profile is not None and tokenizer is None and out is None and (parts := _with_recipes(for_profile)):
        _require_alone(context, for_profile)
        raise typer.Exit(_build_recipes(parts, file, overwrite))
    profile = _profile(for_profile) if for_profile is not None else None
    layout = _layout(block_size, lookahead, profile)._replace(
        max_blocks=max_blocks, seed=seed, per_length=per_length, held_out=held_out
    )
    folder = tokenizer or (profile.tokenizer_folder if profile is not None else None)
    if kind == "copy":
        prompts, path = _copies(folder, layout), out or _default_out()
        dropped: dict[str, int] = {}
    else:
        if folder is None or out is None:
            raise UsageError(
                f"--kind {kind}: expected --tokenizer DIR (or --for-profile) and --out FILE, found one of them missing"
            )
        if not (folder / "tokenizer_config.json").is_file():
            raise UsageError(f"--tokenizer {folder}: expected a folder with tokenizer_config.json, found none")
        path = out
        if kind == "echo":
            prompts, dropped = _echoes(folder, layout), {}
        else:
            count = _per_stratum(per_stratum, for_profile, effect)
            read_day = _day(day)
            built = _natural(folder, _texts(file, dataset, config, split, column, revision), layout, count, read_day)
            prompts, dropped = built.prompts, built.dropped
            _tell_short(prompts, count)
    write_prompts(prompts, path)
    _show(prompts)
    for reason, number in dropped.items():
        typer.echo(f"{number} texts left out: {reason}")
    typer.echo(f"{len(prompts.prompts)} prompts: {path}")


def _with_recipes(name: str) -> list[Profile]:
    """The parts of a profile whose prompt sets have a recipe, one for each set."""
    from harness.config import read_profile
    from harness.hub import localise

    parts = [localise(p, name) for p in read_profile(name).written_parts if p.workload.recipe is not None]
    return list({p.workload.prompts: p for p in reversed(parts)}.values())


def _require_alone(context: typer.Context, profile: str) -> None:
    """Raise UsageError for options that a recipe would leave unheard."""
    heard = {"for_profile", "file", "overwrite"}
    given = [n for n in context.params if str(context.get_parameter_source(n)).endswith("COMMANDLINE")]
    if ignored := [f"--{n.replace('_', '-')}" for n in given if n not in heard]:
        raise UsageError(
            f"--for-profile {profile}: expected its recipes (workload.recipe) to say what is built, found "
            f"{', '.join(ignored)} too; change the recipe, or build one set with --out FILE"
        )


def _build_recipes(parts: Sequence[Profile], file: Path | None, overwrite: bool) -> int:
    """Build each set as its recipe says, from ``file`` where there is no hub; one that cannot be built does not hide
    the others. Sets that are there are kept unless told otherwise: baselines belong to them. Returns the exit code."""
    from harness.errors import EXIT_UNKNOWN, HarnessError
    from harness.natural import DATE
    from harness.prompts import Layout, load_prompts, write_prompts

    code = 0
    for part in parts:
        recipe, path = part.workload.recipe, part.workload.prompts
        if recipe is None:
            continue
        try:
            folder = part.tokenizer_folder
            if path.is_file() and not overwrite:
                kept = load_prompts(path)
                kept.check_tokenizer(folder, path)
                typer.echo(f"{len(kept.prompts)} prompts are there already: {path}; --overwrite builds them anew")
                continue
            texts = _texts(
                file, None if file else recipe.dataset, recipe.config, recipe.split, recipe.column, recipe.revision
            )
            built = _natural(folder, texts, Layout.of_recipe(recipe), recipe.per_stratum, DATE)
        except HarnessError as error:
            typer.echo(f"{path}: not built: {error}")
            code = max(code, EXIT_UNKNOWN)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        _tell_short(built.prompts, recipe.per_stratum)
        write_prompts(built.prompts, path)
        typer.echo(f"{len(built.prompts.prompts)} prompts: {path}")
    return code


def _profile(name: str) -> Profile:
    from harness.config import read_profile
    from harness.hub import localise

    return localise(read_profile(name, with_prompts=False), name)


def _layout(block_sizes: list[int] | None, lookaheads: list[int] | None, profile: Profile | None) -> Layout:
    from harness.prompts import Layout

    sizes = tuple(dict.fromkeys(block_sizes or [profile.engine.block_size if profile else _BLOCK_SIZE]))
    wanted = lookaheads or ([m.lookahead for m in profile.methods] if profile else [_LOOKAHEAD])
    largest, *smaller = sorted(set(wanted), reverse=True)
    if largest >= min(sizes):
        raise UsageError(f"--lookahead: expected less than --block-size {min(sizes)}, found {largest}")
    # Below 2 there is no length that only a lookahead makes special.
    more = tuple(n for n in smaller if n > 1)
    return Layout(block_size=sizes[0], lookahead=largest, more_sizes=sizes[1:], more_lookaheads=more)


def _default_out() -> Path:
    from harness.config import REPOSITORY

    return REPOSITORY / "prompts" / "probe.jsonl"


def _copies(folder: Path | None, layout: Layout) -> PromptSet:
    from harness.probe.build import WEIGHTS
    from harness.prompts import build_probe_prompts

    return build_probe_prompts(folder or WEIGHTS / "tokenizer", layout)


def _echoes(folder: Path, layout: Layout) -> PromptSet:
    from harness.echo import build_echo_prompts

    return build_echo_prompts(folder, layout)


def _natural(folder: Path, texts: Texts, layout: Layout, count: int, day: date) -> Built:
    from harness.natural import build_natural_prompts

    return build_natural_prompts(folder, texts, layout, count, day)


def _texts(file: Path | None, dataset: str | None, config: str | None, split: str, column: str, revision: str) -> Texts:
    from harness.hub import Hub
    from harness.texts import MT_BENCH, fetch_texts, read_texts

    if file is not None and dataset is not None:
        raise UsageError("expected --file or --dataset, found both")
    if file is not None:
        return read_texts(file, column)
    return fetch_texts(dataset or MT_BENCH, config, split, column, revision, Hub())


def _per_stratum(given: int | None, source: str | None, effect: float | None) -> int:
    if given is not None and effect is not None:
        raise UsageError("expected --per-stratum or --effect, found both")
    if effect is None:
        return given or 8
    if source is None:
        raise UsageError("--effect: expected --for-profile NAME with it, found none")
    from harness.operations import prepare
    from harness.sensitivity import per_stratum

    prompts = _profile(source).workload.prompts
    if not prompts.is_file():
        raise UsageError(
            f"--effect: expected the profile's prompt set {prompts}, from which the tests are known, found none; build "
            "a first one with --per-stratum"
        )
    return per_stratum(prepare(source, ()), effect)


def _day(given: str | None) -> date:
    from harness.natural import DATE

    if given is None:
        return DATE
    try:
        return date.fromisoformat(given)
    except ValueError as error:
        raise UsageError(f"--date {given!r}: expected a day as YYYY-MM-DD, found something else") from error


def _tell_short(prompts: PromptSet, wanted: int) -> None:
    from harness.natural import coverage

    held = bool(prompts.held_out)
    for row in coverage(prompts):
        found = min(row.cold, row.held_out) if held else row.cold
        if found < wanted:
            typer.echo(
                f"block size {row.key.block_size}, {_words(row.key)}: expected {wanted} prompts, found {found}: too "
                "few texts reach such a length"
            )


def _words(key: SizedStratum) -> str:
    """Of the strata, only this one depends on the lookahead in a way that matters to a reader."""
    return f"{key.stratum} {key.lookahead}" if key.stratum == "lookahead" else key.stratum.value


def _show(prompts: PromptSet) -> None:
    from harness.natural import coverage

    table = Table(title="prompts per stratum", title_justify="left")
    for name in ("block size", "stratum", "cold", "held out", "whole blocks"):
        table.add_column(name, justify="left" if name in ("stratum", "whole blocks") else "right")
    for row in coverage(prompts):
        blocks = ", ".join(map(str, row.blocks)) or "–"
        table.add_row(str(row.key.block_size), _words(row.key), str(row.cold), str(row.held_out), blocks)
    Console(width=None if sys.stdout.isatty() else 120).print(table)
