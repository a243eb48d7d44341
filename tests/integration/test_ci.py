"""A night for CI systems: parts true to their profile, pipelines valid by the systems' own schemas, safe with hostile
names; the scripts that they call; the image."""

from __future__ import annotations

import functools
import json
import re
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser

from harness.commands.ci import plan
from harness.commands.ci.plan import SETUP_MINUTES, SplitRun
from harness.commands.ci.systems import buildkite_pipeline, github_matrix
from harness.errors import UsageError
from harness.profiles.availability import references_of
from harness.profiles.cells import CellName, all_cells
from harness.profiles.load import read_profile, shipped_profile_names
from harness.util.paths import REPOSITORY
from harness.workload.prepare import Prepared, prepare
from tests.support.builders import changed_profile
from tests.support.program import harness, script
from tests.support.program import run as cli

pytestmark = pytest.mark.computes

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


@functools.cache
def prepared(source: str, patterns: tuple[str, ...], record: bool) -> Prepared:
    return prepare(source, patterns, planned=True, record=record)


@functools.cache
def split_once(source: str, patterns: tuple[str, ...], wanted: tuple[tuple[str, Any], ...]) -> SplitRun:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "prepare", lambda source, chosen, planned, record: prepared(source, tuple(chosen), record))
        return plan.split_run(source, patterns, **dict(wanted))


def split_run(source: str, patterns: Sequence[str] = (), **wanted: Any) -> SplitRun:
    """Shipped profiles stay as they are, and the largest take seconds."""
    if source in shipped_profile_names():
        return split_once(source, tuple(patterns), tuple(sorted((k, v) for k, v in wanted.items() if v is not None)))
    return plan.split_run(source, patterns, **wanted)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def buildkite(source: str, *patterns: str, queue: str = "default", verdict_queue: str = "default") -> list[dict]:
    return buildkite_pipeline(split_run(source, patterns), queue, verdict_queue)["steps"]


# --- committed files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda p: p.parent.name)
def test_committed_pipeline_is_valid_by_the_systems_own_schema(path):
    done = program("check-jsonschema", "--builtin-schema", SCHEMAS[path], str(path))
    assert done.returncode == 0, done.stdout


def test_uploaded_steps_are_valid_by_buildkites_own_schema(tmp_path):
    paths = [tmp_path / f"{profile}.json" for profile in shipped_profile_names()]
    for path in paths:
        path.write_text(json.dumps({"steps": buildkite(path.stem)}))
    done = program("check-jsonschema", "--builtin-schema", SCHEMAS[BOOTSTRAP], *map(str, paths))
    # Each file that is wrong is named.
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


def test_a_step_has_as_few_gpus_as_its_engines_need():
    night = split_run("nightly")
    assert {s.gpus for s in night.steps} == {1, 2, 4}
    for step in night.steps:
        # P with two GPUs and D with one, apart, are on a machine with four.
        wide = any(c.id.endswith((".p2d1", ".p1d2")) for c in step.cells)
        together = all(c.id.endswith(".together") for c in step.cells)
        assert step.gpus == (4 if wide else 1 if together else 2), step.title
    assert {s.gpus for s in split_run("cpu").steps} == {0}


def test_steps_of_many_gpus_are_sized_by_the_makespan():
    """Eight GPUs run several pairs at the same time, so that an hour holds more of them than one after the other."""
    hour = split_run("nightly", minutes=60, gpus=8)
    # The plain engine of a variant waits for the others, so that one with states alone takes 71 minutes.
    assert len(hour.steps) <= 6 and all(s.expected_s <= 72 * 60 and s.gpus == 8 for s in hour.steps)
    assert all(s.timeout_minutes <= 5 * 60 + SETUP_MINUTES for s in hour.steps)
    assert len(split_run("nightly", minutes=60, gpus=4).steps) > len(hour.steps)
    with pytest.raises(UsageError, match="--gpus: some cells do not fit on 1 GPUs of 80 GiB"):
        split_run("nightly", gpus=1)


def test_the_smoke_lane_fits_two_gpus_for_a_quarter_of_an_hour():
    (step,) = split_run("gpu", minutes=15, gpus=2).steps
    assert step.expected_s <= 15 * 60 and {c.id for c in step.cells} == {
        c.id for c in all_cells(split_run("gpu").profile)
    }


