"""Run a bisection: try versions as the search asks for them, and keep the result of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from packaging.version import Version
from pydantic import Field
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from harness.commands.bisect.search import Bracket, bracket, next_index
from harness.commands.repro import Result, Target, expected_s, reproduce, results_of, settled
from harness.engines.builds import Candidate
from harness.engines.environment import inspect_environment
from harness.errors import EXIT_PASS, EXIT_UNKNOWN, InfrastructureError
from harness.history.verdict import Verdict
from harness.util.files import write_json
from harness.util.progress import Reporter
from harness.util.strict import Strict
from harness.util.text import without_log
from harness.workload.prepare import Prepared

Said = Literal["shown", "not shown", "skipped"]
_ANSWER: dict[Said, bool | None] = {"shown": True, "not shown": False, "skipped": None}
_REASON_CHARS = 160


class VersionResult(Strict):
    """The result of one version."""

    version: str
    environment: str | None = None
    """Its interpreter; None when installing failed."""
    packages: dict[str, str | None] = Field(default_factory=dict)
    """Versions of other packages that may differ between environments."""
    verdict: Said
    shown: int = 0
    told: int = 0
    """Conclusive tries; ``shown`` of them showed the finding."""
    seconds: float = 0.0
    install_s: float = 0.0
    folder: str | None = None
    """Folder of the repro, relative to that of the bisection."""
    reason: str = ""
    """Why the version was skipped, with the last lines of a log if an engine ended."""

    @property
    def why(self) -> str:
        """The reason in one line, without the log."""
        return without_log(self.reason)

    @property
    def brief(self) -> str:
        if self.verdict == "skipped":
            return f"skipped: {self.why}"
        return f"{self.verdict} ({self.shown} of {self.told} tries)"


class Bisection(Strict):
    """The state of a bisection (``bisect.json``)."""

    format: Literal[1] = 1
    finding: str
    cell: str
    scenario: str
    mutants: tuple[str, ...]
    profile: str
    repeat: int
    """Most tries per version."""
    quiet_tries: int | None = None
    """Quiet tries that make a version good; None in records of earlier versions, which took ``repeat``."""
    candidates: tuple[str, ...]
    """Versions that may be tried, oldest first; the first is --good, the last --bad."""
    environments: tuple[str | None, ...]
    """Their interpreters; None for versions that are installed only when they are tried."""
    steps: tuple[VersionResult, ...] = ()
    trying: str | None = None
    """The version being tried, or that was being tried when the search was interrupted."""
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def answers(self) -> dict[int, bool | None]:
        return {self.candidates.index(s.version): _ANSWER[s.verdict] for s in self.steps}

    @property
    def bracket(self) -> Bracket | None:
        return bracket(len(self.candidates), self.answers)

    @property
    def complete(self) -> bool:
        return next_index(len(self.candidates), self.answers) is None

    @property
    def first_bad(self) -> tuple[str, ...]:
        """Versions that can be the first to show the finding, oldest first; empty until both ends are confirmed."""
        known = self.bracket
        return tuple(self.candidates[i] for i in known.first_bad) if known is not None else ()

    @property
    def exit_code(self) -> int:
        """0 when the first version, or a few that must include it, are found; 2 otherwise."""
        return EXIT_PASS if self.complete and self.bracket is not None else EXIT_UNKNOWN

    @property
    def sentence(self) -> str:
        return f"{self._found}; {self._tried}, {self.seconds:.0f} s"

    @property
    def _found(self) -> str:
        known = self.bracket
        stopped = "interrupted: " if self.interrupted else ""
        if known is None:
            return f"{stopped}UNKNOWN: {self._ends}"
        good, possible = self.candidates[known.good], self.first_bad
        if len(possible) == 1:
            return f"first shown in {possible[0]} (good: {good})"
        listed = ", ".join(possible) if len(possible) <= 6 else f"{possible[0]} … {possible[-1]} ({len(possible)})"
        return f"{stopped}first shown in one of {listed} (good: {good}; shown in {possible[-1]})"

    @property
    def _ends(self) -> str:
        """How the two ends behave."""
        said = {s.version: s for s in self.steps}
        ends: tuple[tuple[str, str, Said], ...] = (
            ("--good", self.candidates[0], "not shown"),
            ("--bad", self.candidates[-1], "shown"),
        )
        words = []
        for option, version, wanted in ends:
            step = said.get(version)
            found = _short(step.brief) if step is not None else "it was not tried"
            held = step is not None and step.verdict == wanted
            words.append(f"{option} {version}: expected {wanted}, found {'that' if held else found}")
        return "; ".join(words)

    @property
    def _tried(self) -> str:
        told = sum(s.verdict != "skipped" for s in self.steps)
        skipped = [s for s in self.steps if s.verdict == "skipped"]
        text = f"{told} version{'' if told == 1 else 's'} tried"
        # ``_found`` already gives the reasons of the two ends.
        between = [s for s in skipped if s.version not in (self.candidates[0], self.candidates[-1])]
        if skipped:
            text += f", {len(skipped)} skipped"
        if between:
            text += ": " + "; ".join(f"{s.version} ({_short(s.why)})" for s in between)
        return text


def _short(text: str) -> str:
    return text if len(text) <= _REASON_CHARS else text[: _REASON_CHARS - 1] + "…"


# --- searching -------------------------------------------------------------------------------------------------------

Trier = Callable[[Candidate, Path], VersionResult]
"""Tries a version, with its files in the folder. Raises KeyboardInterrupt when the user interrupts it."""


def bisect(
    begun: Bisection, candidates: Sequence[Candidate], folder: Path, attempt: Trier, say: Callable[[str], None]
) -> Bisection:
    """Try versions until the first that shows the finding is known, keeping bisect.json in ``folder`` up to date."""
    started = time.monotonic()
    state = begun

    def keep(**changes: object) -> Bisection:
        kept = state.model_copy(update={**changes, "seconds": round(time.monotonic() - started, 1)})
        result = {"first_bad": kept.first_bad, "complete": kept.complete, "sentence": kept.sentence}
        write_json(folder / "bisect.json", {**kept.model_dump(mode="json"), **result})
        return kept

    try:
        while (index := next_index(len(candidates), state.answers)) is not None:
            version = state.candidates[index]
            state = keep(trying=version)
            step = attempt(candidates[index], folder / f"{len(state.steps) + 1:02d}-{version}")
            state = keep(trying=None, steps=(*state.steps, step))
            say(f"{version}: {step.brief}; {step.seconds:.0f} s")
    except KeyboardInterrupt:
        state = keep(interrupted=True)
    return state


def start(
    prepared: Prepared, target: Target, mutants: tuple[str, ...], candidates: Sequence[Candidate], repeat: int
) -> Bisection:
    """Return a bisection in which nothing has been tried yet."""
    return Bisection(
        finding=target.words,
        cell=target.cell,
        scenario=target.scenario,
        mutants=mutants,
        profile=prepared.profile.name,
        repeat=repeat,
        quiet_tries=target.goal.tries,
        candidates=tuple(str(c.version) for c in candidates),
        environments=tuple(c.executable for c in candidates),
    )


def expected_total_s(prepared: Prepared, repeat: int, candidates: int) -> float:
    """Estimate the wall time in seconds, without installing, if no version is skipped and no try ends early."""
    between = max(candidates - 2, 0)
    return (2 + between.bit_length()) * expected_s(prepared, repeat)


# --- one version -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VersionTrier:
    """Tries a finding on the engines of a version."""

    prepared: Prepared
    target: Target
    mutants: tuple[str, ...]
    repeat: int
    python_of: Callable[[Version, Path], str]
    """Installs a version, logging to a file, and returns its interpreter."""
    reporter: Reporter

    def __call__(self, candidate: Candidate, folder: Path) -> VersionResult:
        begun = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)
        step = VersionResult(version=str(candidate.version), verdict="skipped")
        self.reporter.line(f"trying {step.version}")
        try:
            python = candidate.executable or self.python_of(candidate.version, folder / "install.log")
            installed = 0.0 if candidate.executable else round(time.monotonic() - begun, 1)
            step = step.model_copy(update={"environment": python, "install_s": installed})
            found = inspect_environment(python)
            packages = {"torch": found.torch, "transformers": found.transformers, "nixl": found.nixl}
            step = step.model_copy(update={"packages": packages})
            result = reproduce(
                self.prepared, self.target, self.mutants, folder, python, self.reporter, self.repeat, settled
            )
        except InfrastructureError as error:
            step = step.model_copy(update={"reason": str(error).removeprefix("--engine-python ")})
        else:
            if result.interrupted and not result.shown:
                raise KeyboardInterrupt
            relative = str(result.folder.relative_to(folder.parent))
            step = step.model_copy(update={**judged(result), "folder": relative})
        return step.model_copy(update={"seconds": round(time.monotonic() - begun, 1)})


def judged(result: Result) -> dict[str, object]:
    """Return verdict, counts and reason of a step: not shown only if the quiet tries exclude the finding's rate."""
    goal = result.target.goal
    counts = {"shown": result.shown, "told": result.told}
    if result.shown:
        return {"verdict": "shown", **counts}
    if result.told >= goal.tries:
        return {"verdict": "not shown", **counts}
    told_all = 0 < result.told == len(result.attempts)
    reason = result.problem or ("no more tries were allowed" if told_all else _missing(result))
    if result.told:
        reason = (
            f"not shown in {result.told} of {len(result.attempts)} tries; {goal.tries} tries without it are needed to "
            f"exclude {goal.words}: {reason}"
        )
    return {"verdict": "skipped", "reason": reason, **counts}


