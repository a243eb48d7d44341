"""``harness fuzz``: a profile of random traces, which runs like any other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml

from harness.errors import UsageError
from harness.history.records import COLD
from harness.profiles.load import load_profile
from harness.profiles.model import Profile
from harness.profiles.scenarios import Trace
from harness.util.files import write_atomic
from harness.workload.prepare import Prepared, prepare
from harness.workload.scripts import scripts
from harness.workload.traces import random_traces

COLD_PER_STRATUM = 1
"""Cold prompts per stratum that accompany the traces: what fails only in traces is a matter of the state."""


def prepare_fuzz(source: str, patterns: Sequence[str], seed: int, minutes: float, out: Path) -> Prepared:
    """Write a profile with random traces that take about so many minutes below ``out``, and prepare it. Raises
    UsageError when the profile has axes or no prompt with a known answer, and the errors of ``prepare``."""
    if axes := load_profile(source).axes:
        raise UsageError(
            f"profile {source} has axes ({', '.join(axes)}), which random traces cannot have; name a profile without"
        )
    plain = prepare(source, patterns, [COLD], prompts_per_stratum=COLD_PER_STRATUM)
    if all(p.expected is None for p in plain.prompts.prompts):
        raise UsageError(
            f"profile {source}: random traces are judged by prompts whose right answer is known, and "
            f"{plain.profile.workload.prompts.name} has none; name a profile with probe models"
        )
    traces = _traces(plain, seed, max(0.0, minutes * 60 - plain.expected_s))
    path = out.absolute() / f"fuzz-{plain.profile.name}-{seed}.yaml"
    try:
        out.mkdir(parents=True, exist_ok=True)
        write_atomic(path, yaml.safe_dump(_profile(plain.profile, source, seed, traces), sort_keys=False, width=120))
    except OSError as error:
        raise UsageError(
            f"--out {out}: expected a folder to write runs into, but {path} cannot be written ({error.strerror})"
        ) from error
    return prepare(str(path), patterns, prompts_per_stratum=COLD_PER_STRATUM)


def _traces(plain: Prepared, seed: int, seconds: float) -> list[Trace]:
    """Return traces that all cells together need about so many seconds for, at least one."""
    known = {p.id: p for p in plain.prompts.prompts if p.expected is not None}
    cells = [(group, cell) for group in plain.plan.groups for cell in group.cells if not cell.routed]
    found: list[Trace] = []
    for trace in random_traces(plain.profile, tuple(known.values()), seed):
        found.append(trace)
        for group, cell in cells:
            requests = sum(script.requests for script in scripts(trace, known, cell.topology))
            seconds -= requests * group.expected.request_s(cell.topology)
        if seconds <= 0 or not cells:
            break
    return found


def _profile(profile: Profile, source: str, seed: int, traces: Sequence[Trace]) -> dict[str, object]:
    return {
        "format": 1,
        "name": f"fuzz-{profile.name}",
        "extends": str(Path(source).absolute()) if Path(source).suffix else source,
        "description": f"random traces of seed {seed}",
        "scenarios": [t.model_dump(mode="json", exclude_defaults=True) | {"kind": "trace"} for t in traces],
    }