def test_baselines_are_recorded_by_single_engines_alone():
    night = split_run("nightly", record=True)
    assert night.patterns == ("single-*",) and all(c.topology == "single" for s in night.steps for c in s.cells)
    # Patterns are those of the night.
    (step,) = split_run("cpu", ["*-eagle3"], record=True).steps
    assert {c.id for c in step.cells} == {"single-none", "single-eagle3"}
    with pytest.raises(UsageError, match=r"--cell pd-\*: baselines are recorded from engines alone"):
        split_run("cpu", ["pd-*"], record=True)
    assert all(e["record"] for e in github_matrix(night)["include"])
    *parts, last = buildkite_pipeline(night, "default", "default")["steps"]
    assert {s["env"]["HARNESS_RECORD"] for s in (*parts, last)} == {"true"}
    assert last["artifact_paths"] == ["reports/baselines/**/*"]
    once = sum(s.expected_s for s in split_run("gpu", ["single-mtp"]).steps)
    assert sum(s.expected_s for s in split_run("gpu", ["single-mtp"], record=True).steps) > once
    # The plain engine verifies the others' tokens.
    drafting = split_run("cpu", ["single-dflash"], record=True)
    assert drafting.patterns == ("single-dflash", "single-none")
    assert [[c.id for c in s.cells] for s in drafting.steps] == [["single-none", "single-dflash"]]


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


@pytest.mark.parametrize("name", ["audit", "site"])
def test_dependencies_and_documentation_are_looked_at_beside_the_verdict(name):
    """None waits for another, and a vulnerability or a dead link is red by itself."""
    (step,) = [s for s in load(BOOTSTRAP)["steps"] if s["key"] == name]
    for job in (load(WORKFLOW)["jobs"][name], step):
        assert f"ci/{name}.sh" in str(job)
        assert not {"needs", "depends_on", "if", "continue-on-error"} & set(job)
        assert not job.get("soft_fail")


def test_nothing_is_tried_again_and_no_step_of_buildkite_fails_softly():
    *parts, verdict = buildkite("cpu")
    assert len(parts) == 4
    for step in (*parts, verdict):
        assert step["soft_fail"] is False and step["retry"] == {"automatic": False}
    assert {p["command"] for p in parts} == {"ci/part.sh"}
    assert verdict["command"] == "ci/merge.sh"
    assert verdict["env"] == {"HARNESS_PROFILE": "cpu", "HARNESS_CELLS": "", "HARNESS_RECORD": "false"}
    assert verdict["allow_dependency_failure"] is True
    assert [d["step"] for d in verdict["depends_on"]] == [p["key"] for p in parts]
    assert all(s["soft_fail"] is False for s in load(BOOTSTRAP)["steps"])


def test_no_job_of_github_fails_softly_and_the_verdict_is_always_made():
    jobs = load(WORKFLOW)["jobs"]
    assert set(jobs) == {"plan", "smoke", "part", "verdict", "audit", "site"}
    assert not any("continue-on-error" in job for job in jobs.values())
    softly = [s["name"] for job in jobs.values() for s in job["steps"] if "continue-on-error" in s]
    assert softly == ["Fetch the parts"]
    assert jobs["part"]["strategy"]["fail-fast"] is False
    assert jobs["verdict"]["if"] == "always()" and jobs["verdict"]["needs"] == ["plan", "part"]
    for name in ("smoke", "part", "verdict"):
        assert jobs[name]["steps"][-1]["if"] == "always()"


def test_workflow_uses_all_that_the_matrix_says_and_nothing_else():
    entries = github_matrix(split_run("cpu"))["include"]
    used = set(re.findall(r"\bmatrix\.(\w+)", WORKFLOW.read_text()))
    assert all(set(e) == used for e in entries)


def test_the_smoke_stage_is_a_real_model_without_a_hub_in_five_minutes_on_two_gpus():
    (step,) = split_run("smollm2-gpu-quick", minutes=60).steps
    assert step.gpus == 2 and step.expected_s <= 300
    assert not any(references_of(p) for p in read_profile("smollm2-gpu-quick").written_parts)


