"""One finding again: exactly that cell's engines, exactly that prompt in its scenario, as often as asked."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from harness.config import Profile, describe_validation_error
from harness.engine.client import REMOTE_DECODE, Sampling, request_body
from harness.engine.environment import EngineEnvironment
from harness.engine.exchange import payload
from harness.engine.key import HeaderFile, header_file
from harness.engine.topology import EngineGroupSession
from harness.errors import EXIT_PASS, EXIT_REGRESSION, EXIT_UNKNOWN, DataError, InfrastructureError, UsageError
from harness.files import write_json
from harness.findings import CheckResult, Finding, Judgement, Verdict, how_many
from harness.history import COLD, Form, History, load_history
from harness.matrix import CellName, EngineGroup, all_cells, make_plan, start_expected_s
from harness.operations import Prepared, assess, engines_for, judge_and_report, new_folder, prepare, prepared_recorder
from harness.progress import Reporter
from harness.prompts import Prompt, load_prompts
from harness.remote_code import require_trusted
from harness.runner import armed, run_cell
from harness.scrub import Scrubber
from harness.stats.sequential import Interval, interval_of
from harness.summary import RunSummary
from harness.workload import CellWork, Choice, cell_work

# The reference of another cell is not there when one cell is tried alone; the baseline says the same.
_INSTEAD = {
    "tokens-reference": "tokens-baseline",
    "rescored": "tokens-baseline",
    "acceptance-single": "acceptance-baseline",
}


class Target(NamedTuple):
    """What is tried again."""

    cell: str
    scenario: str
    instance: int | None
    """Which run through the scenario; None takes all."""
    prompt: str | None
    """Id of the cold prompt; None takes all."""
    form: Form
    check: str | None
    """The check that has to find something again; None takes any."""
    key: str | None
    """The request that it has to find it in; None takes any."""
    words: str


class Attempt(NamedTuple):
    """One try."""

    verdict: Verdict
    again: bool | None
    """Whether the finding showed; None when the try says nothing."""


class Result(NamedTuple):
    """All tries."""

    target: Target
    attempts: tuple[Attempt, ...]
    folder: Path
    summary: RunSummary | None
    """Of the last try."""
    seconds: float
    decided: bool
    problem: str = ""
    """Why trying ended before its time."""
    interrupted: bool = False

    @property
    def told(self) -> int:
        return sum(a.again is not None for a in self.attempts)

    @property
    def shown(self) -> int:
        return sum(a.again is True for a in self.attempts)

    @property
    def interval(self) -> Interval:
        return interval_of(self.shown, self.told)

    @property
    def exit_code(self) -> int:
        """1 when it showed; 0 when it never did in tries that all say something, or are enough to decide; 2 otherwise,
        so that engines which die are never taken for a defect that is gone."""
        if self.shown:
            return EXIT_REGRESSION
        return EXIT_UNKNOWN if self._cut_short else EXIT_PASS

    @property
    def _cut_short(self) -> str:
        """Why tries that did not show it do not say that it is gone; empty when they do."""
        if self.problem:
            return self.problem
        if self.interrupted:
            return "interrupted"
        lost = len(self.attempts) - self.told
        if not self.told or (lost and not self.decided):
            return f"{lost} of {len(self.attempts)} tries say nothing"
        return ""

    @property
    def sentence(self) -> str:
        if not self.told:
            why = f": {self.problem}" if self.problem else ""
            return f"UNKNOWN: none of {len(self.attempts)} tries says anything about {self.target.words}{why}"
        if not self.shown and self._cut_short:
            return (
                f"UNKNOWN: {self.target.words} did not show in {self.told} of {len(self.attempts)} tries, but this "
                + (f"says too little: {self._cut_short}")
            )
        what = "reproduced" if self.shown else "not reproduced"
        rate = ""
        if len(self.attempts) > 1:
            low, high = self.interval
            rate = f", {100 * low:.0f} to {100 * high:.0f} % of tries with 95 % confidence"
            rate += " (decided)" if self.decided else ""
        lost = f"; {len(self.attempts) - self.told} tries say nothing" if self.told < len(self.attempts) else ""
        return f"{what}: {self.target.words} in {self.shown} of {self.told} tries{rate}{lost}"


# --- what is tried ---------------------------------------------------------------------------------------------------


def find(judgement: Judgement, wanted: str) -> Finding:
    """The finding of that id, or the only one whose id begins so. Raises UsageError naming what there is."""
    findings = judgement.findings
    exact = [f for f in findings if f.id == wanted]
    unlisted = how_many(findings) - len(findings)
    # Where not all are listed, the only one that begins so may not be the one that is meant.
    beginning = f"{wanted.rstrip('/')}/" if unlisted else wanted
    begun = list({f.id: f for f in findings if f.id.startswith(beginning)}.values())
    if exact or len(begun) == 1:
        return (exact or begun)[0]
    known = [f.id for f in begun] or list(dict.fromkeys(f.id for f in findings))
    shown = "\n".join(f"    {i}" for i in known[:12]) + (f"\n    … {len(known) - 12} more" if len(known) > 12 else "")
    what = f"{len(begun)} of them" if begun else "none"
    raise UsageError(
        f"expected the id of a finding of {judgement.run_id}, or a beginning that only one has, found {what} for "
        f"{wanted!r}; "
        + (f"{unlisted} more are counted and not listed, try theirs with --cell and --prompt; " if unlisted else "")
        + (f"there are:\n{shown}" if known else "the run has no findings")
    )


def target_of(finding: Finding) -> Target:
    """The request that a finding is about, and the check that has to find it again."""
    instance = None
    if finding.scenario != COLD and finding.part:
        number = finding.part.rpartition("#")[2].split(".")[0]
        instance = int(number) if number.isdigit() else None
    return Target(
        finding.cell,
        finding.scenario,
        instance,
        finding.prompt_id if finding.scenario == COLD else None,
        "text" if finding.form == "text" else "ids",
        finding.check,
        finding.part or finding.prompt_id,
        finding.id,
    )


def from_run(run_dir: Path, wanted: str, trust_code: bool = False) -> tuple[Prepared, Target, tuple[str, ...]]:
    """A finding of a recorded run with the run's own profile, and the mutants that were armed then. Raises UsageError
    when engines would run code of models and ``trust_code`` does not say that this is meant."""
    history = load_history(run_dir)
    require_trusted(history.run.profile, trust_code)
    target = target_of(find(assess(history).judgement, wanted))
    return (
        _prepared(_profile(history), str(history.run.profile.get("source", "")), target, history),
        target,
        (history.run.mutants),
    )


def from_names(source: str, cell: str, prompt: str, scenario: str) -> tuple[Prepared, Target, tuple[str, ...]]:
    """A prompt of a shipped profile or a profile file in a cell, without a recorded run."""
    everything = prepare(source, [cell], () if scenario == COLD else [scenario])
    chosen = [c.id for c in everything.plan.cells]
    if len(chosen) != 1:
        raise UsageError(f"--cell {cell!r}: expected one cell, found {', '.join(chosen)}")
    words = f"{chosen[0]}/{prompt}" if scenario == COLD else f"{chosen[0]}/{scenario}"
    key = prompt if scenario == COLD else None
    target = Target(chosen[0], scenario, None, prompt if scenario == COLD else None, "ids", None, key, words)
    return _prepared(everything.profile, source, target, None), target, ()


def _profile(history: History) -> Profile:
    raw = {k: v for k, v in history.run.profile.items() if k != "source"}
    try:
        return Profile.model_validate(raw)
    except ValidationError as error:
        raise DataError(
            f"{history.folder}: the recorded profile is damaged:\n{describe_validation_error(error)}"
        ) from error


def _prepared(whole: Profile, source: str, target: Target, history: History | None) -> Prepared:
    profile = whole.part(CellName.of(target.cell).variant)
    prompts = load_prompts(profile.workload.prompts)
    prompts.check_tokenizer(profile.tokenizer_folder, profile.workload.prompts)
    recorded = _prompts_of(history, target) if history is not None else None
    if recorded is not None and prompts.sha256 != recorded:
        raise UsageError(
            f"{profile.workload.prompts}: expected the prompts of the run ({recorded[:12]}…), found "
            f"others ({prompts.sha256[:12]}…); restore the file that the run used"
        )
    cells = {c.id: c for c in all_cells(profile)}
    if target.cell not in cells:
        raise UsageError(f"expected a cell of profile {profile.name} ({', '.join(cells)}), found {target.cell!r}")
    if target.prompt is not None and target.prompt not in {p.id for p in prompts.prompts}:
        raise UsageError(f"expected a prompt of {profile.workload.prompts.name}, found {target.prompt!r}")
    choice = Choice(
        scenarios=(target.scenario,),
        prompts=None if target.prompt is None else (target.prompt,),
        forms=(target.form,),
        uses=("cold", "scenario", "held-out") if target.prompt is not None else ("cold",),
    )
    work = cell_work(profile, prompts, cells[target.cell], choice)
    if target.instance is not None:
        work = work._replace(scripts=tuple(s for s in work.scripts if s.instance == target.instance))
    if not work.requests:
        raise UsageError(f"expected {target.cell} to be sent something in {target.scenario}, found nothing to send")
    # A single cell ran on the decode engine of the pair: the same engines are started.
    together = history.cell(target.cell) if history is not None else None
    group = [c for c in cells.values() if c.id == target.cell or _shared(history, together, c.id)]
    # Nobody scores the outputs again here; asked for, it would be missing evidence in every try.
    alone = profile.model_copy(update={"workload": profile.workload.model_copy(update={"rescore": False})})
    return Prepared(alone, source, {profile.variant: prompts}, make_plan(alone, group), (work,))


def _prompts_of(history: History, target: Target) -> str:
    """Hash of the prompts that the target's cell was sent."""
    identity = history.run.identities.get(CellName.of(target.cell).lineup, {})
    return str(identity.get("prompts_sha256", history.run.prompts_sha256))


