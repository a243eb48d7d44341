"""``harness prompts build``: prompt sets of each kind, and those that the recipes of a profile describe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer
from rich.table import Table

from harness.cli import completion
from harness.cli.help import HelpfulGroup
from harness.cli.options import ProfileOption, make_console
from harness.errors import EXIT_UNKNOWN, EnvironmentFault, HarnessError, UsageError

if TYPE_CHECKING:
    from harness.profiles.model import Profile, PromptRecipe
    from harness.prompts.datasets import Texts
    from harness.prompts.model import Layout, PromptSet, SizedStratum
    from harness.prompts.padded import Built


prompts_app = typer.Typer(cls=HelpfulGroup, no_args_is_help=True, help="Prompt sets.")
build_app = typer.Typer(
    cls=HelpfulGroup,
    no_args_is_help=True,
    help="Build a prompt set on and around block boundaries, and show how many prompts each stratum has.",
)
prompts_app.add_typer(build_app, name="build")

_BLOCK_SIZE, _LOOKAHEAD = 32, 4


class SetOptions(NamedTuple):
    """What a set of any kind is rendered with, and the lengths that it covers."""

    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder with tokenizer and chat template. Default: that of --for-profile."),
    ] = None
    for_profile: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            autocompletion=completion.profiles,
            help="Use the tokenizer, block size and lookahead of this profile.",
        ),
    ] = None
    block_size: Annotated[
        list[int] | None,
        typer.Option(
            min=8, metavar="N", help="KV block size of the strata. Repeatable: one set then covers all. Default: 32."
        ),
    ] = None
    lookahead: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            metavar="N",
            help="Lookahead of a method (DFlash: k + 1). Repeatable: natural prompts fill a stratum for each, the "
            "other kinds only for the largest. Default: 4.",
        ),
    ] = None
    max_blocks: Annotated[
        int,
        typer.Option(
            min=1, max=64, metavar="N", help="Maximum number of whole blocks in a prompt (of the largest block size)."
        ),
    ] = 5
    seed: Annotated[int, typer.Option(metavar="N", help="Seed for choosing words, texts and held-out halves.")] = 7
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Add as many again for the second stage of the normal tier.")
    ] = False

    def resolved(self, default: Path | None = None, per_length: int = 1) -> tuple[Path, Layout]:
        """Return the tokenizer's folder and the layout: as given, else the profile's, else the defaults.

        Raises UsageError without a folder, and when a lookahead does not fit into the smallest block.
        """
        profile = profile_without_prompts(self.for_profile) if self.for_profile is not None else None
        layout = layout_of(self.block_size, self.lookahead, profile)
        folder = self.tokenizer or (profile.tokenizer_folder if profile is not None else default)
        if folder is None:
            raise UsageError("name the tokenizer: --tokenizer DIR, or --for-profile PROFILE for that of a profile")
        if not (folder / "tokenizer_config.json").is_file():
            raise UsageError(
                f"--tokenizer {folder}: there is no tokenizer_config.json in it; name the folder of a tokenizer"
            )
        return folder, layout._replace(
            max_blocks=self.max_blocks, seed=self.seed, held_out=self.held_out, per_length=per_length
        )


class TextOptions(NamedTuple):
    """The texts that natural prompts are made of."""

    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A file of texts instead of the hub: .jsonl, .parquet, or plain text with one a line."
        ),
    ] = None
    dataset: Annotated[
        str | None, typer.Option(help="Dataset on the hub. Default: HuggingFaceH4/mt_bench_prompts.")
    ] = None
    config: Annotated[str | None, typer.Option(help="Configuration of the dataset.")] = None
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "train"
    column: Annotated[str, typer.Option(help="Column with a text, turns or messages; see --turns.")] = "prompt"
    turns: Annotated[
        Literal["first", "all"],
        typer.Option(
            metavar="first|all",
            help="Of a conversation, use the first turn of its user, or all up to the last one, answers included.",
        ),
    ] = "first"
    revision: Annotated[str, typer.Option(help="Commit, tag or branch of the dataset.")] = "main"

    def read(self) -> Texts:
        """Read texts from the file or fetch them from the hub. Raises UsageError when both are given."""
        from harness.profiles.hub import Hub
        from harness.prompts.datasets import MT_BENCH, fetch_texts, read_texts

        if self.file is None:
            of = self.dataset or MT_BENCH
            return fetch_texts(of, self.config, self.split, self.column, self.revision, Hub(), self.turns)
        if self.dataset is not None:
            raise UsageError("--file and --dataset exclude each other; leave one out")
        return read_texts(self.file, self.column, self.turns)


OutOption = Annotated[Path, typer.Option("--out", metavar="FILE", help="File to write.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace sets that already exist.")]
PerLengthOption = Annotated[
    int,
    typer.Option(
        min=1, max=200, metavar="N", help="Prompts per length; `harness plan` says how many an effect size needs."
    ),
]


@build_app.command("copy")
def build_copy(
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="File to write. Default: prompts/probe.jsonl.")
    ] = None,
    overwrite: OverwriteOption = False,
    of: SetOptions,
    per_length: PerLengthOption = 1,
) -> None:
    """Build words to copy for the probe models, which were trained to do that; their tokenizer is the default."""
    from harness.prompts.model import build_probe_prompts
    from harness.prompts.probe_task import WEIGHTS
    from harness.util.paths import REPOSITORY

    path = out or REPOSITORY / "prompts" / "probe.jsonl"
    folder, layout = of.resolved(WEIGHTS / "tokenizer", per_length)
    require_writable(path, overwrite)
    _write(build_probe_prompts(folder, layout), path)


@build_app.command("echo")
def build_echo(
    *, out: OutOption, overwrite: OverwriteOption = False, of: SetOptions, per_length: PerLengthOption = 1
) -> None:
    """Build words to repeat for a real instruct model: every output token has a known place in its prompt."""
    from harness.prompts.echo import build_echo_prompts

    folder, layout = of.resolved(per_length=per_length)
    require_writable(out, overwrite)
    _write(build_echo_prompts(folder, layout), out)


@build_app.command("natural")
def build_natural(
    *,
    out: OutOption,
    overwrite: OverwriteOption = False,
    of: SetOptions,
    per_stratum: Annotated[
        int | None, typer.Option(min=1, max=5000, metavar="N", help="Prompts per stratum and block size. Default: 8.")
    ] = None,
    effect: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            max=100,
            metavar="POINTS",
            help="With --for-profile: build as many prompts as this effect size (percentage points) needs.",
        ),
    ] = None,
    texts: TextOptions,
    day: Annotated[
        str | None, typer.Option("--date", metavar="YYYY-MM-DD", help="The date for chat templates that contain one.")
    ] = None,
) -> None:
    """Build questions that people asked, for a real instruct model, padded until they fill every stratum."""
    from harness.prompts.padded import build_natural_prompts

    folder, layout = of.resolved()
    require_writable(out, overwrite)
    count = count_per_stratum(per_stratum, of.for_profile, effect)
    date_of_templates = parse_day(day)
    built = build_natural_prompts(folder, texts.read(), layout, count, date_of_templates)
    print_shortages(built, count)
    _write(built.prompts, out, built.dropped)


@build_app.command("recipe")
def build_recipe(
    profile: ProfileOption,
    file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A file of texts in place of those that the recipes name.")
    ] = None,
    overwrite: OverwriteOption = False,
) -> None:
    """Build the sets that the recipes (workload.recipe) of a profile describe.

    One that cannot be built does not stop the others; the exit code is 2 then. Sets that are there are kept.
    """
    parts = parts_with_recipes(profile)
    if not parts:
        raise UsageError(
            f"--profile {profile}: the profile has no recipe for prompts (workload.recipe); write one, or build a "
            f"set of a kind, for example with `harness prompts build natural --for-profile {profile}`"
        )
    raise typer.Exit(build_recipes(parts, file, overwrite))


def require_writable(path: Path, overwrite: bool) -> None:
    """Raise UsageError, before anything is built, for a place where no set can be written: a folder that is not there,
    another file, or a set that is there and must not be replaced."""
    from harness.prompts.model import is_prompt_set

    if not path.absolute().parent.is_dir():
        raise UsageError(f"--out {path}: there is no folder {path.absolute().parent}; make it, or name another one")
    if not path.exists():
        return
    if not is_prompt_set(path):
        raise UsageError(f"--out {path}: this file exists and is no prompt set; name another one, or remove it")
    if not overwrite:
        raise UsageError(
            f"{path}: this prompt set exists, and baselines may belong to it; name another file with --out FILE, or "
            "replace it with --overwrite"
        )


def _write(prompts: PromptSet, path: Path, dropped: Mapping[str, int] | None = None) -> None:
    """Write a set and say what is in it. ``dropped`` counts the texts that were left out, by reason."""
    from harness.prompts.model import write_prompts

    write_prompts(prompts, path)
    print_coverage(prompts)
    for reason, number in (dropped or {}).items():
        typer.echo(f"{number} texts left out: {reason}")
    typer.echo(f"{len(prompts.prompts)} prompts: {path}")


def parts_with_recipes(name: str) -> list[Profile]:
    """Return the parts of a profile whose prompt sets have a recipe, one part per set."""
    from harness.profiles.availability import localise
    from harness.profiles.load import read_profile

    parts = [localise(p, name) for p in read_profile(name).written_parts if p.workload.recipe is not None]
    return list({p.workload.prompts: p for p in reversed(parts)}.values())


def build_recipes(parts: Sequence[Profile], file: Path | None, overwrite: bool) -> int:
    """Build the prompt set of each part from its recipe and return the exit code.

    ``file`` replaces the texts of the recipe; the shipped questions do where the hub does not answer. A set that cannot
    be built does not stop the others. Existing sets are kept unless ``overwrite`` is set, because baselines belong to
    them.
    """
    from harness.prompts.model import load_prompts, write_prompts
    from harness.prompts.padded import build_from_recipe

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
                typer.echo(f"{path} already exists with {len(kept.prompts)} prompts; --overwrite rebuilds it")
                continue
            texts = texts_of_recipe(recipe, file)
            built = build_from_recipe(folder, texts, recipe)
        except HarnessError as error:
            typer.echo(f"{path}: not built: {error}")
            code = max(code, EXIT_UNKNOWN)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if recipe.per_stratum is not None:
            print_shortages(built, recipe.per_stratum)
        for what in built.lacking:
            typer.echo(f"scenario prompts: not made: {what}")
        write_prompts(built.prompts, path)
        typer.echo(f"{len(built.prompts.prompts)} prompts: {path}")
    return code


def texts_of_recipe(recipe: PromptRecipe, file: Path | None) -> Texts:
    """Return the texts that a recipe asks for, or those of ``file``. Where the hub is asked and does not answer, say so
    and return the questions that the project ships."""
    from harness.prompts.datasets import read_texts, shipped_texts

    if (own := file or recipe.file) is not None:
        option = "--file" if file is not None else "workload.recipe.file"
        advice = "correct workload.recipe.column of the profile"
        return read_texts(own, recipe.column, recipe.turns, option, advice)
    named = (recipe.dataset, recipe.config, recipe.split, recipe.column, recipe.turns, recipe.revision or "")
    try:
        return TextOptions(None, *named).read()
    except EnvironmentFault as error:
        typer.echo(
            f"the data set {recipe.dataset} is not available ({str(error).partition(';')[0]}); using the questions of "
            "this project instead, as the set's origin says. To use your own, name a file: workload.recipe.file in the "
            "profile, or --file FILE --overwrite here",
            err=True,
        )
        texts = shipped_texts(recipe.turns)
        instead = f"{texts.source.dataset} of this project, in place of {recipe.dataset}"
        return texts._replace(source=texts.source.model_copy(update={"dataset": instead}))


def profile_without_prompts(name: str) -> Profile:
    """Load a profile whose prompts need not exist yet."""
    from harness.profiles.availability import localise
    from harness.profiles.load import read_profile

    return localise(read_profile(name, with_prompts=False), name)


def layout_of(block_sizes: list[int] | None, lookaheads: list[int] | None, profile: Profile | None) -> Layout:
    """Return the block sizes and lookaheads to cover: as given, else the profile's, else the defaults.

    Raises UsageError when a lookahead does not fit into the smallest block.
    """
    from harness.prompts.model import Layout

    sizes = tuple(dict.fromkeys(block_sizes or [profile.engine.block_size if profile else _BLOCK_SIZE]))
    wanted = lookaheads or ([m.lookahead for m in profile.methods] if profile else [_LOOKAHEAD])
    largest, *smaller = sorted(set(wanted), reverse=True)
    if largest >= min(sizes):
        raise UsageError(
            f"--lookahead {largest}: a lookahead has to be smaller than a block (--block-size {min(sizes)})"
        )
    # Below 2, the lookahead stratum has no length of its own.
    more = tuple(n for n in smaller if n > 1)
    return Layout(block_size=sizes[0], lookahead=largest, more_sizes=sizes[1:], more_lookaheads=more)


def count_per_stratum(given: int | None, source: str | None, effect: float | None) -> int:
    """Return the number of prompts per stratum: as given, as ``effect`` needs in the profile ``source``, or 8."""
    if given is not None and effect is not None:
        raise UsageError("--per-stratum and --effect exclude each other; leave one out")
    if effect is None:
        return given or 8
    if source is None:
        raise UsageError("--effect needs --for-profile NAME, the profile that is to show this effect; add it")
    from harness.judging.power import per_stratum
    from harness.workload.prepare import prepare

    prompts = profile_without_prompts(source).workload.prompts
    if not prompts.is_file():
        raise UsageError(
            f"--effect: the profile's prompt set {prompts} does not exist, and the tests depend on it; build a first "
            "one with --per-stratum"
        )
    return per_stratum(prepare(source, ()), effect)


def parse_day(given: str | None) -> date:
    """Parse ``--date``; without one, return the date that prompt sets have by default."""
    from harness.prompts.chat import DATE

    if given is None:
        return DATE
    try:
        return date.fromisoformat(given)
    except ValueError as error:
        raise UsageError(f"--date {given!r} is not a date; write it as YYYY-MM-DD") from error


_SHORT_QUESTION = 4
"""Tokens that the shortest question has beyond a single word, at least."""


def print_shortages(built: Built, wanted: int) -> None:
    """Print the strata that have fewer prompts than wanted. A prompt within its first block is no shortage where the
    chat template leaves no room for a question there."""
    from harness.prompts.lengths import Stratum
    from harness.prompts.padded import coverage

    held = bool(built.prompts.held_out)
    for row in coverage(built.prompts):
        if row.key.stratum is Stratum.SUB_BLOCK and row.key.block_size < built.shortest + _SHORT_QUESTION:
            continue
        found = min(row.cold, row.held_out) if held else row.cold
        if found < wanted:
            typer.echo(
                f"block size {row.key.block_size}, {_stratum_name(row.key)}: expected {wanted} prompts, found {found}: "
                "too few texts have such a length; give more texts, or longer ones"
            )


def _stratum_name(key: SizedStratum) -> str:
    # Only in this stratum does the lookahead matter to a reader.
    return f"{key.stratum} {key.lookahead}" if key.stratum == "lookahead" else key.stratum.value


def print_coverage(prompts: PromptSet) -> None:
    """Print a table of the number of prompts per stratum."""
    from harness.prompts.padded import coverage

    table = Table(title="prompts per stratum", title_justify="left")
    for name in ("block size", "stratum", "cold", "held out", "whole blocks"):
        table.add_column(name, justify="left" if name in ("stratum", "whole blocks") else "right")
    for row in coverage(prompts):
        blocks = ", ".join(map(str, row.blocks)) or "–"
        table.add_row(str(row.key.block_size), _stratum_name(row.key), str(row.cold), str(row.held_out), blocks)
    make_console(120).print(table)