def test_no_part_starts_before_the_smoke_stage_has_passed():
    first, *parts, last = buildkite_pipeline(
        split_run("gpu"), "gpu-{gpus}", "small", split_run("smollm2-gpu-quick", minutes=60)
    )["steps"]
    assert first["key"] == "smoke-part-1" and first["env"]["HARNESS_SMOKE"] == "true"
    assert first["env"]["HARNESS_PROFILE"] == "smollm2-gpu-quick" and first["agents"] == {"queue": "gpu-2"}
    # Not below the names that are merged.
    assert first["artifact_paths"] == ["reports/smoke-part-1/**/*"]
    assert first["soft_fail"] is False
    assert all(p["depends_on"] == ["smoke-part-1"] for p in parts)
    assert [d["step"] for d in last["depends_on"]] == [p["key"] for p in parts]
    jobs = load(WORKFLOW)["jobs"]
    assert jobs["part"]["needs"] == ["plan", "smoke"] and "needs.smoke.result" in jobs["part"]["if"]
    assert jobs["smoke"]["needs"] == "plan"
    judged = [s for s in jobs["smoke"]["steps"] if s.get("run") == "ci/part.sh"]
    assert [s["env"]["HARNESS_SMOKE"] for s in judged] == ["true"] and "secrets" not in str(judged)


def test_steps_behind_a_smoke_stage_are_valid_by_buildkites_own_schema(tmp_path):
    path = tmp_path / "pipeline.json"
    path.write_text(harness("ci", "buildkite", "--profile", "gpu", "--smoke", "smollm2-gpu-quick").output)
    done = program("check-jsonschema", "--builtin-schema", SCHEMAS[BOOTSTRAP], str(path))
    assert done.returncode == 0 and "smoke-part-1" in path.read_text(), done.stdout


@pytest.mark.parametrize(
    ("profile", "said", "recorded", "stage"),
    [
        ("nightly", "", "false", "smollm2-gpu-quick"),
        ("nightly-invariant", "", "", "smollm2-gpu-quick"),
        ("nightly", "none", "", ""),
        ("nightly", "", "true", ""),
        ("gpu", "", "", ""),
        ("gpu", "smollm2-gpu", "", "smollm2-gpu"),
    ],
)
def test_the_smoke_stage_is_planned_before_nightly_and_where_it_is_named(tmp_path, profile, said, recorded, stage):
    night = {"NIGHT_PROFILE": profile, "NIGHT_SMOKE": said, "NIGHT_RECORD": recorded}
    github = stage_of(tmp_path / "github", "github", night)
    assert [c.split()[3] for c in github[1:]] == ([stage] if stage else [])
    (uploaded,) = stage_of(tmp_path / "buildkite", "buildkite", night)
    assert (uploaded.split("--smoke ")[1:] == [stage]) if stage else ("--smoke" not in uploaded)


def test_the_smoke_stage_waits_for_the_machines_that_there_are(tmp_path):
    pipeline = json.loads(
        harness(
            *("ci", "buildkite", "--profile", "gpu", "--gpus", "8", "--queue", "gpu-{gpus}"),
            *("--smoke", "smollm2-gpu-quick"),
        ).stdout
    )
    assert {s["agents"]["queue"] for s in pipeline["steps"][:-1]} == {"gpu-8"}
    calls = stage_of(tmp_path, "github", {"NIGHT_PROFILE": "nightly", "NIGHT_GPUS": "8"})
    assert calls[-1] == "ci matrix --profile smollm2-gpu-quick --minutes-per-step 60 --gpus 8"


def stage_of(tmp_path: Path, system: str, night: dict[str, str]) -> list[str]:
    folder = stage(tmp_path, 4 * [0])
    found, calls = call(folder, "plan.sh", system, **night, GITHUB_OUTPUT="output", PATH=agent(folder, "exit 0"))
    assert found == 0
    return calls


