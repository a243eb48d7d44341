"""What a run of a profile needs and does not have yet, as the commands that make it (``harness run --prepare``)."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Callable
from typing import NamedTuple

from harness.errors import EnvironmentFault, UsageError
from harness.judging.power import lookups_now
from harness.profiles.availability import references_of
from harness.profiles.hub import Hub
from harness.profiles.load import read_profile
from harness.profiles.model_survey import survey_convertible
from harness.workload.prepare import prepare


class PrepareStep(NamedTuple):
    """One command that makes something that a run needs."""

    what: str
    argv: tuple[str, ...]
    way_out: str = ""
    """What to do where the command cannot succeed, as without a hub."""


def next_step(profile: str, engine_python: str | None = None) -> PrepareStep | None:
    """Return the first thing that a run of a profile lacks; None when nothing is missing that a command can make.
    Raises ProfileError and DataError for what no command can put right."""
    written = read_profile(profile, with_prompts=False)
    hub = Hub()
    if any(
        hub.cached(ref, role) is None for part in written.written_parts for role, ref in references_of(part).items()
    ) or any(m.folder is None for m in survey_convertible(written)):
        name = shlex.quote(profile)
        way_out = (
            "without a hub, fill a cache elsewhere and set HF_HOME to it, or name folders in the profile; the prompts "
            f"need no hub: harness prompts build recipe --profile {name} --file FILE"
        )
        return PrepareStep(
            "download the models that are not here", ("models", "--profile", profile, "--download"), way_out
        )
    if any(not p.workload.prompts.is_file() and p.workload.recipe is not None for p in written.written_parts):
        what = "build the prompt sets of the texts that their recipes name; no engine is started"
        argv = ("prompts", "build", "recipe", "--profile", profile)
        way_out = f"with texts of your own: {shlex.join(('harness', *argv))} --file FILE"
        return PrepareStep(what, argv, way_out)
    prepared = prepare(profile, [], record=True)
    if not all(found.found for found in lookups_now(prepared, None).values()):
        own = ("--engine-python", engine_python) if engine_python is not None else ()
        what = "record the baselines: the single engine of each method is asked everything twice"
        return PrepareStep(what, ("baseline", "record", "--profile", profile, *own))
    return None


def make_missing(
    profile: str, tell: Callable[[str], None], engine_python: str | None = None, attached: bool = False
) -> None:
    """Carry out the steps, each as the command that it is; for servers that run already (``attached``) no engine is
    started, and a command says how their baselines are recorded. Raises EnvironmentFault when a command fails, or when
    what it was to make is missing all the same."""
    done: set[PrepareStep] = set()
    while (step := next_step(profile, engine_python)) is not None:
        command = shlex.join(("harness", *step.argv))
        if attached and step.argv[0] == "baseline":
            tell(
                "baselines are missing, and no engine is started to record them beside servers that run already: from "
                f"an engine alone, {command} --single URL"
            )
            return
        if step in done:
            raise EnvironmentFault(
                f"--prepare: {command} ended well, but the same is missing as before; run `harness doctor` with this "
                "profile to see what"
            )
        done.add(step)
        tell(f"to {step.what}: {command}")
        code = subprocess.run([sys.executable, "-m", "harness", *step.argv], check=False).returncode
        if code:
            kind = UsageError if code == UsageError.exit_code else EnvironmentFault
            raise kind(
                f"--prepare: {command} failed (exit code {code}); fix what it reports"
                + (f", or {step.way_out}" if step.way_out else "")
            )
