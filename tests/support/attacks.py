"""Semantic damage to a recorded run: whole stories that agree with themselves, such as a bug of vLLM, of the recorder
or of a merge would tell. ``damage`` changes one field at a time; here an attack changes all that belong together, and
the record is sealed anew.

An attack is a story, times where it happens. None may leave the run green unless ``BENIGN`` says why.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from harness.history.engine_interfaces import (
    BY_SOURCE,
    PER_REQUEST,
    RESET_PREFIX_CACHE,
    SERVER_INFO,
    STEP_TOKENS,
    WITHOUT,
)
from tests.support.damage import Run, copied

Row = dict[str, Any]
Leg = dict[str, Any]
Change = Callable[[Row, Run, random.Random], None]


class Attack(NamedTuple):
    story: str
    where: str
    do: Callable[[Run, random.Random], None]

    @property
    def name(self) -> str:
        return f"{self.story}:{self.where}"


def attacked(run: Run, attack: Attack) -> Run | None:
    """Return the damaged run, or None if the attack changes nothing in it."""
    out = run.copy()
    attack.do(out, random.Random(attack.name))
    return None if out == run else out


# --- where -----------------------------------------------------------------------------------------------------------


def answers(run: Run) -> list[Row]:
    return [row for name, rows in sorted(run.rows.items()) if name.endswith("observations.jsonl") for row in rows]


def scores(run: Run) -> list[Row]:
    return [row for name, rows in sorted(run.rows.items()) if name.endswith("scores.jsonl") for row in rows]


def is_pair(row: Row) -> bool:
    return str(row["cell"]).startswith("pd-")


def speculates(row: Row) -> bool:
    return "none" not in row["cell"]


PLACES: dict[str, Callable[[Row], bool]] = {
    "all": lambda row: True,
    "pairs": is_pair,
    "single engines": lambda row: not is_pair(row),
    "with speculation": speculates,
    "without speculation": lambda row: not speculates(row),
    "cold": lambda row: row.get("scenario", "cold") == "cold",
    "in scenarios": lambda row: row.get("scenario", "cold") != "cold",
    "pairs with speculation, cold": lambda row: (
        is_pair(row) and speculates(row) and row.get("scenario", "cold") == "cold"
    ),
    "as text": lambda row: row["form"] == "text",
    "router": lambda row: row["cell"].endswith("-router"),
    "sampled": lambda row: row.get("scenario") == "sampled",
    "features": lambda row: row.get("feature") is not None,
}


def each(change: Change, wanted: Callable[[Row], bool], one: bool = False) -> Callable[[Run, random.Random], None]:
    """Change every answer that is wanted, or one of those that are judged: the first that the change changes, from a
    random one on."""

    def do(run: Run, rng: random.Random) -> None:
        rows = [row for row in answers(run) if wanted(row) and row.get("error") is None]
        rows = [row for row in rows if not one or _judged(row)]
        if one and rows:
            start = rng.randrange(len(rows))
            rows = rows[start:] + rows[:start]
        for row in rows:
            before = copied(row) if one else None
            change(row, run, rng)
            if one and row != before:
                return

    return do


def _judged(row: Row) -> bool:
    """Whether an answer is judged: not one that only fills a cache, or that its client gave up."""
    return row.get("abandon") is None and len(final(row).get("output_ids") or ()) > 8


def final(row: Row) -> Leg:
    return next((leg for leg in row["legs"] if leg["role"] in ("decode", "single")), {})


def prefill(row: Row) -> Leg:
    return next((leg for leg in row["legs"] if leg["role"] == "prefill"), {})


# --- log-probs -------------------------------------------------------------------------------------------------------


def shifted(field: str, by: float, every: int = 1) -> Change:
    def change(row: Row, run: Run, rng: random.Random) -> None:
        for leg in row["legs"]:
            if leg.get(field):
                leg[field] = [v if v is None or i % every else v + by for i, v in enumerate(leg[field])]

    return change


def replaced(field: str, value: Any) -> Change:
    """Every entry of a list becomes ``value``."""

    def change(row: Row, run: Run, rng: random.Random) -> None:
        for leg in row["legs"]:
            if leg.get(field):
                leg[field] = [value] * len(leg[field])

    return change


def unset(field: str) -> Change:
    def change(row: Row, run: Run, rng: random.Random) -> None:
        for leg in row["legs"]:
            if leg.get(field) is not None:
                leg[field] = None

    return change


def last_logprob_lost(row: Row, run: Run, rng: random.Random) -> None:
    for leg in row["legs"]:
        if leg.get("top_gaps"):
            leg["top_gaps"] = [*leg["top_gaps"][:-1], None]


def of_another(field: str) -> Change:
    """The list of another answer of the same length in the same cell."""

    def change(row: Row, run: Run, rng: random.Random) -> None:
        leg = final(row)
        others = [
            final(other)[field]
            for other in answers(run)
            if other["cell"] == row["cell"]
            and final(other).get(field)
            and len(final(other).get(field) or ()) == len(leg.get(field) or ())
        ]
        different = [o for o in others if o != leg.get(field)]
        if different and leg.get(field):
            leg[field] = copy.copy(rng.choice(different))

    return change


# --- tokens and ends -------------------------------------------------------------------------------------------------


def token_changed(at: int) -> Change:
    def change(row: Row, run: Run, rng: random.Random) -> None:
        leg = final(row)
        if leg.get("output_ids"):
            leg["output_ids"][at % len(leg["output_ids"])] += 1

    return change


def put(value: Any, *fields: str) -> Change:
    """Fields of every answer get this value, or what it makes of theirs."""

    def change(row: Row, run: Run, rng: random.Random) -> None:
        for leg in row["legs"]:
            for field in fields:
                if leg.get(field) is not None or not callable(value):
                    leg[field] = value(leg[field]) if callable(value) else value

    return change


def own_token_of_p_changed(row: Row, run: Run, rng: random.Random) -> None:
    leg = prefill(row)
    if leg.get("output_ids"):
        leg["output_ids"] = [leg["output_ids"][0] + 1]


def end_turned(row: Row, run: Run, rng: random.Random) -> None:
    leg = final(row)
    if leg:
        leg["finish_reason"] = "length" if leg["finish_reason"] == "stop" else "stop"


def held_for_ever(row: Row, run: Run, rng: random.Random) -> None:
    if row.get("held_until") is not None:
        row["held_until"] += 1e6


def garbage(row: Row, run: Run, rng: random.Random) -> None:
    """Every token but the first is another one; the plain engine dislikes what it reads."""
    leg = final(row)
    ids = leg.get("output_ids")
    if ids and len(ids) > 2:
        leg["output_ids"] = [ids[0], *(rng.randrange(30, 400) for _ in ids[1:-1]), ids[-1]]


def second_half_is_one_token(row: Row, run: Run, rng: random.Random) -> None:
    leg = final(row)
    ids = leg.get("output_ids")
    if ids and len(ids) > 4:
        half = len(ids) // 2
        leg["output_ids"] = [*ids[:half], *[77] * (len(ids) - half - 1), ids[-1]]


# --- drafts ----------------------------------------------------------------------------------------------------------


def drafted_again(row: Row, accepted: list[int], k: int = 3) -> None:
    """Write these accepted drafts into an answer, with totals and counters."""
    leg = final(row)
    old, padded = leg["speculation"], leg["role"] == "decode" and leg["speculation"]["per_step_accepted"][:1] == [0]
    steps = [0, *accepted] if padded and accepted[:1] != [0] else accepted
    leg["speculation"] = {
        **old,
        "per_step_accepted": steps,
        "per_step_drafted": [k] * len(steps),
        "num_steps": len(steps),
        "num_drafted": k * len(steps),
        "num_accepted": sum(steps),
    }
    counters = leg.get("counters") or {}
    if "drafts" in counters:
        counters |= {"drafts": len(steps), "draft_tokens": k * len(steps), "accepted_tokens": sum(steps)}
        for at in range(k):
            counters.pop(f"accepted_at_{at}", None)
            if count := sum(a > at for a in steps):
                counters[f"accepted_at_{at}"] = count


def _has_steps(row: Row) -> bool:
    return bool((final(row).get("speculation") or {}).get("per_step_accepted"))


def nothing_accepted(row: Row, run: Run, rng: random.Random) -> None:
    if _has_steps(row):
        drafted_again(row, [0] * (len(final(row)["output_ids"]) - 1))


def one_draft_less(row: Row, run: Run, rng: random.Random) -> None:
    if _has_steps(row):
        steps = list(final(row)["speculation"]["per_step_accepted"])
        at = next((i for i, a in enumerate(steps) if a > 0), None)
        if at is not None:
            steps[at] -= 1
            drafted_again(row, [*steps, 0])


def all_accepted(row: Row, run: Run, rng: random.Random) -> None:
    if _has_steps(row):
        left, steps = len(final(row)["output_ids"]) - 1, []
        while left > 0:
            steps.append(min(3, left - 1))
            left -= steps[-1] + 1
        drafted_again(row, steps)


def not_speculating(row: Row, run: Run, rng: random.Random) -> None:
    leg = final(row)
    if leg.get("speculation"):
        leg["speculation"] = None
        leg["counters"] = {k: v for k, v in leg["counters"].items() if not k.startswith(("draft", "accepted"))}


# --- one exchange for several ----------------------------------------------------------------------------------------


def copied_from(twin: Callable[[Row, Row], bool]) -> Change:
    """The legs of another answer stand for this one too."""

    def change(row: Row, run: Run, rng: random.Random) -> None:
        found = next((other for other in answers(run) if other is not row and twin(row, other)), None)
        if found is not None and [leg["role"] for leg in found["legs"]] == [leg["role"] for leg in row["legs"]]:
            row["legs"] = copy.deepcopy(found["legs"])

    return change


def _same_prompt(row: Row, other: Row) -> bool:
    return bool(row["prompt_id"] == other["prompt_id"] and row["sent_ids"] == other["sent_ids"])


def text_by_ids(row: Row, other: Row) -> bool:
    return (
        row["form"] == "text" and other["form"] == "ids" and row["cell"] == other["cell"] and _same_prompt(row, other)
    )


def second_round_by_first(row: Row, other: Row) -> bool:
    same = all(row.get(k) == other.get(k) for k in ("cell", "scenario", "part", "form"))
    return same and row.get("instance", 0) > other.get("instance", 0) and _same_prompt(row, other)


def warm_by_cold(row: Row, other: Row) -> bool:
    warm = row.get("scenario", "cold") != "cold" == other.get("scenario", "cold")
    return warm and row["cell"] == other["cell"] and _same_prompt(row, other)


def all_ids_one(row: Row, run: Run, rng: random.Random) -> None:
    for leg in row["legs"]:
        leg["request_id"] = "0"


# --- hand-offs -------------------------------------------------------------------------------------------------------


def counters_times(names: tuple[str, ...], factor: float) -> Change:
    def change(row: Row, run: Run, rng: random.Random) -> None:
        holders = [leg.get("counters") or {} for leg in row["legs"]] + list((row.get("shared_counters") or {}).values())
        for counters in holders:
            for name in names:
                if name in counters:
                    counters[name] *= factor

    return change


def block_ids(make: Callable[[int], Any]) -> Change:
    def change(row: Row, run: Run, rng: random.Random) -> None:
        params = prefill(row).get("kv_transfer_params") or {}
        if params.get("remote_block_ids"):
            params["remote_block_ids"] = [[make(b) for b in group] for group in params["remote_block_ids"]]

    return change


def expired(row: Row, run: Run, rng: random.Random) -> None:
    """P gave the blocks up before D had read them, and an engine's record excuses it."""
    leg = prefill(row)
    if leg.get("counters") is not None:
        leg["counters"]["nixl_expired"] = leg["counters"].get("nixl_expired", 0) + 1


