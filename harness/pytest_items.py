"""The matrix as pytest items, which share their core with the command line.

The matrix runs once, when the first selected check is set up. UNKNOWN and SUSPECT are errors, KNOWN is an expected
failure (xfail), and REGRESSION, DRIFT and IMPROVED are failures. A check that turned out not to apply is skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.commands.run import execute
from harness.errors import HarnessError
from harness.history.records import COLD
from harness.history.verdict import Verdict
from harness.judging.checks.hypothesis_tests import tests_of
from harness.judging.checks.registry import CHECKS, NORMAL_CHECKS, TEST_NAMES, check_names
from harness.judging.findings import CellVerdict, CheckResult
from harness.profiles.cells import CellName
from harness.profiles.load import SHIPPED_PROFILES, shipped_profile_names
from harness.profiles.model import Profile
from harness.reports.judge_run import Outcome
from harness.runner.options import RunOptions
from harness.util.paths import DEFAULT_OUT
from harness.util.progress import Reporter
from harness.util.text import counted
from harness.workload.prepare import Prepared, prepare

_SHOWN = 6
_SEPARATOR = "@"
"""Separates cell and scenario in the name of a collector; the cold scenario has none."""


_PREPARED = pytest.StashKey[Prepared]()
_SOURCE = pytest.StashKey[tuple[str, Path]]()
_OUTCOME = pytest.StashKey[Outcome]()


def prepare_config(config: pytest.Config, source: str) -> None:
    """Make pytest collect the profile ``source``. Raises pytest.UsageError when it cannot be prepared."""
    path = SHIPPED_PROFILES / f"{source}.yaml" if source in shipped_profile_names() else Path(source)
    try:
        prepared = prepare(source, [])
    except HarnessError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_PREPARED] = prepared
    config.stash[_SOURCE] = (source, path.resolve())
    config.args[:] = [str(path)]


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.resolve() != parent.config.stash[_SOURCE][1]:
        return None
    return ProfileFile.from_parent(parent, path=file_path)


class ProfileFile(pytest.File):
    """The cells and scenarios of a profile."""

    def collect(self) -> Iterator[pytest.Collector]:
        for work in self.config.stash[_PREPARED].works:
            if work.items:
                yield CellCollector.from_parent(self, name=work.cell.id)
            for scenario in work.planned:
                yield CellCollector.from_parent(self, name=f"{work.cell.id}{_SEPARATOR}{scenario}")


class CellCollector(pytest.Collector):
    """The checks of one cell in one scenario."""

    def collect(self) -> Iterator[pytest.Item]:
        cell, _, scenario = self.name.partition(_SEPARATOR)
        profile = self.config.stash[_PREPARED].profile
        for name in check_names(profile.judging.tier):
            if name in _possible(cell, scenario or COLD, profile.part(CellName.of(cell).variant)):
                yield CheckItem.from_parent(self, name=name)


def _possible(cell: str, scenario: str, profile: Profile) -> set[str]:
    """Return the checks that can apply to a cell in a scenario when all cells are selected.

    A check of the registry may be among them that does not: its item is skipped when the run is judged.
    """
    name = CellName.of(cell)
    tier = profile.judging.tier
    names = set(check_names(tier))
    names -= {"state-occurred"} if scenario == COLD else {"cold-stays-cold", "text-form"}
    if not profile.workload.text_prompts:
        names.discard("text-form")
    if tier == "normal":
        rescores = profile.workload.rescore and "single" in profile.topologies
        has_single = "single" in profile.topologies
        tests, drafted_by_client = tests_of(name, has_single, rescores, scenario == COLD), name.route == "client"
        registered = {
            *tests,
            *(
                ("acceptance-pooled",)
                if "acceptance-single" in tests and scenario == COLD and drafted_by_client
                else ()
            ),
            *(("pooled",) if scenario != COLD or (name.topology == "pd" and has_single) else ()),
        }
        names -= set(TEST_NAMES) - registered
        names -= {"drafts-happened", "request-acceptance"} if name.method == "none" else set()
        return names if rescores else names - {"logprob-trace"}
    if name.method == "none":
        names -= {"drafts-happened", "drafts-computed", "acceptance-single", "acceptance-baseline"}
    if name.topology == "single":
        names.discard("acceptance-single")
    if cell == name.reference:
        names.discard("tokens-reference")
    return names


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Drop checks that compare with a cell that ``-k`` deselected; baselines still judge the cells that are left."""
    ours = [i for i in items if isinstance(i, CheckItem)]
    if not ours:
        return
    cells = {i.cell for i in ours}
    scenarios = {i.scenario for i in ours}
    prepared = config.stash[_PREPARED]
    places = {
        (w.cell.id, s) for w in prepared.works if w.cell.id in cells for s in (COLD, *w.planned) if s in scenarios
    }
    beside_single = {"acceptance-single", "first-step"}
    if prepared.profile.judging.tier == "normal":
        # The bitwise check of this name compares with the plain engine instead.
        beside_single.add("logprobs-single")
    dropped = [
        i
        for i in ours
        if (i.name == "tokens-reference" and (CellName.of(i.cell).reference, i.scenario) not in places)
        or (i.name == "rescored" and (CellName.of(i.cell).reference, COLD) not in places)
        or (i.name in beside_single and CellName.of(i.cell).single not in cells)
    ]
    items[:] = [i for i in items if i not in dropped]
    if dropped:
        config.hook.pytest_deselected(items=dropped)