@pytest.mark.parametrize("code", [0, 1, 2, 4])
def test_a_smoke_stage_is_judged_and_asks_for_no_token(tmp_path, code):
    folder = stage(tmp_path, [0, 0, code])
    path = agent(folder, 'echo "$*" >>agent')
    own = {"HARNESS_SMOKE": "true", "HARNESS_FETCH": "true", "BUILDKITE": "true", "PATH": path}
    found, calls = call(folder, "part.sh", **part_of("pd-none", "smollm2-gpu-quick", **own))
    assert found == code
    assert calls[-1] == "run --out reports/part-1 --profile smollm2-gpu-quick --cell pd-none"
    asked = folder / "agent"
    assert "secret" not in (asked.read_text() if asked.exists() else "")


def test_both_systems_record_the_same_parts():
    night = split_run("nightly")
    entries = github_matrix(night)["include"]
    *parts, _ = buildkite_pipeline(night, "default", "default")["steps"]
    assert len(entries) == len(parts) == len(night.steps)
    for entry, part, step in zip(entries, parts, night.steps, strict=True):
        assert entry["cells"].split() == part["env"]["HARNESS_CELLS"].split() == [c.id for c in step.cells]
        assert (entry["part"], entry["title"]) == (part["key"], part["label"])
        assert (entry["device"], entry["gpus"]) == ("gpu", step.gpus)
        assert entry["timeout_minutes"] == part["timeout_in_minutes"]


def test_workflow_may_read_contents_only_and_pins_every_action():
    document = load(WORKFLOW)
    assert document["permissions"] == {"contents": "read"}
    assert document["concurrency"]["cancel-in-progress"] is False
    assert not any("permissions" in job for job in document["jobs"].values())
    steps = [s for job in document["jobs"].values() for s in job["steps"]]
    used = [s["uses"] for s in steps if "uses" in s]
    assert used and all(re.fullmatch(r"[a-z-]+/[a-z/-]+@[0-9a-f]{40}", u) for u in used)
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
    assert set(runs) == {"ci/plan.sh github", "ci/part.sh", "ci/merge.sh", "ci/audit.sh", "ci/site.sh"}
    assert set(commands) == {"ci/plan.sh buildkite", "ci/part.sh", "ci/merge.sh", "ci/audit.sh", "ci/site.sh"}


def test_hostile_names_stay_one_word(tmp_path):
    source = tmp_path / HOSTILE
    Path(changed_profile(tmp_path, lambda raw: None)).rename(source)
    printed = harness("ci", "buildkite", "--profile", str(source), "-c", "pd-*")
    assert printed.code == 0, printed.output
    assert printed.output.isascii() and len(printed.output.splitlines()) == 1
    part, *_, verdict = json.loads(printed.output)["steps"]
    # The newline in the name makes more than one line of a call.
    folder = stage(tmp_path, [0] * 9)
    for name, step in (("part.sh", part), ("merge.sh", verdict)):
        assert call(folder, name, **step["env"])[0] == 0
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
        (["matrix", "--cell", "pd-medusa"], "there is no such cell"),
        (["matrix", "--cell", "pd-[a e]*"], "a pattern must have no blanks"),
        (["buildkite", "--gpus", "0"], "--gpus"),
        (["matrix", "--gpus", "all --privileged"], "--gpus"),
        (["matrix", "--gpus", "4"], "--gpus 4: the engines of profile cpu run on CPUs; leave it out"),
        (["buildkite", "--queue", "gpu-{gpu}"], "--queue 'gpu-{gpu}': expected no braces but {gpus}, which becomes"),
        (["buildkite", "--queue", ""], "--queue '': expected the name of a queue"),
        (["buildkite", "--verdict-queue", "q-{gpus}"], "expected no braces, since the merge step has no GPUs"),
        (["engines", "nowhere"], "VLLM nowhere: expected a version"),
        (["buildkite", "--minutes-per-step", "0"], "minutes-per-step"),
    ],
)
def test_bad_input(arguments, sentence):
    code, output = cli("ci", *arguments)
    assert code == 64, output
    assert sentence in output


