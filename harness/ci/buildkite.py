"""A night as a Buildkite pipeline."""

from __future__ import annotations

from typing import Any, NamedTuple

from harness.ci.plan import (
    AUDIT_COMMAND,
    AUDIT_MINUTES,
    RETRY_ON,
    TRIES,
    Environments,
    Night,
    Step,
    dump,
    environments,
    head_of,
    require_plain,
)


class Options(NamedTuple):
    """Where the steps run."""

    queue: str = "default"
    verdict_queue: str = "default"
    image: str | None = None
    gpus: str | None = None


def render(night: Night, options: Options) -> str:
    """The pipeline as YAML, for ``buildkite-agent pipeline upload``. Raises UsageError for options that cannot be."""
    for what, text in (("--queue", options.queue), ("--verdict-queue", options.verdict_queue)):
        require_plain(what, text)
    env = environments(night, options.image, options.gpus, options.queue == options.verdict_queue)
    document = {
        **({"env": env.shared} if env.shared else {}),
        "steps": [
            *(_part(s, night, options, env) for s in night.steps),
            _verdict(night, options, env),
            _audit(options),
        ],
    }
    head = [
        *head_of(night, "buildkite"),
        "Upload it with `buildkite-agent pipeline upload`; a schedule belongs to the pipeline's settings in Buildkite.",
    ]
    return dump(head, _literal(document))


def _part(step: Step, night: Night, options: Options, env: Environments) -> dict[str, Any]:
    return {
        "label": step.title,
        "key": step.name,
        # Retries are Buildkite's affair: one try per job.
        "command": night.record_command(step, 1),
        **({"env": env.recording} if env.recording else {}),
        "agents": {"queue": options.queue},
        "artifact_paths": [f"reports/{step.name}/**/*"],
        "timeout_in_minutes": step.timeout_minutes,
        "soft_fail": False,
        "retry": {"automatic": [{"exit_status": RETRY_ON, "limit": TRIES - 1}]},
    }


def _verdict(night: Night, options: Options, env: Environments) -> dict[str, Any]:
    return {
        "label": "verdict",
        "key": "verdict",
        "depends_on": [{"step": s.name, "allow_failure": True} for s in night.steps],
        "allow_dependency_failure": True,
        "command": night.merge_command,
        **({"env": env.judging} if env.judging else {}),
        "agents": {"queue": options.verdict_queue},
        "artifact_paths": ["reports/merged/**/*"],
        "timeout_in_minutes": 60,
        "soft_fail": False,
        "retry": {"automatic": False},
    }


def _audit(options: Options) -> dict[str, Any]:
    return {
        "label": "audit of the dependencies",
        "key": "audit",
        "command": AUDIT_COMMAND,
        "agents": {"queue": options.verdict_queue},
        "timeout_in_minutes": AUDIT_MINUTES,
        "soft_fail": False,
        "retry": {"automatic": False},
    }


def _literal(value: Any) -> Any:
    """Text that Buildkite must not take for a variable: ``$$`` is a dollar sign to it."""
    if isinstance(value, str):
        return value.replace("$", "$$")
    if isinstance(value, dict):
        return {k: _literal(v) for k, v in value.items()}
    return [_literal(v) for v in value] if isinstance(value, list) else value