def _missing(result: Result) -> str:
    """Return why the last try was inconclusive."""
    results = results_of(result.summary, result.target) if result.summary is not None else []
    for check in (r for r in results if r.verdict is Verdict.UNKNOWN):
        messages = [f.message for f in check.findings if f.verdict is Verdict.UNKNOWN]
        return f"{check.check} is UNKNOWN: {(messages or ['no evidence'])[0]}"
    return "the finding's check did not run"


_STYLE: dict[Said, str] = {"shown": "bold red", "not shown": "green", "skipped": "yellow"}
_SYMBOL: dict[Said, str] = {"shown": "✘", "not shown": "✔", "skipped": "?"}


def print_bisection(found: Bisection, console: Console) -> None:
    """Print a table of the versions tried, oldest first, and the result in a sentence."""
    table = Table(title=f"bisect {escape(found.finding)}", title_justify="left")
    table.add_column("version", no_wrap=True)
    table.add_column("finding", no_wrap=True)
    table.add_column("tries", justify="right")
    table.add_column("seconds", justify="right")
    table.add_column("folder or reason", overflow="fold")
    for step in sorted(found.steps, key=lambda s: found.candidates.index(s.version)):
        table.add_row(
            step.version,
            Text(f"{_SYMBOL[step.verdict]} {step.verdict}", style=_STYLE[step.verdict]),
            f"{step.shown} of {step.told}",
            f"{step.seconds:.0f}",
            escape(step.why or step.folder or ""),
        )
    console.print(table)
    if found.mutants:
        console.print(f"engines ran with injected faults: {', '.join(found.mutants)}", highlight=False)
    console.print(Text(found.sentence, style="yellow" if found.exit_code else "bold"), soft_wrap=True)
