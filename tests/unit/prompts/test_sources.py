"""Which text a prompt was made of."""

from __future__ import annotations

from harness.profiles.model import PromptRecipe
from harness.prompts.model import load_prompts, planned_prompts
from harness.util.paths import REPOSITORY

RECIPE = {"dataset": "fake/bench", "revision": "d" * 40, "block_sizes": [16, 32], "lookaheads": [4], "per_stratum": 8}


def test_padded_copies_have_the_text_that_they_were_made_of():
    prompt = load_prompts(REPOSITORY / "prompts" / "probe.jsonl").prompts[0]
    assert prompt.source is None
    copies = [
        prompt.model_copy(update={"origin": f"fake/bench, row {row}, padded by {n} tokens"})
        for row, n in ((3, 0), (3, 7), (4, 7))
    ]
    assert [p.source for p in copies] == ["fake/bench, row 3", "fake/bench, row 3", "fake/bench, row 4"]


def test_plans_know_how_many_prompts_share_a_text():
    known = planned_prompts(PromptRecipe.model_validate({**RECIPE, "texts": 20}))
    assert len({p.source for p in known.cold}) == 10 < len(known.cold)
    assert {p.source for p in known.cold}.isdisjoint({p.source for p in known.held_out})
    unknown = planned_prompts(PromptRecipe.model_validate(RECIPE))
    assert len({p.source for p in unknown.cold}) == len(unknown.cold)
