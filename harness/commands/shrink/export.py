"""``harness repro --shrink --export``: export the smallest case found, as a file and as the text of an issue."""

from __future__ import annotations

from pathlib import Path

from harness.commands.export.finding import Exported, Smallest, export
from harness.commands.shrink.run import Shrunk
from harness.engines.environment import engines_for
from harness.history.folder import load_history
from harness.workload.prepare import Prepared


def export_shrunk(
    shrunk: Shrunk,
    prepared: Prepared,
    found: tuple[Path | None, str | None],
    file: Path,
    issue: bool,
    engine_python: str | None,
) -> Exported:
    """Export the smallest case found; ``found`` is the run and the finding it comes from."""
    environment = engines_for(prepared.profile, prepared.plan, engine_python)
    run_dir, finding = found
    history = load_history(run_dir) if run_dir is not None else None
    case = shrunk.case(prepared)
    return export(case, environment, file, history, finding, issue, Smallest(shrunk.law, shrunk.observed))
