"""The gate of the normal tier for single answers: wrong KV in one of them never passes, rounding always does."""

from __future__ import annotations

import random

import pytest

from harness.baselines.lookup import Lookup
from harness.history.folder import History
from harness.history.records import RESCORE, Observation, Preferred
from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge, tripped_once
from harness.judging.evidence import Stages
from harness.judging.exposure import exposure_of
from harness.judging.findings import CheckResult, Judgement
from harness.reports.trend import answers_of
from harness.reports.trend_model import Answers
from tests.support.builders import change_final, with_answers
from tests.support.normal_tier import baselines, night, scored

PROMPTS = list(range(32, 332))


def garbage(prompts: int):
    """Every token but the first, which P knows, is wrong in the first answers of P/D."""

    def change(o: Observation) -> Observation:
        if o.cell != "pd-eagle3" or len(o.sent_ids) >= PROMPTS[0] + prompts:
            return o
        first, *others = o.final.output_ids
        return change_final(o, output_ids=(first, *(t + 100 for t in others)))

    return change


def judged(prompts: int, nats: float = 15.0) -> Judgement:
    made = night(change=garbage(prompts), lengths=PROMPTS, stages=1)
    plain = {o.prompt_id: o.final.output_ids for o in made.observations if o.cell == "single-none"}
    made = scored(made, lambda o: nats if o.final.output_ids != plain[o.prompt_id] else 0.0)
    return judge(made, baselines(PROMPTS))


@pytest.mark.parametrize("prompts", [9, 1])
def test_garbage_in_a_few_of_300_answers_is_suspect_with_the_prompts_named(prompts):
    judgement = judged(prompts)
    assert judgement.verdict is Verdict.SUSPECT
    found = [f for f in judgement.findings if f.verdict is Verdict.SUSPECT]
    assert {f.check for f in found} == {"logprob-trace"}
    assert {f.prompt_id for f in found} == {f"p{n}" for n in PROMPTS[:prompts]}
    assert all(f.prompt_id in f.message for f in found)
    (cell,) = [c for c in judgement.cells if c.cell == "pd-eagle3"]
    assert cell.diagnosis.damage == "target-kv"
    assert exposure_of(judgement).handed_off == len(PROMPTS)
    assert answers_of(judgement)["pd-eagle3"] == Answers(prompts, len(PROMPTS))


def test_what_a_test_sees_beyond_chance_is_a_regression():
    assert judged(30).verdict is Verdict.REGRESSION


def test_what_rounding_can_make_passes():
    assert judged(1, nats=2.9).verdict is Verdict.PASS
    assert judged(1, nats=3.1).verdict is Verdict.SUSPECT


def test_a_token_beyond_near_ties_that_many_right_answers_have_is_rounding():
    """Every answer of the plain engine has a token that it dislikes by 4 nats when it reads it afresh."""
    made = scored(night(lengths=PROMPTS, stages=1), lambda o: 4.0)
    assert result(made, "pd-eagle3", baselines(PROMPTS)).verdict is Verdict.PASS
    wrong = scored(night(lengths=PROMPTS, stages=1), lambda o: 4.0 if o.prompt_id == "p40" else 0.0)
    assert result(wrong, "pd-eagle3", baselines(PROMPTS)).verdict is Verdict.SUSPECT


def result(made: History, cell: str, lookups: dict[str, Lookup]) -> CheckResult:
    found = judge(made, lookups).result(cell, "logprob-trace")
    assert found is not None
    return found


# --- asked again ------------------------------------------------------------------------------------------------------


def read(prompts: int, lengths: list[int] = PROMPTS, stages: int = 2, cell: str = "pd-eagle3") -> History:
    """Return a night in which the first answers of P/D are garbage, as the plain engine reads it."""
    made = night(change=garbage(prompts), lengths=lengths, stages=stages)
    plain = {o.prompt_id: o.final.output_ids for o in made.observations if o.cell == "single-none"}
    return scored(made, lambda o: 15.0 if o.final.output_ids != plain[o.prompt_id] else 0.0)


@pytest.mark.parametrize(
    ("rounds", "verdict", "words"),
    [
        ((1, 1, 1), Verdict.REGRESSION, "asked again: found 3 of 3 times; in single-eagle3, cold, 0 of 3 times"),
        ((0, 1, 0), Verdict.REGRESSION, "asked again: found 1 of 3 times"),
        ((0, 0, 0), Verdict.SUSPECT, "did not come again when the request was sent again"),
        ((), Verdict.SUSPECT, "no test over all requests sees single ones"),
    ],
)
def test_an_answer_that_is_wrong_again_is_a_regression(rounds, verdict, words):
    again = tuple(read(wrong, PROMPTS[:1]) for wrong in rounds)
    judgement = judge(read(1), baselines(PROMPTS), Stages(again=again))
    (found,) = [f for f in judgement.findings if f.check == "logprob-trace"]
    assert (found.verdict, found.prompt_id) == (verdict, "p32")
    assert words in found.message


