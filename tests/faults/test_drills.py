"""Drills' own machinery: the catalogue, the proxy, the relay, and how a drill is judged. No engine."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from faults import response_faults as rf
from faults.catalogue import catalogue, select
from faults.cli import app
from faults.leaks import MARK, Footprint, Watch, new_mark, sweep
from faults.model import GROUPS, ControlRun, Drill, DrillSet, Ending, Result, joined
from faults.proxy import completions, path
from faults.report import render_markdown, write_drills
from faults.response_drills import RESPONSES
from faults.run import load_drills
from faults.tcp_relay import Relay
from faults.verdict import Seen, judge_drill, lost
from harness.engines.client import Client
from harness.errors import EXIT_USAGE, DataError, HandoffError, UsageError
from harness.history.verdict import Verdict
from harness.util.paths import REPOSITORY
from tests.faults.fake_server import FakeServer, ask

DRILL = Drill("d", "response", "a fault", "P", (Verdict.UNKNOWN,), "broke", 10.0)
GOOD = Seen(Verdict.UNKNOWN, ("the exchange broke",), 4, 4, 1.0)


def test_ids_are_distinct_and_every_drill_says_what_must_come_of_it():
    drills = catalogue()
    assert len({d.id for d in drills}) == len(drills) > 80
    for drill in drills:
        assert drill.group in GROUPS
        assert drill.verdicts
        assert drill.reason
        assert drill.bound_s > 0
        assert Verdict.PASS not in drill.verdicts or drill.group == "folder"


def test_every_group_has_drills():
    assert {d.group for d in catalogue()} == set(GROUPS)


def test_drills_are_chosen_by_id_pattern_and_group():
    assert [d.id for d in select(["cut"])] == ["cut"]
    assert {d.group for d in select(["handoff"])} == {"handoff"}
    assert len(select(["error-*"])) > 2
    with pytest.raises(UsageError, match="no match"):
        select(["no-such-drill"])


def test_what_is_not_struck_passes_through_unchanged(proxy):
    direct = httpx.post(f"{proxy.target}/v1/completions", json={"prompt": [1], "model": "m"}).json()
    with proxy.armed(rf.instead(500, b""), completions((9, 9))) as armed:
        headers = {"Authorization": "Bearer planted"}
        through = httpx.post(f"{proxy.url}/v1/completions", json={"prompt": [1], "model": "m"}, headers=headers)
    assert through.json() == direct
    assert through.headers["content-type"] == "application/json"
    assert FakeServer.seen[-1]["authorization"] == "Bearer planted"
    assert httpx.get(f"{proxy.url}/metrics").text == httpx.get(f"{proxy.target}/metrics").text
    assert armed.struck == 0


def test_a_fault_strikes_its_prompt_only_while_it_is_armed(proxy):
    with proxy.armed(rf.instead(500, b"{}"), completions((5, 6, 7))) as armed:
        with pytest.raises(HandoffError, match="found 500"):
            ask(proxy)
        assert armed.struck == 1
    assert ask(proxy).output_ids == tuple(range(10, 20))


def test_a_hang_ends_with_the_limit_and_with_the_proxy(proxy):
    begun = time.monotonic()
    with proxy.armed(rf.hung, completions()), pytest.raises(HandoffError, match="Timeout"):
        ask(proxy, timeout=0.5)
    assert time.monotonic() - begun < 5


EDITS = [
    (rf.repeat_tokens, lambda leg: len(set(leg.output_ids)) < 10 == len(leg.output_ids)),
    (rf.drop_token, lambda leg: len(leg.output_ids) == 9 and leg.usage_completion_tokens == 10),
    (
        rf.shorten,
        lambda leg: len(leg.output_ids) == 7 == leg.usage_completion_tokens == len(leg.chosen_logprobs),
    ),
    (rf.add_token, lambda leg: len(leg.output_ids) == 11),
    (rf.no_tokens, lambda leg: leg.output_ids == ()),
    (rf.echo_another, lambda leg: leg.echoed_ids == (5, 5, 6, 7)),
    (
        rf.steps_cut,
        lambda leg: leg.speculation.per_step_accepted == (3,) and leg.speculation.num_accepted == 3,
    ),
    (rf.no_drafts, lambda leg: leg.speculation.num_drafted == 0),
]


@pytest.mark.parametrize(("change", "holds"), EDITS)
def test_edits_spoil_one_thing(proxy, change, holds):
    with proxy.armed(rf.edited(change), completions()):
        assert holds(ask(proxy))


def test_all_faults_of_answers_can_be_made():
    for drill in RESPONSES:
        assert callable(drill.make(None))  # type: ignore[arg-type]


def test_a_relay_delays_and_a_silent_one_says_nothing():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def echo() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                connection.sendall(connection.recv(10))

        threading.Thread(target=echo, daemon=True).start()
        with Relay(server.getsockname()[1], delay_s=0.3) as relay:
            begun = time.monotonic()
            with socket.create_connection(("127.0.0.1", relay.port), timeout=5) as near:
                near.sendall(b"hello")
                assert near.recv(10) == b"hello"
            assert time.monotonic() - begun >= 0.6
    with Relay(None) as relay, socket.create_connection(("127.0.0.1", relay.port), timeout=0.5) as near:
        near.sendall(b"hello")
        with pytest.raises(TimeoutError):
            near.recv(10)


def test_left_overs_are_found_and_swept(tmp_path):
    mark = new_mark()
    before = Footprint(mark)
    code = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); print(1, flush=True); time.sleep(60)"
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, MARK: mark},
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert child.stdout is not None
    child.stdout.readline()
    (left,) = before.left(0)
    assert f"process {child.pid}" in left
    assert "listening on" in left
    sweep(before)
    child.wait(5)
    child.stdout.close()
    assert before.left(5) == ()


@pytest.mark.parametrize("watched", [True, False])
def test_processes_that_overwrite_their_environment_are_found_and_swept_when_known(watched):
    """As vLLM's engine cores and workers do, when they have lost their parent."""
    mark = new_mark()
    before = Footprint(mark)
    code = (
        # Its parent lives long enough to be seen with it.
        "import os, time\nif os.fork(): time.sleep(2); os._exit(0)\nimport setproctitle\n"
        "setproctitle.setproctitle('VLLM::EngineCore')\nprint(os.getpid(), flush=True)\nos.close(1)\ntime.sleep(60)"
    )
    with Watch(mark) if watched else contextlib.nullcontext():
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, MARK: mark},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            check=True,
        )
        pid = int(done.stdout)
        assert any(f"process {pid} " in left for left in before.left(0))
        sweep(before)
    if not watched:
        # Told, and left alone: it may be somebody else's.
        os.kill(pid, signal.SIGKILL)
        return
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert not any(f"process {pid} " in left for left in before.left(5))


