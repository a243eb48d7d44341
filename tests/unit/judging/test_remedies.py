"""What is advised about a run without a baseline: to record one only where it helps, and with a profile that exists."""

import pytest

from harness.judging.references import baselines_for
from harness.judging.remedies import without_baseline
from harness.profiles.load import load_profile
from harness.prompts.model import load_prompts
from tests.support.builders import history, identity, observation, with_profile, with_run

CURRENT = load_prompts(load_profile("cpu").workload.prompts).sha256
RECORD = "record it with `harness baseline record --profile cpu`"


def advised(prompts_sha256, source):
    made = with_profile(history([observation("single-none")]), source=source)
    return without_baseline(made, prompts_sha256, "")


def test_a_run_of_the_current_prompts_is_told_to_record():
    assert advised(CURRENT, "cpu") == RECORD


def test_a_run_of_other_prompts_is_told_to_run_again_since_recording_would_not_help():
    words = advised("0" * 64, "cpu")
    assert "profile cpu has other prompts now: run it again" in words and "--baselines DIR" in words
    assert "harness baseline record" not in words


@pytest.mark.parametrize("name", ["mine.yaml", "elsewhere/mine.yaml", "mine"])
def test_a_profile_that_is_not_here_is_not_advised(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = advised("0" * 64, name)
    assert "--profile FILE`" in words and f"recorded with profile {name}, which is not here" in words


def test_a_file_that_is_here_is_advised_though_its_prompts_are_not_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("extends: cpu\n")
    assert advised("0" * 64, "mine.yaml") == RECORD.replace("cpu", "mine.yaml")


def test_a_name_too_long_for_a_file_is_not_here():
    assert "not here" in advised("0" * 64, "x" * 5000)


def test_a_judged_run_says_so_whatever_its_nearest_baseline_differs_in(tmp_path):
    made = with_profile(history([observation("single-none")]), source="cpu")
    made = with_run(made, identities={"none": identity(prompts_sha256="0" * 64).model_dump(mode="json")})
    assert "profile cpu has other prompts now" in baselines_for(made, tmp_path)["none"].reason