def test_a_round_without_the_answer_says_nothing():
    judgement = judge(read(1), baselines(PROMPTS), Stages(again=(read(0, PROMPTS[5:6]),)))
    (found,) = [f for f in judgement.findings if f.check == "logprob-trace"]
    assert found.verdict is Verdict.SUSPECT
    assert "asked again" not in found.message


def test_only_a_tier_with_two_stages_asks_again():
    assert [a.key for a in tripped_once(read(2), baselines(PROMPTS)).answers] == ["p32", "p33"]
    assert tripped_once(read(2, stages=1), baselines(PROMPTS)) == ([], [])


# --- log-probs --------------------------------------------------------------------------------------------------------


def rounded(
    less: dict[str, float] | None = None,
    sd: float = 0.05,
    coarser: float = 1.0,
    tokens: int = 64,
    seed: int = 0,
    close: dict[str, float] | None = None,
) -> History:
    """A night in which both readings of each answer are rounded, those of P/D ``coarser`` times as much, and in which
    the tokens of P/D's answers to the prompts ``less`` are so many nats less likely to the plain engine, which dislikes
    a token of the answers to ``close`` by so many."""
    rng = random.Random(seed)

    def said(o: Observation) -> Observation:
        output = tuple(rng.randrange(1000) for _ in range(tokens)) if o.cell == "single-none" else ()
        ids = outputs.setdefault(o.prompt_id, output)
        moved = sd * (coarser if o.cell.startswith("pd") else 1.0)
        likely = tuple(min(0.0, rng.gauss(-1, moved)) for _ in ids)
        return change_final(o, output_ids=ids, chosen_logprobs=likely, top_gaps=(9.0,) * len(ids))

    outputs: dict[str, tuple[int, ...]] = {}
    made = night(change=said, lengths=PROMPTS, cells=("single-none", "pd-none"), stages=1)
    made = scored(made, lambda o: (close or {}).get(o.prompt_id, 0.0))

    def read(o: Observation) -> Observation:
        if o.scenario != RESCORE:
            return o
        return change_final(o, rescored_logprobs=tuple(rng.gauss(-1, sd) for _ in o.final.rescored))

    made = with_answers(made, tuple(read(o) for o in made.observations))
    lost = less or {}

    def damaged(o: Observation) -> Observation:
        if o.cell != "pd-none" or o.prompt_id not in lost:
            return o
        return change_final(o, chosen_logprobs=tuple(p - lost[o.prompt_id] for p in o.final.chosen_logprobs))

    return with_answers(made, tuple(damaged(o) for o in made.observations))


def ranked(made: History, rank: int, second: int | None = None, prompt: str = "p40") -> History:
    """The same, with rank and best token of what the plain engine does not prefer: token 7 there; ``second`` is what
    the engine that said the answer to a prompt thought second."""

    def told(o: Observation) -> Observation:
        if o.scenario == RESCORE:
            others = [i for i, gap in enumerate(o.final.rescored) if gap > 0]
            return change_final(o, rescored_preferred=tuple(Preferred(at=i, rank=rank, best=7) for i in others))
        if o.prompt_id != prompt:
            return o
        return change_final(o, runner_ups=tuple(second for _ in o.final.output_ids))

    return with_answers(made, tuple(told(o) for o in made.observations))


def trace_of(made: History) -> CheckResult:
    return result(made, "pd-none", baselines(PROMPTS))


@pytest.mark.parametrize("sd, coarser", [(0.0, 1.0), (0.03, 1.0), (0.12, 1.0), (0.03, 3.0)])
def test_rounding_passes_also_where_pd_rounds_more(sd: float, coarser: float):
    found = trace_of(rounded(sd=sd, coarser=coarser))
    assert found.verdict is Verdict.PASS and found.judged == len(PROMPTS)
    assert "could have seen a mean of" in found.note


@pytest.mark.parametrize("nats, verdict", [(0.015, Verdict.PASS), (0.5, Verdict.SUSPECT)])
def test_engines_that_round_nothing_part_at_near_ties_only(nats: float, verdict: Verdict):
    found = trace_of(rounded(sd=1e-7, close={"p40": nats}))
    assert found.verdict is verdict and {f.prompt_id for f in found.findings} <= {"p40"}


@pytest.mark.parametrize(
    "rank, second, verdict",
    [(2, 7, Verdict.PASS), (2, None, Verdict.PASS), (2, 8, Verdict.SUSPECT), (5, 7, Verdict.SUSPECT)],
)
def test_a_near_tie_excuses_the_two_best_tokens_alone(rank: int, second: int | None, verdict: Verdict):
    """The same dislike: of the second-best token, behind what was second to the engine that said it, it is a near tie;
    of any other one, no rounding that this run shows explains it."""
    close = rounded(sd=1e-7, close={"p40": 0.015})
    assert trace_of(close).verdict is Verdict.PASS
    found = trace_of(ranked(close, rank, second))
    assert found.verdict is verdict
    for finding in found.findings:
        assert finding.prompt_id == "p40" and (finding.evidence.rank, finding.evidence.best_token) == (rank, 7)
        assert f"by 0.01 nats: it has rank {rank} there, and token 7 is the best" in finding.message


def test_what_rounding_explains_passes_whatever_its_rank():
    assert trace_of(ranked(rounded(sd=0.05, close={"p40": 0.3}), 5, 8)).verdict is Verdict.PASS


