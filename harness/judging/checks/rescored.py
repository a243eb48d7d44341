"""Check of re-scored outputs: whether the plain engine, given prompt and output, prefers the same tokens."""

from __future__ import annotations

from harness.history.records import RESCORE
from harness.history.token_ids import output_key
from harness.history.verdict import Verdict
from harness.judging.evidence import CellView
from harness.judging.figures import WrongWhenRescored
from harness.judging.findings import CheckResult, Finding, conclude
from harness.judging.near_ties import near_tie_nats
from harness.profiles.scenarios import Sampled

NAME = "rescored"


def rescored(cell: CellView) -> CheckResult:
    """Check that each output token is the plain engine's choice after the tokens before it, or nearly ties with it."""
    scores = cell.history.of(cell.name.reference, scenario=RESCORE)
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
            message = f"expected {cell.name.reference} to re-score this output, found no score ({reason})"
            findings.append(cell.untested(NAME, message, o))
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
                    WrongWhenRescored(
                        position=at, gap_nats=found[at], wrong_tokens=len(wrong), scored_tokens=len(found)
                    ),
                )
            )
    return conclude(NAME, cell.id, judged, findings, note=f"{ties} near ties, benign" if ties else "")


def applies(cell: CellView) -> bool:
    """Return whether the check applies: to cold and sampled cells, if the run re-scores and has the plain engine."""
    asked = cell.history.run.rescore and cell.selected(cell.name.reference)
    return asked and (cell.cold or isinstance(cell.config, Sampled))
