"""A night for CI systems: parts true to their profile, pipelines valid by the systems' own schemas, safe with hostile
names; the scripts that they call; the image."""

from __future__ import annotations

import json
import re
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from harness.commands.ci.plan import SETUP_MINUTES, split_run
from harness.commands.ci.systems import TRIES, buildkite_pipeline, github_matrix
from harness.errors import EXIT_UNKNOWN
from harness.profiles.cells import CellName, all_cells
from harness.profiles.model import read_profile, shipped_profile_names
from harness.util.paths import REPOSITORY
from tests.support.builders import changed_profile
from tests.support.program import harness
from tests.support.program import run as cli

CI = REPOSITORY / "ci"
WORKFLOW = CI / "github" / "nightly.yaml"
BOOTSTRAP = CI / "buildkite" / "nightly.yaml"
DIGEST = "registry.example/kv@sha256:" + "0" * 64
SCHEMAS = {BOOTSTRAP: "vendor.buildkite", WORKFLOW: "vendor.github-workflows"}
PROGRAMS = Path(sys.executable).parent
RECIPE = {"dataset": "a/b", "revision": "0" * 40, "block_sizes": [32], "lookaheads": [4], "per_stratum": 2}
HOSTILE = "a b'; $(touch x) `id` \"&& {{ $HOME ${{ github.token }} \n\x1b[31m\u2028 * é.yaml"


