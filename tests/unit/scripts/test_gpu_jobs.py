"""The jobs for a GPU (``ci/gpu``): each dry-run against a stand-in for harness; every command line is understood."""

from __future__ import annotations

import os
import signal
import subprocess
import tarfile
import time
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.profiles.load import read_profile, shipped_profile_names
from harness.util.paths import REPOSITORY
from tests.support.command_lines import parsed
from tests.support.program import script

FOLDER = REPOSITORY / "ci" / "gpu"
JOBS = sorted(p.stem for p in FOLDER.glob("*.sh") if p.stem != "common")
STUB = """#!/usr/bin/env bash
printf '%s\\0' "$@" >>{words}
printf '\\n' >>{words}
out="" previous=""
for word in "$@"; do [ "$previous" != --out ] || out="$word"; previous="$word"; done
mkdir -p "$out/run" && echo recorded >"$out/run/run.json"
{body}
"""


class Done(NamedTuple):
    """A job that ended."""

    code: int
    output: str
    calls: list[list[str]]
    """Arguments of each call of harness."""
    kept: Path

    @property
    def steps(self) -> dict[str, list[str]]:
        """The columns of steps.tsv behind the step's name."""
        told = (self.kept / "steps.tsv").read_text().splitlines() if (self.kept / "steps.tsv").exists() else []
        return {line.split("\t")[0]: line.split("\t")[1:] for line in told}


