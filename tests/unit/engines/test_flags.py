"""Arguments and variables under test: whose they are, what is refused, and where they show."""

from __future__ import annotations

import shlex

import pytest

from harness.baselines.build import NewBaselines
from harness.commands.baseline import accept
from harness.engines import environment
from harness.engines.flags import NO_FLAGS, parse_flags, require_same_flags
from harness.errors import EnvironmentFault, UsageError
from harness.history.engine_interfaces import PER_REQUEST
from harness.history.identity import identity_of
from harness.judging.checks.registry import judge
from harness.profiles.load import load_profile
from harness.reports.markdown import versions_in_words
from harness.reports.next_steps import repro_line
from harness.runner.run import require_free
from harness.workload.prepare import prepare
from tests.support.builders import LENGTHS, change_final, flawless, history, lookups, with_run
from tests.support.engines import ENVIRONMENT, command_of
from tests.support.program import inside

PROFILE = load_profile("cpu")
FLAGS = parse_flags(["--my-flag", "prefill:--x=a b", "decode:--y"], ["VLLM_MINE=1", "single:OTHER=x=y"])


def command(role: str, flags=FLAGS):
    return command_of(role, environment=ENVIRONMENT.model_copy(update={"flags": flags}))


def test_each_engine_gets_what_is_for_all_and_for_its_role():
    added = {role: command(role).argv[len(command(role, NO_FLAGS).argv) :] for role in ("prefill", "decode", "single")}
    assert added == {"prefill": ["--my-flag", "--x=a b"], "decode": ["--my-flag", "--y"], "single": ["--my-flag"]}
    assert command("single").env["OTHER"] == "x=y"
    assert command("decode").env["VLLM_MINE"] == "1"
    assert "OTHER" not in command("decode").env


def test_a_variable_is_set_before_anything_that_may_read_it_is_imported():
    assert command("single", NO_FLAGS).preload
    assert command("single", parse_flags(["--x"], [])).preload
    assert command("single").preload == ()


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["my-flag"], [], "--engine-arg 'my-flag': expected --NAME or --NAME=VALUE"),
        (["router:--x"], [], "for some of the engines, with one of single:, prefill:, decode: before it"),
        ([], ["NAME"], "--engine-env 'NAME': expected NAME=VALUE"),
        ([], ["1X=2"], "expected NAME=VALUE"),
    ],
)
def test_what_is_neither_argument_nor_variable_is_refused(arguments, variables, words):
    with pytest.raises(UsageError, match=words):
        parse_flags(arguments, variables)


@pytest.mark.parametrize(
    ("arguments", "variables", "words"),
    [
        (["--port=1"], [], "--engine-arg --port=1: the harness sets this argument of the .* engine"),
        (["--kv_transfer_config.kv_role=kv_both"], [], "kv_role=kv_both: the harness sets this argument of the"),
        (["prefill:--kv_transfer_config={}"], [], "argument of the prefill engine .*; use engine.kv_connector there$"),
        (["prefill:--block-size=16"], [], "use engine.block_size there, or engine.prefill.block_size for P alone"),
        (["--no-enforce-eager"], [], "use engine.enforce_eager there$"),
        (["--tensor-parallel-size=2"], [], "use engine.tensor_parallel there"),
        (["--seed=1"], [], "the .* engine itself; leave it out"),
        (["--max-model-le=128"], [], "use engine.max_model_len there"),
        (["--no-enforce"], [], "use engine.enforce_eager there"),
        (["--served-model=x"], [], "the .* engine itself; leave it out"),
        ([], ["UCX_TLS=rc"], r"the harness sets UCX_TLS=tcp,sm,self for the .* engine; leave it out, or change"),
        ([], ["VLLM_API_KEY=abc"], r"the harness sets VLLM_API_KEY=<redacted>"),
        ([], ["decode:LD_PRELOAD=x.so"], r"the harness sets LD_PRELOAD=an OpenMP library"),
        ([], ["single:X=1"], "single:X=1: the chosen cells have no single engine, only decode and prefill"),
        (["single:--x"], [], "single:--x: the chosen cells have no single engine"),
    ],
)
def test_what_the_harness_sets_itself_is_refused_before_anything_starts(arguments, variables, words):
    prepared = prepare("cpu", ["pd-none"])
    require_free(prepared, FLAGS, every_role=False)
    with pytest.raises(UsageError, match=words):
        require_free(prepared, parse_flags(arguments, variables))


def test_flags_are_recorded_without_secrets_and_no_part_of_a_baseline():
    given = parse_flags(["decode:--y"], ["HF_TOKEN=hf_abcdefghijklmnopqrstuvwxyzabcdefgh"])
    assert given.options[0] == "--engine-arg=decode:--y" and "hf_abc" not in given.options[1]
    assert "flags" not in str(identity_of(PROFILE, PROFILE.methods[0], "0")).lower()


def test_a_run_with_flags_says_so_and_is_tried_again_with_the_same():
    plain = history([change_final(o, output_ids=(9,)) if o.cell == "pd-none" else o for o in flawless()])
    flagged = with_run(plain, engine_flags=FLAGS.options)
    judgement = judge(flagged, lookups(LENGTHS))
    assert any("engines under test with --engine-arg=--my-flag" in notice for notice in judgement.notices)
    assert repro_line(flagged, judgement.findings[0]).endswith("--engine-env=single:OTHER=x=y")
    require_same_flags(FLAGS.options, FLAGS, "run")
    with pytest.raises(UsageError, match="run was recorded with --engine-arg=--my-flag"):
        require_same_flags(FLAGS.options, NO_FLAGS, "run")


