"""A night as a GitHub Actions workflow."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from harness.ci.plan import (
    AUDIT_COMMAND,
    AUDIT_MINUTES,
    TRIES,
    Environments,
    Night,
    Step,
    dump,
    environments,
    head_of,
    require_plain,
)
from harness.errors import UsageError

ACTIONS: dict[str, tuple[str, str]] = {
    "actions/checkout": ("11bd71901bbe5b1630ceea73d27597364c9af683", "v4.2.2"),
    "actions/upload-artifact": ("ea165f8d65b6e75b540449e92b4886f43607fa02", "v4.6.2"),
    "actions/download-artifact": ("d3f86a106a0bac45b974a628896c90dbdf5c8093", "v4.3.0"),
}
"""Every action that is used: its commit, and the release that this is."""
_RUNNERS = {"cpu": ("ubuntu-24.04",), "gpu": ("self-hosted", "linux", "x64", "gpu")}
_CRON = re.compile(r"[0-9A-Za-z*/,\-]+(?: [0-9A-Za-z*/,\-]+){4}")
_KEPT_DAYS = 30


class Options(NamedTuple):
    """Where and when the jobs run."""

    runners: tuple[str, ...] = ()
    """Labels; none takes those of the profile's device."""
    verdict_runner: str = "ubuntu-24.04"
    schedule: str = "17 2 * * *"
    hf_token: bool = False
    image: str | None = None
    gpus: str | None = None


def render(night: Night, options: Options) -> str:
    """The workflow as YAML. Raises UsageError for options that cannot be."""
    if not _CRON.fullmatch(options.schedule):
        raise UsageError(f"--schedule: expected five fields of cron, such as '17 2 * * *', found {options.schedule!r}")
    for label in (*options.runners, options.verdict_runner):
        require_plain("--runner", label)
    name = f"nightly-{night.profile.name}"
    recording = options.runners or _RUNNERS[night.extra]
    env = environments(night, options.image, options.gpus, list(recording) == [options.verdict_runner])
    document = {
        "name": name,
        "on": {"schedule": [{"cron": options.schedule}], "workflow_dispatch": {}},
        "permissions": {"contents": "read"},
        "concurrency": {"group": name, "cancel-in-progress": False},
        **({"env": env.shared} if env.shared else {}),
        "jobs": {
            **{s.name: _part(s, night, options, env) for s in night.steps},
            "verdict": _verdict(night, options, env),
            "audit": _audit(options),
        },
    }
    pins = [f"  {action} {commit} is {version}" for action, (commit, version) in ACTIONS.items()]
    return dump([*head_of(night, "github"), "Actions are pinned by commit:", *pins], document)


def _uses(action: str) -> str:
    return f"{action}@{ACTIONS[action][0]}"


def _checkout() -> dict[str, Any]:
    return {"name": "Check out", "uses": _uses("actions/checkout"), "with": {"persist-credentials": False}}


def _keep(name: str, folder: str) -> dict[str, Any]:
    return {
        "name": "Keep the record",
        "if": "always()",
        "uses": _uses("actions/upload-artifact"),
        "with": {
            # A job that is run again by hand must not meet its own artifact.
            "name": f"{name}-attempt-${{{{ github.run_attempt }}}}",
            "path": folder,
            "if-no-files-found": "warn",
            "retention-days": _KEPT_DAYS,
        },
    }


def _part(step: Step, night: Night, options: Options, env: Environments) -> dict[str, Any]:
    labels = list(options.runners or _RUNNERS[night.extra])
    record: dict[str, Any] = {"name": "Record", "run": night.record_command(step, TRIES)}
    if options.hf_token:
        record["env"] = {"HF_TOKEN": "${{ secrets.HF_TOKEN }}"}
    return {
        "name": step.title,
        "runs-on": labels[0] if len(labels) == 1 else labels,
        "timeout-minutes": TRIES * step.timeout_minutes,
        **({"env": env.recording} if env.recording else {}),
        "steps": [_checkout(), record, _keep(step.name, f"reports/{step.name}/")],
    }


def _audit(options: Options) -> dict[str, Any]:
    return {
        "name": "audit of the dependencies",
        "runs-on": options.verdict_runner,
        "timeout-minutes": AUDIT_MINUTES,
        "steps": [_checkout(), {"name": "Audit", "run": AUDIT_COMMAND}],
    }


def _verdict(night: Night, options: Options, env: Environments) -> dict[str, Any]:
    fetch = {
        "name": "Fetch the parts",
        # Without a single part there is nothing to fetch; the verdict is UNKNOWN then, which the next step says.
        "continue-on-error": True,
        "uses": _uses("actions/download-artifact"),
        "with": {"pattern": "part-*", "path": "reports/parts"},
    }
    return {
        "name": "verdict",
        "needs": [s.name for s in night.steps],
        "if": "always()",
        "runs-on": options.verdict_runner,
        "timeout-minutes": 60,
        **({"env": env.judging} if env.judging else {}),
        "steps": [
            _checkout(),
            fetch,
            {"name": "Merge and judge", "run": night.merge_command},
            _keep("merged", "reports/merged/"),
        ],
    }
