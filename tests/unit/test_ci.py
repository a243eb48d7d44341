"""Generated pipelines: true to their profile, valid by the CI systems' own schemas, safe with hostile names; the
scripts that they call; the image."""

from __future__ import annotations

import re
import shlex
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from harness.ci import buildkite, github
from harness.ci.plan import SETUP_MINUTES, Night, plan_night
from harness.config import REPOSITORY, read_profile, shipped_profile_names
from harness.errors import EXIT_UNKNOWN, UsageError
from harness.matrix import CellName, all_cells
from tests.unit.builders import changed_profile
from tests.unit.program import run as cli

CI = REPOSITORY / "ci"
DIGEST = "registry.example/kv@sha256:" + "0" * 64
SYSTEMS = {"buildkite": "vendor.buildkite", "github": "vendor.github-workflows"}
PROGRAMS = Path(sys.executable).parent
RECIPE = {"dataset": "a/b", "revision": "0" * 40, "block_sizes": [32], "lookaheads": [4], "per_stratum": 2}
HOSTILE = "a b'; $(touch x) `id` \"&& {{ $HOME } é.yaml"


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PROGRAMS / arguments[0]), *arguments[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def rendered(system: str, night: Night, **options: object) -> str:
    if system == "buildkite":
        return buildkite.render(night, buildkite.Options(**options))
    return github.render(night, github.Options(**options))


def steps(system: str, text: str) -> list[dict]:
    """The parts and the verdict; the audit beside them is ``audit_of``."""
    return everything(system, text)[:-1]


def audit_of(system: str, text: str) -> dict:
    return everything(system, text)[-1]


def everything(system: str, text: str) -> list[dict]:
    document = yaml.safe_load(text)
    return document["steps"] if system == "buildkite" else list(document["jobs"].values())


def commands(system: str, text: str) -> list[list[str]]:
    """What a shell makes of the commands."""
    if system == "buildkite":
        return [shlex.split(s["command"].replace("$$", "$")) for s in steps(system, text)]
    runs = [next(s["run"] for s in job["steps"] if "run" in s) for job in steps(system, text)]
    return [shlex.split(r) for r in runs]


def cells_of(command: list[str]) -> list[str]:
    return [command[i + 1] for i, word in enumerate(command) if word == "--cell"]


# --- committed files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", shipped_profile_names())
@pytest.mark.parametrize("system", SYSTEMS)
def test_committed_pipeline_is_what_its_profile_gives(system, profile):
    path = CI / system / f"{profile}.yaml"
    renew = f"harness ci {system} --profile {profile} --out ci/{system}/{profile}.yaml"
    found = path.read_text(encoding="utf-8") if path.is_file() else ""
    assert found == rendered(system, plan_night(profile)), f"{path} is out of date; renew it: {renew}"


@pytest.mark.parametrize("profile", shipped_profile_names())
@pytest.mark.parametrize("system", SYSTEMS)
def test_committed_pipeline_is_valid_by_the_systems_own_schema(system, profile):
    path = CI / system / f"{profile}.yaml"
    done = program("check-jsonschema", "--builtin-schema", SYSTEMS[system], str(path))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("profile", shipped_profile_names())
def test_committed_workflow_has_no_security_finding(profile):
    done = program("zizmor", "--offline", "--no-config", "--pedantic", str(CI / "github" / f"{profile}.yaml"))
    assert done.returncode == 0, done.stdout
    assert "No findings" in done.stdout


def test_schemas_and_lint_do_find_mistakes(tmp_path):
    """The validators are not deaf."""
    text = rendered("github", plan_night("cpu"))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text.replace("runs-on:", "run-on:"))
    assert program("check-jsonschema", "--builtin-schema", SYSTEMS["github"], str(wrong)).returncode == 1
    wrong.write_text(rendered("buildkite", plan_night("cpu")).replace("soft_fail: false", "soft_fail: 7"))
    assert program("check-jsonschema", "--builtin-schema", SYSTEMS["buildkite"], str(wrong)).returncode == 1
    wrong.write_text(re.sub(r"checkout@[0-9a-f]{40}", "checkout@v4", text))
    assert program("zizmor", "--offline", "--no-config", str(wrong)).returncode != 0


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", shipped_profile_names())
@pytest.mark.parametrize("minutes", [None, 1, 8, 600])
def test_every_cell_is_recorded_and_each_part_has_the_plain_engine_that_it_needs(profile, minutes):
    night = plan_night(profile, minutes=minutes)
    wanted = [c.id for c in all_cells(night.profile)]
    recorded = [c.id for s in night.steps for c in s.cells]
    assert set(recorded) == set(wanted)
    plain = {CellName.of(cell).reference for cell in wanted}
    assert all(recorded.count(cell) == 1 for cell in wanted if cell not in plain)
    for step in night.steps:
        ids = [c.id for c in step.cells]
        assert len(ids) == len(set(ids))
        assert all(c.name.single in ids for c in step.cells if c.name.single in wanted)
        # Each variant has the plain engine of its own, and no other's.
        assert {c for c in ids if c in plain} == {c.name.reference for c in step.cells} & set(wanted)
        assert step.timeout_minutes >= SETUP_MINUTES + step.expected_s / 60


