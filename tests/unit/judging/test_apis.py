"""Answers in pieces and from messages, and what usage says of cached tokens."""

from __future__ import annotations

import pytest

from harness.history.records import Streamed
from harness.history.verdict import Verdict
from harness.judging.checks.apis import CACHED, SAME, STREAMED, cached_tokens, same_answer, streamed
from harness.judging.checks.registry import judge
from tests.support.builders import argv_of, change_final, engine, history, lookups, observation, text_of, view
from tests.support.builders import with_prefill as with_p

APIS = {"id": "apis", "kind": "apis", "prompts": ["p96"]}
CELL = "single-none"


def asked(api: str, cell: str = CELL, **changes):
    number = ["completion", "completion-stream", "chat", "chat-stream"].index(api)
    o = observation(cell, 96, scenario="apis", part=api, api=api, sequence=number)
    produced = len(o.final.output_ids)
    counters = {"finished_requests": 1.0, "generation_tokens": float(produced)}
    return change_final(o, **({"counters": counters} | changes))


def pieces(o, **changes):
    """An answer in pieces of two tokens."""
    ids = o.final.output_ids
    sizes = tuple(len(ids[at : at + 2]) for at in range(0, len(ids), 2))
    upto = tuple(min(2 * n + 2, len(ids)) for n in range(len(sizes)))
    told = {"tokens": sizes, "characters": sizes, "counted": upto, "ended_at": (len(sizes) - 1,), "usages": 1}
    return change_final(o, streamed=Streamed(**(told | {"closed": True} | changes)))


def seen(*observations, cell: str = CELL, engines=None):
    return view(history(list(observations), scenarios=[APIS], engines=engines), cell, scenario="apis")


def test_the_same_answer_in_every_way_passes():
    whole, stream = asked("completion"), pieces(asked("completion-stream"))
    cell = seen(whole, stream, asked("chat"), pieces(asked("chat-stream")))
    assert (same_answer(cell).verdict, same_answer(cell).judged) == (Verdict.PASS, 3)
    assert (streamed(cell).verdict, streamed(cell).judged) == (Verdict.PASS, 2)


@pytest.mark.parametrize(
    ("changes", "words", "damage"),
    [
        ({"text": "w1"}, "expected the text of the whole completion", "text"),
        ({"finish_reason": "length"}, "expected the end of the whole completion", "sampler"),
        ({"stop_reason": 7}, "expected the stop reason of the whole completion", "sampler"),
        ({"chosen_logprobs": (-3.0,) * 93}, "expected the log-probs of the whole completion", "target-kv"),
    ],
)
def test_another_answer_to_messages_is_a_regression(changes, words, damage):
    found = same_answer(seen(asked("completion"), asked("chat", **changes)))
    assert found.verdict is Verdict.REGRESSION
    assert [(f.damage, words in f.message) for f in found.findings] == [(damage, True)]


@pytest.mark.parametrize(
    ("whole", "stream", "found"),
    [
        (("why w1", "why "), ("why w1", "why "), []),
        (("why w1", "why "), ("why w1", "why w1"), ["reasoning"]),
        (("why w1", "why "), ("why w1", None), ["reasoning"]),
        (("why w1", "why "), ("hy w1", "hy "), ["text", "reasoning"]),
    ],
)
def test_what_a_parser_has_cut_is_compared_within_the_chat_endpoint(whole, stream, found):
    """Completions pass no parser, which takes the marks of reasoning out."""
    chat, streamed_chat = (
        asked(api, text=text, reasoning=reasoning)
        for api, (text, reasoning) in (("chat", whole), ("chat-stream", stream))
    )
    cell = seen(asked("completion"), chat, pieces(streamed_chat))
    assert [f.message.split()[2] for f in same_answer(cell).findings] == found


def lossy(at: int = 3):
    """A stream that lost a token that the engine counted."""
    ids = asked("completion").final.output_ids
    kept = (*ids[:at], *ids[at + 1 :])
    return pieces(asked("completion-stream", output_ids=kept, text=text_of(kept[:-1]), usage_completion_tokens=92))


def test_a_token_that_the_engine_counted_was_lost_on_the_way():
    cell = seen(asked("completion"), lossy())
    (found,) = same_answer(cell).findings
    assert found.damage == "delivery" and "output token 3 of 93" in found.message
    (found,) = streamed(cell).findings
    assert (
        "the 93 tokens that the engine counted, found 92 in the pieces of the stream: 1 did not come" in found.message
    )


