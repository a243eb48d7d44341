"""The kinds of recorded runs. Folders of all kinds have the same files, but only a plain run (``harness run``) can be
resumed, merged, or taken as evidence about the engines."""

from __future__ import annotations

from harness.errors import UsageError
from harness.history.folder import History
from harness.history.records import RunRecord

_WHY = {
    "soak": "its answers were given under load, round after round, and only the soak as a whole has a verdict",
    "control": "faults were installed in its engines, and switched off",
    "drill": "a fault was injected while it was recorded",
}


def require_plain(history: History) -> None:
    """Raise UsageError for the record of a soak or a fault test."""
    kind = history.run.kind
    if kind != "run":
        raise UsageError(
            f"{history.folder}: this is a run of `harness {kind}`: {_WHY[kind]}; name one of `harness run`"
        )


def notices_of(run: RunRecord) -> list[str]:
    """Return the remarks on the record's kind that a judgement must include."""
    if run.kind == "soak":
        whole = f"ended with {run.came_to}" if run.came_to else "has no verdict"
        return [f"a soak: the cells show only its last round; the soak as a whole {whole}, and this run is no better"]
    return []
