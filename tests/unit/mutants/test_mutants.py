"""Mutants without engines: inert by default, refused on another shape, switched one at a time, judged fairly."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest

from harness.engines.command import EngineCommand
from harness.engines.request import Ask
from harness.errors import HandoffError, UsageError
from harness.history import records
from harness.history.verdict import Verdict
from harness.judging.checks.registry import CHECKS
from harness.judging.findings import CellVerdict, CheckResult, DamageClass, Diagnosis, Judgement, Law
from harness.lab.selftest.outcome import classify_kill, first_caught
from harness.lab.selftest.report import render_markdown, write_selftest
from harness.lab.selftest.run import SelfTester
from harness.lab.selftest.run import self_test as run_self_test
from harness.lab.selftest.setups import choose_prompts, make_setups, not_shown, select_trials, trial_works
from harness.mutants import LOG_MARK, families, hooks
from harness.mutants.catalogue import HISTORIC, MUTANTS, TRIALS
from harness.mutants.exchange import MutatedExchange
from harness.mutants.install import EnabledMutants, patched_roles, unbound, with_mutants
from harness.mutants.model import COLD, RECURRENT, Mutant, PromptChoice, Trial, declare
from harness.profiles.load import load_profile
from harness.prompts.model import load_prompts
from harness.reports.selftest_result import Kill
from harness.supervision.server import full_environment
from harness.util.paths import REPOSITORY
from harness.util.progress import Reporter
from harness.workload.cells import cold_prompts
from harness.workload.prepare import prepare
from tests.support.builders import changed_profile, finding, history, observation
from tests.support.engines import ENVIRONMENT, FakeClient, group_of, session_of
from tests.support.self_tests import self_test

PROFILE = load_profile("cpu")
PROMPTS = load_prompts(PROFILE.workload.prompts)


# --- the plugin ------------------------------------------------------------------------------------------------------


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
    def change(original, active, *args, **kwargs):
        return "mutated" if active() else original(*args, **kwargs)

    return hooks.Patch("M1", "target", symbol, parameters, change)


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
    with pytest.raises(hooks.MutantRefused, match="one injected fault at a time"):
        state.on()
    switch.write_text("M7")
    with pytest.raises(hooks.MutantRefused, match="installed faults"):
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


def test_a_parameter_that_the_change_cannot_take_is_refused():
    """The engine would pass it, and end at the call, even with the fault switched off."""
    active = hooks.Active("M1", hooks.Switch(frozenset({"M1"}), None, together=False))
    one = patch("Manager.blocks", ("self", "request"))._replace(change=lambda original, active, self, request: None)
    with pytest.raises(hooks.MutantRefused, match=r"found \(self, request, computed\) in this vLLM version"):
        hooks.install(target(), one, active)


# --- arming ----------------------------------------------------------------------------------------------------------


def test_arming_gives_each_engine_its_own(tmp_path):
    arming = EnabledMutants(["M1", "M4", "M2", "M9"], pair=True, folder=tmp_path)
    assert arming.by_role == {"prefill": ("M1", "M2"), "decode": ("M4", "M2")}
    assert (tmp_path / "switch.prefill").read_text() == ""
    arming.switch(["M1"])
    assert (tmp_path / "switch.prefill").read_text() == "M1"
    assert (tmp_path / "switch.decode").read_text() == ""
    assert arming.environment("single", sys.prefix) == {}
    assert arming.environment("decode", sys.prefix)["KV_HARNESS_MUTANTS"] == "M4,M2"
    assert patched_roles("M4", pair=False) == ("single",)
    with pytest.raises(UsageError, match="M99"):
        EnabledMutants(["M99"], pair=True, folder=tmp_path)


def test_a_variable_of_the_shell_cannot_arm_an_engine(monkeypatch):
    monkeypatch.setenv("KV_HARNESS_MUTANTS", "M1")
    assert "KV_HARNESS_MUTANTS" not in full_environment(EngineCommand("single", 1, None, [], {}).env)


def test_mutant_that_found_no_target_is_named(tmp_path):
    arming = EnabledMutants(["M1", "M4"], pair=True, folder=tmp_path)
    target = "vllm.v1.core.kv_cache_manager.KVCacheManager.get_block_ids_for_computed_tokens"
    log = f"(EngineCore) [kv-harness mutant] bound M1 {target} pid=7\n"
    missing = unbound(arming, {"prefill": log})
    assert {(u.mutant, u.role) for u in missing} == {("M4", "decode")}
    # Half of a mutant is none: M4 has two targets, and each must be bound.
    half = f"[kv-harness mutant] bound M4 {missing[0].target} pid=8\n"
    assert len(missing) == 2
    assert unbound(arming, {"prefill": log, "decode": half}) == missing[1:]


def mutated_pair(*on: str) -> tuple[MutatedExchange, list[str]]:
    calls: list[str] = []
    clients = {role: FakeClient(role, calls) for role in ("prefill", "decode")}
    routers = {True: FakeClient("decode", calls), False: FakeClient("single", calls)}
    return MutatedExchange(clients, PROFILE, routers, lambda mutant: mutant in on), calls


def test_router_that_loses_the_parameters_leaves_blocks_on_p():
    exchange, _ = mutated_pair("M9")
    exchange.send(Ask(True, [1, 2]), [])
    assert exchange.kept_by_p == 1


@pytest.mark.parametrize("on, asked", [((), "decode asked"), (("N6",), "single asked")])
def test_router_that_knows_of_no_p_gets_the_hand_offs(on, asked):
    exchange, calls = mutated_pair(*on)
    exchange.send(Ask(True, [1, 2], routed=True, counted=False), [])
    assert calls == [asked]


def test_mutants_of_the_client_are_switched_in_the_session(tmp_path):
    arming = EnabledMutants(["M9", "N6"], pair=True, folder=tmp_path)
    session = session_of("pd-none", tmp_path, mutation=arming)
    calls: list[str] = []
    for role in session.group.roles:
        session._launcher.clients[role] = FakeClient(role, calls)
    session.ask(Ask(True, [1, 2]), [])
    assert session._exchange.kept_by_p == 0
    session.switch("M9")
    session.ask(Ask(True, [1, 2]), [])
    assert session._exchange.kept_by_p == 1


@pytest.mark.parametrize("cells, routers", [([], []), ([True], [True, False]), ([False], [False])])
def test_router_that_knows_of_no_p_is_started_beside_the_one_that_hands_off(cells, routers, tmp_path):
    assert set(EnabledMutants(["N6"], pair=True, folder=tmp_path).routers(cells)) == set(routers)
    assert EnabledMutants(["M9"], pair=True, folder=tmp_path).routers(cells) == cells


def test_mutant_of_the_command_line_takes_the_drafter_from_p_alone(tmp_path):
    pair, single = group_of("pd-eagle3"), group_of("single-eagle3")
    changed, _ = with_mutants(pair, PROFILE, ["M10"], tmp_path, together=False)
    assert (changed.method_of("prefill").kind, changed.method_of("decode").kind) == ("none", "eagle3")
    assert with_mutants(single, PROFILE, ["M10"], tmp_path, together=False)[0] == single
    assert with_mutants(pair, PROFILE, [], tmp_path / "none", together=False)[0] == pair
    assert not (tmp_path / "none").exists()


# --- trials ----------------------------------------------------------------------------------------------------------


def test_every_historic_defect_is_quick():
    assert [t.mutant for t in select_trials([], quick=True)] == list(HISTORIC)
    assert {m[:2] for m in HISTORIC} == {"M1", "M2", "M3", "M4", "M5"}
    assert [t.mutant for t in select_trials(["M7", "M1"], quick=False)] == ["M1", "M7"]
    usual, whole = ({t.mutant for t in select_trials([], False, complete=e)} for e in (False, True))
    long = {"N25", "N26", "N27", "N28", "N29", "N30", "N31", "N36", "N46", "N48"}
    long |= {"N59", "N60", "N61", "N62", "N63", "N64", "N65", "N74"}
    assert (whole - usual, whole) == (long, set(MUTANTS))
    with pytest.raises(UsageError, match="M99"):
        select_trials(["M99"], quick=False)


def test_trials_name_checks_and_damage_that_exist():
    checks = {c.name for c in CHECKS}
    assert {c for t in TRIALS.values() for c in t.checks} <= checks
    assert {t.damage for t in TRIALS.values()} <= set(get_args(DamageClass))
    assert records.COLD == COLD


def test_an_id_is_declared_once():
    with pytest.raises(ValueError, match="expected one mutant M1, found two"):
        declare(Mutant("M1", "", "", "both", ""), Trial((), "input", ()))


def test_engines_that_are_injected_import_the_standard_library_alone():
    """Every package of an engine is its own; the harness's may be missing there."""
    code = "import sys; import harness.mutants.catalogue; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    loaded = {name.partition(".")[0] for name in ran.stdout.split()} - {"__main__", "harness"}
    assert loaded <= sys.stdlib_module_names


