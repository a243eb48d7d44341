"""Reproduce one finding: the engines of its cell, and its prompt in its scenario, up to a number of attempts.

A finding that does not appear again is gone only when the tries exclude the rate at which it appeared before
(``Goal``); fewer quiet tries are UNKNOWN.
"""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from harness.commands.plain_beside import PlainAnswers, ask_plain
from harness.engines.answers import Sampling, request_body
from harness.engines.api_key import HeaderFile, header_file
from harness.engines.client import REMOTE_DECODE
from harness.engines.environment import EngineEnvironment, engines_for
from harness.engines.flags import NO_FLAGS, EngineFlags, require_same_flags
from harness.engines.request import payload
from harness.engines.session import EngineGroupSession
from harness.errors import EXIT_PASS, EXIT_REGRESSION, EXIT_UNKNOWN, DataError, InfrastructureError, UsageError
from harness.history.folder import History, load_history
from harness.history.records import COLD, Form
from harness.history.verdict import Verdict
from harness.judging.findings import CheckResult, Finding, Judgement, how_many
from harness.mutants.install import with_mutants
from harness.profiles.cells import CellName, EngineGroup, all_cells, make_plan, start_expected_s, what_lists
from harness.profiles.model import Profile
from harness.profiles.remote_code import require_trusted
from harness.prompts.model import Prompt, load_prompts
from harness.reports.judge_run import assess, judge_and_report
from harness.reports.next_steps import asked_by
from harness.reports.summary import RunSummary
from harness.runner.kv_scrub import Scrubber
from harness.runner.record_cells import record_cells
from harness.runner.run import new_folder, prepared_recorder
from harness.stats.quiet import excluded_above, least_rate, quiet_tries
from harness.stats.sequential import Interval, interval_of
from harness.util.choices import nearest, no_such
from harness.util.files import write_json
from harness.util.invalid_data import refused_as
from harness.util.progress import Reporter
from harness.util.text import listed
from harness.workload.at_once import AtOnce, Item
from harness.workload.cells import CellWork, Choice, cell_work, spread
from harness.workload.prepare import Prepared, prepare, without_rescoring

# When one cell is tried alone, the reference cell is missing; the baseline check takes the place of the comparison.
_INSTEAD = {
    "tokens-reference": "tokens-baseline",
    "rescored": "tokens-baseline",
    "acceptance-single": "acceptance-baseline",
}

MOST_TRIES = 60
"""Most tries unless the user says otherwise: one more than exclude a rate of 1 in 20."""


class Goal(NamedTuple):
    """The rate that quiet tries must exclude before a finding counts as gone."""

    rate: float
    """Share of tries in which the finding appears."""
    why: str
    """Where the rate comes from."""

    @property
    def tries(self) -> int:
        """The number of quiet tries that exclude the rate with 95 % confidence."""
        return quiet_tries(self.rate)

    @property
    def words(self) -> str:
        return f"a rate of {_percent(self.rate)} ({self.why})"


ASSUMED = Goal(1 / 20, "1 in 20 is assumed, since no run says how often it shows; --rate names another")


class Target(NamedTuple):
    """The request to try again, and the check that must find the defect."""

    cell: str
    scenario: str
    instance: int | None
    """Instance of the scenario; None means all."""
    prompt: str | None
    """Id of the cold prompt; None means all."""
    form: Form
    check: str | None
    """The check that must report the finding again; None means any."""
    key: str | None
    """The request in which it must be found; None means any."""
    words: str
    goal: Goal = ASSUMED


class Attempt(NamedTuple):
    verdict: Verdict
    again: bool | None
    """Whether the finding appeared; None when the attempt is inconclusive."""


