"""What engines fail at is sent a second time, and both tries are recorded."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from harness.engines.session import Broken
from harness.errors import EngineDiedError, HandoffError
from harness.history.records import Failure, Observation
from harness.profiles.load import load_profile
from harness.runner.perform import perform
from harness.workload.prepare import prepare
from tests.support.builders import observation

SAID = Failure(role="single", status=500, words="Grammar error")
ENDED = Failure(role="single", words="RuntimeError: max()", ended=1)


class Session:
    """Stands for a single engine that answers the n-th request, counted from 0, as ``outcomes`` says."""

    roles = ("single",)

    def __init__(self, outcomes: dict[int, Broken]) -> None:
        self.profile = load_profile("cpu")
        self.outcomes, self.asked, self.salts = outcomes, 0, []
        self.gone: EngineDiedError | None = None
        self.restarts = self.settled = 0
        self.unable = False

    def client(self, _role):
        return SimpleNamespace(last_snapshot={}, snapshot=dict, text_of=lambda ids: " ".join(map(str, ids)))

    def _came(self) -> Broken | None:
        broken = self.outcomes.get(self.asked)
        self.asked += 1
        if broken is not None and broken.gone is not None:
            self.gone = broken.gone
        return broken

    def observe(self, cell, prompt, form, sequence) -> Observation:
        broken = self._came()
        told = {} if broken is None else {"error": broken.error, "failure": broken.failure}
        return observation(cell.id, prompt_id=prompt.id, sequence=sequence, **told)

    def ask_counted(self, ask, _legs):
        self.salts.append(ask.salt)
        return self._came(), {}

    def require_alive(self):
        if self.gone is not None:
            raise self.gone

    def restart_ended(self):
        if self.unable:
            raise HandoffError("it runs elsewhere")
        self.gone, self.restarts = None, self.restarts + (self.gone is not None)

    def settle(self):
        self.settled += 1


def recorded(outcomes: dict[int, Broken], scenario: str = "cold") -> tuple[list[Observation], Session]:
    (work,) = prepare("cpu", ["single-none"], [scenario]).works
    session = Session(outcomes)
    found = []
    try:
        for o in perform(session, replace(work, items=work.items[:3], scripts=work.scripts[:1])):
            found.append(o)
    except EngineDiedError:
        found.append(None)
    return found, session


FAILS = Broken("status 500", SAID)


def test_a_request_at_which_an_engine_fails_is_sent_again_at_once():
    (first, second, third), session = recorded({1: FAILS, 2: FAILS})
    assert (first.second_try, third.second_try, session.asked, session.settled) == (None, None, 4, 1)
    assert (second.failure, second.second_try.failure, second.second_try.error) == (SAID, SAID, "status 500")
    assert [first.sequence, second.sequence, third.sequence] == [0, 1, 2]


def test_an_answer_the_second_time_is_recorded_as_evidence():
    (_, second, _), _ = recorded({1: FAILS})
    assert second.error == "status 500" and second.second_try.error is None and second.second_try.legs


@pytest.mark.parametrize(
    "broken",
    [
        Broken("no connection"),
        Broken("status 503", SAID.model_copy(update={"status": 503})),
        Broken("status 400", SAID.model_copy(update={"status": 400})),
    ],
)
def test_what_is_no_failure_of_the_engine_is_not_sent_again(broken):
    (_, second, _), session = recorded({1: broken})
    assert second.second_try is None and session.asked == 3


def test_an_engine_that_ended_is_started_again_for_the_second_try():
    ended = Broken("it ended", ENDED, EngineDiedError("it ended", 1, ENDED.words))
    found, session = recorded({1: ended})
    assert (session.restarts, len(found), session.gone) == (1, 3, None)
    assert found[1].failure == ENDED and found[1].second_try.error is None


def test_a_request_that_ends_an_engine_twice_is_recorded_and_the_others_are_sent():
    ended = Broken("it ended", ENDED, EngineDiedError("it ended", 1, ENDED.words))
    (_, second, third), session = recorded({1: ended, 2: ended})
    assert (second.failure, second.second_try.failure) == (ENDED, ENDED)
    assert third.error is None and session.restarts == 2


def test_an_engine_that_others_ended_is_not_started_again():
    killed = ENDED.model_copy(update={"ended": -9})
    (_, second, end), session = recorded({1: Broken("it ended", killed, EngineDiedError("it ended", -9))})
    assert end is None and (second.failure, second.second_try, session.restarts) == (killed, None, 0)


def test_an_engine_that_cannot_be_started_again_is_said(monkeypatch):
    monkeypatch.setattr(Session, "restart_ended", lambda _: (_ for _ in ()).throw(HandoffError("it runs elsewhere")))
    ended = Broken("it ended", ENDED, EngineDiedError("it ended", 1, ENDED.words))
    (_, second, end), _ = recorded({1: ended})
    assert end is None and "could not be sent again: it runs elsewhere" in second.second_try.error


def test_a_script_is_played_again_from_its_beginning_once_it_is_over():
    whole, untouched = recorded({}, "features")
    found, session = recorded({1: FAILS, len(whole) + 1: FAILS}, "features")
    assert [(o.part, o.sequence) for o in found] == [(o.part, o.sequence) for o in whole]
    assert [o.part for o in found if o.second_try is not None] == [whole[1].part]
    assert found[1].second_try.failure == SAID and session.asked == 2 * untouched.asked
    first, second = session.salts[: len(whole)], session.salts[len(whole) :]
    assert not set(first) & set(second), "with caches of their own"


def test_a_script_goes_on_where_a_request_ended_an_engine():
    whole, _ = recorded({}, "features")
    ended = Broken("it ended", ENDED, EngineDiedError("it ended", 1, ENDED.words))
    found, session = recorded({1: ended, len(whole) + 1: ended}, "features")
    assert [o.part for o in found] == [o.part for o in whole]
    assert (found[1].failure, found[1].second_try.failure) == (ENDED, ENDED)
    assert all(o.error is None for o in [found[0], *found[2:]]) and session.restarts == 2


def test_a_script_ends_where_an_engine_cannot_be_started_again(monkeypatch):
    monkeypatch.setattr(Session, "restart_ended", lambda _: (_ for _ in ()).throw(HandoffError("it runs elsewhere")))
    ended = Broken("it ended", ENDED, EngineDiedError("it ended", 1, ENDED.words))
    found, _ = recorded({1: ended}, "features")
    assert len(found) == 3 and found[-1] is None
    assert "it runs elsewhere" in found[1].second_try.error
