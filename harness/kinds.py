"""What a run was recorded for. Folders of all kinds have the same files; only a plain run (``harness run``) can be gone
on with, be part of a night, or stand for the engines as they are."""

from __future__ import annotations

from harness.errors import UsageError
from harness.history import History, RunRecord

_WHY = {
    "soak": "its answers were given under load, round after round, and only a whole soak has a verdict",
    "drill": "something was broken on purpose while it was recorded",
}


def require_plain(history: History) -> None:
    """Raises UsageError for the record of a soak or of a drill."""
    kind = history.run.kind
    if kind != "run":
        raise UsageError(
            f"{history.folder}: expected a run of `harness run`, found one of `harness {kind}`: {_WHY[kind]}; give a "
            "plain run"
        )


def notices_of(run: RunRecord) -> list[str]:
    """What a judgement of the record has to say of its kind."""
    if run.kind == "soak":
        whole = f"came to {run.came_to}" if run.came_to else "has no verdict"
        return [f"a soak: the cells show its last round alone; the whole of it {whole}, and this is no better"]
    return []