def test_options_reach_the_parts():
    printed = harness("ci", "matrix", "--profile", "gpu", "--gpus", "2", "--minutes-per-step", "600")
    assert printed.code == 0, printed.output
    (entry,) = json.loads(printed.output)["include"]
    assert entry["gpus"] == 2
    *parts, verdict = buildkite("nightly", queue="gpu-{gpus}", verdict_queue="small")
    assert {p["agents"]["queue"] for p in parts} == {"gpu-1", "gpu-2", "gpu-4"}
    assert verdict["agents"]["queue"] == "small"
    assert all(p["env"]["HARNESS_EXTRA"] == "gpu" for p in parts)


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
    for name in ("part.sh", "merge.sh", "plan.sh", "annotate.sh"):
        script(folder / name, (CI / name).read_text())
    script(folder / "harness.sh", STUB)
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


def agent(folder: Path, does: str) -> str:
    """Put a buildkite-agent into ``bin`` of the folder, and return a PATH with it."""
    program = script(folder / "bin" / "buildkite-agent", f"#!/bin/sh\n{does}\n")
    return f"{program.parent}:/usr/bin:/bin"


def part_of(cells: str, profile: str = "cpu", **environment: str) -> dict[str, str]:
    return {"HARNESS_PART": "part-1", "HARNESS_PROFILE": profile, "HARNESS_CELLS": cells, **environment}


@pytest.mark.parametrize("code", [0, 1, 2, 64, 137])
def test_a_part_is_recorded_once_whatever_came_of_it(tmp_path, code):
    folder = stage(tmp_path, [code])
    (folder / "reports" / "part-1" / "of an earlier night").mkdir(parents=True)
    summary = folder / "shown"
    found, calls = call(folder, "part.sh", **part_of("pd-none pd-mtp", GITHUB_STEP_SUMMARY=str(summary)))
    assert (found, calls) == (code, ["run --part --out reports/part-1 --profile cpu --cell pd-none --cell pd-mtp"])
    # Of a harness that was killed the engines' logs are as they wrote them.
    cleaned = folder / "cleaned"
    assert (cleaned.read_text() if code > 128 else cleaned.exists()) == (
        "clean --logs reports/part-1\n" if code > 128 else False
    )
    assert [p.name for p in (folder / "reports" / "part-1").iterdir()] == ["run-1"]
    assert summary.read_text().count("summary of run") == 1


def test_a_part_of_baselines_records_them_beside_its_runs(tmp_path):
    _, calls = call(stage(tmp_path, [0]), "part.sh", **part_of("single-none", HARNESS_RECORD="true"))
    assert calls == [
        "baseline record --baselines reports/part-1/baselines --out reports/part-1 --profile cpu --cell single-none"
    ]


def test_part_fetches_models_and_prompts_and_runs_without_missing_ones(tmp_path):
    folder = stage(tmp_path, [2, 2, 0])
    path = agent(folder, 'echo "$*" >>agent; echo hf_of_the_cluster')
    (folder / "ci" / "harness.sh").write_text(
        STUB.replace('echo "$*" >>calls', 'echo "$*" >>calls; echo "$HF_TOKEN" >>tokens')
    )
    environment = part_of("pd-eagle3 single-none", "night ly.yaml", HARNESS_FETCH="true", BUILDKITE="true", PATH=path)
    found, calls = call(folder, "part.sh", **environment)
    assert found == 0
    assert calls == [
        "models --profile night ly.yaml --cell pd-eagle3 --cell single-none --download",
        "prompts build recipe --profile night ly.yaml",
        "run --part --out reports/part-1 --profile night ly.yaml --cell pd-eagle3 --cell single-none",
    ]
    assert (folder / "agent").read_text().splitlines()[0] == "secret get HF_TOKEN"
    assert (folder / "tokens").read_text().splitlines() == 3 * ["hf_of_the_cluster"]


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
    path = agent(folder, f'echo "$@" >>"{folder}/agent"\ncat >/dev/null\nexit {0 if agent_works else 1}')
    found, _ = call(folder, "merge.sh", HARNESS_PROFILE="cpu", PATH=path, BUILDKITE="true")
    assert found == code
    asked = (folder / "agent").read_text().splitlines()
    assert asked[0] == "artifact download --include-retried-jobs reports/part-*/**/* reports/parts/"
    assert asked[1] == f"annotate --context verdict --style {style}"


