"""The single table that turns established facts into a verdict.

Checks only establish ``Facts``; the first row that matches them gives the verdict. Nothing else decides. A test keeps
the table in docs/verdicts.md equal to this one.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from harness.history.verdict import Verdict

Against = Literal["baseline", "other engines", "this run", "known answer"]
Change = Literal["none", "drop", "rise", "differ"]
SecondStage = Literal["not needed", "missing", "confirmed", "not confirmed"]


class Facts(NamedTuple):
    """What a comparison established."""

    evidence: bool = True
    """Whether the data is complete and could have shown the smallest change that must be detected."""
    quiet: bool = True
    """Whether two equal runs (A/A) pass the same test."""
    change: Change = "none"
    """``drop`` or ``rise`` of acceptance beyond chance and the practical floor; ``differ`` for tokens."""
    against: Against = "baseline"
    """What the cell was compared with: the recorded baseline, one that other engines recorded on purpose
    (``judging.baseline_across``), another cell of the same run, or the right answer."""
    together: bool = False
    """Whether the other topology of this run, or the plain engine, moved in the same way."""
    second_stage: SecondStage = "not needed"
    few: bool = False
    """Whether the change is in single answers, too few for a test over all of them."""


class Rule(NamedTuple):
    """One row: the facts that must all hold, the verdict and the reason."""

    when: dict[str, object]
    verdict: Verdict
    why: str


TABLE: tuple[Rule, ...] = (
    Rule({"evidence": False}, Verdict.UNKNOWN, "evidence is missing, or too little to see what must be seen"),
    Rule({"quiet": False}, Verdict.UNKNOWN, "two equal runs differ as much, so the test says nothing"),
    Rule({"change": "none"}, Verdict.PASS, "nothing beyond chance and the practical floor"),
    Rule(
        {"few": True, "second_stage": "confirmed"},
        Verdict.REGRESSION,
        "rounding cannot make this, and it came again when the request was sent again",
    ),
    Rule(
        {"few": True, "second_stage": "not confirmed"},
        Verdict.SUSPECT,
        "rounding cannot make this, but it did not come again when the request was sent again: `harness trend` adds up "
        "the nights with one",
    ),
    Rule({"few": True}, Verdict.SUSPECT, "rounding cannot make this, and no test over all requests sees single ones"),
    Rule({"second_stage": "missing"}, Verdict.UNKNOWN, "failed once; the declared second stage did not run"),
    Rule(
        {"second_stage": "not confirmed"},
        Verdict.SUSPECT,
        "failed once, passed on fresh prompts and engines: run it again; failing in another run is a finding",
    ),
    Rule({"against": "this run"}, Verdict.REGRESSION, "both ran the same code in this run, so any difference is wrong"),
    Rule({"against": "known answer"}, Verdict.REGRESSION, "the right answer is known, so every other one is wrong"),
    Rule(
        {"against": "other engines"},
        Verdict.REGRESSION,
        "other engines recorded the reference on purpose, and these do not do as they did",
    ),
    Rule({"change": "rise"}, Verdict.IMPROVED, "better than recorded: update the baseline"),
    Rule({"together": True}, Verdict.DRIFT, "single engine and P/D moved alike: the engine changed for everyone"),
    Rule({}, Verdict.REGRESSION, "worse than recorded, and not for everyone"),
)


def decide(facts: Facts) -> tuple[Verdict, str]:
    """Return the verdict of the first matching row, and its reason."""
    values = facts._asdict()
    for row in TABLE:
        if all(values[name] == wanted for name, wanted in row.when.items()):
            return row.verdict, row.why
    raise AssertionError("the last row of the table matches everything")


DIFFERS, _ = decide(Facts(change="differ", against="this run"))
"""The verdict on a cell that differs from another one of the same run where both have to agree."""