def test_a_drill_is_survived_only_with_its_verdict_its_reason_its_data_and_in_time():
    assert judge_drill(DRILL, GOOD).ending is Ending.SURVIVED
    bad = {
        "another reason": GOOD._replace(reasons=("something else",)),
        "no verdict": GOOD._replace(verdict=None),
        "another verdict": GOOD._replace(verdict=Verdict.REGRESSION),
        "lost": GOOD._replace(recorded=3),
        "late": GOOD._replace(seconds=11.0),
        "left": GOOD._replace(left=("process 1",)),
        "strays": GOOD._replace(strays=("other/prompt",)),
    }
    for name, seen in bad.items():
        result = judge_drill(DRILL, seen)
        assert result.ending is Ending.FAILED, name
        assert len(result.problems) == 1, name


def test_green_is_false_whatever_else_holds():
    assert judge_drill(DRILL, GOOD._replace(verdict=Verdict.PASS)).ending is Ending.FALSE_GREEN
    assert judge_drill(DRILL, GOOD._replace(verdict=Verdict.KNOWN)).ending is Ending.FALSE_GREEN


def test_a_fault_that_did_not_take_place_is_lost_not_survived():
    assert judge_drill(DRILL, GOOD._replace(struck=False)).ending is Ending.LOST
    assert judge_drill(DRILL, GOOD._replace(struck=False, verdict=Verdict.PASS)).ending is Ending.LOST


def made(*results: Result, asked: tuple[str, ...] = ("d",), verdict: Verdict = Verdict.PASS, **more) -> DrillSet:
    control = ControlRun(id="c", verdict=verdict, requests=4, seconds=1.0)
    return DrillSet(
        run_id="r",
        started="2026-01-01T00:00:00+00:00",
        profile="cpu",
        versions={"vllm": "0.32.0"},
        hardware={},
        asked=asked,
        results=results,
        controls=(control,),
        seconds=1.0,
        **more,
    )


def test_exit_codes():
    survived = judge_drill(DRILL, GOOD)
    assert made(survived).exit_code == 0
    assert made(judge_drill(DRILL, GOOD._replace(verdict=Verdict.PASS))).exit_code == 1
    assert made(judge_drill(DRILL, GOOD._replace(recorded=1))).exit_code == 1
    assert made(survived, left=("process 7",)).exit_code == 1
    assert made(survived, verdict=Verdict.UNKNOWN).exit_code == 2
    assert made(survived).model_copy(update={"controls": ()}).exit_code == 2
    assert made(survived, asked=("d", "e")).exit_code == 2
    assert made(survived, interrupted=True).exit_code == 2
    assert made(lost(DRILL, "no engines")).exit_code == 2
    assert made().exit_code == 2