def test_nights_are_kept_with_their_trend_which_changes_no_verdict(tmp_path):
    folder = stage(tmp_path, [1, 64])
    (folder / "ci" / "harness.sh").write_text(
        STUB.replace('echo "summary', 'touch "$run/run.json"; mkdir "$run/logs"; echo "summary')
    )
    old = [folder / "nights" / "my_night.yaml" / f"2025010{n}T000000Z" for n in range(3)]
    for night in old:
        night.mkdir(parents=True)
    environment = {"HARNESS_PROFILE": "my night.yaml", "HARNESS_HISTORY": str(folder / "nights"), "HARNESS_NIGHTS": "2"}
    found, calls = call(folder, "merge.sh", **environment)
    assert found == 1
    assert calls[1] == f"trend {old[0].parent} --out reports/merged"
    kept = sorted(old[0].parent.iterdir())
    assert len(kept) == 2 and kept[0] == old[2]
    assert (kept[1] / "run.json").exists() and not (kept[1] / "logs").exists()


def test_a_slow_drift_is_told_on_the_page_of_the_build(tmp_path):
    folder = stage(tmp_path, [0, 0])
    stub = STUB.replace('echo "summary', 'touch "$run/run.json"; echo "summary')
    (folder / "ci" / "harness.sh").write_text(stub.replace("out=", '[ "$1" != trend ] || echo "slow drift"\nout=', 1))
    shown = {"HARNESS_HISTORY": str(folder / "nights"), "GITHUB_STEP_SUMMARY": str(folder / "shown")}
    assert call(folder, "merge.sh", HARNESS_PROFILE="cpu", **shown)[0] == 0
    assert (folder / "shown").read_text() == "summary of merge with 0\n```\nslow drift\n```\n"


def test_baselines_of_all_parts_are_gathered_by_hardware(tmp_path):
    folder = stage(tmp_path, [])
    for part, hardware in (("part-1", "NVIDIA H100 80GB HBM3"), ("part-2", "NVIDIA H100 80GB HBM3"), ("part-3", "cpu")):
        place = folder / "reports" / "parts" / part / "baselines"
        place.mkdir(parents=True)
        text = json.dumps({"identity": {"hardware": hardware, "method": "none"}, "other": {"hardware": {}}}, indent=2)
        (place / "none.json").write_text(text)
        (place / "none.csv").write_text(part)
    assert call(folder, "merge.sh", HARNESS_PROFILE="cpu", HARNESS_RECORD="true")[0] == 0
    found = {
        str(p.relative_to(folder / "reports" / "baselines")) for p in (folder / "reports").rglob("baselines/*/*.csv")
    }
    gpu = "NVIDIA-H100-80GB-HBM3"
    assert found == {f"{gpu}/none-{gpu}-part-1.csv", f"{gpu}/none-{gpu}-part-2.csv", "cpu/none-cpu-part-3.csv"}


def test_no_baselines_are_no_success(tmp_path):
    assert call(stage(tmp_path, []), "merge.sh", HARNESS_PROFILE="cpu", HARNESS_RECORD="true")[0] == 2


NIGHT = {
    "NIGHT_PROFILE": "my night.yaml",
    "NIGHT_CELLS": "pd-*  single-none",
    "NIGHT_MINUTES": "30",
    "NIGHT_GPUS": "2",
    "NIGHT_RECORD": "true",
}
ASKED = "plan --full --profile my night.yaml"
PLANNED = "--profile my night.yaml --cell pd-* --cell single-none --minutes-per-step 30 --gpus 2 --record"


def test_the_plan_is_the_output_of_githubs_step(tmp_path):
    folder = stage(tmp_path, [0, 0])
    found, calls = call(folder, "plan.sh", "github", **NIGHT, GITHUB_OUTPUT="output")
    assert (found, calls) == (0, [ASKED, f"ci matrix {PLANNED}"])
    assert (folder / "output").read_text() == "matrix=\nsmoke=\n"


