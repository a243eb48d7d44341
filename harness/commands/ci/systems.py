"""Describe a split run to CI systems, whose steps run ``ci/part.sh`` and ``ci/merge.sh`` with environment variables."""

from __future__ import annotations

import re
from typing import Any

from harness.commands.ci.plan import SplitRun, Step
from harness.errors import EXIT_UNKNOWN, UsageError

TRIES = 2
"""Tries of a part: one that could not record everything is repeated once."""


def github_matrix(run: SplitRun, gpus: str | None = None) -> dict[str, Any]:
    """Return ``strategy.matrix`` for the workflow ``ci/github/nightly.yaml``: one entry per part.

    ``gpus`` is the number of GPUs for a part that runs in a container, or ``all``; None takes all for GPU profiles.
    Raises UsageError for any other text.
    """
    wanted = _gpus(run, gpus)
    include = [
        {
            "part": step.name,
            "title": step.title,
            "cells": _cells(step),
            "device": run.device,
            "gpus": wanted,
            "fetch": run.fetches,
            "tries": TRIES,
            "timeout_minutes": TRIES * step.timeout_minutes,
        }
        for step in run.steps
    ]
    return {"include": include}


def buildkite_pipeline(run: SplitRun, queue: str, verdict_queue: str, gpus: str | None = None) -> dict[str, Any]:
    """Return the steps that ``ci/plan.sh`` uploads: one per part, and the verdict. ``gpus`` as in ``github_matrix``."""
    wanted = _gpus(run, gpus)
    parts = [_recording(step, run, queue, wanted) for step in run.steps]
    return {"steps": [*parts, _verdict(run, queue, verdict_queue)]}


def _gpus(run: SplitRun, given: str | None) -> str:
    if given is not None and not re.fullmatch(r"all|[1-9][0-9]*", given):
        raise UsageError(f"--gpus: expected 'all' or a number, found {given!r}")
    return given or ("all" if run.device == "gpu" else "")


def _cells(step: Step) -> str:
    """Join the cell ids, none of which contains a blank or a pattern character."""
    return " ".join(c.id for c in step.cells)


def _recording(step: Step, run: SplitRun, queue: str, gpus: str) -> dict[str, Any]:
    return {
        "label": step.title,
        "key": step.name,
        "command": "ci/part.sh",
        "env": {
            "HARNESS_PART": step.name,
            "HARNESS_PROFILE": run.source,
            "HARNESS_CELLS": _cells(step),
            "HARNESS_EXTRA": run.device,
            "HARNESS_GPUS": gpus,
            "HARNESS_FETCH": "true" if run.fetches else "false",
        },
        "agents": {"queue": queue},
        "artifact_paths": [f"reports/{step.name}/**/*"],
        # Each try is a separate job.
        "timeout_in_minutes": step.timeout_minutes,
        "soft_fail": False,
        "retry": {"automatic": [{"exit_status": EXIT_UNKNOWN, "limit": TRIES - 1}]},
    }


def _verdict(run: SplitRun, queue: str, verdict_queue: str) -> dict[str, Any]:
    return {
        "label": "verdict",
        "key": "verdict",
        "depends_on": [{"step": s.name, "allow_failure": True} for s in run.steps],
        "allow_dependency_failure": True,
        "command": "ci/merge.sh",
        "env": {
            "HARNESS_PROFILE": run.source,
            "HARNESS_CELLS": " ".join(run.patterns),
            # Judging needs no GPU, but on the machines of the parts it can share their environment.
            "HARNESS_EXTRA": run.device if queue == verdict_queue else "cpu",
        },
        "agents": {"queue": verdict_queue},
        "artifact_paths": ["reports/merged/**/*"],
        "timeout_in_minutes": 60,
        "soft_fail": False,
        "retry": {"automatic": False},
    }