class Result(NamedTuple):
    target: Target
    attempts: tuple[Attempt, ...]
    folder: Path
    summary: RunSummary | None
    """Summary of the last attempt."""
    seconds: float
    problem: str = ""
    """Why the attempts ended early."""
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
        """1 when the finding appeared; 0 when the tries exclude the rate at which it appeared before; 2 otherwise, so
        that neither dying engines nor luck is taken for a defect that is gone."""
        if self.shown:
            return EXIT_REGRESSION
        return EXIT_UNKNOWN if self._cut_short else EXIT_PASS

    @property
    def _cut_short(self) -> str:
        """Why the attempts do not show that the finding is gone; empty when they do."""
        if self.problem:
            return self.problem
        if self.interrupted:
            return "interrupted"
        needed = self.target.goal.tries
        if self.told >= needed:
            return ""
        lost = len(self.attempts) - self.told
        return (
            f"so many tries without it exclude a rate above {_percent(excluded_above(self.told))}, and {needed} are "
            f"needed to exclude {self.target.goal.words}: --repeat {needed + lost}"
            + (f"; {lost} of {len(self.attempts)} tries were inconclusive" if lost else "")
        )

    @property
    def sentence(self) -> str:
        if not self.told:
            why = f": {self.problem}" if self.problem else ""
            return f"UNKNOWN: none of {len(self.attempts)} tries was conclusive about {self.target.words}{why}"
        if not self.shown and self._cut_short:
            return (
                f"UNKNOWN: {self.target.words} did not appear in {self.told} of {len(self.attempts)} tries, which "
                f"are too few to say that it is gone: {self._cut_short}"
            )
        lost = f"; {len(self.attempts) - self.told} tries were inconclusive" if self.told < len(self.attempts) else ""
        counted = f"{self.target.words} in {self.shown} of {self.told} tries"
        if not self.shown:
            return f"not reproduced: {counted}, which exclude {self.target.goal.words} with 95 % confidence{lost}"
        rate = ""
        if self.told > 1:
            low, high = self.interval
            rate = f", {100 * low:.0f} to {100 * high:.0f} % of tries with 95 % confidence"
        return f"reproduced: {counted}{rate}{lost}"


def _percent(rate: float) -> str:
    return f"{100 * rate:.2g} %" if rate < 0.995 else "100 %"


# --- targets ---------------------------------------------------------------------------------------------------------


def find(judgement: Judgement, wanted: str) -> Finding:
    """Return the finding with that id, or the only one whose id begins with it. Raises UsageError if there is none."""
    findings = judgement.findings
    exact = [f for f in findings if f.id == wanted]
    unlisted = how_many(findings) - len(findings)
    # When not all findings are listed, the only listed match may not be the one that was meant.
    beginning = f"{wanted.rstrip('/')}/" if unlisted else wanted
    begun = list({f.id: f for f in findings if f.id.startswith(beginning)}.values())
    if exact or len(begun) == 1:
        return (exact or begun)[0]
    known = [f.id for f in begun] or list(dict.fromkeys(f.id for f in findings))
    shown = "\n".join(f"    {i}" for i in known[:12]) + (f"\n    … {len(known) - 12} more" if len(known) > 12 else "")
    what = f"{len(begun)} findings" if begun else "no finding"
    raise UsageError(
        f"{wanted!r} matches {what} of {judgement.run_id}; give {'more of the id' if begun else 'the id of one'}; "
        + (f"{unlisted} more are counted and not listed, try theirs with --cell and --prompt; " if unlisted else "")
        + (f"there are:\n{shown}" if known else "the run has no findings")
    )


def target_of(finding: Finding) -> Target:
    """Return the request that a finding is about, with the check that must report it again."""
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


def goal_of(judgement: Judgement, finding: Finding) -> Goal:
    """Return the rate at which a finding appeared in its run: the share of the requests, in the finding's cell and
    scenario, in which its check found something.

    When all of them had it, the smallest rate that still explains that is taken, since one failing request of one says
    little. A registered test judges a whole cell at once; an effect at the edge of what it detects appears in half of
    all tries.
    """
    if finding.prompt_id is None:
        return Goal(0.5, "one test of all prompts; an effect that it barely detects shows in half of the tries")
    results = [
        r
        for c in judgement.cells
        if (c.cell, c.scenario) == (finding.cell, finding.scenario)
        for r in c.results
        if r.check == finding.check
    ]
    judged = sum(r.judged for r in results)
    found = [f for r in results for f in r.findings if f.verdict is not Verdict.UNKNOWN]
    shown = len({(f.part or f.prompt_id, f.form) for f in found}) + sum(f.others for f in found)
    if shown < judged:
        return Goal(shown / judged, f"{shown} of {judged} requests had it") if shown else ASSUMED
    who = "the only request" if shown == 1 else f"all {shown} requests"
    return Goal(least_rate(shown), f"{who} had it, and a lower rate would not explain that")