def test_steps_are_packed_by_expected_time():
    assert len(plan_night("cpu", minutes=600).steps) == 1
    assert len(plan_night("cpu", minutes=1).steps) == 4
    two = plan_night("cpu", minutes=10)
    assert 1 < len(two.steps) < 4
    assert all(s.expected_s <= 600 for s in two.steps)
    assert [c.id for s in plan_night("cpu", ["pd-mtp"]).steps for c in s.cells] == ["pd-mtp"]


def test_a_night_of_two_stages_has_time_for_both(tmp_path):
    def bitwise(raw: dict) -> None:
        raw.update(scenarios=[], judging={"tier": "bitwise"})
        raw["workload"].update(prompts="to-be-built.jsonl", recipe=RECIPE)

    def normal(raw: dict) -> None:
        bitwise(raw)
        raw["judging"] = {"tier": "normal", "stages": 2}

    two = plan_night(changed_profile(tmp_path, normal)).steps[0].timeout_minutes
    one = plan_night(changed_profile(tmp_path, bitwise)).steps[0].timeout_minutes
    assert two - SETUP_MINUTES >= 2 * (one - SETUP_MINUTES) - 2


@pytest.mark.parametrize("system", SYSTEMS)
def test_dependencies_are_audited_beside_the_verdict(system):
    """Neither waits for the other, and a vulnerability is red by itself."""
    audit = audit_of(system, rendered(system, plan_night("cpu")))
    assert "ci/audit.sh" in str(audit)
    assert not {"needs", "depends_on", "if", "continue-on-error"} & set(audit)
    assert not audit.get("soft_fail")


@pytest.mark.parametrize("system", SYSTEMS)
def test_only_unknown_is_tried_again_and_no_step_fails_softly(system):
    text = rendered(system, plan_night("cpu"))
    *parts, verdict = steps(system, text)
    *recording, merging = commands(system, text)
    assert len(parts) == 4
    assert "exit_status: '*'" not in text
    assert merging[:3] == ["ci/merge.sh", "--expect", "cpu"]
    for part, command in zip(parts, recording, strict=True):
        assert command[0] == "ci/part.sh"
        if system == "buildkite":
            assert part["retry"] == {"automatic": [{"exit_status": EXIT_UNKNOWN, "limit": 1}]}
            assert part["soft_fail"] is False and command[2] == "1"
        else:
            assert "continue-on-error" not in part and command[2] == "2"
            assert not any("continue-on-error" in s for s in part["steps"])
    if system == "buildkite":
        assert verdict["allow_dependency_failure"] is True
        assert [d["step"] for d in verdict["depends_on"]] == [p["key"] for p in parts]
        assert verdict["soft_fail"] is False and verdict["retry"] == {"automatic": False}
    else:
        assert verdict["if"] == "always()" and verdict["needs"] == [f"part-{n}" for n in range(1, 5)]


def test_workflow_may_read_contents_only_and_pins_every_action():
    document = yaml.safe_load(rendered("github", plan_night("cpu"), hf_token=True))
    assert document["permissions"] == {"contents": "read"}
    assert document["concurrency"]["cancel-in-progress"] is False
    used = [s["uses"] for job in document["jobs"].values() for s in job["steps"] if "uses" in s]
    assert used and all(re.fullmatch(r"[a-z-]+/[a-z-]+@[0-9a-f]{40}", u) for u in used)
    secrets = [s for job in document["jobs"].values() for s in job["steps"] if "secrets" in str(s)]
    assert len(secrets) == 4
    assert all(s["env"] == {"HF_TOKEN": "${{ secrets.HF_TOKEN }}"} and "HF_TOKEN" not in s["run"] for s in secrets)
    assert "secrets" not in rendered("github", plan_night("cpu"))


