"""Pairs of whose KV nothing proves what moved, by their connector: never a pass, always with the reason."""

from __future__ import annotations

from harness.history.folder import History
from harness.history.records import Leg
from harness.history.verdict import Verdict
from harness.judging.checks import transfer
from harness.judging.checks.registry import judge
from tests.support.builders import (
    LENGTHS,
    change_final,
    history,
    lookups,
    observation,
    view,
    with_answers,
    with_profile,
)

MULTI = {
    "kv_connector": "MultiConnector",
    "kv_connector_extra_config": {"connectors": [{"kv_connector": "NixlConnector"}]},
}


def moved_by(connector: dict, lost: int = 0) -> History:
    """A run whose pair used this connector; without NIXL, nothing counts what moved, and ``lost`` tokens did not."""
    made = []
    for tokens in LENGTHS:
        o = observation("pd-none", tokens)
        kept = {k: v for k, v in o.final.counters.items() if not k.startswith("nixl_")}
        kept["prompt_tokens_external_kv_transfer"] -= lost
        made += [change_final(o, counters=kept), observation("single-none", tokens)]
    found = history(made)
    silent = (o.model_copy(update={"legs": tuple(_without_nixl(leg) for leg in o.legs)}) for o in found.observations)
    return with_profile(with_answers(found, silent), engine=connector)


def _without_nixl(leg: Leg) -> Leg:
    return leg.model_copy(update={"counters": {k: v for k, v in leg.counters.items() if not k.startswith("nixl_")}})


def test_a_pair_without_nixl_cannot_pass_and_says_why_once():
    judgement = judge(moved_by({"kv_connector": "MooncakeConnector"}), lookups(LENGTHS))
    (pair,) = [c for c in judgement.cells if c.cell == "pd-none"]
    assert pair.verdict is Verdict.UNKNOWN
    (finding,) = [f for r in pair.results for f in r.findings]
    assert (finding.check, finding.verdict) == ("transfer", Verdict.UNKNOWN)
    assert "MooncakeConnector is not NIXL" in finding.message
    (single,) = [c for c in judgement.cells if c.cell == "single-none"]
    assert single.verdict is Verdict.PASS


def test_prompt_tokens_that_d_did_not_get_are_named():
    result = transfer.transfer(view(moved_by({"kv_connector": "MooncakeConnector"}, lost=5), "pd-none"))
    assert result.verdict is Verdict.UNKNOWN
    assert sum("part of the prompt was not transferred" in f.message for f in result.findings) == len(LENGTHS)


def test_without_counters_of_nixl_that_is_there_nothing_is_proven():
    result = transfer.transfer(view(moved_by(MULTI), "pd-none"))
    assert result.verdict is Verdict.UNKNOWN
    assert sum("found no bytes by NIXL" in f.message for f in result.findings) == len(LENGTHS)