def from_run(
    run_dir: Path, wanted: str, trust_code: bool = False, flags: EngineFlags = NO_FLAGS
) -> tuple[Prepared, Target, tuple[str, ...]]:
    """Prepare a finding of a recorded run with the run's own profile, and return the mutants enabled then.

    Raises UsageError for a run of attached servers, when engines would run code of models and ``trust_code`` is False,
    or when ``flags`` are not those of the run.
    """
    history = load_history(run_dir)
    if history.run.attached:
        raise UsageError(
            f"{run_dir}: this run asked servers that ran already; ask them again with: {asked_by(history)}; or try "
            "it on engines that are started here, with --cell and --prompt"
        )
    require_trusted(history.run.profile, trust_code)
    require_same_flags(history.run.engine_flags, flags, history.run.run_id)
    judgement = assess(history).judgement
    finding = find(judgement, wanted)
    target = target_of(finding)._replace(goal=goal_of(judgement, finding))
    source = history.run.asked_for.file
    return _prepared(_profile(history), source, target, history), target, history.run.mutants


def from_names(source: str, cell: str, prompt: str, scenario: str) -> tuple[Prepared, Target, tuple[str, ...]]:
    """Prepare a prompt of a shipped profile or a profile file in a cell, without a recorded run.

    ``prompt`` is the id of a prompt, or a stratum, of which one is taken.
    """
    everything = prepare(source, [cell], () if scenario == COLD else [scenario])
    chosen = [c.id for c in everything.plan.cells]
    if len(chosen) != 1:
        raise UsageError(f"--cell {cell!r}: expected one cell, found {', '.join(chosen)}")
    of_stratum = [p for p in everything.prompts.cold if p.stratum == prompt]
    prompt = spread(of_stratum, 1)[0].id if of_stratum else prompt
    words = f"{chosen[0]}/{prompt}" if scenario == COLD else f"{chosen[0]}/{scenario}"
    key = prompt if scenario == COLD else None
    target = Target(chosen[0], scenario, None, prompt if scenario == COLD else None, "ids", None, key, words)
    return _prepared(everything.profile, source, target, None), target, ()


def _profile(history: History) -> Profile:
    with refused_as(DataError, f"{history.folder}: the recorded profile is damaged"):
        return history.run.asked_for.as_profile()


def _prepared(whole: Profile, source: str, target: Target, history: History | None) -> Prepared:
    profile = whole.part(CellName.of(target.cell).variant)
    prompts = load_prompts(profile.workload.prompts)
    prompts.check_tokenizer(profile.tokenizer_folder, profile.workload.prompts)
    if history is not None:
        identity = history.run.identities.get(CellName.of(target.cell).lineup, {})
        recorded = str(identity.get("prompts_sha256", history.run.prompts_sha256))
        if prompts.sha256 != recorded:
            raise UsageError(
                f"{profile.workload.prompts} is not the prompt set of the run (its hash is {prompts.sha256[:12]}…, "
                f"the run's {recorded[:12]}…); restore the file that the run used"
            )
    cells = {c.id: c for c in all_cells(profile)}
    if target.cell not in cells:
        raise no_such(
            "--cell", target.cell, list(cells), *what_lists(profile, "cell", None if history is not None else source)
        )
    ids = [p.id for p in prompts.prompts]
    if target.prompt is not None and target.prompt not in ids:
        strata = list(dict.fromkeys(p.stratum for p in prompts.cold))
        near = nearest(target.prompt, [*strata, *ids])
        hint = f"; did you mean {listed(near, 'or')}?" if near else ""
        raise UsageError(
            f"--prompt {target.prompt!r} is neither a prompt of {profile.workload.prompts.name} nor a stratum "
            f"({', '.join(strata)}){hint}"
        )
    choice = Choice(
        scenarios=(target.scenario,),
        prompts=None if target.prompt is None else (target.prompt,),
        forms=(target.form,),
        uses=("cold", "scenario", "held-out") if target.prompt is not None else ("cold",),
    )
    work = cell_work(profile, prompts, cells[target.cell], choice)
    if history is not None and (beside := _beside(history, target)):
        # It was found in a crowd, which is asked again as it was.
        others = [Item(p, form) for p in prompts.prompts for form in beside.get(p.id, ()) if p.id != target.prompt]
        work = replace(work, items=(*work.items, *others), at_once=AtOnce(0, (len(others) + 1,), False))
    if target.instance is not None:
        work = replace(work, scripts=tuple(s for s in work.scripts if s.instance == target.instance))
    if not work.requests:
        raise UsageError(f"{target.cell} is sent nothing in {target.scenario}; name another cell or scenario")
    # A single cell may have run on the decode engine of a pair, so the same engines are started.
    groups = {c.cell: c.group for c in history.run.cells} if history is not None else {}
    together = {cell for cell, group in groups.items() if group == groups.get(target.cell)}
    group = [c for c in cells.values() if c.id in {target.cell, *together}]
    # Outputs are not re-scored here; if the profile asked for it, evidence would be missing in every attempt.
    alone = without_rescoring(profile)
    return Prepared(alone, source, {profile.variant: prompts}, make_plan(alone, group), (work,))