# --- hostile input ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("system", SYSTEMS)
def test_hostile_names_stay_one_word(system, tmp_path):
    hostile = tmp_path / HOSTILE
    Path(changed_profile(tmp_path, lambda raw: None)).rename(hostile)
    text = rendered(system, plan_night(str(hostile), ["pd-*"]))
    for command in commands(system, text):
        assert str(hostile) in command
    assert cells_of(commands(system, text)[-1]) == ["pd-*"]
    path = tmp_path / "pipeline.yaml"
    path.write_text(text, encoding="utf-8")
    done = program("check-jsonschema", "--builtin-schema", SYSTEMS[system], str(path))
    assert done.returncode == 0, done.stdout
    if system == "buildkite":
        # What the agent would take for a variable is escaped.
        assert not re.search(r"(?<!\$)\$(?:\$\$)*(?!\$)", "".join(yaml.safe_load(text)["steps"][0]["command"]))


@pytest.mark.parametrize("name", ["a\nb.yaml", "x${{ secrets.HF_TOKEN }}.yaml", "a\x1b[31m.yaml", "a\u2028b.yaml"])
@pytest.mark.parametrize("system", SYSTEMS)
def test_names_that_a_pipeline_cannot_hold_are_refused(system, name, tmp_path):
    path = tmp_path / name
    Path(changed_profile(tmp_path, lambda raw: None)).rename(path)
    code, output = cli("ci", system, "--profile", str(path))
    assert code == 64, output
    assert "expected a name without control characters" in output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["buildkite", "--profile", "nowhere"], "expected a shipped profile"),
        (["github", "--cell", "pd-medusa"], "expected a pattern that matches a cell"),
        (["github", "--image", "ubuntu:24.04"], "pinned by digest"),
        (["buildkite", "--gpus", "all"], "expected --image with it"),
        (["buildkite", "--image", DIGEST, "--gpus", "0"], "expected 'all' or a number"),
        (["github", "--schedule", "every night"], "five fields of cron"),
        (["github", "--runner", "${{ github.actor }}"], "without control characters"),
        (["buildkite", "--queue", "a\nb"], "without control characters"),
        (["buildkite", "--minutes-per-step", "0"], "minutes-per-step"),
    ],
)
def test_bad_input(arguments, sentence):
    code, output = cli("ci", *arguments)
    assert code == 64, output
    assert sentence in output


def test_options_reach_the_pipeline(tmp_path):
    text = rendered("github", plan_night("cpu"), runners=("self-hosted", "h200"), image=DIGEST, gpus="2")
    document = yaml.safe_load(text)
    assert document["env"] == {"HARNESS_IMAGE": DIGEST}
    *parts, verdict, _ = document["jobs"].values()
    assert all(p["env"] == {"HARNESS_GPUS": "2"} for p in parts)
    assert "env" not in verdict
    assert document["jobs"]["part-1"]["runs-on"] == ["self-hosted", "h200"]
    assert document["jobs"]["verdict"]["runs-on"] == "ubuntu-24.04"
    document = yaml.safe_load(rendered("buildkite", plan_night("cpu"), queue="gpu", verdict_queue="small"))
    queues = {s["label"]: s["agents"]["queue"] for s in document["steps"] if "agents" in s}
    assert {label for label, queue in queues.items() if queue == "small"} == {"verdict", "audit of the dependencies"}
    code, output = cli("ci", "github", "--out", str(tmp_path / "x.yaml"), "--schedule", "5 4 * * 1-5")
    assert code == 0, output
    assert yaml.safe_load((tmp_path / "x.yaml").read_text())["on"]["schedule"] == [{"cron": "5 4 * * 1-5"}]


# --- the scripts -----------------------------------------------------------------------------------------------------

