"""Random traces: the same for the same seed, possible on the profile's engines, and with something to judge."""

from __future__ import annotations

import hashlib
import json
from itertools import islice
from typing import get_args

import pytest
import yaml

from harness.commands.fuzz import prepare_fuzz
from harness.errors import UsageError
from harness.profiles.load import load_profile
from harness.profiles.scenarios import CHANGING, OF_TEXT, SAMPLED, Api, Feature, Parameter
from harness.prompts.lengths import blocks
from harness.prompts.model import load_prompts
from harness.scenarios.kinds import kind_of
from harness.workload.prepare import prepare
from harness.workload.scripts import scripts
from harness.workload.traces import random_traces
from tests.support.builders import extending

PROFILE = load_profile("cpu")
PROMPTS = load_prompts(PROFILE.workload.prompts).prompts
KNOWN = {p.id: p for p in PROMPTS}


def traces(seed: int, count: int = 200):
    return list(islice(random_traces(PROFILE, PROMPTS, seed), count))


def test_a_seed_gives_the_same_traces_and_another_gives_others():
    assert traces(3) == traces(3)
    assert traces(3) != traces(4)


def test_traces_enter_the_states_that_they_are_for():
    made = traces(0)
    requests = [r for t in made for r in t.requests]
    given_up = [r.abandon for r in requests if r.abandon is not None]
    assert {r.to for r in requests} == {"cell", "local"}
    assert {(a.leg, a.after_s is None) for a in given_up} == {("decode", True), ("decode", False), ("prefill", False)}
    assert 0.1 < len(given_up) / len(requests) < 0.2
    assert any(len(stage) > PROFILE.engine.max_num_seqs for t in made for stage in t.stages)
    needed = [
        sum(blocks(2 * KNOWN[r.prompt].tokens, PROFILE.engine.block_size) for r in stage)
        for t in made
        for stage in t.stages
    ]
    assert max(needed) > PROFILE.engine.kv_blocks


def test_what_is_sent_and_when_is_as_it_was_before_requests_had_parameters():
    """Seeds in docs/scenarios.md and in issues name these traces."""
    kept = {"prompt", "cache", "to", "delay_s", "max_tokens", "abandon"}
    seen = hashlib.sha256()
    for trace in traces(7, 100):
        stages = [stage for stage in trace.stages if not any(r.mistaken or r.feature == "seed-again" for r in stage)]
        told = [[r.model_dump(mode="json", include=kept) for r in stage] for stage in stages]
        seen.update(json.dumps(told, sort_keys=True).encode())
    assert seen.hexdigest() == "77ac0a988beccf9996e6c23b6a2d92ed289323cdd17df107e91946889690e4c8"


def test_requests_are_asked_with_everything_that_there_is():
    made = traces(2, 2000)
    requests = [r for t in made for r in t.requests]
    # top-k ends a speculative CPU engine.
    drawn = {*get_args(Feature), *get_args(Parameter)} - OF_TEXT - {"top-k"}
    assert {r.feature for r in requests} - {None} == drawn
    assert {r.api for r in requests} == set(get_args(Api))
    assert {r.feature for r in requests if r.api == "chat-stream"} >= {None, "stop-token", "bad-words"}
    again = [r for r in requests if r.parameters_of is not None]
    assert {r.lost for r in again} > {"", "remote_num_tokens", "remote_host"} and any(r.p_tokens > 1 for r in requests)
    sent = [s for t in made for script in scripts(t, KNOWN, "pd") for s in script.sends]
    assert {s.mistake for s in sent} > {None, "used-twice", "used-late", "shared", "more-tokens"}
    # D reads what P has done with the blocks since, whatever got lost besides.
    assert {s.mistake for s in sent} > {"lost tp_size", "used-late and lost tp_size"}
    # Most traces still have answers that baselines know.
    assert sum(r.feature in CHANGING for r in requests) < len(requests) / 4


def test_seeds_are_drawn_where_they_end_no_engine_and_can_be_judged():
    for trace in traces(4, 1500):
        seeds: set[str] = set()
        for stage in trace.stages:
            for r in stage:
                if r.feature in SAMPLED:
                    answers = 3 if r.feature == "siblings" else 1
                    assert len(stage) == 1 and answers * KNOWN[r.prompt].tokens <= PROFILE.engine.max_num_batched_tokens
                assert r.feature != "seed-again" or r.prompt in seeds
                seeds |= {r.prompt} if r.feature == "seed" else set()
    hybrid = load_profile("cpu-hybrid")
    drawn = {r.feature for t in islice(random_traces(hybrid, PROMPTS, 4), 500) for r in t.requests}
    assert not drawn & (SAMPLED | {"grammar", "regex"}) and "stop-token" in drawn


def test_pairs_that_push_have_no_parameters_to_use_again():
    push = load_profile("cpu-push")
    assert not any(r.mistaken for t in islice(random_traces(push, PROMPTS, 2), 300) for r in t.requests)


def test_drawn_traces_can_be_sent():
    for trace in traces(6, 400):
        assert kind_of(trace).impossible(trace, PROFILE, KNOWN) is None


def test_every_trace_ends_with_an_answer_and_runs_in_both_topologies():
    for trace in traces(1):
        (last,) = trace.stages[-1]
        assert last.abandon is None and last.feature is None
        mistaken = any(r.mistaken for r in trace.requests)
        assert set(trace.topologies) == ({"pd"} if mistaken else {"pd", "single"})
        # D is never left unasked: each such request would cost P's whole lease.
        assert not any(r.abandon is not None and r.abandon.unasked for r in trace.requests)


def test_no_request_asks_for_more_tokens_than_baselines_have(tmp_path):
    short = PROFILE.model_copy(update={"workload": PROFILE.workload.model_copy(update={"max_tokens": 24})})
    limits = [r.max_tokens for t in islice(random_traces(short, PROMPTS, 7), 100) for r in t.requests if r.max_tokens]
    assert max(limits) <= 24 and len(set(limits)) > 10
    stages = [[{"prompt": "copy-096-19", "max_tokens": 193}]]
    source = extending(tmp_path, more_scenarios=[{"id": "long", "kind": "trace", "stages": stages}])
    with pytest.raises(UsageError, match=r"workload\.max_tokens = 192, the length that baselines record, found 193"):
        prepare(source, [])


def test_traces_are_written_as_a_profile_that_can_be_run_again(tmp_path):
    prepared = prepare_fuzz("cpu", ["*-eagle3"], seed=5, minutes=2, out=tmp_path)
    (path,) = tmp_path.glob("*.yaml")
    assert prepare(str(path), ["*-eagle3"], prompts_per_stratum=1).works == prepared.works
    assert len(prepared.profile.scenarios) > 5 and prepared.profile.baselines == PROFILE.baselines
    assert yaml.safe_load(path.read_text())["description"] == "random traces of seed 5"
    shorter = prepare_fuzz("cpu", ["*-eagle3"], seed=5, minutes=0.1, out=tmp_path)
    assert len(shorter.profile.scenarios) == 1
    assert shorter.profile.scenarios[0] == prepared.profile.scenarios[0]


def test_a_profile_with_axes_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"profile nightly has axes \(model"):
        prepare_fuzz("nightly", [], seed=0, minutes=1, out=tmp_path)


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path):
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(UsageError, match=r"--out .*: expected a folder to write runs into"):
        prepare_fuzz("cpu", ["pd-none"], seed=0, minutes=1, out=taken)
