"""Every kind of evidence and of figures is read back from JSON as the type that it was."""

from __future__ import annotations

from typing import get_args

import pytest
from pydantic import BaseModel, TypeAdapter

from harness.judging.figures import (
    AcceptanceFigures,
    AcceptanceTestEvidence,
    CacheHit,
    CheckFigures,
    ColumnFigures,
    ConditionalRates,
    Counted,
    DraftDifference,
    DraftFigures,
    DraftsBeside,
    EchoDifference,
    FailedRequest,
    FindingEvidence,
    HandOffParameters,
    HypothesisFigures,
    IncompleteCell,
    KVDifference,
    KVOfLayers,
    KVPlace,
    LogprobDifference,
    MeanDifference,
    NoEvidence,
    OfEngine,
    PositionRates,
    PublishedBlocks,
    RatesFigures,
    RepeatDifference,
    RouterCounted,
    StepsBeside,
    StepsDifference,
    StopToken,
    TextDifference,
    TokenDifference,
    TokenTestEvidence,
    TotalsDifference,
    TraceMoved,
    TransferFigures,
    WrongWhenRescored,
)

RATES = {
    "requests": 1,
    "steps": 2,
    "accepted_at": (1, 0),
    "rates": (0.5, 0.0),
    "acceptance_length_pooled": 1.5,
    "acceptance_length_per_prompt": None,
}
TESTED = {
    "reference": PositionRates(rates=(0.5, None)),
    "conditional": ConditionalRates(reference=(0.5,), found=(None,)),
    "p": 0.01,
    "p_adjusted": None,
    "alpha": 0.005,
    "prompts": 96,
    "detectable_points": 1.0,
    "detectable_stratum_points": None,
    "columns": (
        ColumnFigures(
            column="all@0",
            reference=0.5,
            found=0.25,
            effect_points=-25.0,
            interval_points=(-30.0, None),
            prompts=96,
            p_adjusted=0.01,
        ),
    ),
}
WINDOW = {"position": 3, "found": (1, 2), "expected": (1, 3)}
FIGURES = (
    NoEvidence(),
    DraftFigures(**RATES, padded_first_steps=1, by_step=(("0", 1, 0.5),)),
    AcceptanceFigures(ours=RatesFigures(**RATES), reference=RatesFigures(**RATES), against="the baseline"),
    TransferFigures(bytes=1, descriptors=2, external_tokens=3),
    HypothesisFigures(**TESTED),
)
EVIDENCE = (
    NoEvidence(),
    IncompleteCell(reason="the engine died"),
    EchoDifference(role="single", position=0, sent=(1,), seen=(2,)),
    OfEngine(role="decode"),
    StopToken(role="decode", token=7),
    TextDifference(position=1, as_text=(1,), as_ids=(2,)),
    TokenDifference(**WINDOW, reference_gap_nats=None, window_start=0, differing_tokens=1, output_tokens=9),
    LogprobDifference(
        logprob_position=3,
        found_nats=5.0,
        expected_nats=9.0,
        bound_nats=1e-5,
        moved_tokens=1,
        compared_tokens=9,
        most=((3, 4.0),),
    ),
    RepeatDifference(**WINDOW),
    FailedRequest(role="decode", status=500, exit_code=None, words="Grammar error", answered_by="single-none"),
    TotalsDifference(found_totals=(3, 1), expected_totals=(3, 2)),
    StepsDifference(
        step=0,
        positions=(1,),
        common_steps=2,
        found=(0,),
        expected=(1,),
        found_mean=0.0,
        expected_mean=1.0,
        found_rates=(0.0,),
        expected_rates=(1.0,),
        padded_first_step=False,
        raw=(),
    ),
    MeanDifference(found=1.0, expected=2.0, rounds=10),
    WrongWhenRescored(position=1, gap_nats=2.5, wrong_tokens=1, scored_tokens=4, rank=5, best_token=9),
    TraceMoved(position=16, tokens=16, mean_nats=0.4, limit_nats=0.1, usual_nats=0.05),
    DraftsBeside(accepted=0, steps=40, expected_accepted=30, expected_steps=41, p=1e-9),
    KVDifference(
        role="decode",
        places=(
            KVPlace(layer="model.layers.1.attn", kind="keys", heads=(2,), first_token=32, zeros=False, found_at=None),
        ),
        differing=1,
        tokens=(40,),
        prompt_tokens=65,
        by_layer=(KVOfLayers(layers=("model.layers.1.attn",), keys=(1,), values=(), zeros=False),),
    ),
    DraftDifference(
        role="decode", behind_token=83, draft=1, found=7, expected=7, differing_drafts=2, compared_drafts=9
    ),
    CacheHit(hit_blocks=2),
    Counted(counters={"nixl_bytes": 1.0}),
    RouterCounted(counters={"nixl_bytes": 1.0}, prefill_counters={}),
    HandOffParameters(kv_transfer_params={"remote_block_ids": [[1]]}),
    PublishedBlocks(kv_transfer_params={}, group=0, expected_blocks=1, published_blocks=2),
    TokenTestEvidence(**TESTED, changed=("all@token 1",)),
    AcceptanceTestEvidence(
        **TESTED, changed=("all@0",), by_step=StepsBeside(found=(("0", 1, 0.5),), reference=(("8+", 2, 1.0),))
    ),
)


@pytest.mark.parametrize(("union", "examples"), [(CheckFigures, FIGURES), (FindingEvidence, EVIDENCE)])
def test_each_kind_is_read_back_as_it_was(union: type, examples: tuple[BaseModel, ...]):
    assert {type(e) for e in examples} == set(get_args(union))
    adapter = TypeAdapter(union)
    for example in examples:
        raw = adapter.dump_json(example)
        assert raw == example.model_dump_json().encode()
        found = adapter.validate_json(raw)
        assert type(found) is type(example) and found == example