def test_joining_keeps_the_worst_of_a_drill():
    survived, failed = judge_drill(DRILL, GOOD), judge_drill(DRILL, GOOD._replace(recorded=1))
    assert joined([made(failed), made(survived)]).results == (failed,)
    assert joined([made(survived), made(failed)]).results == (failed,)
    other = survived.model_copy(update={"id": "e"})
    both = joined([made(survived), made(other, asked=("e",))])
    assert both.exit_code == 0
    assert "2 faults tried, 2 survived, 0 false greens, 0 leftovers" in both.sentence


def test_sets_of_other_engines_or_profiles_are_not_joined():
    survived = judge_drill(DRILL, GOOD)
    with pytest.raises(UsageError, match="expected the versions of r"):
        joined([made(survived), made(survived).model_copy(update={"versions": {"vllm": "0.31.0"}})])
    with pytest.raises(UsageError, match="expected the profile of r"):
        joined([made(survived), made(survived).model_copy(update={"profile": "other"})])


def test_joined_sets_say_of_which_states_of_the_harness_they_are():
    survived = judge_drill(DRILL, GOOD)
    both = joined([made(survived, commits=("a" * 40,)), made(survived, commits=("b" * 40 + "+changes",))])
    assert "with 2 versions of the harness" in both.sentence
    assert f"harness at {'a' * 12}, {'b' * 12}+changes" in render_markdown(both)


def test_results_are_written_read_again_and_printed(tmp_path):
    drills = made(judge_drill(DRILL, GOOD._replace(reasons=("the exchange broke | <b>",))))
    write_drills(drills, tmp_path)
    assert load_drills(tmp_path) == drills
    assert "| d | a fault |" in render_markdown(drills)
    shown = CliRunner().invoke(app, ["--from", str(tmp_path / "drills.json"), "--markdown"])
    assert shown.exit_code == 0
    assert "1 faults tried, 1 survived" in shown.stdout


def test_damaged_results_are_refused_by_name(tmp_path):
    file = tmp_path / "drills.json"
    for text in ("", "[1]", "{}", "{" * 50_000):
        file.write_text(text)
        with pytest.raises(DataError, match=r"drills\.json"):
            load_drills(tmp_path)


def test_the_catalogue_is_listed_without_starting_anything():
    shown = CliRunner().invoke(app, ["--list", "handoff"])
    assert shown.exit_code == 0
    assert "side-refused" in shown.stdout


def test_module_is_the_program_and_wrong_usage_is_one_sentence():
    done = subprocess.run(
        [sys.executable, "-m", "faults", "no-such-drill"],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        check=False,
    )
    assert done.returncode == EXIT_USAGE
    assert "expected a pattern that matches the id or group of a fault test" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_package_does_not_need_what_stands_beside_it():
    """``faults`` and ``tools`` are not in the wheel."""
    for source in (REPOSITORY / "harness").rglob("*.py"):
        found = re.search(r"^\s*(from|import) (faults|tools)\b", source.read_text(encoding="utf-8"), re.MULTILINE)
        assert found is None, source


JUDGED_LATER = {"no-echo", "no-acceptance", "no-acceptance-all", "other-model-asked"}
"""Drills whose answer is well-formed, or that only a real engine refuses."""
EXCHANGES = [
    d
    for d in RESPONSES
    if d.drill.verdicts == (Verdict.UNKNOWN,) and d.path != "/metrics" and d.drill.id not in JUDGED_LATER
]


@pytest.mark.parametrize("drill", EXCHANGES, ids=lambda d: d.drill.id)
def test_every_broken_exchange_is_refused_for_the_stated_reason(proxy, drill):
    """By the real client, over the real proxy; the verdict on real engines is in docs/evidence/drills.md."""
    limit = 1.0 if drill.drill.id in ("hang", "hang-prefill", "drip") else 20.0
    begun = time.monotonic()
    with proxy.armed(drill.make(None), completions()) as armed, pytest.raises(HandoffError) as found:  # type: ignore[arg-type]
        ask(proxy, limit)
    assert armed.failed == ""
    assert re.search(drill.drill.reason, f"the exchange broke: {found.value}", re.DOTALL), found.value
    assert time.monotonic() - begun < drill.drill.bound_s
    assert ask(proxy).output_ids == tuple(range(10, 20))


@pytest.mark.parametrize("drill", [d for d in RESPONSES if d.path == "/metrics"], ids=lambda d: d.drill.id)
def test_metrics_of_every_kind_of_wrong_end_in_no_crash(proxy, drill):
    client = Client("decode", proxy.url, 3.0)
    with proxy.armed(drill.make(None), path("/metrics")) as armed, contextlib.suppress(HandoffError):  # type: ignore[arg-type]
        assert "generation_tokens" not in client.snapshot()
    assert armed.failed == ""
    client.close()
