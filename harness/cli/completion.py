"""Values that a shell completes: profiles, cells, scenarios, faults, runs and findings.

Nothing here raises: whoever presses Tab wants words or none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from harness.errors import HarnessError
from harness.util.paths import DEFAULT_OUT

if TYPE_CHECKING:
    from harness.profiles.model import Profile

_SHIPPED = Path(__file__).resolve().parents[1] / "profiles"


def profile_names() -> list[str]:
    """Return the names of the shipped profiles, without reading them."""
    return sorted(path.stem for path in _SHIPPED.glob("*.yaml"))


def profiles(incomplete: str) -> list[str]:
    """Complete a shipped profile, or the path of a YAML file."""
    folder, _, begun = incomplete.rpartition("/")
    here = Path(folder or ("/" if incomplete.startswith("/") else "."))
    try:
        paths = sorted(p for p in here.glob(f"{begun}*") if p.suffix in (".yaml", ".yml") or p.is_dir())
    except (OSError, ValueError):
        paths = []
    prefix = incomplete[: len(incomplete) - len(begun)]
    return [*_begun(profile_names(), incomplete), *(f"{prefix}{p.name}{'/' * p.is_dir()}" for p in paths)]


def cells(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a cell of the profile that was given."""
    from harness.profiles.cells import all_cells

    return _begun(_of_profile(ctx, lambda profile: (cell.id for cell in all_cells(profile))), incomplete)


def scenarios(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a scenario of the profile that was given."""
    return _begun(_of_profile(ctx, lambda p: ("cold", *(s.id for part in p.parts for s in part.scenarios))), incomplete)


def faults(incomplete: str) -> list[tuple[str, str]]:
    """Complete a fault that can be injected, with what it is."""
    from harness.mutants.catalogue import MUTANTS

    return [(m.id, m.title) for m in MUTANTS.values() if m.id.startswith(incomplete)]


def runs(incomplete: str) -> list[str]:
    """Complete a recorded run in the default folder, newest first."""
    found = [DEFAULT_OUT / "latest", *sorted((p.parent for p in DEFAULT_OUT.glob("*/run.json")), reverse=True)]
    return _begun(dict.fromkeys(_short(path) for path in found if path.is_dir()), incomplete)


def runs_or_findings(incomplete: str) -> list[str]:
    """Complete a recorded run, or a finding of the latest one."""
    return [*runs(incomplete), *_findings(DEFAULT_OUT / "latest", incomplete)]


def findings(ctx: typer.Context, incomplete: str) -> list[str]:
    """Complete a finding of the run that was given."""
    return _findings(Path(ctx.params.get("run_dir") or DEFAULT_OUT / "latest"), incomplete)


def _findings(run: Path, incomplete: str) -> list[str]:
    try:
        judged = json.loads((run / "judgement.json").read_text(encoding="utf-8"))
        return _begun(dict.fromkeys(_ids(judged)), incomplete)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return []


def _ids(judged: dict[str, list[dict[str, list[dict[str, list[dict[str, str | None]]]]]]]) -> Iterable[str]:
    """Return the ids of the findings of a judgement, as ``Finding.id`` makes them."""
    for cell in judged["cells"]:
        for result in cell["results"]:
            for f in result["findings"]:
                scenario = None if f["scenario"] == "cold" else f["scenario"]
                names = (f["cell"], scenario, f["check"], f["part"] or f["prompt_id"], f["form"])
                yield "/".join(name for name in names if name)


def _short(path: Path) -> str:
    """Return a path as one would type it: relative to the current folder where it lies below."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _of_profile(ctx: typer.Context, names: Callable[[Profile], Iterable[str]]) -> list[str]:
    from harness.profiles.load import read_profile

    try:
        return list(dict.fromkeys(names(read_profile(ctx.params.get("profile") or "cpu"))))
    except HarnessError:
        return []


def _begun(words: Iterable[str], incomplete: str) -> list[str]:
    return [word for word in words if word.startswith(incomplete)]