def _shared(history: History | None, mine: Any, other: str) -> bool:
    record = history.cell(other) if history is not None else None
    return record is not None and mine is not None and record.group == mine.group


# --- trying ----------------------------------------------------------------------------------------------------------


def reproduce(
    prepared: Prepared,
    target: Target,
    mutants: tuple[str, ...],
    out: Path,
    engine_python: str,
    reporter: Reporter,
    repeat: int,
    keep: Callable[[list[str]], None] | None = None,
    until: Callable[[list[Attempt]], bool] | None = None,
) -> Result:
    """Start the engines once and try until it is decided, or ``until`` says so; at most ``repeat`` times.

    ``keep`` is called with lines for a person while the engines are still up. KeyboardInterrupt ends the engines; what
    was tried counts.
    """
    begun = time.monotonic()
    environment = engines_for(prepared.profile, prepared.plan, engine_python)
    (group,) = prepared.plan.groups
    folder = new_folder(out, prepared.profile, "repro")
    changed, arming = armed(group, prepared.profile, mutants, folder / "arming" / group.id, False)
    attempts: list[Attempt] = []
    summary: RunSummary | None = None
    problem, interrupted, tried = "", False, False
    try:
        with EngineGroupSession(
            changed, prepared.profile, environment, folder / "logs", None, reporter.line, arming
        ) as session:
            session.switch(*mutants)
            reporter.step(group.id, start_expected_s(group))
            scrubber = Scrubber(session, prepared.prompts.prompts)
            while len(attempts) < repeat and not (until or _decided)(attempts):
                if attempts:
                    scrubber.scrub()
                    session.refresh_counters()
                summary = _attempt(
                    session, prepared, environment, folder / f"try-{len(attempts) + 1:02d}", mutants, reporter
                )
                attempts.append(Attempt(summary.verdict, _again(summary, target)))
                reporter.line(f"try {len(attempts)}: {summary.verdict}")
            tried = True
            if keep is not None:
                with header_file(session.key) as key:
                    keep([*_requests(session, prepared, group, folder, key), key.use])
    except KeyboardInterrupt:
        reporter.line("interrupted: engines are gone")
        # That is how engines that were kept are ended.
        interrupted = not tried
    except InfrastructureError as error:
        reporter.line(f"{group.id}: UNKNOWN: {error}")
        attempts.append(Attempt(Verdict.UNKNOWN, None))
        problem = str(error)
    seconds = time.monotonic() - begun
    return Result(target, tuple(attempts), folder, summary, seconds, _decided(attempts), problem, interrupted)


