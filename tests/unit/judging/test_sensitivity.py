"""What ``plan`` promises, and the figures of others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from harness.baselines.model import Again
from harness.baselines.published import Band, load_published, matching
from harness.cli.app import app
from harness.commands.plan import _correlation
from harness.errors import DataError, ProfileError, UsageError
from harness.judging import power
from harness.judging.detection import Sample
from harness.judging.power import Noise, Sensitivity, Together, sensitivity
from harness.profiles.model import Judging
from harness.profiles.recorded_profile import RecordedProfile
from harness.prompts.model import load_prompts, prompt_row, write_prompts
from harness.util.files import sha256_json
from harness.workload.prepare import prepare
from tests.support.builders import baseline_row, changed_profile, lookup_of


def normal(tmp_path: Path, **judging) -> str:
    return changed_profile(
        tmp_path, lambda r: r.update(judging={"tier": "normal", "stages": 1, **judging}, scenarios=[])
    )


def test_bitwise_leaves_nothing_to_chance():
    found = sensitivity(prepare("cpu", ["*-eagle3"]))
    assert (found.normal, found.registered, found.alpha) == (False, 0, 0.0)
    cold = next(r for r in found.rows if r.scenario == "cold")
    assert found.needed(cold, 1.0) == 1 and found.smallest(cold) == pytest.approx(100 / cold.steps)


def test_normal_tier_announces_its_tests(tmp_path):
    found = sensitivity(prepare(normal(tmp_path), []))
    # A test of tokens for each of twelve cells, re-scoring for all but the plain one, log-probs for the eight of P/D,
    # one of acceptance for nine, two more for the six P/D cells among them. Single cells share one half of alpha.
    assert found.registered == 12 + 11 + 8 + 9 + 6 * 2
    assert found.alpha == pytest.approx(0.5e-3 / found.registered)
    # Behind a router there is no other single engine to compare with.
    assert found.pooled["cold"].cells == ("pd-dflash", "pd-eagle3", "pd-mtp", "pd-none")
    alone = sensitivity(prepare(normal(tmp_path), ["pd-eagle3"]))
    assert alone.registered == 2
    assert not alone.pooled and alone.in_all() is None


def row(prompts: int, texts: int | None = None, **changes: object) -> power.PowerRow:
    noise = Noise(0.04, 100, 0.7, True)
    return power.PowerRow(
        "pd-eagle3", "cold", ("survival",), Sample(prompts, texts or prompts), 1000, noise, 3
    )._replace(**changes)


def test_more_prompts_see_smaller_effects():
    few, many = row(60), row(600)
    found = Sensitivity(Judging(tier="normal"), (few, many))
    assert found.smallest(few) > found.smallest(many)
    assert found.needed(few, 1.0) > found.needed(few, 2.0)
    none = row(60, noise=None)
    assert found.smallest(none) is None and found.needed(none, 1.0) is None


def test_yes_or_no_tests_have_their_share_of_prompts_and_copies_are_no_texts():
    found = Sensitivity(Judging(tier="normal"), (row(100),))
    alone, copies = found.in_answers(row(100)), found.in_answers(row(100, 25))
    assert alone.prompts == copies.prompts > 5
    assert alone.share > alone.prompts / 100 and copies.share > alone.share
    assert not found.in_answers(row(100, 5)).enough(100)


def test_cells_that_cannot_show_wrong_answers_are_named():
    blind = Sensitivity(Judging(tier="normal"), (row(100, 6, noise=None),)).blind()
    assert blind == {"damage to 50 % of their answers": ["pd-eagle3"]}
    few = Together(("pd-eagle3",), Sample(600, 10))
    together = Sensitivity(Judging(tier="normal"), (row(600),), {"cold": few, "concurrent": few}).blind()
    assert together == {
        "damage to 5 % of the answers of all P/D cells together": ["pd-eagle3"],
        "damage to 5 % of the answers of all cells together in concurrent": ["pd-eagle3"],
    }


def test_plan_prints_how_much_padded_copies_correlate(tmp_path, monkeypatch):
    """Two copies of each text, with the same change between the equal runs of the baseline."""
    prepared = prepare(normal(tmp_path), ["*-eagle3", "single-none"])
    copies = [
        p.model_copy(update={"origin": f"bench, row {n // 2}, padded by 3 tokens"})
        for n, p in enumerate(prepared.prompts.prompts)
    ]
    made = prepared.prompts.model_copy(update={"prompts": tuple(copies)})
    by_id = {p.id: p for p in copies}
    works = tuple(
        replace(w, items=tuple(i._replace(prompt=by_id[i.prompt.id]) for i in w.items)) for w in prepared.works
    )
    rows = []
    for p in made.prompts:
        again = Again(divergence=None, gap=None, steps=10, accepted_at=(5 + int(p.source.split()[-1]) % 5, 3, 1))
        rows.append(baseline_row(p.id, (1,), (3, 2, 2, 1, 1, 1, 1, 0, 0, 0), again=again))
    monkeypatch.setattr(power, "lookups_now", lambda *_: {"eagle3": lookup_of("eagle3", rows)})
    found = sensitivity(prepared._replace(sets={"": made}, works=works))
    noise = next(r.noise for r in found.rows if r.cell == "pd-eagle3")
    assert noise.measured and noise.steps == pytest.approx(10) and noise.rate == pytest.approx(0.7)
    assert noise.correlation == pytest.approx(1.0)
    assert _correlation(found)[0].endswith("correlate by up to 1.00 (pd-eagle3).")


def test_plan_that_can_never_pass_says_so(tmp_path):
    printed = CliRunner().invoke(app, ["plan", "--profile", normal(tmp_path), "--cell", "*-eagle3"])
    assert "This plan can never PASS" in printed.output
    assert "cells cannot show a change by 20 points in their weakest stratum" in printed.output
    shipped = CliRunner().invoke(app, ["plan", "--profile", "nightly"])
    assert "never PASS" not in shipped.output
    assert "68 P/D cells together" in shipped.output and "one wrong answer in" in shipped.output
    assert "no A/A says yet how much copies correlate" in shipped.output


def test_plan_command_prints_levels_and_effects(tmp_path):
    run = CliRunner()
    bitwise = run.invoke(app, ["plan"])
    assert bitwise.exit_code == 0 and "without statistical tests" in bitwise.output
    printed = run.invoke(app, ["plan", "--profile", normal(tmp_path), "--effect", "2"])
    assert printed.exit_code == 0 and "52 registered tests" in printed.output
    assert "texts for 2" in printed.output
    assert run.invoke(app, ["plan", "--effect", "0"]).exit_code != 0


def test_two_stages_need_prompts_that_were_held_out(tmp_path):
    path = changed_profile(tmp_path, lambda r: r.update(judging={"tier": "normal"}, scenarios=[]))
    with pytest.raises(UsageError, match="held out for the second stage"):
        prepare(path, [])
    prompts = load_prompts(prepare("cpu", []).profile.workload.prompts)
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
    assert (
        len(matching(bands, RecordedProfile(profile), "eagle3")) == 2
        and matching(bands, RecordedProfile(profile), "mtp") == []
    )
    profile["methods"][0]["num_speculative_tokens"] = 5
    assert matching(bands, RecordedProfile(profile), "eagle3") == []
    assert matching(bands, RecordedProfile({"target": "/x", "methods": []}), "eagle3") == []


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


def test_tolerance_of_a_published_row_as_a_gate():
    band = Band(
        target="t", drafter="d", method="eagle3", k=3, rates=(0.72, 0.52), length=2.6, tolerance=0.05, origin="o"
    )
    assert band.outside((0.72, 0.52, 0.36), 2.6) == []
    assert band.outside((0.685, 0.54, 0.36), 2.48) == []
    assert band.outside((0.68, 0.52, 0.36), 2.46) == ["position 0", "length"]
    # What was not measured does not pass.
    assert band.outside((0.72, None), None) == ["position 1", "length"]
