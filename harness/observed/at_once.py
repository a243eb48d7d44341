"""What a recorded cell shows of asking its cold prompts together."""

from __future__ import annotations

from harness.history.at_once import CrowdProof, proof_of
from harness.observed.cell import ObservedCell
from harness.profiles.scenarios import AT_ONCE


def crowd_proof(cell: ObservedCell) -> CrowdProof | None:
    """Return what the first prompts of a cell show, which were asked alone and together; None if they had to show
    nothing."""
    if AT_ONCE not in cell.record.scenarios or not cell.record.planned:
        return None
    alone = {key: o for key, o in cell.history.of(cell.id).items() if o.concurrent == 1}
    together = cell.history.of(cell.id, scenario=AT_ONCE).values()
    return proof_of(alone, together, cell.profile.judging.logprob_nats, cell.speculative)
