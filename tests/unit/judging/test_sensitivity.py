"""What ``plan`` promises, and the figures of others."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.baselines.published import Band, load_published, matching
from harness.cli.app import app
from harness.errors import DataError, UsageError
from harness.judging.power import Row, Sensitivity, sensitivity
from harness.prompts.model import load_prompts, write_prompts
from harness.workload.prepare import prepare
from tests.support.builders import changed_profile


def normal(tmp_path: Path, **judging) -> str:
    return changed_profile(
        tmp_path, lambda r: r.update(judging={"tier": "normal", "stages": 1, **judging}, scenarios=[])
    )


def test_bitwise_leaves_nothing_to_chance():
    found = sensitivity(prepare("cpu", ["*-eagle3"]))
    assert (found.tier, found.registered, found.alpha) == ("bitwise", 0, 0.0)
    cold = next(r for r in found.rows if r.scenario == "cold")
    assert found.needed(cold, 1.0) == 1
    assert found.smallest(cold) == pytest.approx(100 / cold.steps)


def test_normal_tier_announces_its_tests(tmp_path):
    found = sensitivity(prepare(normal(tmp_path), []))
    # Two tests of tokens for each of twelve cells, re-scoring for all but the plain one, one of acceptance for nine,
    # two more for the six P/D cells among them.
    assert found.registered == 12 * 2 + 11 + 9 + 6 * 2
    assert found.alpha == pytest.approx(1e-3 / found.registered)
    alone = sensitivity(prepare(normal(tmp_path), ["pd-eagle3"]))
    assert alone.registered == 3


def test_more_prompts_see_smaller_effects():
    few, many = (Row("pd-eagle3", "cold", (), n, 1000, 0.04, True) for n in (60, 600))
    found = Sensitivity("normal", (few, many), 36, 1e-3, 2, 1e-3, 0.9, 0.5, 3)
    assert found.smallest(few) > found.smallest(many)
    assert found.needed(few, 1.0) > found.needed(few, 2.0)
    none = Row("pd-none", "cold", (), 60, 0, None, False)
    assert found.smallest(none) is None and found.needed(none, 1.0) is None


def test_plan_command_prints_levels_and_effects(tmp_path):
    run = CliRunner()
    bitwise = run.invoke(app, ["plan"])
    assert bitwise.exit_code == 0
    assert "without statistical tests" in bitwise.output
    printed = run.invoke(app, ["plan", "--profile", normal(tmp_path), "--effect", "2"])
    assert printed.exit_code == 0
    assert "56 registered tests" in printed.output
    assert "prompts for 2" in printed.output
    assert run.invoke(app, ["plan", "--effect", "0"]).exit_code != 0


def test_two_stages_need_prompts_that_were_held_out(tmp_path):
    path = changed_profile(tmp_path, lambda r: r.update(judging={"tier": "normal"}, scenarios=[]))
    with pytest.raises(UsageError, match="held out for the second stage"):
        prepare(path, [])
    prompts = load_prompts(prepare("cpu", []).profile.workload.prompts)
    from harness.prompts.model import prompt_row
    from harness.util.files import sha256_json

    kept = tuple(
        p.model_copy(update={"use": "held-out"}) if i % 2 and p.use == "cold" else p
        for i, p in enumerate(prompts.prompts)
    )
    header = prompts.header.model_copy(update={"rows_sha256": sha256_json([prompt_row(p) for p in kept])})
    write_prompts(prompts.model_copy(update={"prompts": kept, "header": header}), tmp_path / "half.jsonl")
    path = changed_profile(
        tmp_path,
        lambda r: (
            r.update(judging={"tier": "normal"}, scenarios=[]),
            r["workload"].update(prompts=str(tmp_path / "half.jsonl")),
        ),
    )
    prepared = prepare(path, [])
    asked = {i.prompt.id for w in prepared.works for i in w.items}
    assert asked.isdisjoint(p.id for p in prepared.prompts.held_out)


@pytest.mark.parametrize(
    "judging",
    [
        {"family_alpha": 0},
        {"family_alpha": 0.5},
        {"floor_points": -1},
        {"floor_points": 9},
        {"stages": 3},
        {"permutations": 10},
        {"tier": "loose"},
        {"confidence": 1.0},
    ],
)
def test_bounds_are_validated(tmp_path, judging):
    from harness.errors import ProfileError

    with pytest.raises(ProfileError, match="judging"):
        prepare(normal(tmp_path, **judging), [])


# --- published figures -----------------------------------------------------------------------------------------------


def test_published_bands_load_and_the_row_of_two_runs_is_found():
    bands = load_published()
    assert len(bands) >= 11
    inconsistent = [b for b in bands if b.consistent is False]
    assert [b.target for b in inconsistent] == ["Qwen/Qwen3-VL-30B-A3B-Instruct-FP8"]
    assert "different runs" in inconsistent[0].describe()


def test_bands_match_by_model_name_method_and_k():
    bands = load_published()
    profile = {
        "target": "/models/Llama-3.1-8B-Instruct",
        "methods": [
            {
                "kind": "eagle3",
                "drafter": "/models/Llama-3.1-8B-Instruct-speculator.eagle3",
                "num_speculative_tokens": 3,
            }
        ],
    }
    assert len(matching(bands, profile, "eagle3")) == 2
    assert matching(bands, profile, "mtp") == []
    profile["methods"][0]["num_speculative_tokens"] = 5
    assert matching(bands, profile, "eagle3") == []
    assert matching(bands, {"target": "/x", "methods": []}, "eagle3") == []


@pytest.mark.parametrize("changes", [{"rates": [0.3, 0.5]}, {"rates": [1.5]}, {"rates": [], "length": None}])
def test_impossible_bands_are_refused(changes):
    base = {"target": "t", "drafter": "d", "method": "mtp", "tolerance": 0.05, "origin": "o", "length": 2.0}
    with pytest.raises(ValueError):
        Band.model_validate(base | changes)


def test_damaged_file_is_refused(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("format: 1\nbands: [{target: 1}]\n")
    with pytest.raises(DataError, match="published"):
        load_published(path)