def test_the_plan_is_uploaded_to_buildkite_without_reading_variables_into_it(tmp_path):
    folder = stage(tmp_path, [0, 0])
    path = agent(folder, 'echo "$@" >agent')
    found, calls = call(folder, "plan.sh", "buildkite", **NIGHT, NIGHT_QUEUE="a b", PATH=path)
    assert (found, calls) == (0, [ASKED, f"ci buildkite {PLANNED} --queue a b"])
    assert (folder / "agent").read_text() == "pipeline upload --no-interpolation reports/pipeline.json\n"


@pytest.mark.parametrize(("profile", "counts"), [("cpu-quick", False), ("gpu", True)])
def test_the_gpus_of_a_night_do_not_keep_its_smoke_lane_on_cpus_from_being_planned(tmp_path, profile, counts):
    folder = stage(tmp_path, [0, 0])
    whole = harness("plan", "--full", "--profile", profile).stdout
    (folder / "whole").write_text(whole)
    stub = STUB.replace('code="$(sed', '[ "$1" != plan ] || cat whole\ncode="$(sed')
    script(folder / "ci" / "harness.sh", stub)
    night = {"NIGHT_PROFILE": profile, "NIGHT_GPUS": "8"}
    found, calls = call(folder, "plan.sh", "github", **night, GITHUB_OUTPUT="output")
    assert found == 0
    assert calls[-1] == f"ci matrix --profile {profile}" + (" --gpus 8" if counts else "")


@pytest.mark.parametrize("codes", [[64], [0, 64]])
@pytest.mark.parametrize("system", ["github", "buildkite"])
def test_a_plan_that_cannot_be_made_is_no_empty_night(tmp_path, system, codes):
    folder = stage(tmp_path, codes)
    found, _ = call(folder, "plan.sh", system, **NIGHT, GITHUB_OUTPUT="output")
    assert found == 64
    assert not (folder / "output").exists()


def test_scripts_are_programs_and_parse():
    for name in ("harness.sh", "part.sh", "merge.sh", "plan.sh", "audit.sh", "site.sh"):
        assert (CI / name).stat().st_mode & stat.S_IXUSR
        assert subprocess.run(["bash", "-n", str(CI / name)], check=False).returncode == 0


