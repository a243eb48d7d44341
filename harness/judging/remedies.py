"""What to do about a recorded run that has no baseline."""

from __future__ import annotations

from harness.baselines.lookup import record_with
from harness.errors import HarnessError
from harness.history.folder import History
from harness.profiles.load import is_here, read_profile, shipped_profile_names
from harness.prompts.model import load_prompts


def without_baseline(history: History, prompts_sha256: str, variant: str) -> str:
    """Return what to do about a variant of a run that was sent these prompts and has no baseline: record one, where
    that helps."""
    source = history.run.asked_for.source
    current = _current_prompts(source, variant)
    if current is not None and current != prompts_sha256:
        # A baseline that is recorded now has answers to other prompts.
        return (
            f"profile {source} has other prompts now: run it again, or judge the run by baselines of its own prompts "
            "(--baselines DIR)"
        )
    if is_here(source):
        return record_with(source)
    return f"{record_with('FILE')}: the run was recorded with profile {source}, which is not here"


def _current_prompts(source: str, variant: str) -> str | None:
    """Return the hash of the prompts that a shipped profile sends; None where it cannot be told."""
    if source not in shipped_profile_names():
        return None
    try:
        part = next((p for p in read_profile(source).written_parts if p.variant == variant), None)
        return load_prompts(part.workload.prompts).sha256 if part is not None else None
    except HarnessError:
        return None
