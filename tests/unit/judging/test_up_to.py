"""Methods that draft up to k tokens a step, such as n-gram lookup; steps without drafts are not counted."""

from __future__ import annotations

import pytest

from harness.api import acceptance
from harness.baselines.lookup import Lookup
from harness.baselines.model import Again, BaselineRow
from harness.baselines.store import load_baseline, write_baseline
from harness.history.acceptance import pool, real_steps, request_counts
from harness.history.records import Observation, Speculation
from harness.history.verdict import Verdict
from harness.judging.checks import drafting, responses
from harness.judging.checks.registry import judge
from tests.support.builders import (
    change_final,
    changed_rows,
    history,
    identity,
    lookup,
    observation,
    provenance,
    rows,
    view,
)

ACCEPTED, DRAFTED = (3, 0, 1), (3, 2, 1)
LENGTHS = (40, 65, 96)


def steps(accepted: tuple[int, ...], drafted: tuple[int, ...]) -> Speculation:
    return Speculation(
        per_step_accepted=accepted,
        per_step_drafted=drafted,
        num_steps=len(accepted),
        num_drafted=sum(drafted),
        num_accepted=sum(accepted),
        up_to=True,
    )


def drafting_up_to(cell: str, tokens: int, accepted=ACCEPTED, drafted=DRAFTED, padded: bool = True) -> Observation:
    o = observation(cell, tokens)
    pads = padded and cell.startswith("pd")
    return change_final(o, speculation=steps((0, *accepted), (3, *drafted)) if pads else steps(accepted, drafted))


def both(**pd) -> list[Observation]:
    """Single engine and pair; the pair's request of 65 tokens has these steps."""
    made = [drafting_up_to("single-ngram", n) for n in LENGTHS]
    return [*made, *(drafting_up_to("pd-ngram", n, **(pd if n == 65 else {})) for n in LENGTHS)]


def with_plain(observations: list[Observation]) -> list[Observation]:
    return [*(observation(f"{t}-none", n) for t in ("pd", "single") for n in LENGTHS), *observations]


def baselines() -> dict[str, Lookup]:
    steps = {"accepted": ACCEPTED, "drafted": DRAFTED}
    return {"none": lookup(list(LENGTHS)), "ngram": changed_rows(lookup(list(LENGTHS), "ngram"), lambda _: steps)}


def test_flawless_run_passes_every_check():
    judgement = judge(history(with_plain(both())), baselines())
    assert judgement.findings == [] and judgement.verdict is Verdict.PASS


def test_rates_are_shares_of_what_was_drafted_at_a_position():
    rates = pool([ACCEPTED], 3, [DRAFTED])
    assert (rates.accepted_at, rates.drafted_at) == ((2, 1, 1), (3, 2, 1))
    assert rates.rates == (2 / 3, 1 / 2, 1) and rates.length_pooled == 1 + 4 / 3
    assert pool([ACCEPTED], 3).rates == (2 / 3, 1 / 3, 1 / 3)
    counted = request_counts(drafting_up_to("pd-ngram", 65).final, 3)
    assert counted is not None
    assert (counted.steps, counted.trials) == (3, (3, 2, 1))


def test_a_first_step_of_k_drafts_after_a_hand_off_is_read_as_padding_and_never_certain():
    padded = real_steps(drafting_up_to("pd-ngram", 65).final)
    assert (padded.accepted, padded.drafted, padded.padded, padded.certain) == (ACCEPTED, DRAFTED, True, False)
    fewer = real_steps(drafting_up_to("pd-ngram", 65, (0, 2), (1, 3), padded=False).final)
    assert (fewer.accepted, fewer.padded, fewer.certain) == ((0, 2), False, True)
    alone = drafting_up_to("single-ngram", 65, (0, *ACCEPTED), (3, *DRAFTED))
    assert real_steps(alone.final).padded is False
    one_token_left = change_final(alone, counters={"prompt_tokens_local_compute": 1.0})
    assert real_steps(one_token_left.final).accepted == ACCEPTED