def test_what_was_lost_on_the_way_is_no_damage_to_the_kv():
    made = history([asked("completion"), lossy()], scenarios=[APIS])
    judged = judge(made, lookups([96]))
    (cell,) = [c for c in judged.cells if c.scenario == "apis"]
    assert {f.check for r in cell.results for f in r.findings} >= {SAME, STREAMED, "tokens-baseline"}
    assert cell.diagnosis is not None and cell.diagnosis.damage == "delivery"


def test_other_tokens_of_as_many_are_no_matter_of_delivery():
    ids = asked("completion").final.output_ids
    other = pieces(asked("completion-stream", output_ids=(*ids[:3], 99, *ids[4:])))
    (found,) = same_answer(seen(asked("completion"), other)).findings
    assert found.damage == "target-kv"


def test_without_a_whole_completion_nothing_is_compared():
    assert same_answer(seen(asked("chat"))).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"counted": (2, 3, *range(6, 93, 2), 93)},
            "expected piece 1 to count 4 tokens up to its end in its usage, found 3",
        ),
        ({"ended_at": ()}, "the finish reason is in no piece, not in the last one (46) alone"),
        ({"ended_at": (3, 46)}, "is in pieces 3, 46, not in the last one"),
        ({"usages": 0}, "came 0 times, not once"),
        ({"usages": 2}, "came 2 times, not once"),
        ({"closed": False}, "the stream stopped before its end mark"),
    ],
)
def test_a_stream_that_contradicts_itself_is_a_regression(changes, words):
    (found,) = streamed(seen(pieces(asked("completion-stream"), **changes))).findings
    assert words in found.message and (found.verdict, found.damage) == (Verdict.REGRESSION, "delivery")


def test_pieces_that_do_not_count_and_engines_that_do_not_are_believed():
    o = pieces(asked("completion-stream", counters={}), counted=(None,) * 47)
    assert streamed(seen(o)).verdict is Verdict.PASS


def test_tokens_may_not_come_twice():
    o = pieces(asked("completion-stream", counters={"generation_tokens": 91.0}))
    assert "2 came twice" in streamed(seen(o)).findings[0].message


def cached(number, hits: float = 32.0, external: float = 0.0, cell: str = CELL):
    counters = {"prompt_tokens_local_cache_hit": hits, "prompt_tokens_external_kv_transfer": external}
    return asked("completion", cell, cached_tokens=number, counters=counters)


@pytest.mark.parametrize(("said", "verdict"), [(32, Verdict.PASS), (0, Verdict.REGRESSION), (33, Verdict.REGRESSION)])
def test_usage_counts_the_cached_tokens_that_the_engine_counted(said, verdict):
    found = cached_tokens(seen(cached(said)))
    assert found.verdict is verdict and {f.damage for f in found.findings} <= {"delivery"}


@pytest.mark.parametrize(
    ("told", "on_p", "said", "verdict"),
    [
        # D says what P had cached, where P tells it, and what it has itself otherwise.
        (64, 64.0, 64, Verdict.PASS),
        (64, 64.0, 96, Verdict.REGRESSION),
        (64, 0.0, 64, Verdict.REGRESSION),
        (None, 64.0, 96, Verdict.PASS),
        (None, 64.0, 64, Verdict.REGRESSION),
    ],
)
def test_d_says_what_p_had_cached(told, on_p, said, verdict):
    o = cached(said, hits=0.0, external=96.0, cell="pd-none")
    params = {**o.leg("prefill").kv_transfer_params, **({"remote_prefill_cached_tokens": told} if told else {})}
    counters = {"prompt_tokens_local_cache_hit": on_p}
    o = with_p(o, kv_transfer_params=params, counters=counters, cached_tokens=int(on_p))
    assert cached_tokens(seen(o, cell="pd-none")).verdict is verdict


def test_an_engine_that_was_asked_and_does_not_say_is_unknown():
    silent = cached(None)
    flagged = engine(CELL, "single").model_copy(
        update={"argv": (*argv_of(CELL, "single"), "--enable-prompt-tokens-details")}
    )
    found = cached_tokens(seen(silent, engines=(flagged,)))
    assert found.verdict is Verdict.UNKNOWN and "found nothing in 1 answer" in found.findings[0].message
    judged = judge(history([silent], scenarios=[APIS]), lookups([96]))
    assert CACHED not in {r.check for c in judged.cells for r in c.results}
