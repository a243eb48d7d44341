"""Mutants without engines: inert by default, refused on another shape, switched one at a time, judged fairly."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.config import load_profile
from harness.engine.arming import Arming, Marks, roles_of, unbound
from harness.engine.command import EngineCommand, full_environment
from harness.errors import UsageError
from harness.findings import CellVerdict, CheckResult, Diagnosis, Finding, Judgement, Law, Verdict
from harness.mutants import hooks
from harness.mutants.catalogue import HISTORIC, MUTANTS
from harness.operations import prepare
from harness.progress import Reporter
from harness.prompts import load_prompts
from harness.report.selftest import render_markdown, write_selftest
from harness.selftest.outcome import Control, Kill, Outcome, SelfTest, classify_kill
from harness.selftest.trials import TRIALS, make_setups, select_trials
from tests.unit.builders import changed_profile
from tests.unit.test_engine import ENVIRONMENT

PROFILE = load_profile("cpu")
PROMPTS = load_prompts(PROFILE.workload.prompts)


# --- the plugin ------------------------------------------------------------------------------------------------------


def run_python(code: str, **env: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={"PATH": "/usr/bin", **env}
    )


def test_without_its_variable_the_plugin_does_nothing():
    count = "print(len(sys.meta_path))"
    loaded = "print('harness.mutants.hooks' in sys.modules)"
    done = run_python(f"import sys, harness.mutants as m; m.register(); {loaded}; {count}")
    assert done.stdout.split() == ["False", run_python(f"import sys; {count}").stdout.strip()]
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("env", "sentence"),
    [
        ({"KV_HARNESS_MUTANTS": "M99"}, "expected mutant ids"),
        ({"KV_HARNESS_MUTANTS": "M1,M4"}, "expected one mutant at a time, found M1, M4"),
    ],
)
def test_bad_arming_ends_the_process_with_one_line(env, sentence):
    done = run_python("import harness.mutants as m; m.register(); print('went on')", **env)
    assert done.returncode == 70
    assert "went on" not in done.stdout
    (line,) = done.stderr.splitlines()
    assert sentence in line


def test_two_together_when_asked_for():
    env = {"KV_HARNESS_MUTANTS": "M1,M4", "KV_HARNESS_MUTANTS_TOGETHER": "1"}
    assert "armed M1,M4" in run_python("import harness.mutants as m; m.register()", **env).stderr


TARGET = """
class Manager:
    def blocks(self, request, computed):
        return [1, 2]
    @staticmethod
    def still(output):
        return output