STUB = """#!/usr/bin/env bash
[ "$1" != clean ] || { echo "$*" >>cleaned; exit 0; }
echo "$*" >>calls
out="" previous=""
for word in "$@"; do [ "$previous" != --out ] || out="$word"; previous="$word"; done
code="$(sed -n "$(wc -l <calls)p" codes)"
if [ -e writes ] && [ -n "$out" ]; then
  if [ "$1" = merge ]; then run="$out"; else
    run="$out/run-$(wc -l <calls)"; mkdir -p "$run"; ln -sfn "$(basename "$run")" "$out/latest"
  fi
  mkdir -p "$run"; echo "summary of $1 with $code" >"$run/summary.md"
fi
exit "$code"
"""


def stage(tmp_path: Path, codes: list[int], writes: bool = True) -> Path:
    """A checkout whose harness is a stub that exits with the codes in turn."""
    folder = tmp_path / "ci"
    folder.mkdir()
    for name in ("part.sh", "merge.sh", "annotate.sh"):
        (folder / name).write_text((CI / name).read_text())
        (folder / name).chmod(0o755)
    (folder / "harness.sh").write_text(STUB)
    (folder / "harness.sh").chmod(0o755)
    (tmp_path / "codes").write_text("".join(f"{c}\n" for c in codes))
    if writes:
        (tmp_path / "writes").touch()
    return tmp_path