def start(tmp_path: Path, job: str, *arguments: str, body: str = "exit 0", **more: str) -> subprocess.Popen[str]:
    words = tmp_path / "words"
    script(tmp_path / "harness", STUB.format(words=words, body=body))
    # A copy: a job packs baselines/ of its checkout, and writes there.
    folder = tmp_path / "checkout" / "ci" / "gpu"
    for path in FOLDER.glob("*.sh"):
        script(folder / path.name, path.read_text())
    environment = {**os.environ, "HARNESS": str(tmp_path / "harness"), "KEEP": str(tmp_path / "kept"), **more}
    return subprocess.Popen(
        [str(folder / f"{job}.sh"), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ended(tmp_path: Path, running: subprocess.Popen[str]) -> Done:
    output, _ = running.communicate(timeout=60)
    words = tmp_path / "words"
    calls = [line.split("\0")[:-1] for line in words.read_text().splitlines()] if words.exists() else []
    return Done(running.returncode, output, calls, tmp_path / "kept")


def run(tmp_path: Path, job: str, *arguments: str, body: str = "exit 0", **more: str) -> Done:
    return ended(tmp_path, start(tmp_path, job, *arguments, body=body, **more))


def test_there_is_a_job_for_each_question():
    assert JOBS == ["aa", "connectors", "gpu-ways", "layouts", "ranks", "selftest", "smollm2"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.sh")), ids=lambda p: p.stem)
def test_scripts_are_bash(path):
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("job", JOBS)
def test_every_command_is_understood_and_names_what_there_is(tmp_path, job, device, monkeypatch):
    if device == "cpu":
        # The files of a dry run are gone when it has ended.
        monkeypatch.setattr("harness.profiles.load.require_profile", lambda name: name)
    done = run(tmp_path, job, device)
    assert done.code == 0, done.output
    assert len(done.calls) == len(done.steps) > 0
    for words in done.calls:
        given = parsed(words).params
        # A dry run has a file that extends the profile of its name, with fewer prompts.
        name = given["profile"] if device == "gpu" else Path(given["profile"]).stem
        assert name in shipped_profile_names()
        profile = read_profile(name)
        assert profile.engine.device == device, "the dry run has CPU engines, the other none"
        assert {s for s in given.get("scenario") or () if s != "cold"} <= {s.id for s in profile.scenarios}
    for name in done.steps:
        with tarfile.open(done.kept / f"{name}.tar.xz") as packed:
            assert f"{name}/run/run.json" in packed.getnames()


@pytest.mark.parametrize("job", JOBS)
def test_a_job_says_how_long_each_step_takes(tmp_path, job):
    """In its header, by plan; and no limit is shorter than that, nor a dry run longer than three minutes."""
    header = (FOLDER / f"{job}.sh").read_text().split("set -euo", 1)[0]
    plan = header.split("Minutes by plan on one GPU: ", 1)[1].replace("\n#", "").strip().rstrip(".")
    minutes = {name: int(figure) for name, figure in (part.rsplit(" ", 1) for part in plan.split(", "))}
    done = run(tmp_path, job, "gpu")
    for name, (_, _, limit, _) in done.steps.items():
        assert 60 * minutes.get(name, minutes.get("each way", 0)) <= int(limit), name
        assert name in minutes or "each way" in minutes
    dry = run(tmp_path, job, "cpu")
    assert sum(int(limit) for _, _, limit, _ in dry.steps.values()) <= 300


def test_a_dry_run_writes_no_baselines_where_runs_look(tmp_path):
    for words in run(tmp_path, "layouts", "cpu").calls:
        assert ("--baselines" in words) is (words[:2] == ["baseline", "record"])
    for words in run(tmp_path / "other", "layouts", "gpu").calls:
        assert "--baselines" not in words


def test_settings_of_a_machine_reach_every_profile(tmp_path):
    """They are in a file beside the records while the step runs."""
    body = 'while [ "$1" != --profile ]; do shift; done; cp "$2" "$out/run/profile.yaml"'
    settings = '{gpu_memory_utilization: 0.06, env: {VLLM_USE_FLASHINFER_SAMPLER: "0"}}'
    done = run(tmp_path, "layouts", body=body, ENGINE=settings)
    with tarfile.open(done.kept / "states.tar.xz") as packed:
        packed.extract("states/run/profile.yaml", tmp_path, filter="data")
    profile = read_profile(str(tmp_path / "states" / "run" / "profile.yaml"))
    assert (profile.name, profile.engine.gpu_memory_utilization) == ("gpu-hybrid", 0.06)
    assert profile.engine.env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    # Where the job's baselines are.
    assert profile.baselines == read_profile("gpu-hybrid").baselines
    assert profile.workload == read_profile("gpu-hybrid").workload
    dry = run(tmp_path / "dry", "layouts", "cpu", body=body)
    with tarfile.open(dry.kept / "states.tar.xz") as packed:
        packed.extract("states/run/profile.yaml", tmp_path / "dry", filter="data")
    assert read_profile(str(tmp_path / "dry" / "states" / "run" / "profile.yaml")).workload.per_stratum == 1


def test_kept_baselines_are_not_recorded_again(tmp_path):
    held = tmp_path / "checkout" / "baselines" / "gpu"
    held.mkdir(parents=True)
    (held / "none.json").write_text("{}")
    done = run(tmp_path, "gpu-ways")
    assert [words[:1] for words in done.calls] == [["run"]] * 6
    assert (done.kept / "baselines-gpu.tar.xz").exists()


def test_single_steps_can_be_chosen(tmp_path):
    done = run(tmp_path, "smollm2", "gpu", "usual", "invariant")
    assert done.code == 0 and list(done.steps) == ["usual", "invariant"]
    wrong = run(tmp_path / "other", "smollm2", "gpu", "unusual")
    assert wrong.code == 64 and "found 'unusual'" in wrong.output and not wrong.steps
    assert run(tmp_path / "third", "aa", "tpu").code == 64


def test_a_step_that_fails_stops_no_other_and_its_code_stays(tmp_path):
    done = run(tmp_path, "layouts", "cpu", body='[ "$1" = run ] && exit 2; exit 0')
    assert done.code == 2
    assert [code for code, *_ in done.steps.values()] == ["0", "2", "0", "2"]


def test_without_harness_nothing_passes(tmp_path, monkeypatch):
    running = start(tmp_path, "aa", "cpu")
    running.communicate(timeout=60)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    environment = {**os.environ, "HARNESS": str(tmp_path / "nowhere"), "KEEP": str(tmp_path / "kept")}
    job = tmp_path / "checkout" / "ci" / "gpu" / "aa.sh"
    assert subprocess.run([str(job), "cpu"], env=environment, check=False).returncode == 127


def test_a_limit_ends_a_step_with_term_and_keeps_what_it_wrote(tmp_path):
    path = FOLDER / "aa.sh"
    body = "trap 'echo ended >\"$out/run/late\"; exit 2' TERM\nsleep 30 & wait"
    running = start(tmp_path, "aa", "cpu", body=body)
    running.kill()
    running.communicate()
    job = tmp_path / "checkout" / "ci" / "gpu" / "aa.sh"
    job.write_text(path.read_text().replace("limits=(90)", "limits=(1)"))
    environment = {**os.environ, "HARNESS": str(tmp_path / "harness"), "KEEP": str(tmp_path / "kept")}
    done = subprocess.run([str(job), "cpu"], env=environment, check=False, timeout=60)
    assert done.returncode == 124
    with tarfile.open(tmp_path / "kept" / "aa.tar.xz") as packed:
        assert "aa/run/late" in packed.getnames()


def test_a_job_that_is_ended_ends_its_step_and_packs(tmp_path):
    body = f"trap 'echo ended >\"$out/run/late\"; exit 2' TERM\ntouch {tmp_path / 'runs'}\nsleep 30 & wait"
    running = start(tmp_path, "layouts", "cpu", body=body)
    while not (tmp_path / "runs").exists():
        time.sleep(0.05)
    running.send_signal(signal.SIGTERM)
    done = ended(tmp_path, running)
    assert done.code == 2 and list(done.steps) == ["record-windows"]
    with tarfile.open(done.kept / "record-windows.tar.xz") as packed:
        assert "record-windows/run/late" in packed.getnames()
