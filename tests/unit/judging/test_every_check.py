"""Every check is registered, tested and described, and pytest offers it where it applies."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator

import pytest

from harness import pytest_items
from harness.history.folder import load_history
from harness.history.verdict import Verdict
from harness.judging import checks
from harness.judging.checks.registry import CHECKS, GATES, NORMAL_CHECKS, Check, check_names, evidence_for, judge_cell
from harness.judging.findings import CheckResult
from harness.pytest_items import CellCollector, CheckItem, ProfileFile, VerdictError, _possible
from harness.reports.judge_run import Outcome, assess
from harness.util.paths import REPOSITORY
from tests.golden.oracle import ROOT

REGISTERED: dict[str, Check] = {check.name: check for check in (*CHECKS, *NORMAL_CHECKS)}
CANNOT_PASS = pytest_items._cannot_pass
ATTACKED = ROOT / "tests" / "golden" / "attacked"
"""A run in all states of the profile ``cpu``."""


def written() -> Iterator[Callable[..., object]]:
    """Yield the functions of the modules of checks that take a cell and give a result."""
    for found in pkgutil.iter_modules(checks.__path__, f"{checks.__name__}."):
        module = importlib.import_module(found.name)
        for name, function in inspect.getmembers(module, inspect.isfunction):
            own = function.__module__ == found.name and not name.startswith("_")
            if own and inspect.get_annotations(function) == {"cell": "CellView", "return": "CheckResult"}:
                yield function


def test_every_check_is_registered():
    known = {check.judge for check in REGISTERED.values()}
    lost = sorted(one.__name__ for one in written() if one not in known)
    assert lost == [], f"harness/judging/checks/registry.py: expected a Check of {', '.join(lost)}"
    assert len(known) > 20


@pytest.mark.parametrize("check", REGISTERED.values(), ids=lambda check: check.name)
def test_every_check_is_tested(check):
    texts = [p.read_text() for p in (REPOSITORY / "tests" / "unit" / "judging").glob("*.py")]
    calls = re.compile(rf"\b{check.judge.__name__}\(|[\"']{check.name}[\"']")
    tested = any(calls.search(text) for text in texts)
    assert tested, f"tests/unit/judging/test_checks.py: expected a broken history that {check.name} finds"


def test_every_check_is_described():
    page = (REPOSITORY / "docs" / "checks.md").read_text()
    table = page.split("| check | cells |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    told = {name for row in table for name in re.findall(r"`([a-z-]+)`", row.split("|")[1])}
    lost = sorted((REGISTERED.keys() | set(GATES)) - told)
    assert lost == [], f"docs/checks.md: expected a row for {', '.join(lost)} in the table of checks"
    assert told == REGISTERED.keys() | set(GATES)


# --- pytest's items --------------------------------------------------------------------------------------------------


def test_pytest_offers_every_check_where_it_applies():
    evidence = evidence_for(load_history(ATTACKED), {})
    profile = evidence.history.run.asked_for.as_profile()
    lost = {
        check.name
        for view in evidence.views()
        for check in CHECKS
        if check.applies(view) and check.name not in _possible(view.id, view.scenario, profile)
    }
    assert lost == set(), f"harness/pytest_items.py: expected _possible to have {', '.join(sorted(lost))}"


def item(request: pytest.FixtureRequest, name: str, cell: str) -> CheckItem:
    """The item of a check, as pytest makes it of a profile."""
    file = ProfileFile.from_parent(request.session, path=ROOT / "cpu.yaml")
    return CheckItem.from_parent(CellCollector.from_parent(file, name=cell), name=name)


@pytest.fixture
def plain(monkeypatch):
    """The run's plain engine, judged as the result of the session."""
    evidence = evidence_for(load_history(ATTACKED), {})
    judged = judge_cell(next(v for v in evidence.views() if v.id == "single-none"))
    monkeypatch.setattr(pytest_items, "_judged", lambda session: (judged,))
    monkeypatch.setattr(pytest_items, "_cannot_pass", lambda session: "")
    monkeypatch.setattr(pytest_items, "_offered", lambda *_: {*check_names("auto")})
    return judged


def test_what_no_item_stands_for_passes_nowhere(request, plain, monkeypatch):
    """A run with tier auto may come to the normal tier, whose tests have no items then."""
    for check, verdict in (("survival", Verdict.REGRESSION), ("location", Verdict.UNKNOWN)):
        result = CheckResult(check=check, cell="single-none", verdict=verdict, judged=0, note="as told")
        judged = plain.model_copy(update={"results": (*plain.results, result)})
        monkeypatch.setattr(pytest_items, "_judged", lambda session, judged=judged: (judged,))
        for name in ("complete", "prefill-token"):
            with pytest.raises(VerdictError, match=f"{check}, which no item stands for, does not pass\n{verdict}"):
                item(request, name, "single-none").setup()


def test_no_item_passes_of_a_run_that_cannot(request, plain, monkeypatch):
    monkeypatch.setattr(pytest_items, "_cannot_pass", CANNOT_PASS)
    history = load_history(ATTACKED)
    stopped = history.model_copy(update={"run": history.run.model_copy(update={"interrupted": True})})
    for made, words in ((history, ""), (stopped, "the run was interrupted before its end")):
        summary = assess(made)
        monkeypatch.setattr(pytest_items, "_outcome", lambda session, s=summary: Outcome(ATTACKED, s))
        assert words in pytest_items._cannot_pass(request.session)
        if not words:
            item(request, "transfer", "single-none").setup()
            continue
        with pytest.raises(VerdictError, match=f"UNKNOWN: the run as a whole cannot pass: {words}"):
            item(request, "transfer", "single-none").setup()


def test_an_item_whose_check_does_not_apply_is_skipped(request, plain):
    assert "prefill-token" not in {r.check for r in plain.results}
    with pytest.raises(pytest.skip.Exception, match="prefill-token does not apply to single-none in this run"):
        item(request, "prefill-token", "single-none").setup()
    item(request, "transfer", "single-none").setup()


def test_an_item_of_a_cell_that_was_not_judged_is_no_pass(request, plain):
    for name in ("single-mtp", "single-none@refill"):
        with pytest.raises(VerdictError, match=f"UNKNOWN: expected a result of complete for {name}"):
            item(request, "complete", name).setup()