def program(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(PROGRAMS / arguments[0]), *arguments[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def buildkite(source: str, *patterns: str, queue: str = "default", verdict_queue: str = "default") -> list[dict]:
    return buildkite_pipeline(split_run(source, patterns), queue, verdict_queue)["steps"]


# --- committed files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda p: p.parent.name)
def test_committed_pipeline_is_valid_by_the_systems_own_schema(path):
    done = program("check-jsonschema", "--builtin-schema", SCHEMAS[path], str(path))
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("profile", shipped_profile_names())
def test_uploaded_steps_are_valid_by_buildkites_own_schema(profile, tmp_path):
    path = tmp_path / "pipeline.json"
    path.write_text(json.dumps({"steps": buildkite(profile)}))
    done = program("check-jsonschema", "--builtin-schema", SCHEMAS[BOOTSTRAP], str(path))
    assert done.returncode == 0, done.stdout


def test_committed_workflow_has_no_security_finding():
    done = program("zizmor", "--offline", "--no-config", "--pedantic", str(WORKFLOW))
    assert done.returncode == 0, done.stdout
    assert "No findings" in done.stdout


def test_schemas_and_lint_do_find_mistakes(tmp_path):
    """The validators are not deaf."""
    text = WORKFLOW.read_text()
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text.replace("runs-on:", "run-on:"))
    assert program("check-jsonschema", "--builtin-schema", SCHEMAS[WORKFLOW], str(wrong)).returncode == 1
    wrong.write_text(BOOTSTRAP.read_text().replace("soft_fail: false", "soft_fail: 7"))
    assert program("check-jsonschema", "--builtin-schema", SCHEMAS[BOOTSTRAP], str(wrong)).returncode == 1
    wrong.write_text(re.sub(r"checkout@[0-9a-f]{40}", "checkout@v4", text))
    assert program("zizmor", "--offline", "--no-config", str(wrong)).returncode != 0


# --- steps -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("profile", shipped_profile_names())
@pytest.mark.parametrize("minutes", [None, 1, 8, 600])
def test_every_cell_is_recorded_and_each_part_has_the_plain_engine_that_it_needs(profile, minutes):
    night = split_run(profile, minutes=minutes)
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
    assert len(split_run("cpu", minutes=600).steps) == 1
    assert len(split_run("cpu", minutes=1).steps) == 4
    two = split_run("cpu", minutes=4)
    assert 1 < len(two.steps) < 4
    assert all(s.expected_s <= 240 for s in two.steps)
    assert [c.id for s in split_run("cpu", ["pd-mtp"]).steps for c in s.cells] == ["pd-mtp"]


def test_a_night_of_two_stages_has_time_for_both(tmp_path):
    def bitwise(raw: dict) -> None:
        raw.update(scenarios=[], judging={"tier": "bitwise"})
        raw["workload"].update(prompts="to-be-built.jsonl", recipe=RECIPE)

    def normal(raw: dict) -> None:
        bitwise(raw)
        raw["judging"] = {"tier": "normal", "stages": 2}

    two = split_run(changed_profile(tmp_path, normal)).steps[0].timeout_minutes
    one = split_run(changed_profile(tmp_path, bitwise)).steps[0].timeout_minutes
    assert two - SETUP_MINUTES >= 2 * (one - SETUP_MINUTES) - 2


def test_dependencies_are_audited_beside_the_verdict():
    """Neither waits for the other, and a vulnerability is red by itself."""
    for audit in (load(WORKFLOW)["jobs"]["audit"], load(BOOTSTRAP)["steps"][1]):
        assert "ci/audit.sh" in str(audit)
        assert not {"needs", "depends_on", "if", "continue-on-error"} & set(audit)
        assert not audit.get("soft_fail")


def test_only_unknown_is_tried_again_and_no_step_of_buildkite_fails_softly():
    *parts, verdict = buildkite("cpu")
    assert len(parts) == 4
    for part in parts:
        assert part["command"] == "ci/part.sh"
        assert part["retry"] == {"automatic": [{"exit_status": EXIT_UNKNOWN, "limit": 1}]}
        # Each try is a job: the script itself does not try again.
        assert part["soft_fail"] is False and "HARNESS_TRIES" not in part["env"]
    assert verdict["command"] == "ci/merge.sh"
    assert verdict["env"] == {"HARNESS_PROFILE": "cpu", "HARNESS_CELLS": "", "HARNESS_EXTRA": "cpu"}
    assert verdict["allow_dependency_failure"] is True
    assert [d["step"] for d in verdict["depends_on"]] == [p["key"] for p in parts]
    assert verdict["soft_fail"] is False and verdict["retry"] == {"automatic": False}
    assert all(s["soft_fail"] is False for s in load(BOOTSTRAP)["steps"])


def test_no_job_of_github_fails_softly_and_the_verdict_is_always_made():
    jobs = load(WORKFLOW)["jobs"]
    assert set(jobs) == {"plan", "part", "verdict", "audit"}
    assert not any("continue-on-error" in job for job in jobs.values())
    softly = [s["name"] for job in jobs.values() for s in job["steps"] if "continue-on-error" in s]
    assert softly == ["Fetch the parts"]
    assert jobs["part"]["strategy"]["fail-fast"] is False
    assert jobs["verdict"]["if"] == "always()" and jobs["verdict"]["needs"] == ["plan", "part"]
    for name in ("part", "verdict"):
        assert jobs[name]["steps"][-1]["if"] == "always()"


def test_workflow_uses_all_that_the_matrix_says_and_nothing_else():
    entries = github_matrix(split_run("cpu"))["include"]
    used = set(re.findall(r"\bmatrix\.(\w+)", WORKFLOW.read_text()))
    assert all(set(e) == used for e in entries)


def test_both_systems_record_the_same_parts():
    night = split_run("nightly")
    entries = github_matrix(night)["include"]
    *parts, _ = buildkite_pipeline(night, "default", "default")["steps"]
    assert len(entries) == len(parts) == len(night.steps)
    for entry, part, step in zip(entries, parts, night.steps, strict=True):
        assert entry["cells"].split() == part["env"]["HARNESS_CELLS"].split() == [c.id for c in step.cells]
        assert (entry["part"], entry["title"]) == (part["key"], part["label"])
        assert (entry["device"], entry["gpus"]) == ("gpu", "all")
        # GitHub tries again within the job.
        assert entry["tries"] == TRIES
        assert entry["timeout_minutes"] == TRIES * part["timeout_in_minutes"]


def test_workflow_may_read_contents_only_and_pins_every_action():
    document = load(WORKFLOW)
    assert document["permissions"] == {"contents": "read"}
    assert document["concurrency"]["cancel-in-progress"] is False
    assert not any("permissions" in job for job in document["jobs"].values())
    steps = [s for job in document["jobs"].values() for s in job["steps"]]
    used = [s["uses"] for s in steps if "uses" in s]
    assert used and all(re.fullmatch(r"[a-z-]+/[a-z-]+@[0-9a-f]{40}", u) for u in used)
    # The only secret is in the environment of one step, for parts that fetch models.
    assert WORKFLOW.read_text().count("secrets.") == 1
    assert [s["env"]["HF_TOKEN"] for s in steps if "secrets" in str(s)] == [
        "${{ matrix.fetch && secrets.HF_TOKEN || '' }}"
    ]


# --- hostile input ---------------------------------------------------------------------------------------------------


def test_commands_of_pipelines_hold_no_value():
    """Whatever a profile, a pattern or an input says comes through the environment."""
    runs = [s["run"] for job in load(WORKFLOW)["jobs"].values() for s in job["steps"] if "run" in s]
    commands = [s["command"] for s in load(BOOTSTRAP)["steps"] + buildkite("cpu", "pd-*")]
    assert set(runs) == {"ci/plan.sh github", "ci/part.sh", "ci/merge.sh", "ci/audit.sh"}
    assert set(commands) == {"ci/plan.sh buildkite", "ci/part.sh", "ci/merge.sh", "ci/audit.sh"}


def test_hostile_names_stay_one_word(tmp_path):
    source = tmp_path / HOSTILE
    Path(changed_profile(tmp_path, lambda raw: None)).rename(source)
    printed = harness("ci", "buildkite", "--profile", str(source), "-c", "pd-*")
    assert printed.code == 0, printed.output
    assert printed.output.isascii() and len(printed.output.splitlines()) == 1
    part, *_, verdict = json.loads(printed.output)["steps"]
    # The newline in the name makes more than one line of a call.
    folder = stage(tmp_path, [0] * 9)
    for script, step in (("part.sh", part), ("merge.sh", verdict)):
        assert call(folder, script, **step["env"])[0] == 0
    words = (folder / "words").read_text().split("\0")
    assert words.count(str(source)) == 2
    assert [words[n + 1] for n, w in enumerate(words) if w == "--cell"] == [
        *part["env"]["HARNESS_CELLS"].split(),
        "pd-*",
    ]
    assert not (folder / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["buildkite", "--profile", "nowhere"], "expected a shipped profile"),
        (["matrix", "--cell", "pd-medusa"], "expected a pattern that matches a cell"),
        (["matrix", "--cell", "pd-[a e]*"], "expected a pattern without blanks"),
        (["buildkite", "--gpus", "0"], "expected 'all' or a number"),
        (["matrix", "--gpus", "all --privileged"], "expected 'all' or a number"),
        (["buildkite", "--minutes-per-step", "0"], "minutes-per-step"),
    ],
)
def test_bad_input(arguments, sentence):
    code, output = cli("ci", *arguments)
    assert code == 64, output
    assert sentence in output


