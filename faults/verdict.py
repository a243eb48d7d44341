"""Decide whether a drill was survived, from what the run says and what is left. Pure functions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from faults.model import Drill, Ending, Result
from harness.history.folder import History
from harness.history.verdict import Verdict
from harness.judging.findings import Finding, Judgement

_SHOWN = 300


class Seen(NamedTuple):
    """The observed outcome of a struck run."""

    verdict: Verdict | None
    """The run's verdict; None if it has none."""
    reasons: tuple[str, ...]
    """Messages of findings, reasons of cells, notes of checks, and the output of the command line."""
    planned: int
    recorded: int
    seconds: float
    left: tuple[str, ...] = ()
    struck: bool = True
    """Whether the fault took place."""
    trouble: str = ""
    """Why the fault did not take place."""
    strays: tuple[str, ...] = ()
    """Findings on prompts that were not struck."""


def reasons_of(judgement: Judgement, history: History) -> tuple[str, ...]:
    """Return all reasons that a run gives, findings first."""
    found = [f.message for f in judgement.findings]
    found += [c.reason for c in history.run.cells if c.reason]
    found += [r.note for c in judgement.cells for r in c.results if r.note and r.verdict is not Verdict.PASS]
    return tuple(dict.fromkeys([*found, *judgement.notices]))


def strays(judgement: Judgement, struck: Sequence[str], late: Sequence[str] = ()) -> tuple[str, ...]:
    """Return findings on prompts that no fault struck.

    The transfer of ``late`` prompts, and nothing else about them, may be UNKNOWN, because D counts a failed one there.
    """
    return tuple(
        f.id
        for f in judgement.findings
        if f.prompt_id is not None and f.prompt_id not in struck and not (f.prompt_id in late and _uncounted(f))
    )


def _uncounted(finding: Finding) -> bool:
    return finding.check == "transfer" and finding.verdict is Verdict.UNKNOWN


def judge_drill(drill: Drill, seen: Seen, folder: str = "") -> Result:
    """Compare what was observed with what the drill states."""
    match = next((r for r in seen.reasons if re.search(drill.reason, r, re.DOTALL)), None)
    problems = tuple(_problems(drill, seen, match))
    green = seen.verdict in (Verdict.PASS, Verdict.KNOWN) and Verdict.PASS not in drill.verdicts
    if not seen.struck:
        ending = Ending.LOST
        why = f": {seen.trouble[:_SHOWN]}" if seen.trouble else ""
        problems = (f"the fault did not take place{why}", *problems)
    elif green:
        ending = Ending.FALSE_GREEN
    else:
        ending = Ending.FAILED if problems else Ending.SURVIVED
    shown = match or next(iter(seen.reasons), "")
    return _result(drill, ending, problems, seen.left, folder).model_copy(
        update={
            "verdict": seen.verdict,
            "reason": _around(shown, drill.reason),
            "planned": seen.planned,
            "recorded": seen.recorded,
            "seconds": round(seen.seconds, 1),
        }
    )


def lost(drill: Drill, why: str, left: tuple[str, ...] = (), folder: str = "") -> Result:
    """Return the result of a drill that itself failed."""
    return _result(drill, Ending.LOST, (" ".join(why.split())[:_SHOWN],), left, folder)


def _result(drill: Drill, ending: Ending, problems: tuple[str, ...], left: tuple[str, ...], folder: str) -> Result:
    return Result(
        id=drill.id,
        group=drill.group,
        title=drill.title,
        strikes=drill.strikes,
        expected=drill.expected,
        ending=ending,
        problems=problems,
        left=left,
        bound_s=drill.bound_s,
        folder=folder,
    )


def _problems(drill: Drill, seen: Seen, match: str | None) -> list[str]:
    found = []
    if seen.verdict not in drill.verdicts:
        found.append(f"expected the verdict {drill.expected}, found {seen.verdict or 'none'}")
    if match is None:
        found.append(f"expected a reason like /{drill.reason}/, found none among {len(seen.reasons)}")
    if seen.recorded < seen.planned:
        found.append(f"expected {seen.planned} recorded observations, found {seen.recorded}")
    if seen.seconds > drill.bound_s:
        found.append(f"expected the end within {drill.bound_s:.0f} s, found {seen.seconds:.0f} s")
    if seen.strays:
        found.append(f"expected findings on what was struck only, found {', '.join(seen.strays[:4])}")
    found += [f"left behind: {what}" for what in seen.left]
    return found


def _around(text: str, pattern: str) -> str:
    """Return the text on one line, cut to the surroundings of the match."""
    match = re.search(pattern, text, re.DOTALL)
    start = max(0, (match.start() if match else 0) - 120)
    return " ".join(text[start : start + _SHOWN].split())