# --- stories ---------------------------------------------------------------------------------------------------------

OF_ANSWERS: dict[str, Change] = {
    "log-prob -1": shifted("chosen_logprobs", -1.0),
    "log-prob -0.01": shifted("chosen_logprobs", -0.01),
    "log-prob +5": shifted("chosen_logprobs", 5.0),
    "every second log-prob -0.5": shifted("chosen_logprobs", -0.5, every=2),
    "log-probs all 0": replaced("chosen_logprobs", 0.0),
    "log-probs lost": unset("chosen_logprobs"),
    "log-probs of another answer": of_another("chosen_logprobs"),
    "gaps +3": shifted("top_gaps", 3.0),
    "gaps -0.1": shifted("top_gaps", -0.1),
    "gaps none": replaced("top_gaps", None),
    "last gap none": last_logprob_lost,
    "gaps lost": unset("top_gaps"),
    "gaps of another answer": of_another("top_gaps"),
    "log-probs of the prompt -1": shifted("prompt_logprobs", -1.0),
    "log-probs of the prompt +3": shifted("prompt_logprobs", 3.0),
    "first token": token_changed(0),
    "a token in the middle": token_changed(5),
    "last token": token_changed(-1),
    "token of P": own_token_of_p_changed,
    "end": end_turned,
    "another text": put(lambda text: "x" + text, "text"),
    "half of the text": put(lambda text: text[: len(text) // 2], "text"),
    "no text": put("", "text"),
    "text of another answer": of_another("text"),
    "text lost": put(None, "text"),
    "own text lost": put(None, "own_text"),
    "no texts": put(None, "text", "own_text"),
    "another text by its own decoding": put(lambda text: "x" + text, "text", "own_text"),
    "text of bytes of no character": put(lambda text: "\ufffdx" + text, "text", "own_text"),
    "stopped by a string": put("a", "stop_reason"),
    "stopped by a token": put(7, "stop_reason"),
    "held for ever": held_for_ever,
    "garbage": garbage,
    "second half one token": second_half_is_one_token,
    "no draft accepted": nothing_accepted,
    "a draft less": one_draft_less,
    "all drafts accepted": all_accepted,
    "no speculation": not_speculating,
    "text by ids": copied_from(text_by_ids),
    "second round by the first": copied_from(second_round_by_first),
    "warm by cold": copied_from(warm_by_cold),
    "one request id": all_ids_one,
    "twice the bytes": counters_times(("nixl_bytes",), 2.0),
    "half the bytes": counters_times(("nixl_bytes",), 0.5),
    "one byte a block": counters_times(("nixl_bytes",), 1 / 32768),
    "block ids of no pool": block_ids(lambda b: b + 1000),
    "block 0": block_ids(lambda b: 0),
    "block ids as words": block_ids(str),
    "an expired lease": expired,
}


def everywhere() -> Iterator[Attack]:
    """Yield each story of answers at each place, in all of them and in one."""
    for story, change in OF_ANSWERS.items():
        for place, wanted in PLACES.items():
            yield Attack(story, place, each(change, wanted))
            yield Attack(story, f"one, {place}", each(change, wanted, one=True))


# --- stories of the record -------------------------------------------------------------------------------------------


def of_engines(change: Callable[[dict[str, Any]], None], roles: Iterable[str]) -> Callable[[Run, random.Random], None]:
    wanted = set(roles)

    def do(run: Run, rng: random.Random) -> None:
        for engine in run.record["engines"]:
            if engine["role"] in wanted:
                change(engine)

    return do


def option(name: str, value: str | None) -> Callable[[dict[str, Any]], None]:
    """Give another value to an option of a command line, or leave it out."""

    def change(engine: dict[str, Any]) -> None:
        argv = list(engine["argv"])
        if name in argv:
            at = argv.index(name)
            argv[at : at + 2] = [name, value] if value is not None else []
        engine["argv"] = argv

    return change


def setting(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(engine: dict[str, Any]) -> None:
        engine[name] = value

    return change


OF_ENGINES: dict[str, Callable[[dict[str, Any]], None]] = {
    "no speculation asked": option("--speculative-config", None),
    "one draft a step asked": option("--speculative-config", '{"num_speculative_tokens": 1}'),
    "another drafter asked": option("--speculative-config", '{"model": "x", "num_speculative_tokens": 3}'),
    "bfloat16 asked": option("--dtype", "bfloat16"),
    "another model asked": option("--model", "models/another"),
    "no connector asked": option("--kv-transfer-config", None),
    "blocks of 16 asked": option("--block-size", "16"),
    "another pool asked": option("--num-gpu-blocks-override", "4096"),
    "no command line": setting("argv", []),
    "steps of one token": setting("step_tokens", 1),
    "endless steps": setting("step_tokens", 1 << 20),
    "a pool of two blocks": setting("kv_blocks", 2),
    "a mutant": setting("mutants", ["M1"]),
    "one process": setting("pid", 1),
    "of another group": setting("group", "pd-mtp"),
    "no counters": setting("counters", []),
    "counters not told": setting("counters", None),
}
ROLES = {"every engine": ("prefill", "decode", "single"), "P": ("prefill",), "D": ("decode",), "single": ("single",)}


def _cells(change: Callable[[dict[str, Any]], None]) -> Callable[[Run, random.Random], None]:
    def do(run: Run, rng: random.Random) -> None:
        for cell in run.record["cells"]:
            change(cell)

    return do


def _engine_twice(run: Run, rng: random.Random) -> None:
    run.record["engines"].append(copy.deepcopy(run.record["engines"][0]))


def _set_aside(run: Run, rng: random.Random) -> None:
    run.record["resumed"] = [
        {
            **{"at": "2026-01-01T00:00:00+00:00", "command": ["x"], "git_commit": None, "git_dirty": None},
            **{"hardware": {}, "cells": ["pd-eagle3"], "set_aside": 48, "files": [], "found": []},
        }
    ]


def _excused(run: Run, rng: random.Random) -> None:
    """Every lease ends early, and P's record says that as many hand-offs were left over at its start."""
    of_engines(setting("kept_blocks", 999), ["prefill"])(run, rng)
    each(expired, lambda row: row["cell"] == "pd-eagle3")(run, rng)


def _said_to_lack(*interfaces: str) -> Callable[[Run, random.Random], None]:
    def change(run: Run, rng: random.Random) -> None:
        run.record["lacking"] |= {name: WITHOUT[name] for name in interfaces}

    return change


def _metrics_lost_and_lacking(run: Run, rng: random.Random) -> None:
    """Half of the answers have no acceptance of their own, because the engine is said to give none."""
    _said_to_lack(PER_REQUEST)(run, rng)
    for row in answers(run)[::2]:
        for leg in row["legs"]:
            leg["speculation"] = None


def _single_engines_routed(run: Run, rng: random.Random) -> None:
    for cell in run.record["cells"]:
        if cell["cell"].startswith("single"):
            cell["route"] = "router"


def _renamed(run: Run, rng: random.Random) -> None:
    """A scenario becomes one of another kind, whose proof finds none of its requests."""
    for scenario in run.record["profile"]["scenarios"]:
        if scenario["kind"] == "chunked-prefill":
            scenario |= {"kind": "refill", "fill": ["long-222"]}


def _another_prompts(run: Run, rng: random.Random) -> None:
    run.record["prompts_sha256"] = "0" * 64


def _left(words: str) -> Callable[[dict[str, Any]], None]:
    def change(cell: dict[str, Any]) -> None:
        cell["left_over"] = [words]

    return change


def _cell_field(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(cell: dict[str, Any]) -> None:
        cell[name] = value

    return change


def _scores(change: Callable[[Row], None]) -> Callable[[Run, random.Random], None]:
    def do(run: Run, rng: random.Random) -> None:
        for row in scores(run):
            change(row)

    return do


def _score(field: str, by: float) -> Callable[[Row], None]:
    def change(row: Row) -> None:
        for leg in row["legs"]:
            if leg.get(field):
                leg[field] = [v + by for v in leg[field]]

    return change


def _score_lost(field: str) -> Callable[[Row], None]:
    def change(row: Row) -> None:
        for leg in row["legs"]:
            leg[field] = None

    return change


def _text_is_ids(run: Run, rng: random.Random) -> None:
    """Nothing was sent as text, but each of these answers is on record as one, under an id of its own."""
    each(copied_from(text_by_ids), PLACES["as text"])(run, rng)
    for row in answers(run):
        if row["form"] == "text":
            for leg in row["legs"]:
                leg["request_id"] += "-t"


OF_RECORD: dict[str, Callable[[Run, random.Random], None]] = {
    "an engine twice": _engine_twice,
    "answers set aside nowhere": _set_aside,
    "every lease ends early, excused": _excused,
    "a scenario of another kind": _renamed,
    "prompts of another set": _another_prompts,
    "metrics said to be lacking": _said_to_lack(PER_REQUEST),
    "half of the metrics lost, said to be lacking": _metrics_lost_and_lacking,
    "server info said to be lacking": _said_to_lack(SERVER_INFO),
    "sources said to be lacking": _said_to_lack(BY_SOURCE),
    "steps said to be lacking": _said_to_lack(STEP_TOKENS),
    "resets said to be lacking": _said_to_lack(RESET_PREFIX_CACHE),
    "single engines behind a router": _single_engines_routed,
    "texts not recorded": _cells(_cell_field("texts", False)),
    "pools not told": _cells(_cell_field("emptied_s", {})),
    "a process left over, by its port": _cells(_left("port 25000, and process 5 of pd-eagle3, which cannot be killed")),
    "a process left over, by its memory": _cells(_left("shared memory of process 77, which still runs")),
    "a process left over": _cells(_left("process 5 of pd-eagle3, which cannot be killed")),
    "cells incomplete": _cells(_cell_field("state", "interrupted")),
    "half of the layers": lambda run, rng: each(counters_times(("nixl_bytes",), 0.5), is_pair)(run, rng),
    "scores +5": _scores(_score("rescored", 5.0)),
    "scored log-probs -1": _scores(_score("rescored_logprobs", -1.0)),
    "scored log-probs lost": _scores(_score_lost("rescored_logprobs")),
    "ranks lost": _scores(_score_lost("rescored_preferred")),
    "scores lost": _scores(_score_lost("rescored")),
    "text sent as ids": _text_is_ids,
}


def attacks() -> list[Attack]:
    found = [*everywhere()]
    found += [
        Attack(story, who, of_engines(change, roles))
        for story, change in OF_ENGINES.items()
        for who, roles in ROLES.items()
    ]
    return found + [Attack(story, "the record", do) for story, do in OF_RECORD.items()]


_ALIKE = "all engines say it alike, by every reading: nothing in the run is left to compare it with"
_UNTESTED = "in a state that an expected failure makes say nothing; the headline says so"
_CERTAIN = "the probes are so certain of their tokens that these figures lie within rounding"

BENIGN: dict[str, str] = {
    r"log-probs of the prompt .*:(all|in scenarios|features)": _ALIKE,
    r"(another text by its own decoding|text of bytes of no character):(all|cold|in scenarios|features)": _ALIKE,
    r".*:(one, )?sampled": _UNTESTED,
    r"(log-probs all 0|log-probs of another answer|gaps of another answer):.*": _CERTAIN,
    r"one request id:one, .*": "no other exchange has this id",
    r"one process:(P|D|single)": "no other engine is this process",
    r"an expired lease:one, .*": "a hand-off that was given up before must end its lease",
    r"prompts of another set:the record": "a label: plans and baselines have the hash of each prompt",
    r"texts not recorded:the record": "answers that have a text are judged by it, whatever the record says",
    r"scored log-probs lost:the record": "records of earlier versions have none; tokens are scored all the same",
}
"""Attacks that leave a run green, as patterns of names, with the reason why they may."""