@pytest.mark.parametrize(
    ("accepted", "drafted"),
    [((3, 0, 0), DRAFTED), ((3, 0), (3, 2)), ((), ()), ((3, 0, 1, 1), (3, 2, 1, 1)), (ACCEPTED, (3, 1, 1))],
    ids=["fewer accepted", "a step lost", "nothing drafted", "a step more", "fewer drafts"],
)
def test_a_pair_that_drafts_otherwise_than_the_single_engine_is_a_regression(accepted, drafted):
    made = view(history(both(accepted=accepted, drafted=drafted)), "pd-ngram", baselines())
    for check in (drafting.acceptance_single, drafting.acceptance_baseline):
        result = check(made)
        (finding,) = result.findings
        assert finding.prompt_id == "p65"
        assert result.verdict in (Verdict.REGRESSION, Verdict.IMPROVED)
        assert finding.damage in ("sampler", "engine-changed"), "a method without a model has no KV"


def test_requests_without_a_draft_are_legal_and_a_cell_of_them_has_no_evidence():
    some = [drafting_up_to("single-ngram", n) for n in LENGTHS[1:]]
    nothing = [drafting_up_to("single-ngram", n, (), ()) for n in LENGTHS]
    result = drafting.drafts_happened(view(history([nothing[0], *some]), "single-ngram"))
    assert (result.verdict, result.judged) == (Verdict.PASS, 2)
    assert "1 requests without a draft" in result.note
    assert drafting.drafts_happened(view(history(nothing), "single-ngram")).verdict is Verdict.UNKNOWN
    padded_only = [drafting_up_to("pd-ngram", n, (), ()) for n in LENGTHS]
    assert drafting.drafts_happened(view(history(padded_only), "pd-ngram")).verdict is Verdict.UNKNOWN


def test_more_drafts_than_k_are_unknown_and_fewer_only_for_such_methods():
    many = drafting_up_to("single-ngram", 65, (3, 0), (3, 4))
    result = drafting.drafts_happened(view(history([many]), "single-ngram"))
    assert "expected 1 to 3 drafts in every step, found 4 in step 2" in result.findings[0].message
    fixed = change_final(observation("single-eagle3", 65), speculation=steps((0, 3, 3), (2, 3, 3)))
    result = drafting.drafts_happened(view(history([fixed]), "single-eagle3"))
    assert "expected 3 drafts in every step, found 2 in step 1" in result.findings[0].message


def test_only_such_methods_may_leave_tokens_without_a_step():
    up_to = view(history([drafting_up_to("single-ngram", 65)]), "single-ngram")
    assert responses.response_invariants(up_to).verdict is Verdict.PASS
    found = drafting_up_to("single-ngram", 65).final.speculation.model_copy(update={"up_to": False})
    fixed = change_final(observation("single-eagle3", 65), speculation=found)
    result = responses.response_invariants(view(history([fixed]), "single-eagle3"))
    assert "the verify steps account for fewer" in result.findings[0].message


def test_baselines_keep_what_was_drafted(tmp_path):
    plain = rows([40])
    again = Again(divergence=None, gap=None, steps=3, accepted_at=(2, 1, 1), drafted_at=(3, 2, 1))
    changes = {"accepted": ACCEPTED, "drafted": DRAFTED, "again": again}
    mine = [r.model_copy(update=changes) for r in rows([40, 65], "ngram")]
    for method, recorded in (("none", plain), ("ngram", mine)):
        write_baseline(tmp_path / f"{method}.json", identity(method), provenance(), recorded)
        read: tuple[BaselineRow, ...] = load_baseline(tmp_path / f"{method}.json").rows
        assert read == tuple(recorded)
    assert "drafted" not in (tmp_path / "none.csv").read_text()
    summary = load_baseline(tmp_path / "ngram.json").header.summary
    assert summary["rates"] == [0.6667, 0.5, 1.0] and summary["acceptance_length_pooled"] == 2.3333
    assert summary["again"]["steps_differ"] == 0


def test_the_api_divides_by_the_drafts_of_each_position():
    frame = acceptance(history(both()))
    for cell in ("single-ngram", "pd-ngram"):
        assert frame[frame.cell == cell].rate.tolist() == pytest.approx([2 / 3, 1 / 2, 1])
