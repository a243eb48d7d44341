"""What is asked again after something failed once: the same requests, their prompts alone, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.commands import later_stages
from harness.commands.later_stages import ROUNDS
from harness.history.folder import History
from harness.history.layout import AGAIN
from harness.history.records import COLD
from harness.judging.checks.asked_again import AnswerId
from harness.judging.checks.registry import NOTHING, Tripped
from harness.runner.options import RunOptions
from harness.util.progress import Reporter
from harness.workload.prepare import Prepared, prepare
from tests.support.builders import extending, history, observation, with_run

CROWD = {"id": "crowd", "kind": "crowd", "prompts": 8, "together": 4, "proves": ["batched"]}
NORMAL = {"scenarios": [CROWD], "routes": ["client"], "exclude": [], "judging": {"tier": "normal", "stages": 1}}


@pytest.fixture
def asked(tmp_path, monkeypatch) -> Any:
    """Return a function that asks these answers again, and returns what would be sent."""
    prepared = prepare(extending(tmp_path, name="again", **NORMAL), ["*-none", "*-eagle3"])
    sent: list[Prepared] = []

    def record(again: Prepared, _environment: object, folder: Path, times: int, *_: object, **__: object) -> None:
        assert (folder, times) == (tmp_path / AGAIN, ROUNDS)
        sent.append(again)

    monkeypatch.setattr(later_stages, "record_repetitions", record)
    monkeypatch.setattr(later_stages, "engines_for", lambda *_: None)
    monkeypatch.setattr(later_stages, "baselines_for", lambda *_: {})

    def ask(*answers: AnswerId, **changes: object) -> Prepared | None:
        monkeypatch.setattr(later_stages, "tripped_once", lambda *_: Tripped([], list(answers)))
        made: History = with_run(history([observation("single-none", 40)], folder=tmp_path), **changes)
        with Reporter(1.0) as reporter:
            later_stages.later_stages(prepared, made, reporter, RunOptions())
        return sent.pop() if sent else None

    ask.prepared = prepared  # type: ignore[attr-defined]
    return ask


def cold(again: Prepared) -> dict[str, list[str]]:
    return {w.cell.id: [i.prompt.id for i in w.items] for w in again.works}


def test_a_cold_answer_is_asked_through_the_pair_and_alone(asked):
    prompt = asked.prepared.prompts.cold[3].id
    again = asked(AnswerId("pd-eagle3", COLD, prompt, "ids"))
    assert cold(again) == {key: [prompt] for key in ["pd-eagle3", "single-eagle3", "single-none"]}
    assert not any(w.scripts for w in again.works)
    # Without the plain engine nothing would read the outputs afresh.
    assert again.rescores


def test_an_answer_in_a_state_is_asked_in_that_state_and_cold(asked):
    work = next(w for w in asked.prepared.works if w.cell.id == "pd-none")
    script = work.scripts[1]
    send = script.sends[2]
    again = asked(AnswerId("pd-none", "crowd", f"{send.prompt.id}#{script.instance}.{send.part}", "ids"))
    assert cold(again) == {key: [send.prompt.id] for key in ["pd-none", "single-none"]}
    assert {w.cell.id: w.scripts for w in again.works} == {"pd-none": (script,), "single-none": ()}


def test_of_many_answers_the_first_are_asked_again(asked):
    prompts = [p.id for p in asked.prepared.prompts.cold]
    again = asked(*(AnswerId("pd-none", COLD, p, "ids") for p in prompts))
    assert len(prompts) > 8
    assert {len(w.items) for w in again.works} == {8}


def test_nothing_is_asked_again_after_an_interruption_or_without_a_finding(asked):
    answer = AnswerId("pd-none", COLD, asked.prepared.prompts.cold[0].id, "ids")
    assert asked(answer, interrupted=True) is None
    assert asked(*NOTHING.answers) is None