def _beside(history: History, target: Target) -> dict[str, list[Form]]:
    """Return the cold prompts that were under way with the one of a finding, in their forms."""
    asked = [o for o in history.in_order(target.cell) if o.scenario == COLD and o.concurrent > 1]
    stages = {o.stage for o in asked if (o.prompt_id, o.form) == (target.prompt, target.form)}
    found: dict[str, list[Form]] = {}
    for o in asked:
        if target.scenario == COLD and o.stage in stages:
            found.setdefault(o.prompt_id, []).append(o.form)
    return found


# --- attempts --------------------------------------------------------------------------------------------------------


def reproduce(
    prepared: Prepared,
    target: Target,
    mutants: tuple[str, ...],
    out: Path,
    engine_python: str | None,
    reporter: Reporter,
    most: int,
    until: Until,
    keep: Callable[[list[str]], None] | None = None,
    flags: EngineFlags = NO_FLAGS,
) -> Result:
    """Start the engines once and try until ``until`` says that the tries suffice; at most ``most`` times.

    ``keep`` is called with instructions for the user while the engines are still up. KeyboardInterrupt ends the
    engines; attempts made until then count.
    """
    begun = time.monotonic()
    environment = engines_for(prepared.profile, prepared.plan, engine_python, flags)
    (group,) = prepared.plan.groups
    folder = new_folder(out, prepared.profile, "repro")
    changed, mutation = with_mutants(group, prepared.profile, mutants, folder / "arming" / group.id, False)
    attempts: list[Attempt] = []
    summary: RunSummary | None = None
    problem, interrupted, tried = "", False, False
    try:
        beside = ask_plain(prepared, environment, folder / "plain", reporter)
        with EngineGroupSession(
            changed, prepared.profile, environment, folder / "logs", reporter.line, mutation
        ) as session:
            session.switch(*mutants)
            reporter.step(group.id, start_expected_s(group), start=True)
            needed = target.goal.tries
            short = f"; that takes --repeat {needed}" if most < needed else ""
            reporter.line(f"up to {most} tries; {needed} without it exclude {target.goal.words}{short}")
            scrubber = Scrubber(session, prepared.prompts.prompts)
            while len(attempts) < most and not until(attempts, target.goal):
                if attempts:
                    scrubber.scrub()
                    session.refresh_counters()
                one = folder / f"try-{len(attempts) + 1:02d}"
                summary = _attempt(session, prepared, beside, environment, one, mutants, reporter)
                attempts.append(Attempt(summary.verdict, _again(summary, target)))
                reporter.line(f"try {len(attempts)}: {summary.verdict}")
            tried = True
            if keep is not None:
                with header_file(session.key) as key:
                    keep([*_requests(session, prepared, group, folder, key), key.use])
    except KeyboardInterrupt:
        reporter.line("interrupted: the engines were ended")
        # An interruption after the attempts is the normal way to end engines that were kept.
        interrupted = not tried
    except InfrastructureError as error:
        reporter.line(f"{group.id}: UNKNOWN: {error}")
        attempts.append(Attempt(Verdict.UNKNOWN, None))
        problem = str(error)
    return Result(target, tuple(attempts), folder, summary, time.monotonic() - begun, problem, interrupted)