# By command: where it asks for the environment of the engines, which the flags belong to.
COMMANDS = {
    ("aa", "-c", "single-none"): "harness.lab.aa.engines_for",
    ("soak", "-c", "single-none"): "harness.lab.soak.run.engines_for",
    ("fuzz", "-c", "single-none", "--minutes", "0.1"): "harness.runner.run.engines_for",
    ("up", "single-none"): "harness.commands.serve.engines_for",
    ("run", "-c", "single-none"): "harness.engines.environment.engines_for",
}


@pytest.mark.parametrize(("command", "asks"), COMMANDS.items(), ids=lambda value: value[0])
def test_every_command_that_starts_engines_takes_flags(command, asks, tmp_path, monkeypatch):
    def stopped(profile, plan, python, flags):
        raise UsageError(f"stopped: {python} with {flags.options}")

    monkeypatch.setattr(asks, stopped)
    given = ("--engine-python", "mine", "--engine-arg=--my-flag", "--engine-env", "A=1", "--out", str(tmp_path))
    code, words = inside(*command, *given)
    assert code == 64
    assert words.endswith("harness: stopped: mine with ('--engine-arg=--my-flag', '--engine-env=A=1')"), words
    code, words = inside(*command, "--engine-arg=--port=1", "--out", str(tmp_path))
    assert code == 64 and "--engine-arg --port=1: the harness sets this argument of the single engine" in words


def test_baselines_of_engines_with_flags_have_a_folder_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("harness.engines.environment.inspect_environment", lambda python: ENVIRONMENT.model_copy())

    def stopped(prepared, environment, *_, **__):
        raise UsageError(f"stopped: {environment.flags.options}")

    monkeypatch.setattr("harness.runner.repetitions.record_repetitions", stopped)
    record = ("baseline", "record", "-c", "single-none", "--engine-arg=--my-flag", "--out", str(tmp_path / "out"))
    code, words = inside(*record)
    assert code == 64 and "add --baselines DIR" in words and "--my-flag need a folder of their own" in words
    code, words = inside(*record, "--baselines", str(PROFILE.baselines))
    assert code == 64 and "add --baselines DIR" in words
    assert inside(*record, "--baselines", str(tmp_path)) == (64, "harness: stopped: ('--engine-arg=--my-flag',)")
    assert inside(*record[:-3], *record[-2:]) == (64, "harness: stopped: ()")


def test_a_run_with_flags_becomes_no_baseline_of_the_profile(tmp_path, monkeypatch):
    flagged = with_run(history(flawless()), engine_flags=FLAGS.options, profile={"name": "cpu", "source": "cpu"})
    monkeypatch.setattr("harness.commands.baseline.load_history", lambda _: flagged)
    with pytest.raises(
        UsageError, match=r"with --engine-arg=--my-flag .*need a folder of their own.*add --baselines DIR"
    ):
        accept(tmp_path, None, None, None)


def test_cells_that_a_recorded_run_lacks_are_recorded_with_its_flags(tmp_path, monkeypatch):
    flagged = with_run(history(flawless()), engine_flags=FLAGS.options)
    made = NewBaselines((), {"single-none": "it was cut off"}, {})
    monkeypatch.setattr("harness.history.folder.load_history", lambda _: flagged)
    monkeypatch.setattr("harness.baselines.build.new_baselines", lambda *_: made)
    code, words = inside("baseline", "record", "--from", str(tmp_path), "--baselines", str(tmp_path))
    assert code == 2
    again = shlex.join(["-p", "cpu", "-c", "single-none", *FLAGS.options, "--baselines", str(tmp_path)])
    assert words.endswith(f"next: harness baseline record {again}")


OLDER = ENVIRONMENT.model_copy(
    update={"executable": "/older/bin/python", "prefix": "/older", "vllm": "0.31.0", "surfaces": {PER_REQUEST: False}}
)


def test_p_may_be_of_another_vllm(monkeypatch):
    flags = parse_flags(["--x"], [], "/older/bin/python")
    found = {"/older/bin/python": OLDER}
    monkeypatch.setattr(environment, "inspect_environment", lambda python, *_: found.get(python, ENVIRONMENT))
    prepared = prepare("cpu", ["pd-none"])
    both = environment.engines_for(prepared.profile, prepared.plan, None, flags)
    assert [both.of(role).vllm for role in ("prefill", "second-prefill", "decode", "single")] == [
        "0.31.0",
        "0.31.0",
        "0.32.0",
        "0.32.0",
    ]
    assert both.of("prefill").flags.argv("prefill") == ["--x"]
    assert not both.has(PER_REQUEST) and both.of("decode").surfaces.get(PER_REQUEST, True)
    versions = environment.versions(both)
    assert versions_in_words(versions).startswith("vllm 0.32.0, vllm of P 0.31.0")
    assert "prefill_vllm" not in environment.versions(ENVIRONMENT)
    assert flags.options == ("--engine-arg=--x", "--prefill-python=/older/bin/python")


def test_a_p_without_nixl_or_of_another_build_is_refused(monkeypatch):
    prepared = prepare("cpu", ["pd-none"])
    for changed, words in (({"nixl": None}, "need the package nixl"), ({"vllm_build": "gpu"}, "built for GPUs")):
        of_p = OLDER.model_copy(update=changed)
        monkeypatch.setattr(
            environment, "inspect_environment", lambda _, option="", p=of_p: p if option else ENVIRONMENT
        )
        with pytest.raises(EnvironmentFault, match=f"/older/bin/python: .*{words}"):
            environment.engines_for(prepared.profile, prepared.plan, None, parse_flags([], [], "x"))


def test_another_p_needs_cells_with_one():
    with pytest.raises(UsageError, match="--prefill-python x: none of the chosen cells has a P"):
        require_free(prepare("cpu", ["single-none"]), parse_flags([], [], "x"))