def test_a_window_tells_how_many_of_its_tokens_are_not_the_best():
    (found,) = trace_of(ranked(rounded({"p100": 0.4}, close={"p100": 0.2}), 3)).findings
    assert found.evidence.not_best == 1
    assert "1 of them is not its best, the lowest at output token 2, of rank 3 behind token 7" in found.message
    (found,) = trace_of(rounded({"p100": 0.4})).findings
    assert found.evidence.not_best is None and "not its best" not in found.message


def test_a_score_without_ranks_among_others_that_have_them_is_unknown():
    made = ranked(rounded(close={"p40": 0.2, "p41": 0.2}), 2)

    def lost(o: Observation) -> Observation:
        return change_final(o, rescored_preferred=None) if o.scenario == RESCORE and o.prompt_id == "p40" else o

    found = trace_of(with_answers(made, tuple(lost(o) for o in made.observations)))
    assert found.verdict is Verdict.UNKNOWN and "expected rank and best token" in found.findings[0].message


def test_ranks_of_other_tokens_than_the_gaps_are_no_score():
    made = ranked(rounded(close={"p40": 0.2}), 2)

    def moved(o: Observation) -> Observation:
        if o.scenario != RESCORE or not o.final.rescored_preferred:
            return o
        return change_final(o, rescored_preferred=(Preferred(at=3, rank=2, best=7),))

    found = trace_of(with_answers(made, tuple(moved(o) for o in made.observations)))
    assert found.verdict is Verdict.UNKNOWN and "its ranks are of other tokens" in found.findings[0].message


def test_a_wrong_answer_that_is_shorter_than_any_window_is_named():
    found = trace_of(rounded({"p100": 0.6}, tokens=12))
    assert [(f.prompt_id, f.evidence.position, f.evidence.tokens) for f in found.findings] == [("p100", 0, 12)]
    assert "over a whole answer of 12" in found.note


def test_one_answer_whose_tokens_are_less_likely_is_named():
    """Its tokens are right, every one of them, and no test over all answers can see it."""
    made = rounded({"p100": 0.4})
    found = trace_of(made)
    assert [(f.prompt_id, f.verdict, f.damage) for f in found.findings] == [("p100", Verdict.SUSPECT, "target-kv")]
    (finding,) = found.findings
    assert 0.3 < finding.evidence.mean_nats < 0.5 and finding.evidence.limit_nats < 0.3
    assert "p100: for " in finding.message and "single-none, which reads them afresh, differ by" in finding.message


def test_a_wrong_answer_of_the_plain_engine_excuses_none():
    """The text of such an answer would seem to be rounded coarsely."""
    made = rounded({"p100": 0.6})

    def plain_too(o: Observation) -> Observation:
        if o.cell != "single-none" or o.prompt_id != "p100" or o.scenario == RESCORE:
            return o
        return change_final(o, chosen_logprobs=tuple(p - 2.0 for p in o.final.chosen_logprobs))

    made = with_answers(made, tuple(plain_too(o) for o in made.observations))
    for cell in ("single-none", "pd-none"):
        assert {f.prompt_id for f in result(made, cell, baselines(PROMPTS)).findings} == {"p100"}


def test_answers_without_log_probs_and_runs_of_a_few_tokens_are_unknown():
    made = rounded()
    without = [change_final(o, chosen_logprobs=None) if o.prompt_id == "p40" else o for o in made.observations]
    found = trace_of(with_answers(made, tuple(without)))
    assert found.verdict is Verdict.UNKNOWN and "with its log-probs" in found.findings[0].message
    few = judge(scored(night(lengths=PROMPTS[:3], stages=1)), baselines(PROMPTS[:3]))
    found = few.result("pd-eagle3", "logprob-trace")
    assert found.verdict is Verdict.UNKNOWN and "expected 500 tokens of single-none" in found.findings[0].message


def test_output_without_a_score_is_unknown():
    made = scored(night(lengths=PROMPTS, stages=1))
    found = result(with_answers(made, made.observations[:-1]), "single-none", baselines(PROMPTS))
    assert found.verdict is Verdict.UNKNOWN and "no score" in found.findings[0].message


def test_a_run_of_one_answer_is_judged():
    few = judge(scored(night(lengths=PROMPTS[:1], stages=1)), baselines(PROMPTS[:1]))
    assert few.result("pd-eagle3", "logprob-trace").verdict is Verdict.UNKNOWN


def test_what_breaks_the_check_is_unknown_and_hides_nothing(monkeypatch: pytest.MonkeyPatch):
    def breaks(*_: object) -> None:
        raise ZeroDivisionError("a record that nobody thought of")

    monkeypatch.setattr("harness.judging.checks.traces._rounding", breaks)
    judgement = judge(scored(night(lengths=PROMPTS, stages=1)), baselines(PROMPTS))
    found = judgement.result("pd-eagle3", "logprob-trace")
    assert found.verdict is Verdict.UNKNOWN and "a record that nobody thought of" in found.note
    assert judgement.result("pd-eagle3", "rescored").verdict is Verdict.PASS