def _attempt(
    session: EngineGroupSession,
    prepared: Prepared,
    beside: PlainAnswers | None,
    environment: EngineEnvironment,
    folder: Path,
    mutants: tuple[str, ...],
    reporter: Reporter,
) -> RunSummary:
    both = prepared if beside is None else prepared._replace(works=(*prepared.works, beside.work))
    recorder = prepared_recorder(both, environment, folder, mutants, f"{folder.parent.name}-{folder.name}")
    try:
        if beside is not None:
            beside.put_into(recorder)
        record_cells(session, prepared.works, recorder, reporter)
    except InfrastructureError:
        judge_and_report(recorder.finish())
        raise
    return judge_and_report(recorder.finish())


Until = Callable[[Sequence[Attempt], Goal], bool]
"""Says whether the attempts suffice for a goal."""


def settled(attempts: Sequence[Attempt], goal: Goal) -> bool:
    """Return whether the finding appeared, or enough quiet tries exclude its rate."""
    return any(a.again for a in attempts) or sum(a.again is False for a in attempts) >= goal.tries


def measured(attempts: Sequence[Attempt], goal: Goal) -> bool:
    """Return whether it is known if the finding appears in more or less than half of the tries, with 95 % confidence
    that is valid under repeated looks; or, when it never appeared, whether the tries exclude its rate."""
    told = [a for a in attempts if a.again is not None]
    shown = sum(a.again is True for a in told)
    if not shown:
        return settled(attempts, goal)
    low, high = interval_of(shown, len(told))
    return low > 0.5 or high < 0.5


def results_of(summary: RunSummary, target: Target) -> list[CheckResult]:
    """Return the results of the target's check or its substitute for its cell; of all checks if it names none."""
    wanted = {target.check, _INSTEAD.get(target.check or "")} - {None}
    return [
        r
        for c in summary.judgement.cells
        if (c.cell, c.scenario) == (target.cell, target.scenario)
        for r in c.results
        if not wanted or r.check in wanted
    ]


def _again(summary: RunSummary, target: Target) -> bool | None:
    """Return whether the finding appeared again; None when its check lacks evidence."""
    results = results_of(summary, target)
    found = [
        f for r in results for f in r.findings if target.key is None or (f.part or f.prompt_id) in (target.key, None)
    ]
    if any(f.verdict is not Verdict.UNKNOWN for f in found):
        return True
    # It may be among findings that are not listed.
    if not results or any(r.verdict is Verdict.UNKNOWN or r.found > len(r.findings) for r in results):
        return None
    return False


def expected_s(prepared: Prepared, repeat: int) -> float:
    """Return the rough wall time in seconds if all attempts are needed."""
    starts = sum(start_expected_s(g) for g in prepared.plan.groups)
    return starts + repeat * (prepared.expected_s - starts)


# --- instructions for the user ---------------------------------------------------------------------------------------


def _subject(work: CellWork) -> tuple[Prompt, float] | None:
    """Return the prompt that the case is about, and its temperature, or None."""
    if work.items:
        return work.items[0].prompt, 0.0
    sends = [s for script in work.scripts for s in script.sends]
    chosen = next((s for s in sends if s.part == "subject"), sends[0] if sends else None)
    return (chosen.prompt, chosen.temperature) if chosen is not None else None


def _requests(
    session: EngineGroupSession, prepared: Prepared, group: EngineGroup, folder: Path, key: HeaderFile
) -> list[str]:
    """Return the URLs of the engines, and the requests (two for a hand-off, otherwise one) as curl commands."""
    lines = [f"{role} engine: {session.url(role)}" for role in session.roles]
    (work,) = prepared.works
    subject = _subject(work)
    if subject is None:
        return lines
    prompt, temperature = subject
    workload = prepared.profile.workload
    full = request_body(payload(prompt, "ids"), Sampling(workload.max_tokens, workload.logprobs, temperature))
    header = f"{key.curl} -H 'Content-Type: application/json'"
    if work.cell.routed or work.cell.topology == "single":
        write_json(folder / "request.json", full)
        url = session.url(session.roles[0] if group.topology == "single" else "decode")
        if work.cell.routed:
            url = session.router_url(work.cell)
            lines.append(f"router: {url}")
        body = shlex.quote(str(folder / "request.json"))
        return [*lines, f"curl -s {url}/v1/completions {header} -d @{body}"]
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