_EVIDENCE = ("complete", "state-occurred", "transfer")
"""Checks whose UNKNOWN makes all other checks of the cell and scenario inconclusive."""
_APPLY = frozenset(check.name for check in (*CHECKS, *NORMAL_CHECKS))
"""Checks that need not apply to a cell and scenario."""


class VerdictError(Exception):
    """A check whose verdict is not PASS."""


class CheckItem(pytest.Item):
    """One check of one cell."""

    @property
    def cell(self) -> str:
        assert self.parent is not None
        return self.parent.name.partition(_SEPARATOR)[0]

    @property
    def scenario(self) -> str:
        assert self.parent is not None
        return self.parent.name.partition(_SEPARATOR)[2] or COLD

    def _results(self) -> tuple[CheckResult, ...]:
        judged = _judged(self.session)
        return next((c.results for c in judged if (c.cell, c.scenario) == (self.cell, self.scenario)), ())

    def _result(self) -> CheckResult:
        results = self._results()
        for result in results:
            if result.check == self.name:
                return result
        where = self.parent.name if self.parent is not None else self.cell
        # Each check of the registry says itself where it applies; one that fails has a result.
        if results and self.name in _APPLY:
            pytest.skip(f"{self.name} does not apply to {where} in this run")
        raise VerdictError(f"UNKNOWN: expected a result of {self.name} for {where}, found none in the run")

    def setup(self) -> None:
        if why := _cannot_pass(self.session):
            raise VerdictError(f"UNKNOWN: the run as a whole cannot pass: {why}")
        offered = _offered(self.session, self.cell, self.scenario)
        for other in self._results():
            # A check that crashed where no item is, or of the other tier, to which a run with tier auto may come.
            if other.check not in offered and other.verdict not in (Verdict.PASS, Verdict.KNOWN):
                raise VerdictError(f"{other.check}, which no item stands for, does not pass\n{_explain(other)}")
        result = self._result()
        if result.verdict in (Verdict.UNKNOWN, Verdict.SUSPECT):
            raise VerdictError(_explain(result))
        # With -k, the check that reports this may be deselected.
        for needed in self._results():
            if needed.check in _EVIDENCE and needed.verdict is Verdict.UNKNOWN:
                raise VerdictError(f"{self.name} is inconclusive because its evidence is missing\n{_explain(needed)}")

    def runtest(self) -> None:
        result = self._result()
        if result.verdict is Verdict.KNOWN:
            pytest.xfail(f"KNOWN: {', '.join(sorted({f.known or '' for f in result.findings}))}")
        if result.verdict is not Verdict.PASS:
            raise VerdictError(_explain(result))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
        if isinstance(excinfo.value, (VerdictError, HarnessError)):
            return str(excinfo.value)
        return str(super().repr_failure(excinfo))

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, f"{self.cell} {self.name}"


def _explain(result: CheckResult) -> str:
    lines = [
        f"{result.verdict}: {result.check} of {result.cell}: {counted(result.found, 'finding')} {result.note}".rstrip()
    ]
    lines += [f"  {f.prompt_id or ''} {f.message}" for f in result.findings[:_SHOWN]]
    shown = len(result.findings[:_SHOWN])
    if result.found > shown:
        lines.append(f"  … and {result.found - shown} more")
    return "\n".join(lines)


def _judged(session: pytest.Session) -> tuple[CellVerdict, ...]:
    """Return what the checks say of each cell and scenario."""
    return _outcome(session).summary.judgement.cells


def _cannot_pass(session: pytest.Session) -> str:
    """Return why the run cannot pass, whatever its cells say; empty where it can."""
    summary = _outcome(session).summary
    limits = any(v.exit_code for v in summary.history.limiting_verdicts)
    return "; ".join(summary.judgement.notices[:1]) or "see its report" if limits else ""


def _offered(session: pytest.Session, cell: str, scenario: str) -> set[str]:
    """Return the names of the checks of which there are items for a cell in a scenario, selected or not."""
    return _possible(cell, scenario, session.config.stash[_PREPARED].profile.part(CellName.of(cell).variant))


def _outcome(session: pytest.Session) -> Outcome:
    """Run the selected cells, once per session."""
    config = session.config
    done = config.stash.get(_OUTCOME, None)
    if done is not None:
        return done
    ours = [i for i in session.items if isinstance(i, CheckItem)]
    prepared = prepare(config.stash[_SOURCE][0], sorted({i.cell for i in ours}), sorted({i.scenario for i in ours}))
    out = config.getoption("harness_out")
    with Reporter(prepared.expected_s, starts_s=prepared.starts_s) as reporter:
        options = RunOptions(config.getoption("harness_engine_python"))
        outcome = execute(prepared, Path(out) if out else DEFAULT_OUT, reporter, options)
    config.stash[_OUTCOME] = outcome
    return outcome


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the verdict of the matrix, the command that shows its gravest cause again, and the path of its report."""
    outcome = config.stash.get(_OUTCOME, None)
    if outcome is not None:
        terminalreporter.write_line(f"matrix: {outcome.summary.verdict}: {outcome.summary.brief}")
        if outcome.summary.repro:
            terminalreporter.write_line(f"reproduce: {outcome.summary.repro}")
        terminalreporter.write_line(f"report: {outcome.folder / 'report.html'}")
