"""``harness init``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.errors import UsageError


def init_command(
    target: Annotated[
        str, typer.Option("--target", metavar="MODEL", help="A folder, or a name on the hub: Qwen/Qwen3-4B[@REVISION].")
    ],
    drafter: Annotated[
        str | None, typer.Option("--drafter", metavar="MODEL", help="The model that drafts, named in the same way.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option("--tokenizer", metavar="MODEL", help="The tokenizer, if it is not beside the target.")
    ] = None,
    method: Annotated[
        str, typer.Option("--method", help="Speculation method as vLLM calls it: eagle3, dflash, mtp, ngram, …")
    ] = "none",
    drafts: Annotated[int | None, typer.Option("-k", metavar="N", help="Drafts per step. Default: 3.")] = None,
    device: Annotated[str, typer.Option("--device", metavar="cpu|gpu", help="What the engines run on.")] = "gpu",
    block_size: Annotated[
        int | None,
        typer.Option("--block-size", min=8, max=1024, help="Tokens of a KV block. Default: 16 on GPU, 32 on CPU."),
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the profile. Default: that of the target, in lower case.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="File to write, never over another. Default: print it.")
    ] = None,
) -> None:
    """Write a profile for a model and its drafter: harness init --target Qwen/Qwen3-4B > mine.yaml.

    Models of the hub are pinned to the commit that they have now, if the hub answers. Prompts and baselines of the
    profile go into folders beside the file; `harness run -p FILE --prepare` makes them.
    """
    from harness.commands.init import Device, Wanted, new_profile
    from harness.profiles.hub import Hub

    if device not in ("cpu", "gpu"):
        raise UsageError(f"--device {device}: expected cpu or gpu")
    on: Device = "cpu" if device == "cpu" else "gpu"
    written = new_profile(Wanted(target, drafter, method, drafts, on, block_size, name, tokenizer), out, Hub())
    if out is None:
        typer.echo(written.text, nl=False)
    else:
        with out.open("x", encoding="utf-8") as file:
            file.write(written.text)
        typer.echo(f"{out}: read it, then: harness run -p {out} --prepare")
    for note in written.notes:
        typer.echo(f"harness: {note}", err=True)
