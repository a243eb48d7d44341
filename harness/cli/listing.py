"""``harness list``: the names that options and arguments take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from harness.cli import shapes
from harness.cli.help import HelpfulGroup
from harness.cli.options import (
    LATEST,
    BaselinesOption,
    JsonOption,
    KnownOption,
    ProfileOption,
    RunDir,
    make_console,
    print_json,
)

if TYPE_CHECKING:
    from harness.profiles.scenarios import Scenario

list_app = typer.Typer(
    cls=HelpfulGroup,
    no_args_is_help=True,
    help="List the names that options take: profiles, cells, scenarios, faults, and findings of a run.",
)


def _show(rows: Sequence[dict[str, Any]], title: str, as_json: bool) -> None:
    """Print rows, which all have the same keys, as a table or as JSON."""
    if as_json:
        print_json(rows)
        return
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(rows[0] if rows else ()):
        table.add_column(name.replace("_", " "), no_wrap=number == 0, overflow="fold")
    for row in rows:
        table.add_row(*(Text(_words(value)) for value in row.values()))
    make_console().print(table if rows else f"{title}: none")


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, list) else "" if value is None else str(value)


@list_app.command("profiles")
def list_profiles(as_json: JsonOption = False) -> None:
    """List the shipped profiles, which `--profile` takes; it also takes the path of a YAML file."""
    from harness.profiles.cells import all_cells
    from harness.profiles.load import read_profile, shipped_profile_names

    found = [read_profile(name) for name in shipped_profile_names()]
    rows = [
        {"profile": p.name, "device": p.engine.device, "cells": len(all_cells(p)), "description": p.description}
        for p in found
    ]
    _show(rows, "profiles", as_json)


@list_app.command("cells")
def list_cells(profile: ProfileOption = "cpu", as_json: JsonOption = False) -> None:
    """List the cells of a profile, which `--cell` selects."""
    from harness.profiles.cells import all_cells
    from harness.profiles.load import read_profile

    wanted = read_profile(profile)
    rows = [
        {
            "cell": cell.id,
            "topology": cell.topology,
            "method": cell.method.kind,
            "route": cell.route,
            "variant": cell.variant,
        }
        for cell in all_cells(wanted)
    ]
    _show(rows, f"cells of {wanted.name}", as_json)


def _unlike(scenario: Scenario, among: Iterable[Scenario]) -> str:
    """Return the settings in which a scenario differs from others of its kind, in brackets; which prompts it asks is no
    such setting."""
    others = [s for s in among if type(s) is type(scenario) and s.id != scenario.id]
    parts = []
    for key, value in scenario:
        values = value if isinstance(value, tuple) else (value,)
        told = key not in ("id", "prompts", "max_tokens") and all(isinstance(v, str | int | float) for v in values)
        if told and any(getattr(s, key) != value for s in others):
            parts.append(f"{key}: {', '.join(str(v).lower() for v in values) or 'nothing'}")
    return f" ({'; '.join(parts)})" if parts else ""


@list_app.command("scenarios")
def list_scenarios(profile: ProfileOption = "cpu", as_json: JsonOption = False) -> None:
    """List the scenarios of a profile, which `--scenario` selects."""
    from harness.profiles.load import read_profile

    wanted = read_profile(profile)
    cold: dict[str, Any] = {
        "scenario": "cold",
        "kind": "cold",
        "topologies": ["pd", "single"],
        "what": "Each prompt alone, with empty caches.",
    }
    found = {s.id: s for part in wanted.parts for s in part.scenarios}
    rows = [
        {
            "scenario": s.id,
            "kind": s.kind,
            "topologies": list(s.topologies),
            "what": " ".join((type(s).__doc__ or "").partition("\n\n")[0].split()) + _unlike(s, found.values()),
        }
        for s in found.values()
    ]
    _show([cold, *rows], f"scenarios of {wanted.name}", as_json)


@list_app.command("faults")
def list_faults(as_json: JsonOption = False) -> None:
    """List the faults that `--mutant` injects into engines, to show that the harness sees them."""
    from harness.mutants.catalogue import MUTANTS

    rows = [
        {"fault": m.id, "title": m.title, "origin": m.origin, "place": m.place, "historic": m.historic}
        for m in MUTANTS.values()
    ]
    _show(rows, "faults that can be injected", as_json)


@list_app.command("findings")
def list_findings(
    run_dir: RunDir = LATEST, baselines: BaselinesOption = None, known: KnownOption = None, as_json: JsonOption = False
) -> None:
    """List the findings of a recorded run, which `repro` and `bisect` take. The run is judged again; starts no engine.

    A finding that many requests have is listed with as many as the report names, and the number of the others.
    """
    from harness.judging.references import References
    from harness.reports.judge_run import check

    found = check(run_dir, References(baselines, known)).summary
    rows = [shapes.finding(f) for f in found.judgement.findings]
    if as_json:
        print_json(rows)
        return
    table = [
        {"finding": r["id"], "verdict": r["verdict"], "damage": r["damage"], "message": _line(r["message"], r["more"])}
        for r in rows
    ]
    _show(table, f"findings of {found.history.run.run_id}", as_json=False)


_MESSAGE = 160


def _line(message: str, more: int) -> str:
    """Return the beginning of a finding's message, and how many further requests have it."""
    text = " ".join(message.split())
    text = text if len(text) <= _MESSAGE else f"{text[: _MESSAGE - 1]}…"
    return f"{text} (and {more} more)" if more else text
