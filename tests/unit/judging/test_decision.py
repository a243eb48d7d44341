"""The verdict table, case by case, and its copy in the documentation."""

from __future__ import annotations

import itertools

import pytest

from harness.history.verdict import Verdict
from harness.judging.decision import TABLE, Facts, decide
from harness.util.paths import REPOSITORY


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        (Facts(), Verdict.PASS),
        (Facts(evidence=False), Verdict.UNKNOWN),
        (Facts(evidence=False, change="drop"), Verdict.UNKNOWN),
        (Facts(quiet=False, change="drop"), Verdict.UNKNOWN),
        (Facts(quiet=False), Verdict.UNKNOWN),
        (Facts(change="drop"), Verdict.REGRESSION),
        (Facts(change="drop", together=True), Verdict.DRIFT),
        (Facts(change="differ", together=True), Verdict.DRIFT),
        (Facts(change="differ"), Verdict.REGRESSION),
        (Facts(change="rise"), Verdict.IMPROVED),
        (Facts(change="rise", together=True), Verdict.IMPROVED),
        (Facts(change="rise", against="this run"), Verdict.REGRESSION),
        (Facts(change="drop", against="this run"), Verdict.REGRESSION),
        (Facts(change="drop", second_stage="confirmed"), Verdict.REGRESSION),
        (Facts(change="drop", second_stage="not confirmed"), Verdict.SUSPECT),
        (Facts(change="rise", second_stage="not confirmed"), Verdict.SUSPECT),
        (Facts(change="drop", second_stage="missing"), Verdict.UNKNOWN),
        (Facts(change="none", second_stage="missing"), Verdict.PASS),
        (Facts(change="differ", against="this run", few=True), Verdict.SUSPECT),
        (Facts(few=True), Verdict.PASS),
        (Facts(change="differ", against="known answer", together=True), Verdict.REGRESSION),
        (Facts(evidence=False, change="differ", few=True), Verdict.UNKNOWN),
    ],
)
def test_each_case(facts, verdict):
    assert decide(facts)[0] is verdict


def test_every_combination_has_a_verdict_and_no_change_beyond_chance_ever_passes():
    values = itertools.product(
        (True, False),
        (True, False),
        ("none", "drop", "rise", "differ"),
        ("baseline", "this run", "known answer"),
        (True, False),
        ("not needed", "missing", "confirmed", "not confirmed"),
        (False, True),
    )
    seen = set()
    for combination in values:
        facts = Facts(*combination)
        verdict, why = decide(facts)
        seen.add(verdict)
        assert why
        if facts.change != "none" or not facts.evidence or not facts.quiet:
            assert verdict is not Verdict.PASS
    assert seen == set(Verdict) - {Verdict.KNOWN}
    assert len(TABLE) == len({why for row in TABLE for why in [row.why]})


def test_documentation_has_the_table_of_the_code():
    text = (REPOSITORY / "docs" / "verdicts.md").read_text(encoding="utf-8")
    names = Facts._fields
    lines = [
        f"| {' | '.join(n.replace('_', ' ') for n in names)} | verdict | because |",
        "|" + "---|" * (len(names) + 2),
    ]
    for row in TABLE:
        cells = [{True: "yes", False: "no"}.get(row.when.get(n, ""), row.when.get(n, "")) for n in names]
        lines.append(f"| {' | '.join(cells)} | {row.verdict.value} | {row.why} |")
    assert "\n".join(lines) in text