"""


def target(source: str = TARGET) -> types.ModuleType:
    module = types.ModuleType("target")
    exec(source, module.__dict__)
    return module


def patch(symbol: str, parameters: tuple[str, ...]) -> hooks.Patch:
    def make(original, active):
        def replacement(*args, **kwargs):
            return "mutated" if active() else original(*args, **kwargs)

        return replacement

    return hooks.Patch("M1", "target", symbol, parameters, make)


def test_patch_is_switched_by_a_file(tmp_path, capsys):
    switch = tmp_path / "switch"
    active = hooks.Active("M1", hooks.Switch(frozenset({"M1", "M4"}), str(switch), together=False))
    module = target()
    hooks.install(module, patch("Manager.blocks", ("self", "request")), active)
    hooks.install(module, patch("Manager.still", ("output",)), active)
    manager = module.Manager()
    assert manager.blocks(1, 2) == [1, 2]
    switch.write_text("M1")
    assert manager.blocks(1, 2) == "mutated"
    assert module.Manager.still(3) == "mutated"
    replacement = tmp_path / "new"
    replacement.write_text("M4")
    replacement.replace(switch)
    assert manager.blocks(1, 2) == [1, 2]
    assert "bound M1 target.Manager.blocks" in capsys.readouterr().err


def test_switch_file_names_one_armed_mutant(tmp_path):
    switch = tmp_path / "switch"
    state = hooks.Switch(frozenset({"M1", "M4"}), str(switch), together=False)
    switch.write_text("M1,M4")
    with pytest.raises(hooks.MutantRefused, match="one mutant at a time"):
        state.on()
    switch.write_text("M7")
    with pytest.raises(hooks.MutantRefused, match="armed mutants"):
        state.on()


@pytest.mark.parametrize(
    ("symbol", "parameters", "found"),
    [
        ("Manager.gone", ("self",), "no such symbol"),
        ("Nobody.blocks", ("self",), "no such symbol"),
        ("Manager.blocks", ("self", "other"), r"found \(self, request, computed\)"),
    ],
)
def test_other_shape_is_refused(symbol, parameters, found):
    active = hooks.Active("M1", hooks.Switch(frozenset({"M1"}), None, together=False))
    with pytest.raises(hooks.MutantRefused, match=found):
        hooks.install(target(), patch(symbol, parameters), active)


def test_refusal_of_a_changed_target_ends_the_process(tmp_path):
    """The real finder on a module that has another shape than the mutant was written for."""
    package = tmp_path / "vllm" / "v1" / "core"
    package.mkdir(parents=True)
    for folder in (tmp_path / "vllm", tmp_path / "vllm" / "v1", package):
        (folder / "__init__.py").write_text("")
    (package / "kv_cache_manager.py").write_text("class KVCacheManager:\n    pass\n")
    code = "import harness.mutants as m; m.register(); import vllm.v1.core.kv_cache_manager; print('went on')"
    done = run_python(code, KV_HARNESS_MUTANTS="M1", PYTHONPATH=str(tmp_path))
    assert done.returncode == 70, done.stderr
    assert "went on" not in done.stdout
    marks = Marks(done.stderr)
    assert len(marks.refused) == 1
    assert "get_block_ids_for_computed_tokens" in marks.refused[0]


# --- arming ----------------------------------------------------------------------------------------------------------


def test_arming_gives_each_engine_its_own(tmp_path):
    arming = Arming(["M1", "M4", "M2", "M9"], pair=True, folder=tmp_path)
    assert arming.by_role == {"prefill": ("M1", "M2"), "decode": ("M4", "M2")}
    assert (tmp_path / "switch.prefill").read_text() == ""
    arming.switch(["M1"])
    assert (tmp_path / "switch.prefill").read_text() == "M1"
    assert (tmp_path / "switch.decode").read_text() == ""
    assert arming.environment("single", None) == {}
    assert arming.environment("decode", None)["KV_HARNESS_MUTANTS"] == "M4,M2"
    assert roles_of("M4", pair=False) == ("single",)
    with pytest.raises(UsageError, match="M99"):
        Arming(["M99"], pair=True, folder=tmp_path)


def test_a_variable_of_the_shell_cannot_arm_an_engine(monkeypatch):
    monkeypatch.setenv("KV_HARNESS_MUTANTS", "M1")
    assert "KV_HARNESS_MUTANTS" not in full_environment(EngineCommand("single", 1, None, [], {}).env)


def test_mutant_that_found_no_target_is_named(tmp_path):
    arming = Arming(["M1", "M4"], pair=True, folder=tmp_path)
    target = "vllm.v1.core.kv_cache_manager.KVCacheManager.get_block_ids_for_computed_tokens"
    log = f"(EngineCore) [kv-harness mutant] bound M1 {target} pid=7\n"
    missing = unbound(arming, {"prefill": log})
    assert {(u.mutant, u.role) for u in missing} == {("M4", "decode")}
    # Half of a mutant is none: M4 has two targets, and each must be bound.
    half = f"[kv-harness mutant] bound M4 {missing[0].target} pid=8\n"
    assert len(missing) == 2
    assert unbound(arming, {"prefill": log, "decode": half}) == missing[1:]


# --- trials ----------------------------------------------------------------------------------------------------------


def test_every_mutant_has_a_trial_and_every_historic_defect_is_quick():
    assert {t.mutant for t in TRIALS} == set(MUTANTS)
    assert [t.mutant for t in select_trials([], quick=True)] == list(HISTORIC)
    assert {m[:2] for m in HISTORIC} == {"M1", "M2", "M3", "M4", "M5"}
    assert [t.mutant for t in select_trials(["M7", "M1"], quick=False)] == ["M1", "M7"]
    with pytest.raises(UsageError, match="M99"):
        select_trials(["M99"], quick=False)


def test_no_engine_is_started_twice_for_the_same_configuration():
    setups = make_setups(select_trials([], quick=False), PROFILE, PROMPTS)
    shared = [s for s in setups if s.controlled and s.armed != ("M4g",)]
    assert len({(s.group.topology, s.group.method.kind) for s in shared}) == len(shared)
    assert sum(s.group.engines for s in setups) <= 8
    for setup in setups:
        sent = {(w.cell.id, i) for w in setup.control for i in w.items}
        assert sent or any(w.scripts for w in setup.control)


def test_control_sends_everything_that_a_trial_sends():
    from harness.selftest.trials import trial_works

    for setup in make_setups(select_trials([], quick=False), PROFILE, PROMPTS):
        control = {w.cell.id: w for w in setup.control}
        for trial in setup.trials:
            for work in trial_works(trial, PROFILE, PROMPTS, setup.group.cells):
                assert set(work.items) <= set(control[work.cell.id].items)
                assert set(work.scripts) <= set(control[work.cell.id].scripts)


def test_profile_that_cannot_show_a_mutant_is_refused(tmp_path):
    path = changed_profile(tmp_path, lambda r: r.update(scenarios=[s for s in r["scenarios"] if s["kind"] != "refill"]))
    prepared = prepare(path, [])
    with pytest.raises(UsageError, match="M5b shows in the scenario refill"):
        make_setups(select_trials(["M5b"], quick=False), prepared.profile, prepared.prompts)


# --- judging a trial -------------------------------------------------------------------------------------------------

M1 = next(t for t in TRIALS if t.mutant == "M1")
M9 = next(t for t in TRIALS if t.mutant == "M9")
M4 = next(t for t in TRIALS if t.mutant == "M4")
LAW = Law(text="", residues=(0, 30, 31), modulus=32, tested=(0, 1, 10, 29, 30, 31))


def judged(cell="pd-eagle3", check="tokens-baseline", verdict=Verdict.REGRESSION, damage="target-kv", law=LAW, more=()):
    finding = Finding(check=check, cell=cell, verdict=verdict, damage=damage, message="")
    result = CheckResult(check=check, cell=cell, verdict=verdict, judged=1, findings=(finding,))
    diagnosis = Diagnosis(damage=damage, failed=1, judged=2, law=law, text="somewhere")
    bad = CellVerdict(cell=cell, verdict=verdict, results=(result,), diagnosis=diagnosis)
    return Judgement(run_id="r", verdict=verdict, cells=(bad, *more))


def unable():
    """The class is right, but of the expected checks none could tell."""
    right = judged(check="transfer")
    blind = CheckResult(check="tokens-baseline", cell="pd-eagle3", verdict=Verdict.UNKNOWN, judged=0)
    cell = right.cells[0].model_copy(update={"results": (*right.cells[0].results, blind)})
    return right.model_copy(update={"cells": (cell,)})


def passed(cell="pd-eagle3"):
    result = CheckResult(check="complete", cell=cell, verdict=Verdict.PASS, judged=1)
    return CellVerdict(cell=cell, verdict=Verdict.PASS, results=(result,))


@pytest.mark.parametrize(
    ("trial", "judgement", "kill"),
    [
        (M1, judged(), Kill.KILLED),
        (M1, judged(damage="drafter-kv"), Kill.OTHER),
        (M1, judged(check="response-invariants"), Kill.OTHER),
        (M1, judged(law=LAW.model_copy(update={"residues": (0, 10)})), Kill.OTHER),
        (M1, judged(law=None), Kill.OTHER),
        # The law of another lookahead than EAGLE3's three slots.
        (M1, judged(law=LAW.model_copy(update={"residues": (0, 31)})), Kill.OTHER),
        (M1, judged(law=LAW.model_copy(update={"residues": (0, 29, 30, 31)})), Kill.OTHER),
        # A check that could not tell has caught nothing.
        (M1, unable(), Kill.OTHER),
        (M4, judged(check="acceptance-baseline", damage="drafter-kv"), Kill.OTHER),
        (M1, Judgement(run_id="r", verdict=Verdict.UNKNOWN, cells=(passed(),)), Kill.SURVIVED),
        (M1, Judgement(run_id="r", verdict=Verdict.UNKNOWN, cells=()), Kill.UNTESTED),
        (M9, judged(check="transfer", verdict=Verdict.UNKNOWN, damage="nothing-tested"), Kill.KILLED),
        (M9, judged(check="transfer", damage="nothing-tested"), Kill.OTHER),
        (M4, judged(check="acceptance-baseline", damage="drafter-kv", more=(passed("single-eagle3"),)), Kill.KILLED),
        (
            M4,
            judged(
                check="acceptance-baseline",
                damage="drafter-kv",
                more=judged("single-eagle3", "acceptance-baseline", damage="drafter-kv").cells,
            ),
            Kill.OTHER,
        ),
    ],
)
def test_kills_need_the_right_reason(trial, judgement, kill):
    assert classify_kill(trial, judgement, {}, fired=True, lookahead=3)[0] is kill


def test_damage_of_something_else_is_no_kill():
    kill, reason = classify_kill(M1, judged(), {}, fired=False, lookahead=3)
    assert kill is Kill.OTHER
    assert "never ran" in reason


def test_survivor_whose_code_never_ran_says_so():
    judgement = Judgement(run_id="r", verdict=Verdict.UNKNOWN, cells=(passed(),))
    assert "never ran" in classify_kill(M1, judgement, {}, fired=False, lookahead=3)[1]


def outcome(kill: Kill) -> Outcome:
    return Outcome(
        mutant="M1",
        kill=kill,
        reason="because | <script>",
        expected="x",
        found=("pd-eagle3 cold: <script>alert(1)</script>",),
        checks={"tokens-baseline": Verdict.REGRESSION, "complete": Verdict.PASS},
        fired=True,
        folder="M1",
        seconds=1.0,
    )


def self_test(kills: list[Kill], controls: list[Verdict], **changes) -> SelfTest:
    base = SelfTest(
        run_id="r",
        started="2026-01-01",
        profile="cpu",
        versions={"vllm": "0"},
        hardware={},
        asked=("M1",) * len(kills),
        outcomes=tuple(outcome(k) for k in kills),
        controls=tuple(Control(id="c", verdict=v, requests=1, folder="control-c", seconds=1.0) for v in controls),
        engine_starts=2,
        seconds=10.0,
    )
    return base.model_copy(update=changes)


@pytest.mark.parametrize(
    ("kills", "controls", "code"),
    [
        ([Kill.KILLED], [Verdict.PASS], 0),
        ([Kill.KILLED, Kill.SURVIVED], [Verdict.PASS], 1),
        ([Kill.OTHER], [Verdict.PASS], 1),
        ([Kill.KILLED], [Verdict.REGRESSION], 1),
        ([Kill.KILLED], [Verdict.UNKNOWN], 2),
        ([Kill.UNTESTED], [Verdict.PASS], 2),
        ([Kill.KILLED], [], 2),
        ([], [Verdict.PASS], 2),
    ],
)
def test_exit_code_of_a_self_test(kills, controls, code):
    assert self_test(kills, controls).exit_code == code


def test_mutant_without_an_outcome_never_passes():
    lost = self_test([Kill.KILLED], [Verdict.PASS], asked=("M1", "M3"))
    assert lost.exit_code == 2
    assert "no outcome of M3" in lost.sentence


def test_trial_that_breaks_has_an_outcome(tmp_path, monkeypatch):
    """A hand-off that breaks outside of a request must not lose the trial."""
    from harness.errors import HandoffError
    from harness.selftest.run import SelfTester

    def breaks(*_):
        raise HandoffError("decode engine: expected metrics, found ConnectError")

    monkeypatch.setattr("harness.selftest.run.run_cell", breaks)
    prepared = prepare("cpu", [])
    setup = make_setups(select_trials(["M1"], quick=False), prepared.profile, prepared.prompts)[0]
    session = SimpleNamespace(switch=lambda *_: None, records=lambda: ())
    tester = SelfTester(prepared, ENVIRONMENT, tmp_path, Reporter(1.0))
    with pytest.raises(HandoffError):
        tester._trial(setup.trials[0], setup, session, tmp_path)
    assert [(o.mutant, o.kill) for o in tester._outcomes] == [("M1", Kill.OTHER)]


def test_interrupted_self_test_never_passes():
    assert self_test([Kill.KILLED], [Verdict.PASS], interrupted=True).exit_code == 2


def test_reports_of_a_self_test(tmp_path: Path):
    test = self_test([Kill.KILLED, Kill.SURVIVED], [Verdict.PASS])
    write_selftest(test, tmp_path)
    html = (tmp_path / "report.html").read_text()
    assert "<script" not in html
    assert "survived" in html
    assert json.loads((tmp_path / "selftest.json").read_text())["exit_code"] == 1
    assert "| M1 P publishes its lookahead blocks | ✘ survived | · | ✘ |" in render_markdown(test)
