"""Cold prompts go together only on engines that answer the first ones alike, alone and together."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest

from harness.engines.request import Ask, Exchange
from harness.errors import HandoffError
from harness.history.at_once import CrowdProof
from harness.history.records import COLD, Failure, Observation
from harness.profiles.load import load_profile
from harness.profiles.scenarios import AT_ONCE
from harness.runner.perform import perform
from harness.workload.prepare import prepare
from harness.workload.rows import planned_rows
from tests.support.builders import extending, leg, observation


class Session:
    """Stands for a single engine; in a crowd it answers ``beside`` with the prompt and how many it is asked at once."""

    roles = ("single",)

    def __init__(self, profile, beside=lambda _ids, out: out) -> None:
        self.profile, self.beside = profile, beside
        self.paths: list[str] = []
        self.senders = ThreadPoolExecutor(16)
        self.lock = threading.Lock()
        self.crowd = threading.Barrier(2, timeout=5)

    def client(self, _role):
        def grown(_before, wanted):
            return {name: float(n) for name, n in wanted.items()}

        def post(path, *_):
            self.paths.append(path)
            return SimpleNamespace(status_code=200)

        return SimpleNamespace(last_snapshot={}, snapshot=dict, counters_after=grown, post=post)

    def observe(self, cell, prompt, form, sequence) -> Observation:
        made = observation(cell.id, prompt_id=prompt.id, form=form, sequence=sequence, sent_ids=prompt.ids)
        return made.model_copy(update={"legs": (leg("single", prompt.ids, prompt.expected),)})

    def attempt(self, ask, legs):
        # Of each crowd two are waited for, so that it is seen that they are under way at the same time.
        self.crowd.wait()
        with self.lock:
            prompt = next(p for p in PROMPTS if list(p.ids) == ask.payload or p.text == ask.payload)
            legs.append(leg("single", prompt.ids, self.beside(prompt.ids, prompt.expected)))

    def require_alive(self):
        pass

    def settle(self):
        pass


PROMPTS: list = []


@pytest.fixture
def work(tmp_path):
    engine = {"kv_blocks": 400, "max_num_seqs": 16, "max_num_batched_tokens": 4096}
    source = extending(tmp_path, workload={"at_once": 4}, engine=engine, scenarios=[])
    (found,) = prepare(source, ["single-none"], [COLD]).works
    PROMPTS[:] = [i.prompt for i in found.items]
    return replace(found, items=found.items[:12], at_once=found.at_once._replace(crowds=(4, 4)))


def asked(work, beside=lambda _ids, out: out) -> tuple[list[Observation], list[CrowdProof]]:
    told: list[CrowdProof] = []
    profile = load_profile("cpu")
    return list(perform(Session(profile, beside), work, told.append)), told


def test_on_engines_that_answer_alike_the_others_go_together(work):
    found, (proof,) = asked(work)
    assert proof.holds and proof.asked == 4
    assert [(o.scenario, o.concurrent) for o in found] == [(COLD, 1)] * 4 + [(AT_ONCE, 4)] * 4 + [(COLD, 4)] * 8
    assert [o.stage for o in found if o.scenario == COLD] == [0] * 4 + [1] * 4 + [2] * 4
    # Counted for all of a crowd, and for each crowd by itself.
    assert all(o.shared_counters == {"single": {"finished_requests": 4.0}} for o in found[4:])


def test_the_proof_alone_is_asked_of_an_engine_that_is_paused_until_all_wait(work):
    session = Session(load_profile("cpu"))
    list(perform(session, work))
    assert session.paths == ["/pause?mode=keep&clear_cache=false", "/resume"]


def test_the_record_is_that_of_the_plan(work):
    found, _ = asked(work)
    rows = planned_rows(work, 192)
    assert [(o.sequence, o.prompt_id, o.form, o.scenario, o.part, o.stage, o.concurrent) for o in found] == [
        (r.sequence, r.prompt_id, r.form, r.scenario, r.part, r.stage, r.concurrent) for r in rows
    ]


def test_on_others_they_are_asked_one_by_one(work):
    worse = work.items[2].prompt.ids
    found, (proof,) = asked(work, lambda ids, out: (1, *out[1:]) if ids == worse else out)
    assert not proof.holds and "other tokens from output 0" in proof.differing[0]
    assert [(o.scenario, o.concurrent) for o in found] == [(COLD, 1)] * 4 + [(AT_ONCE, 4)] * 4 + [(COLD, 1)] * 8
    # They keep their places, by which the plan knows them.
    assert [o.stage for o in found if o.scenario == COLD] == [0] * 4 + [1] * 4 + [2] * 4


def test_without_a_proof_to_give_they_go_together(work):
    found, told = asked(replace(work, at_once=work.at_once._replace(proven=False)))
    assert told == [] and [o.concurrent for o in found] == [1] * 4 + [4] * 8


def test_a_request_that_breaks_in_a_crowd_is_sent_again_with_it(work, monkeypatch):
    fails = Failure(role="single", status=500, words="RuntimeError: of all things")
    broke = work.items[5].prompt.id
    plain = perform.__globals__["_played"]

    def played(session, cell, script, sequence):
        for o in plain(session, cell, script, sequence):
            hurt = o.prompt_id == broke and o.scenario == COLD
            yield o.model_copy(update={"error": "status 500", "failure": fails}) if hurt else o

    monkeypatch.setitem(perform.__globals__, "_played", played)
    alive = []
    monkeypatch.setattr(Session, "require_alive", lambda _self: alive.append(True))
    found, _ = asked(work)
    assert len(found) == 16 and alive == [True]


def test_p_is_asked_in_turn():
    most = under_way = 0
    lock = threading.Lock()

    class P:
        last_snapshot: dict = {}  # noqa: RUF012

        def complete(self, *_args, **_kwargs):
            nonlocal most, under_way
            with lock:
                under_way += 1
                most = max(most, under_way)
            threading.Event().wait(0.02)
            with lock:
                under_way -= 1
            raise HandoffError("enough")

    exchange = Exchange({"prefill": P(), "decode": P()}, load_profile("cpu"))
    turn = threading.Lock()

    def send(ask):
        with pytest.raises(HandoffError, match="enough"):
            exchange.send(ask, [])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(send, [Ask(True, [1, 2], counted=False, turn=turn)] * 4))
    assert most == 1