def test_options_reach_the_parts():
    printed = harness("ci", "matrix", "--gpus", "2", "--minutes-per-step", "600")
    assert printed.code == 0, printed.output
    (entry,) = json.loads(printed.output)["include"]
    assert entry["gpus"] == "2"
    *parts, verdict = buildkite("gpu", queue="gpu", verdict_queue="small")
    assert {p["agents"]["queue"] for p in parts} == {"gpu"} and verdict["agents"]["queue"] == "small"
    # The verdict needs no GPU, nor on other machines an engine of theirs.
    assert all(p["env"]["HARNESS_GPUS"] == "all" and p["env"]["HARNESS_EXTRA"] == "gpu" for p in parts)
    assert verdict["env"]["HARNESS_EXTRA"] == "cpu" and "HARNESS_GPUS" not in verdict["env"]
    assert buildkite("gpu")[-1]["env"]["HARNESS_EXTRA"] == "gpu"


# --- the scripts -----------------------------------------------------------------------------------------------------

STUB = """#!/usr/bin/env bash
[ "$1" != clean ] || { echo "$*" >>cleaned; exit 0; }
echo "$*" >>calls
printf '%s\\0' "$@" >>words
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
    for name in ("part.sh", "merge.sh", "plan.sh", "annotate.sh"):
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


def part_of(cells: str, profile: str = "cpu", **environment: str) -> dict[str, str]:
    return {"HARNESS_PART": "part-1", "HARNESS_PROFILE": profile, "HARNESS_CELLS": cells, **environment}


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
    environment = part_of("pd-none pd-mtp", HARNESS_TRIES=str(tries), GITHUB_STEP_SUMMARY=str(summary))
    found, calls = call(folder, "part.sh", **environment)
    assert (found, len(calls)) == (code, count)
    assert calls[0] == "run --part --out reports/part-1 --profile cpu --cell pd-none --cell pd-mtp"
    # Of a harness that was killed the engines' logs are as they wrote them.
    cleaned = folder / "cleaned"
    assert (cleaned.read_text() if code > 128 else cleaned.exists()) == (
        "clean --logs reports/part-1\n" if code > 128 else False
    )
    assert sorted(p.name for p in (folder / "reports" / "part-1").iterdir()) == [f"run-{n + 1}" for n in range(count)]
    assert summary.read_text().count("summary of run") == count


def test_part_fetches_models_and_prompts_and_runs_without_missing_ones(tmp_path):
    folder = stage(tmp_path, [2, 2, 0])
    environment = part_of("pd-eagle3 single-none", "night ly.yaml", HARNESS_FETCH="true")
    found, calls = call(folder, "part.sh", **environment)
    assert found == 0
    assert calls == [
        "models --profile night ly.yaml --cell pd-eagle3 --cell single-none --download",
        "prompts build --for-profile night ly.yaml",
        "run --part --out reports/part-1 --profile night ly.yaml --cell pd-eagle3 --cell single-none",
    ]


def test_only_profiles_of_hub_models_are_fetched_for():
    for profile, fetches in (("nightly", True), ("cpu", False), ("gpu", False)):
        night = split_run(profile)
        assert all(e["fetch"] is fetches for e in github_matrix(night)["include"])
        *parts, _ = buildkite_pipeline(night, "default", "default")["steps"]
        assert {p["env"]["HARNESS_FETCH"] for p in parts} == {str(fetches).lower()}


def test_a_part_that_need_not_fetch_does_not(tmp_path):
    _, calls = call(stage(tmp_path, [0]), "part.sh", **part_of("pd-mtp", HARNESS_FETCH="false"))
    assert len(calls) == 1


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 64])
def test_the_verdicts_exit_code_is_that_of_the_step(tmp_path, code):
    folder = stage(tmp_path, [code])
    summary = folder / "shown"
    environment = {"HARNESS_PROFILE": "cpu", "HARNESS_CELLS": "pd-* single-none"}
    found, calls = call(folder, "merge.sh", **environment, GITHUB_STEP_SUMMARY=str(summary))
    assert found == code
    assert calls == [
        "merge reports/parts --keep-going --out reports/merged --expect cpu --cell pd-* --cell single-none"
    ]
    assert "summary of merge" in summary.read_text()


def test_no_summary_is_no_pass(tmp_path):
    folder = stage(tmp_path, [0], writes=False)
    shown = folder / "shown"
    assert call(folder, "merge.sh", HARNESS_PROFILE="cpu", GITHUB_STEP_SUMMARY=str(shown))[0] == 2
    assert "No verdict" in shown.read_text()


@pytest.mark.parametrize(
    ("agent_works", "code", "style"),
    [(True, 1, "error"), (False, 1, "error"), (True, 2, "warning"), (True, 3, "warning"), (True, 4, "warning")],
)
def test_buildkite_fetches_all_tries_and_annotates(tmp_path, agent_works, code, style):
    folder = stage(tmp_path, [code])
    agent = folder / "bin" / "buildkite-agent"
    agent.parent.mkdir()
    agent.write_text(f'#!/bin/sh\necho "$@" >>"{folder}/agent"\ncat >/dev/null\nexit {0 if agent_works else 1}\n')
    agent.chmod(0o755)
    path = f"{agent.parent}:/usr/bin:/bin"
    found, _ = call(folder, "merge.sh", HARNESS_PROFILE="cpu", PATH=path, BUILDKITE="true")
    assert found == code
    asked = (folder / "agent").read_text().splitlines()
    assert asked[0] == "artifact download --include-retried-jobs reports/part-*/**/* reports/parts/"
    assert asked[1] == f"annotate --context verdict --style {style}"


NIGHT = {
    "NIGHT_PROFILE": "my night.yaml",
    "NIGHT_CELLS": "pd-*  single-none",
    "NIGHT_MINUTES": "30",
    "NIGHT_GPUS": "2",
    # The stub stands for the image; without one the planner has an environment of its own.
    "HARNESS_IMAGE": DIGEST,
}
PLANNED = "--profile my night.yaml --cell pd-* --cell single-none --minutes-per-step 30 --gpus 2"


def test_the_plan_is_the_output_of_githubs_step(tmp_path):
    folder = stage(tmp_path, [0])
    found, calls = call(folder, "plan.sh", "github", **NIGHT, GITHUB_OUTPUT="output")
    assert (found, calls) == (0, [f"ci matrix {PLANNED}"])
    assert (folder / "output").read_text() == "matrix=\n"


def test_the_plan_is_uploaded_to_buildkite_without_reading_variables_into_it(tmp_path):
    folder = stage(tmp_path, [0])
    agent = folder / "bin" / "buildkite-agent"
    agent.parent.mkdir()
    agent.write_text('#!/bin/sh\necho "$@" >agent\n')
    agent.chmod(0o755)
    path = f"{agent.parent}:/usr/bin:/bin"
    found, calls = call(folder, "plan.sh", "buildkite", **NIGHT, NIGHT_QUEUE="a b", PATH=path)
    assert (found, calls) == (0, [f"ci buildkite {PLANNED} --queue a b"])
    assert (folder / "agent").read_text() == "pipeline upload --no-interpolation reports/pipeline.json\n"


@pytest.mark.parametrize("system", ["github", "buildkite"])
def test_a_plan_that_cannot_be_made_is_no_empty_night(tmp_path, system):
    folder = stage(tmp_path, [64])
    found, _ = call(folder, "plan.sh", system, **NIGHT, GITHUB_OUTPUT="output")
    assert found == 64
    assert not (folder / "output").exists()


def test_scripts_are_programs_and_parse():
    for script in ("harness.sh", "part.sh", "merge.sh", "plan.sh", "audit.sh"):
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


@pytest.mark.parametrize(
    "image", ["x", "x:latest", "x@sha256:12", f"{DIGEST} --privileged", f"{DIGEST}\n", f"-v/:/x@sha256:{'0' * 64}"]
)
def test_unpinned_images_are_refused(tmp_path, image):
    docker = tmp_path / "docker"
    docker.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    docker.chmod(0o755)
    found, _ = call(CI.parent, "harness.sh", "run", HARNESS_IMAGE=image, PATH=f"{tmp_path}:/usr/bin:/bin")
    assert found == 64
    assert not (tmp_path / "started").exists()
