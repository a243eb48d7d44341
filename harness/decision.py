"""The one table that turns what was measured into a verdict.

Checks establish facts (``Facts``); nothing else decides. The first row that fits gives the verdict.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from harness.findings import Verdict

Against = Literal["baseline", "tonight"]
Change = Literal["none", "drop", "rise", "differ"]
SecondStage = Literal["not needed", "missing", "confirmed", "not confirmed"]


class Facts(NamedTuple):
    """What a comparison established."""

    evidence: bool = True
    """Everything that the comparison needs is there, and could have shown the smallest change that must be seen."""
    quiet: bool = True
    """Two equal runs (A/A) do not differ by this test."""
    change: Change = "none"
    """``drop`` and ``rise`` of acceptance, beyond chance and beyond the practical floor; ``differ`` of tokens."""
    against: Against = "baseline"
    together: bool = False
    """The other topology of tonight, or the plain engine, moved in the same way."""
    second_stage: SecondStage = "not needed"


class Row(NamedTuple):
    """One row: conditions that all have to hold, and what follows."""

    when: dict[str, object]
    verdict: Verdict
    why: str


TABLE: tuple[Row, ...] = (
    Row({"evidence": False}, Verdict.UNKNOWN, "evidence is missing, or too little to see what must be seen"),
    Row({"quiet": False}, Verdict.UNKNOWN, "two equal runs differ as much, so the test says nothing"),
    Row({"change": "none"}, Verdict.PASS, "nothing beyond chance and the practical floor"),
    Row({"second_stage": "missing"}, Verdict.UNKNOWN, "failed once; the declared second stage did not run"),
    Row({"second_stage": "not confirmed"}, Verdict.SUSPECT, "failed once, passed on fresh prompts and engines"),
    Row({"against": "tonight"}, Verdict.REGRESSION, "both ran the same code tonight, so any difference is wrong"),
    Row({"change": "rise"}, Verdict.IMPROVED, "better than recorded: the baseline has to be updated"),
    Row({"together": True}, Verdict.DRIFT, "single engine and P/D moved alike: the engine changed for everyone"),
    Row({}, Verdict.REGRESSION, "worse than recorded, and not for everyone"),
)


def decide(facts: Facts) -> tuple[Verdict, str]:
    """The verdict of the first row that fits, and its reason."""
    values = facts._asdict()
    for row in TABLE:
        if all(values[name] == wanted for name, wanted in row.when.items()):
            return row.verdict, row.why
    raise AssertionError("the last row of the table fits everything")


def table_lines() -> list[str]:
    """The table in Markdown, for the documentation; a test holds the two together."""
    names = Facts._fields
    lines = ["| " + " | ".join(n.replace("_", " ") for n in names) + " | verdict | because |"]
    lines.append("|" + "---|" * (len(names) + 2))
    for row in TABLE:
        cells = [_word(row.when[n]) if n in row.when else "" for n in names]
        lines.append(f"| {' | '.join(cells)} | {row.verdict.value} | {row.why} |")
    return lines


def _word(value: object) -> str:
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)
