"""A real chat model from a package, on real vLLM and real NIXL: one pair, its single engine, and the plain engine."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from harness.history.verdict import Verdict
from harness.judging.rounding import RESOLUTION_NATS
from harness.profiles.load import load_profile
from harness.reports.judge_run import assess
from tests.support.real_engines import Done, harness, left_over

pytestmark = pytest.mark.engine

CELLS = ("pd-eagle3", "single-eagle3", "single-none")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    chosen = [word for cell in CELLS for word in ("--cell", cell)]
    out = tmp_path_factory.mktemp("real")
    return harness("run", "--profile", "smollm2-quick", *chosen, "--scenario", "cold", out=out)


def test_it_passes_bit_for_bit_by_measurement(done: Done):
    assert done.code == 0, done.output
    judgement = assess(done.history).judgement
    assert judgement.by_cell() == dict.fromkeys(CELLS, Verdict.PASS)
    assert any(n.startswith("tier bitwise, by measurement") for n in judgement.notices)
    assert done.folder is not None and left_over(done.folder) == []


def test_it_shows_how_it_rounds_itself(done: Done):
    (found,) = done.history.rounding.values()
    assert found.repeats and {"again", "hit", "prefill", "crowd"} <= set(found.ways)
    # Thirty layers round a token that is read with others otherwise, and far less than any damage moves it.
    assert found.largest("prefill") > 0 and found.largest("hit", "prefill", "crowd") < 100 * RESOLUTION_NATS


def test_it_answers_in_sentences_and_accepts_drafts(done: Done):
    folder = load_profile("smollm2-quick").tokenizer_folder
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    answers = [o.final.output_ids for o in done.history.of("pd-eagle3").values()]
    words = [tokenizer.decode(list(ids)).split() for ids in answers]
    assert len(words) >= 4 and sum(len(some) for some in words) > 8 * len(words)
    assert {"the", "a", "is", "of"} & {word.lower() for some in words for word in some}
    steps = [o.final.speculation for o in done.history.of("pd-eagle3").values()]
    accepted, drafted = (sum(getattr(s, f"num_{what}") for s in steps) for what in ("accepted", "drafted"))
    assert 0.02 < accepted / drafted < 0.9