def _attempt(
    session: EngineGroupSession,
    prepared: Prepared,
    environment: EngineEnvironment,
    folder: Path,
    mutants: tuple[str, ...],
    reporter: Reporter,
) -> RunSummary:
    recorder = prepared_recorder(prepared, environment, folder, mutants, f"{folder.parent.name}-{folder.name}")
    recorder.engines(session.records())
    try:
        for work in prepared.works:
            run_cell(session, work, recorder, reporter)
    except InfrastructureError as error:
        recorder.fail_pending([w.cell.id for w in prepared.works], "failed", str(error))
        judge_and_report(recorder.finish())
        raise
    return judge_and_report(recorder.finish())


def _decided(attempts: list[Attempt]) -> bool:
    """Whether it is certain, at 95 % and for as many looks as one likes, that it shows more often than not, or less."""
    told = [a for a in attempts if a.again is not None]
    low, high = interval_of(sum(a.again is True for a in told), len(told))
    return low > 0.5 or high < 0.5


def results_of(summary: RunSummary, target: Target) -> list[CheckResult]:
    """What the check of the finding, or the one in its place, says of its cell; of all checks if none is named."""
    wanted = {target.check, _INSTEAD.get(target.check or "")} - {None}
    return [
        r
        for c in summary.judgement.cells
        if (c.cell, c.scenario) == (target.cell, target.scenario)
        for r in c.results
        if not wanted or r.check in wanted
    ]