def family_of(mutant: str) -> str:
    """The module that declares a mutant."""
    modules = Path(families.__path__[0]).glob("*.py")
    (found,) = (m for m in modules if re.search(rf'Mutant\(\s*"{mutant}"', m.read_text()))
    return str(found.relative_to(REPOSITORY))


def test_every_mutant_of_an_engine_has_a_patch_and_no_other_has_one():
    patched = {p.mutant for p in hooks.PATCHES}
    wanted = {m.id for m in MUTANTS.values() if m.place not in ("client", "command")}
    lost = [f"{family_of(mutant)}: expected a patch of {mutant}" for mutant in sorted(wanted - patched)]
    assert lost == [], "; ".join(lost)
    assert patched == wanted


def test_the_page_tells_of_every_mutant():
    page = (REPOSITORY / "docs" / "mutants.md").read_text()
    table = page.split("| id | defect |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    told = [row.split("|")[1].strip() for row in table]
    lost = [mutant for mutant in MUTANTS if mutant not in told]
    assert lost == [], f"docs/mutants.md: expected a row for {', '.join(lost)}"
    assert told == list(MUTANTS)


def test_the_readme_says_how_many_mutants_there_are():
    (said,) = re.findall(r"injects (\d+) faults", (REPOSITORY / "README.md").read_text())
    assert int(said) == len(MUTANTS), f"README.md: expected {len(MUTANTS)} bugs (mutants), found {said}"


def test_every_mutant_of_an_engine_can_be_shown_with_either_model_runner(tmp_path):
    for mutant in {p.mutant for p in hooks.PATCHES}:
        enabled = EnabledMutants([mutant], pair=False, folder=tmp_path / mutant)
        for runner, other in (("V1", "V2"), ("V2", "V1")):
            own = [p for p in hooks.PATCHES if p.mutant == mutant and p.runner != other]
            # Those that every engine needs first: of the others it has one.
            own.sort(key=lambda p: p.by_drafter)
            lines = [f"{LOG_MARK} bound {mutant} {p.module}.{p.symbol} pid=1" for p in own]
            log = "\n".join([f"INFO Using {runner} Model Runner", *lines])
            assert own and unbound(enabled, {"single": log}) == []
            missing = unbound(enabled, {"single": log.replace("bound", "lost", 1)})
            assert [m.target for m in missing] == [f"{own[0].module}.{own[0].symbol}"]


def test_a_patch_of_one_runners_code_names_the_runner():
    """Bound in the other's engine, where nothing calls it, N61 never fired there."""
    of = {"V1": "vllm.v1.worker.", "V2": "vllm.v1.worker.gpu."}
    for p in hooks.PATCHES:
        runner = next((r for r in ("V2", "V1") if p.module.startswith(of[r])), p.runner)
        assert p.runner == runner, f"{p.mutant}: {p.module}.{p.symbol} is of runner {runner}"


def test_a_fault_needs_its_patch_of_one_kind_of_drafter(tmp_path):
    """An engine with EAGLE3 imports nothing of DFlash, so that N56 and N57 were not tested with V2."""
    enabled = EnabledMutants(["N56"], pair=False, folder=tmp_path)
    own = [p for p in hooks.PATCHES if p.mutant == "N56" and p.runner in (None, "V2")]
    lines = {p: f"{LOG_MARK} bound N56 {p.module}.{p.symbol} pid=1" for p in own}
    drafters = [p for p in own if p.by_drafter]
    assert len(drafters) == 2
    for one in own:
        told = [line for p, line in lines.items() if p is not one]
        log = "\n".join(["INFO Using V2 Model Runner", *told])
        missing = [m.target for m in unbound(enabled, {"single": log})]
        assert missing == ([] if one in drafters else [f"{one.module}.{one.symbol}"])
    without = [line for p, line in lines.items() if p not in drafters]
    assert len(unbound(enabled, {"single": "\n".join(["INFO Using V2 Model Runner", *without])})) == 2


def test_no_engine_is_started_twice_for_the_same_configuration():
    setups = make_setups(select_trials([], quick=False, complete=True), PROFILE, PROMPTS)
    shared = [s for s in setups if s.controlled and all(t.engines is None for t in s.trials)]
    assert len({(s.group.topology, s.group.method.kind) for s in shared}) == len(shared)
    # Seven of engines that read with drafters, two that write, two of which P is restarted, two that a second P joins,
    # six without drafters, two with a drafter and recurrent state, two with a drafter of several modules,
    # two that grow old, two whose k depends on the batch, two of which P is unlike D, two with adapters, two that tell
    # of their prefix caches, one that schedules by priorities.
    assert sum(s.group.engines for s in setups) <= 34
    for setup in setups:
        assert {(w.cell.id, i) for w in setup.control for i in w.items} or any(w.scripts for w in setup.control)


def test_the_plain_engine_is_started_only_for_what_it_alone_knows():
    asked = set()
    for setup in make_setups(select_trials([], quick=False, complete=True), PROFILE, PROMPTS):
        for trial in setup.trials:
            works = trial_works(trial, setup.profile, PROMPTS, setup.group.cells)
            if beside := setup.plain_works(works):
                assert all(work.scripts for work in beside)
                asked.add(trial.mutant)
    assert asked == {"N38", "N39", "N59", "N60", "N61", "N70", "N71", "N72", "N73", "N74"}


def test_a_fault_is_tried_with_the_profiles_own_scenario_or_refused():
    profile = load_profile("smollm2-full")
    prompts = load_prompts(profile.workload.prompts)
    (setup,) = make_setups(select_trials(["N25"], quick=False), profile, prompts)
    assert {script.scenario for work in setup.control for script in work.scripts} == {"restarted-p"}
    with pytest.raises(UsageError, match="'copy-117-22', which profile smollm2-full does not have; give it a scenario"):
        make_setups(select_trials(["N26"], quick=False), profile, prompts)


def test_prompts_without_a_known_answer_are_those_of_the_baselines():
    """Nothing else tells what is right of a real model's answer."""
    profile = load_profile("smollm2")
    prompts = load_prompts(profile.workload.prompts)
    recorded = {p.id for p in cold_prompts(prompts.cold, profile.workload)}
    methods = {m.kind: m for m in profile.methods}
    for choice in get_args(PromptChoice):
        chosen = {p.id for p in choose_prompts(choice, prompts, profile, methods["eagle3"])}
        assert chosen and chosen <= recorded < {p.id for p in prompts.cold}


def test_faults_are_tried_with_each_method_that_can_show_them():
    shown = {
        m: {t.mutant for t in select_trials([], quick=False, method=m)} for m in ("eagle3", "dflash", "mtp", "none")
    }
    assert shown["dflash"] - shown["mtp"] == {"M3", "N58", "N66"} and not {"M3", "N58", "N66"} & shown["eagle3"]
    assert {"M1", "M4", "N4"} <= shown["mtp"] and not {"M1", "M4", "M8", "N4"} & shown["none"]
    assert {"M5b", "N2", "N19", "N20"} <= shown["none"] and not {"N19", "N20"} & shown["mtp"]
    with pytest.raises(UsageError, match="--method mtp can show none of the faults M3"):
        select_trials(["M3"], quick=False, method="mtp")


@pytest.mark.parametrize("method", [None, "dflash", "mtp", "none"])
def test_control_sends_everything_that_a_trial_sends(method):
    for setup in make_setups(select_trials([], quick=False, method=method, complete=True), PROFILE, PROMPTS):
        control = {w.cell.id: w for w in setup.control}
        for trial in setup.trials:
            for work in trial_works(trial, setup.profile, PROMPTS, setup.group.cells):
                assert set(work.items) <= set(control[work.cell.id].items)
                assert set(work.scripts) <= set(control[work.cell.id].scripts)


def test_profile_that_cannot_show_a_mutant_is_refused(tmp_path):
    path = changed_profile(tmp_path, lambda r: r.update(scenarios=[s for s in r["scenarios"] if s["kind"] != "refill"]))
    prepared = prepare(path, [])
    with pytest.raises(UsageError, match="M5b shows in the scenario refill"):
        make_setups(select_trials(["M5b"], quick=False), prepared.profile, prepared.prompts)


def test_faults_that_notes_of_the_kv_alone_show_are_not_tried_without_them(tmp_path):
    seen = load_profile("gpu")
    assert not_shown([t for t in TRIALS.values() if not t.long], seen) == {}
    assert "which profile gpu-hybrid has off" in not_shown([TRIALS["N65"]], seen)["N65"]
    blind = not_shown(list(TRIALS.values()), seen.model_copy(update={"witness": "off"}))
    assert {"N56", "N57", "N58"} <= set(blind) and "M1" not in blind
    assert "by notes of the KV caches, which profile gpu has off" in blind["N57"]
    source = tmp_path / "blind.yaml"
    source.write_text('format: 1\nname: blind\nextends: gpu\nwitness: "off"\n')
    with pytest.raises(UsageError, match="fault N56 cannot show: kv-computed alone shows it"):
        run_self_test(str(source), ["N56", "M1"], False, False, None, tmp_path, None)


def test_faults_that_were_not_tried_are_told_and_fail_nothing(tmp_path):
    test = self_test([Kill.KILLED], [Verdict.PASS]).model_copy(update={"not_tried": {"N56": "no notes"}})
    assert test.exit_code == 0 and "1 killed, not tried: N56;" in test.sentence
    write_selftest(test, tmp_path)
    assert "N56 not tried: no notes." in render_markdown(test)
    assert "N56 not tried:</strong> no notes" in (tmp_path / "report.html").read_text()


def test_engines_of_a_trial_are_those_of_the_profile_s_device():
    """Windows need a larger pool where steps overlap, and GPUs send from their own memory unless they are told."""
    gpu = prepare("gpu", [])
    windows, staging = make_setups([TRIALS["N20"], TRIALS["M4g"]], gpu.profile, gpu.prompts)
    assert windows.profile.engine.kv_blocks == load_profile("gpu-layouts").engine.kv_blocks == 42
    assert windows.profile.baselines == load_profile("gpu-layouts").baselines
    assert windows.profile.engine.device == "gpu" and windows.profile.witness == "kv"
    assert (gpu.profile.engine.kv_buffer_device, staging.profile.engine.kv_buffer_device) == ("cuda", "cpu")
    cpu = make_setups([TRIALS["N20"]], PROFILE, PROMPTS)[0]
    assert cpu.profile.engine.kv_blocks == load_profile("cpu-layouts").engine.kv_blocks


def test_recurrent_state_on_gpus_has_the_settings_that_it_needs_there():
    gpu = prepare("gpu", [])
    name = next(m for m, t in TRIALS.items() if t.engines is RECURRENT)
    engine = make_setups([TRIALS[name]], gpu.profile, gpu.prompts)[0].profile.engine
    assert engine.extra_args == ("--gdn-prefill-backend", "triton")
    assert engine.env == {"VLLM_SSM_CONV_STATE_LAYOUT": "DS", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


# --- judging a trial -------------------------------------------------------------------------------------------------

M1, M4, M9 = TRIALS["M1"], TRIALS["M4"], TRIALS["M9"]
LAW = Law(text="", residues=(0, 30, 31), modulus=32, tested=(0, 1, 10, 29, 30, 31))


def judged(cell="pd-eagle3", check="tokens-baseline", verdict=Verdict.REGRESSION, damage="target-kv", law=LAW, more=()):
    found = finding(cell, None, check=check, verdict=verdict, damage=damage)
    result = CheckResult(check=check, cell=cell, verdict=verdict, judged=1, findings=(found,))
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
    assert classify_kill(trial, judgement, fired=True, lookahead=3)[0] is kill


def test_a_view_stays_clean_whose_findings_known_defects_cover_without_the_fault():
    dirty = judged("single-eagle3", "acceptance-baseline", damage="drafter-kv").cells
    judgement = judged(check="acceptance-baseline", damage="drafter-kv", more=dirty)
    covered = {f.id for r in dirty[0].results for f in r.findings}
    assert classify_kill(M4, judgement, fired=True, lookahead=3, anyway=covered)[0] is Kill.KILLED
    # What no known defect covers, and a check that could not tell, still count.
    other = judged("single-eagle3", "tokens-baseline", damage="target-kv").cells[0]
    blind = CheckResult(check="tokens-baseline", cell="single-eagle3", verdict=Verdict.UNKNOWN, judged=0)
    for more in (other.results[0], blind):
        both = dirty[0].model_copy(update={"results": (*dirty[0].results, more)})
        judgement = judged(check="acceptance-baseline", damage="drafter-kv", more=(both,))
        assert classify_kill(M4, judgement, fired=True, lookahead=3, anyway=covered)[0] is Kill.OTHER


def test_damage_of_something_else_is_no_kill():
    kill, reason = classify_kill(M1, judged(), fired=False, lookahead=3)
    assert kill is Kill.OTHER
    assert "never ran" in reason


def test_what_was_answered_until_the_first_finding_is_counted_in_its_cell():
    lengths = (31, 40, 65)
    made = history([observation(c, n, sequence=i) for c in ("pd-none", "single-none") for i, n in enumerate(lengths)])
    tokens = {o.prompt_id: len(o.final.output_ids) for o in made.observations}
    named = finding("single-none", list(made.of("single-none"))[1], form="ids")
    result = CheckResult(check="c", cell="single-none", verdict=Verdict.REGRESSION, judged=3, findings=(named,))
    cell = CellVerdict(cell="single-none", verdict=Verdict.REGRESSION, results=(result,))
    caught = first_caught(Judgement(run_id="r", verdict=Verdict.REGRESSION, cells=(cell,)), made)
    assert caught is not None
    assert (caught.requests, caught.tokens) == (2, sum(list(tokens.values())[:2]))
    assert first_caught(judged("single-none"), made) is None


def test_fault_whose_code_never_ran_has_no_outcome():
    judgement = Judgement(run_id="r", verdict=Verdict.UNKNOWN, cells=(passed(),))
    kill, reason = classify_kill(M1, judgement, fired=False, lookahead=3)
    assert kill is Kill.UNTESTED and "never ran" in reason


def test_drafts_are_dropped_where_steps_overlap_too(capsys):
    """There, requests have placeholders for drafts when they are scheduled."""
    change = next(p.change for p in hooks.PATCHES if p.mutant == "N23")
    requests = [SimpleNamespace(spec_token_ids=[-1, -1]), SimpleNamespace(spec_token_ids=[])]
    active = hooks.Active("N23", hooks.Switch(frozenset({"N23"}), None, False))
    change(lambda _: None, active, SimpleNamespace(running=requests))
    assert [r.spec_token_ids for r in requests] == [[], []] and "fired N23" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kills", "controls", "code"),
    [
        ([Kill.KILLED], [Verdict.PASS], 0),
        ([Kill.KILLED], [Verdict.PASS, Verdict.KNOWN], 0),
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
    assert lost.exit_code == 2 and "no outcome for M3" in lost.sentence


def test_trial_that_breaks_has_an_outcome(tmp_path, monkeypatch):
    """A hand-off that breaks outside of a request must not lose the trial."""

    def breaks(*_):
        raise HandoffError("decode engine: expected metrics, found ConnectError")

    monkeypatch.setattr("harness.runner.record_cells.run_cell", breaks)
    prepared = prepare("cpu", [])
    setup = make_setups(select_trials(["M1"], quick=False), prepared.profile, prepared.prompts)[0]
    session = SimpleNamespace(
        switch=lambda *_: None, records=lambda: (), kv_folder=Path("no-engines"), notes=None, group=setup.group
    )
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
    assert "<script" not in html and "survived" in html
    assert json.loads((tmp_path / "selftest.json").read_text())["exit_code"] == 1
    assert "| M1 P publishes its lookahead blocks | ✘ survived | – | · | ✘ |" in render_markdown(test)
