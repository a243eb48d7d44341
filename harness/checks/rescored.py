"""Would the plain engine, reading prompt and output afresh, have said the same tokens?"""

from __future__ import annotations

from harness.checks.evidence import CellView
from harness.checks.night import near_tie_nats
from harness.findings import CheckResult, Finding, Verdict, conclude
from harness.history import RESCORE
from harness.sequences import output_key

NAME = "rescored"


def rescored(cell: CellView) -> CheckResult:
    """Each output token is what the plain engine prefers after the tokens before it, or ties with that."""
    scores = cell.evidence.history.of(cell.name.reference, scenario=RESCORE)
    bound = near_tie_nats(cell)
    findings: list[Finding] = []
    judged = ties = 0
    for o in cell.answered().values():
        leg = o.final
        if leg is None or not leg.output_ids:
            continue
        score = scores.get(f"{o.prompt_id}#0.{output_key(leg.output_ids)}")
        found = score.final.rescored if score is not None and score.error is None and score.final else None
        if found is None:
            reason = score.error if score is not None and score.error else "it was not asked"
            findings.append(
                cell.finding(
                    NAME,
                    Verdict.UNKNOWN,
                    "nothing-tested",
                    f"expected {cell.name.reference} to re-score this output, found no score ({reason})",
                    o,
                )
            )
            continue
        judged += 1
        ties += sum(0 < gap <= bound for gap in found)
        wrong = [i for i, gap in enumerate(found) if gap > bound]
        if wrong:
            at = wrong[0]
            findings.append(
                cell.finding(
                    NAME,
                    Verdict.REGRESSION,
                    "target-kv" if cell.handed_off or not cell.cold else "sampler",
                    f"expected output tokens that {cell.name.reference} prefers when it reads prompt and output "
                    f"afresh, found {len(wrong)} of {len(found)} that it does not, the first at output token {at}, by "
                    f"{found[at]:.2f} nats (a near tie is at most {bound:g})",
                    o,
                    position=at,
                    gap_nats=found[at],
                    wrong_tokens=len(wrong),
                    scored_tokens=len(found),
                )
            )
    return conclude(NAME, cell.id, judged, findings, note=f"{ties} near ties, benign" if ties else "")


def applies(cell: CellView) -> bool:
    """Where the run was asked to re-score, and the plain engine of the variant is part of it: cold cells and sampled
    ones."""
    from harness.scenarios.config import Sampled

    asked = cell.evidence.history.run.rescore and cell.evidence.selected(cell.name.reference)
    return asked and (cell.cold or isinstance(cell.config, Sampled))