def _again(summary: RunSummary, target: Target) -> bool | None:
    """Whether the finding is there again; None when its check has no evidence this time."""
    results = results_of(summary, target)
    found = [
        f for r in results for f in r.findings if target.key is None or (f.part or f.prompt_id) in (target.key, None)
    ]
    if any(f.verdict is not Verdict.UNKNOWN for f in found):
        return True
    # Of findings that are not listed nobody can say whether it is among them.
    if not results or any(r.verdict is Verdict.UNKNOWN or r.found > len(r.findings) for r in results):
        return None
    return False


def expected_s(prepared: Prepared, repeat: int) -> float:
    """Rough wall time in seconds, if nothing is decided before the last try."""
    starts = sum(start_expected_s(g) for g in prepared.plan.groups)
    return starts + repeat * (prepared.expected_s - starts)


# --- for a person ----------------------------------------------------------------------------------------------------


def _subject(work: CellWork) -> tuple[Prompt, float] | None:
    """The prompt that the cell is about, and its temperature."""
    if work.items:
        return work.items[0].prompt, 0.0
    sends = [s for script in work.scripts for stage in script.stages for s in stage.sends]
    chosen = next((s for s in sends if s.part == "subject"), sends[0] if sends else None)
    return (chosen.prompt, chosen.temperature) if chosen is not None else None


def _requests(
    session: EngineGroupSession, prepared: Prepared, group: EngineGroup, folder: Path, key: HeaderFile
) -> list[str]:
    """URLs of the engines, and the two requests of a hand-off (or the one of a single engine) as curl lines."""
    lines = [f"{role} engine: {session.url(role)}" for role in session.roles]
    (work,) = prepared.works
    subject = _subject(work)
    if subject is None:
        return lines
    prompt, temperature = subject
    workload = prepared.profile.workload
    full = request_body(payload(prompt, "ids"), Sampling(workload.max_tokens, workload.logprobs, temperature))
    header = f"{key.curl} -H 'Content-Type: application/json'"
    if work.cell.routed:
        write_json(folder / "request.json", full)
        body = shlex.quote(str(folder / "request.json"))
        url = session.router_url(work.cell)
        return [*lines, f"router: {url}", f"curl -s {url}/v1/completions {header} -d @{body}"]
    if work.cell.topology == "single":
        role = session.roles[0] if group.topology == "single" else "decode"
        write_json(folder / "request.json", full)
        body = shlex.quote(str(folder / "request.json"))
        return [*lines, f"curl -s {session.url(role)}/v1/completions {header} -d @{body}"]
    first = request_body(payload(prompt, "ids"), Sampling(1, workload.logprobs, temperature))
    write_json(folder / "prefill.json", {**first, "kv_transfer_params": REMOTE_DECODE})
    write_json(folder / "decode.json", full)
    first_body, second_body = (shlex.quote(str(folder / f"{name}.json")) for name in ("prefill", "decode"))
    merge = (
        "import json,sys; b=json.load(open(sys.argv[1])); "
        "b['kv_transfer_params']=json.load(sys.stdin)['kv_transfer_params']; print(json.dumps(b))"
    )
    answer = shlex.quote(str(folder / "answer-of-p.json"))
    return [
        *lines,
        f"curl -s {session.url('prefill')}/v1/completions {header} -d @{first_body} > {answer}",
        f"python3 -c {shlex.quote(merge)} {second_body} < {answer} | "
        f"curl -s {session.url('decode')}/v1/completions {header} -d @-",
    ]