def in_docker(tmp_path: Path, *arguments: str, **environment: str) -> list[str]:
    """The words of the call of docker that ci/harness.sh makes."""
    script(tmp_path / "docker", '#!/bin/sh\nprintf "%s\\n" "$@"\n')
    done = subprocess.run(
        [str(CI / "harness.sh"), *arguments],
        env={
            "PATH": f"{tmp_path}:/usr/bin:/bin",
            "HF_TOKEN": "hf_secret",
            "HARNESS_CACHE": f"{tmp_path}/cache",
            **environment,
        },
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def values(words: list[str], option: str) -> list[str]:
    return [w for n, w in enumerate(words) if words[n - 1] == option]


def test_harness_script_gives_the_image_no_secret_on_its_command_line(tmp_path):
    models = f"{tmp_path}/models"
    words = in_docker(tmp_path, "run", "--cell", "a b", HARNESS_IMAGE=DIGEST, HARNESS_EXTRA="gpu", HF_HOME=models)
    assert "hf_secret" not in str(words) and "HF_TOKEN" in values(words, "--env")
    assert values(words, "--gpus") == ["all"] and values(words, "--ulimit") == ["memlock=-1:-1"]
    assert f"HF_HOME={models}" in values(words, "--env")
    mounted = values(words, "--volume")
    assert f"{models}:{models}" in mounted
    assert any(m.endswith("/prompts:/opt/harness/prompts") for m in mounted)
    assert words[words.index(DIGEST) :] == [DIGEST, "run", "--cell", "a b"]


def test_an_image_with_a_vllm_runs_the_checkouts_harness_on_the_agents_gpus(tmp_path):
    gpu = {"HARNESS_EXTRA": "gpu", "CUDA_VISIBLE_DEVICES": "2,3"}
    words = in_docker(tmp_path, "run", "--part", HARNESS_VLLM=DIGEST, **gpu)
    assert values(words, "--entrypoint") == [str(CI / "harness.sh")]
    assert "HARNESS_VLLM=python3" in values(words, "--env") and "HARNESS_EXTRA=gpu" in values(words, "--env")
    assert values(words, "--gpus") == ['"device=2,3"']
    # What engines compile outlives the container.
    (home,) = [w.removeprefix("HOME=") for w in values(words, "--env") if w.startswith("HOME=")]
    assert home.startswith(f"{tmp_path}/cache/") and f"{home}:{home}" in values(words, "--volume")
    assert words[words.index(DIGEST) :] == [DIGEST, "run", "--part"]


# --- environments ----------------------------------------------------------------------------------------------------

PYTHON = """#!/bin/sh
case "$*" in
  "-c "*) exit 0 ;;
  *"-m venv"*)
    for last; do :; done
    mkdir -p "$last/bin"; cp "$0" "$last/bin/python"; echo "made $(basename "$last")" >>"$SAID" ;;
  *"-m pip"*) ;;
  *"ci engines"*) echo "$*" >>"$SAID"; echo /opt/theirs/bin/python ;;
  *) echo "$*; PATH=$PATH" >>"$SAID" ;;
esac
"""


@pytest.fixture
def in_environments(tmp_path):
    """Runs ci/harness.sh with a Python that says what it was asked to do, and installs nothing."""
    script(tmp_path / "bin" / "python3.11", PYTHON)

    def run(*arguments: str, **environment: str) -> list[str]:
        said = tmp_path / "said"
        said.unlink(missing_ok=True)
        own = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SAID": str(said), "HARNESS_CACHE": str(tmp_path / "cache")}
        subprocess.run([str(CI / "harness.sh"), *arguments], env={**own, **environment}, check=True)
        return said.read_text().splitlines()

    return run


def test_judging_needs_no_engine_and_its_environment_outlives_the_checkout(in_environments, tmp_path):
    made, merged = in_environments("merge", "parts", HARNESS_VLLM="0.33.0")
    assert made == "made judging" and merged.startswith("-m harness merge parts; ")
    assert in_environments("trend", "reports") == [merged.replace("merge parts", "trend reports")]
    assert not (CI.parent / ".plan").exists() and list((tmp_path / "cache" / "checkouts").glob("*/judging"))


@pytest.mark.parametrize("command", [("run", "--part"), ("baseline", "record")])
def test_engines_have_the_vllm_that_was_asked_for_and_its_programs(in_environments, command):
    _, asked, ran = in_environments(*command, HARNESS_VLLM="0.33.0", HARNESS_EXTRA="gpu")
    assert asked == "-m harness ci engines 0.33.0 --device gpu"
    words, _, path = ran.partition("; PATH=")
    assert words == f"-m harness {' '.join(command)} --engine-python /opt/theirs/bin/python"
    # The harness's own programs, then those of vLLM's environment, such as ninja.
    first, second, *_ = path.split(":")
    assert first.endswith("/recording/bin") and second == "/opt/theirs/bin"


def test_what_starts_no_engine_needs_no_vllm(in_environments):
    assert len(in_environments("models", "--download", HARNESS_VLLM="0.33.0")) == 2


def test_two_vllms_are_refused(tmp_path):
    found, _ = call(
        CI.parent, "harness.sh", "run", HARNESS_IMAGE=DIGEST, HARNESS_VLLM="0.33.0", HARNESS_CACHE=str(tmp_path)
    )
    assert found == 64


# --- the image -------------------------------------------------------------------------------------------------------


def instructions() -> list[dict[str, str]]:
    return DockerfileParser(str(REPOSITORY)).structure


def test_image_is_pinned_unprivileged_and_holds_no_secret():
    parsed = instructions()
    values = {i["instruction"]: i["value"] for i in parsed}
    base = next(i["value"] for i in parsed if i["instruction"] == "ARG")
    assert re.fullmatch(r"BASE=python@sha256:[0-9a-f]{64}", base)
    assert values["FROM"] == "${BASE}" and values["USER"] == "10001"
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
    script(tmp_path / "docker", f"#!/bin/sh\ntouch {tmp_path}/started\n")
    path = f"{tmp_path}:/usr/bin:/bin"
    found, _ = call(
        CI.parent, "harness.sh", "run", HARNESS_IMAGE=image, PATH=path, HARNESS_CACHE=str(tmp_path / "cache")
    )
    assert found == 64
    assert not (tmp_path / "started").exists()