def call(folder: Path, script: str, *arguments: str, **environment: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [f"ci/{script}", *arguments],
        cwd=folder,
        env={"PATH": "/usr/bin:/bin", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    calls = folder / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.is_file() else []


@pytest.mark.parametrize(
    ("codes", "tries", "code", "count"),
    [
        ([0], 2, 0, 1),
        ([2, 0], 2, 0, 2),
        ([2, 2, 0], 2, 2, 2),
        ([2, 0], 1, 2, 1),
        ([1, 0], 2, 1, 1),
        ([64, 0], 2, 64, 1),
        ([137, 0], 2, 137, 1),
    ],
)
def test_a_part_is_tried_again_for_unknown_alone(tmp_path, codes, tries, code, count):
    folder = stage(tmp_path, codes)
    (folder / "reports" / "part-1" / "of an earlier night").mkdir(parents=True)
    summary = folder / "shown"
    found, calls = call(folder, "part.sh", "part-1", str(tries), "--cell", "pd-*", GITHUB_STEP_SUMMARY=str(summary))
    assert (found, len(calls)) == (code, count)
    assert calls[0] == "run --part --out reports/part-1 --cell pd-*"
    # Of a harness that was killed the engines' logs are as they wrote them.
    cleaned = folder / "cleaned"
    assert (cleaned.read_text() if code > 128 else cleaned.exists()) == (
        "clean --logs reports/part-1\n" if code > 128 else False
    )
    assert sorted(p.name for p in (folder / "reports" / "part-1").iterdir()) == [f"run-{n + 1}" for n in range(count)]
    assert summary.read_text().count("summary of run") == count


def test_a_part_fetches_its_models_and_prompts_first_and_runs_without_what_cannot_be_had(tmp_path):
    folder = stage(tmp_path, [2, 2, 0])
    chosen = ["--profile", "night ly.yaml", "--cell", "pd-eagle3", "--cell", "single-none"]
    found, calls = call(folder, "part.sh", "part-1", "1", *chosen, HARNESS_FETCH="1")
    assert found == 0
    assert calls == [
        "models night ly.yaml --cell pd-eagle3 --cell single-none --download",
        "prompts build --for-profile night ly.yaml",
        "run --part --out reports/part-1 --profile night ly.yaml --cell pd-eagle3 --cell single-none",
    ]


def test_only_profiles_of_hub_models_are_fetched_for():
    assert plan_night("nightly").fetches
    assert "HARNESS_FETCH" in rendered("github", plan_night("nightly"))
    assert not any("HARNESS_FETCH" in rendered("github", plan_night(p)) for p in ("cpu", "gpu"))


@pytest.mark.parametrize("code", [0, 1, 2, 64])
def test_the_verdicts_exit_code_is_that_of_the_step(tmp_path, code):
    folder = stage(tmp_path, [code])
    summary = folder / "shown"
    found, calls = call(folder, "merge.sh", "--expect", "cpu", GITHUB_STEP_SUMMARY=str(summary))
    assert found == code
    assert calls == ["merge reports/parts --keep-going --out reports/merged --expect cpu"]
    assert "summary of merge" in summary.read_text()


def test_no_summary_is_no_pass(tmp_path):
    folder = stage(tmp_path, [0], writes=False)
    shown = folder / "shown"
    assert call(folder, "merge.sh", GITHUB_STEP_SUMMARY=str(shown))[0] == 2
    assert "No verdict" in shown.read_text()


@pytest.mark.parametrize("agent_works", [True, False])
def test_buildkite_fetches_all_tries_and_annotates(tmp_path, agent_works):
    folder = stage(tmp_path, [1])
    agent = folder / "bin" / "buildkite-agent"
    agent.parent.mkdir()
    agent.write_text(f'#!/bin/sh\necho "$@" >>"{folder}/agent"\ncat >/dev/null\nexit {0 if agent_works else 1}\n')
    agent.chmod(0o755)
    path = f"{agent.parent}:/usr/bin:/bin"
    found, _ = call(folder, "merge.sh", "--expect", "cpu", PATH=path, BUILDKITE="true")
    assert found == 1
    asked = (folder / "agent").read_text().splitlines()
    assert asked[0] == "artifact download --include-retried-jobs reports/part-*/**/* reports/parts/"
    assert asked[1] == "annotate --context verdict --style error"


def test_scripts_are_programs_and_parse():
    for script in ("harness.sh", "part.sh", "merge.sh"):
        assert (CI / script).stat().st_mode & stat.S_IXUSR
        assert subprocess.run(["bash", "-n", str(CI / script)], check=False).returncode == 0


def test_harness_script_gives_the_image_no_secret_on_its_command_line(tmp_path):
    docker = tmp_path / "docker"
    docker.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    docker.chmod(0o755)
    done = subprocess.run(
        [str(CI / "harness.sh"), "run", "--cell", "a b"],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "HARNESS_IMAGE": DIGEST,
            "HARNESS_GPUS": "2",
            "HF_TOKEN": "hf_secret",
            "HARNESS_MODELS": f"{tmp_path}/models",
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    words = done.stdout.splitlines()
    assert "hf_secret" not in done.stdout and words[words.index("HF_TOKEN") - 1] == "--env"
    assert words[words.index("--gpus") + 1] == "2"
    assert f"HF_HOME={tmp_path}/models" in words
    mounted = [w for n, w in enumerate(words) if words[n - 1] == "--volume"]
    assert f"{tmp_path}/models:{tmp_path}/models" in mounted
    assert any(m.endswith("/prompts:/opt/harness/prompts") for m in mounted)
    assert words[words.index(DIGEST) :] == [DIGEST, "run", "--cell", "a b"]


# --- the image -------------------------------------------------------------------------------------------------------


def instructions() -> list[dict[str, str]]:
    return DockerfileParser(str(REPOSITORY)).structure


def test_image_is_pinned_unprivileged_and_holds_no_secret():
    parsed = instructions()
    values = {i["instruction"]: i["value"] for i in parsed}
    base = next(i["value"] for i in parsed if i["instruction"] == "ARG")
    assert re.fullmatch(r"BASE=python@sha256:[0-9a-f]{64}", base)
    assert values["FROM"] == "${BASE}"
    assert values["USER"] == "10001"
    assert values["ENTRYPOINT"] == '["harness"]'
    assert not any(word in i["value"] for i in parsed for word in ("TOKEN", "PASSWORD", "SECRET"))
    assert "ADD" not in values


def test_image_copies_what_there_is_and_nothing_is_ignored_that_it_copies():
    allowed = [line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = [w.rstrip("/") for i in instructions() if i["instruction"] == "COPY" for w in i["value"].split()[:-1]]
    assert set(copied) == set(allowed)
    assert all((REPOSITORY / name).exists() for name in copied)
    # What the shipped profiles name is in the image.
    for name in shipped_profile_names():
        profile = read_profile(name)
        for path in (profile.workload.prompts, profile.baselines):
            assert path.relative_to(REPOSITORY).parts[0] in copied


def test_image_passes_the_linter():
    done = program("hadolint", str(REPOSITORY / "Dockerfile"))
    assert done.returncode == 0, done.stdout


def test_unpinned_images_are_refused():
    for image in ("x", "x:latest", "x@sha256:12", f"{DIGEST} --privileged", f"-v/:/x@sha256:{'0' * 64}"):
        with pytest.raises(UsageError, match="pinned by digest"):
            rendered("github", plan_night("cpu"), image=image)
