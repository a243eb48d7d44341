"""A check of what drafts are made of: what a drafter is given in a step, and what it reads beside its KV."""

from __future__ import annotations

from harness.history.records import Observation
from harness.history.token_ids import common_prefix
from harness.history.verdict import Verdict
from harness.judging.checks.kv import is_noted, kv_computed, watched
from harness.judging.checks.kv_rounding import constant_bounds
from harness.judging.evidence import CellView
from harness.judging.figures import DraftDifference
from harness.judging.findings import CheckResult, Finding, conclude
from harness.observed.draft_notes import OtherDraft, compare_drafts
from harness.util.text import counted

NAME = "drafts-computed"


def applies(cell: CellView) -> bool:
    """Return whether engines noted what they drafted from, and the method's single engine answered a prompt, too."""
    return (
        watched(cell)
        and cell.speculative
        and cell.kv_held.drafting
        and any(_reference(cell, o) is not None and _drafted(o) for o in cell.all_observations())
    )


def drafts_computed(cell: CellView) -> CheckResult:
    """Check that each draft was sampled from what the single engine's was, but for rounding, where the KV of both is
    alike: what else a drafter is given in a step, and what it does with it, is in that."""
    in_the_kv = {_request(f) for f in kv_computed(cell).findings if f.verdict is not Verdict.UNKNOWN}
    bound = constant_bounds(cell).otherwise
    findings, judged, compared, left = [], 0, 0, 0
    for o in cell.all_observations():
        other = _reference(cell, o)
        if other is None or not _drafted(o):
            continue
        if (o.key, o.form) in in_the_kv:
            left += 1
            continue
        ours, theirs = cell.kv_held.drafts(o), cell.kv_held.drafts(other)
        if not ours or (not theirs and _drafted(other)):
            whose = f"the {_role(o)} engine" if not ours else cell.name.single
            findings.append(cell.untested(NAME, f"expected a note of what {whose} made its drafts of, found none", o))
            continue
        alike = len(o.sent_ids) + common_prefix(o.output, other.output)
        found = compare_drafts(ours, theirs, len(o.sent_ids) - 1, alike, bound)
        judged += bool(found.drafts)
        compared += found.drafts
        if found.others:
            findings.append(_finding(cell, o, found.others, found.drafts))
    notes = [f"{counted(compared, 'draft')} compared"] if compared else []
    notes += [f"{counted(left, 'answer')} with other KV, left to kv-computed"] if left else []
    return conclude(NAME, cell.id, judged + left, findings, note="; ".join(notes))


def _request(finding: Finding) -> tuple[str | None, str | None]:
    return finding.part or finding.prompt_id, finding.form


def _reference(cell: CellView, o: Observation) -> Observation | None:
    """Return the single engine's answer to the same prompt; None where that is ``o``, has no notes, or begins with
    another token, as a parameter may make it: then no step of both follows the same tokens."""
    other = cell.kv_held.other_answer(o, cell.name.single) if is_noted(o) else None
    if other is None or not is_noted(other):
        return None
    return other if common_prefix(o.output, other.output) else None


def _drafted(o: Observation) -> bool:
    """Return whether a step verified drafts of an answer, by what the engine says of it."""
    return o.final is not None and o.final.speculation is not None and o.final.speculation.num_drafted > 0


def _role(o: Observation) -> str:
    return o.final.role if o.final is not None else "answering"


def _finding(cell: CellView, o: Observation, others: tuple[OtherDraft, ...], compared: int) -> Finding:
    first = others[0]
    evidence = DraftDifference(
        role=_role(o),
        behind_token=first.position + 1,
        draft=first.draft,
        found=first.ours,
        expected=first.theirs,
        differing_drafts=len(others),
        compared_drafts=compared,
    )
    where = (
        "the first token of the answer"
        if first.position + 1 == len(o.sent_ids)
        else f"token {first.position + 1}, output {first.position + 1 - len(o.sent_ids)}"
    )
    same = "the same token" if first.ours == first.theirs else f"token {first.ours} instead of {first.theirs}"
    words = (
        f"expected the {_role(o)} engine to draft from what {cell.name.single} did, found {len(others)} of "
        f"{counted(compared, 'draft')} that it made of something else, while all KV is right: first draft "
        f"{first.draft} behind {where}, {first.distance:.0%} away, {same}"
    )
    return cell.finding(NAME, Verdict.REGRESSION, "drafter-input", words, o, evidence)
