"""Describe a split run to CI systems, whose steps run ``ci/part.sh`` and ``ci/merge.sh`` with environment variables."""

from __future__ import annotations

from typing import Any

from harness.commands.ci.plan import MachineStep, SplitRun


def github_matrix(run: SplitRun) -> dict[str, Any]:
    """Return ``strategy.matrix`` for the workflow ``ci/github/nightly.yaml``: one entry per part."""
    include = [
        {
            "part": step.name,
            "title": step.title,
            "profile": run.source,
            "cells": _cells(step),
            "device": run.device,
            "gpus": step.gpus,
            "fetch": run.fetches,
            "record": run.record,
            "timeout_minutes": step.timeout_minutes,
        }
        for step in run.steps
    ]
    return {"include": include}


def buildkite_pipeline(run: SplitRun, queue: str, verdict_queue: str, smoke: SplitRun | None = None) -> dict[str, Any]:
    """Return the steps that ``ci/plan.sh`` uploads: one per part, and the verdict; before them those of the smoke
    stage, without whose PASS no part starts. In ``queue``, ``{gpus}`` stands for the number of GPUs of a step."""
    first = [_smoking(step, smoke, _queue(queue, step)) for step in smoke.steps] if smoke is not None else []
    gate = {"depends_on": [s["key"] for s in first]} if first else {}
    parts = [_recording(step, run, _queue(queue, step)) | gate for step in run.steps]
    return {"steps": [*first, *parts, _verdict(run, verdict_queue)]}


def _queue(queue: str, step: MachineStep) -> str:
    return queue.replace("{gpus}", str(step.gpus))


def _cells(step: MachineStep) -> str:
    """Join the cell ids, none of which contains a blank or a pattern character."""
    return " ".join(c.id for c in step.cells)


def _recording(step: MachineStep, run: SplitRun, queue: str) -> dict[str, Any]:
    return {
        "label": step.title,
        "key": step.name,
        "command": "ci/part.sh",
        "env": {
            "HARNESS_PART": step.name,
            "HARNESS_PROFILE": run.source,
            "HARNESS_CELLS": _cells(step),
            "HARNESS_EXTRA": run.device,
            "HARNESS_FETCH": "true" if run.fetches else "false",
            "HARNESS_RECORD": "true" if run.record else "false",
        },
        "agents": {"queue": queue},
        "artifact_paths": [f"reports/{step.name}/**/*"],
        "timeout_in_minutes": step.timeout_minutes,
        "soft_fail": False,
        # A second try could hide what the first one met.
        "retry": {"automatic": False},
    }


def _smoking(step: MachineStep, run: SplitRun, queue: str) -> dict[str, Any]:
    """Return a step that is judged by itself and whose record is no part of the night."""
    own = _recording(step._replace(name=f"smoke-{step.name}"), run, queue)
    return {**own, "env": {**own["env"], "HARNESS_SMOKE": "true"}}


def _verdict(run: SplitRun, queue: str) -> dict[str, Any]:
    return {
        "label": "verdict",
        "key": "verdict",
        "depends_on": [{"step": s.name, "allow_failure": True} for s in run.steps],
        "allow_dependency_failure": True,
        "command": "ci/merge.sh",
        "env": {
            "HARNESS_PROFILE": run.source,
            "HARNESS_CELLS": " ".join(run.patterns),
            "HARNESS_RECORD": "true" if run.record else "false",
        },
        "agents": {"queue": queue},
        "artifact_paths": ["reports/baselines/**/*" if run.record else "reports/merged/**/*"],
        "timeout_in_minutes": 60,
        "soft_fail": False,
        "retry": {"automatic": False},
    }
