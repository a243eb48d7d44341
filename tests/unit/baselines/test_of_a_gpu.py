"""The shipped baselines of one kind of GPU judge runs on that kind, and no others."""

import shutil

import pytest

from harness.baselines.lookup import Limits, look_up
from harness.baselines.store import load_baseline, stored
from harness.history.folder import load_history
from harness.history.identity import identity_of
from harness.history.verdict import Verdict
from harness.judging.references import References
from harness.profiles.load import load_profile
from harness.prompts.model import load_prompts
from harness.reports.judge_run import assess
from harness.util.paths import REPOSITORY
from tests.support.builders import with_run

FOLDER = REPOSITORY / "baselines" / "gpu"
RUN = REPOSITORY / "tests" / "golden" / "runs" / "gpu"
H200, H100 = "NVIDIA H200, 143771 MiB", "NVIDIA H100 80GB HBM3, 81559 MiB"


def looked_up(gpu):
    """What the profile ``gpu`` finds for each of its methods on a machine with this GPU."""
    profile = load_profile("gpu")
    prompts = load_prompts(profile.workload.prompts).sha256
    wanted = [identity_of(profile, m, prompts, "0.32.0", (gpu,)) for m in profile.methods]
    return [look_up(profile.baselines, i, "gpu", Limits(90, 2), "2026-11-28T00:00:00+00:00") for i in wanted]


def on(hardware=None, versions=None):
    """The recorded run as if it had come from another machine."""
    made = load_history(RUN)
    run = made.run
    if hardware is not None:
        kind = hardware.split(",")[0]
        run = run.model_copy(
            update={
                "hardware": {**run.hardware, "gpus": [hardware]},
                "identities": {k: {**i, "hardware": kind} for k, i in run.identities.items()},
            }
        )
    return with_run(made, **{**dict(run), "versions": {**run.versions, **(versions or {})}})


def judged(made, folder=FOLDER):
    return assess(made, References(baselines=folder)).judgement


def test_the_profile_finds_them_on_their_kind_of_gpu_alone():
    """Where this fails after a change of prompts or models: record them anew on that GPU, or leave them out."""
    assert all(k.found and not k.notices for k in looked_up(H200))
    for other in (H100, "NVIDIA H200 MIG 1g.18gb, 16211 MiB", "NVIDIA H200 NVL, 143771 MiB"):
        found = looked_up(other)
        assert not any(k.found for k in found)
        assert all("hardware: this run has " in k.reason and "harness baseline record" in k.reason for k in found)


def test_they_say_where_they_come_from():
    headers = [load_baseline(path).header for path in stored(FOLDER)]
    assert {h.identity.method for h in headers} == {"none", "eagle3", "dflash", "mtp"}
    for header in headers:
        origin = header.provenance
        assert (header.identity.hardware, origin.hardware["gpus"]) == ("NVIDIA H200", [H200])
        assert (origin.versions["vllm"], origin.versions["torch"]) == ("0.32.0", "2.11.0")
        assert header.summary["again"] == {"prompts": 86, "diverged": 0, "noise_floor_nats": 0.0, "steps_differ": 0}


def test_a_run_on_that_gpu_is_held_against_their_log_probs_too():
    found = judged(on())
    assert found.verdict is Verdict.PASS
    assert all("logprobs-baseline" in {r.check for r in c.results} for c in found.cells if c.scenario == "cold")
    # The processor computes nothing.
    assert judged(with_run(on(), hardware={**on().run.hardware, "processor_model": "6/207/8"})).verdict is Verdict.PASS


def test_with_another_torch_their_log_probs_say_nothing():
    found = judged(on(versions={"torch": "2.13.0"}))
    assert found.verdict is Verdict.PASS
    assert not any(r.check == "logprobs-baseline" for c in found.cells for r in c.results)
    assert any("of another kind of GPU, or of another torch" in n for n in found.notices)


def test_a_run_on_another_gpu_is_not_judged_by_them():
    found = judged(on(H100))
    assert found.verdict is Verdict.UNKNOWN
    words = "hardware: this run has NVIDIA H100 80GB HBM3, the baseline NVIDIA H200"
    assert any(words in f.message for f in found.findings)
    assert not any(f.verdict.fails for f in found.findings)


@pytest.mark.parametrize("name", ["attacked", "runs/plan-rows"])
def test_a_run_on_cpu_engines_is_not_judged_by_them(name, tmp_path):
    shutil.copytree(REPOSITORY / "tests" / "golden" / name, tmp_path / "run")
    found = judged(load_history(tmp_path / "run"))
    compared = [f for f in found.findings if f.check == "tokens-baseline"]
    assert found.verdict is Verdict.UNKNOWN and compared
    assert all(f.verdict is Verdict.UNKNOWN and "hardware: this run has cpu" in f.message for f in compared)
