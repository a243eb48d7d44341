"""Known defects: shown and not failing while they fit; failing again when expired or wider; reported when gone."""

from __future__ import annotations

from copy import deepcopy
from datetime import date
from pathlib import Path

import pytest
import yaml

from harness.errors import DataError
from harness.history.folder import load_history
from harness.history.records import Merged
from harness.history.verdict import Verdict
from harness.judging.checks.drafting import acceptance_baseline
from harness.judging.checks.registry import judge
from harness.judging.figures import KVDifference
from harness.judging.findings import Judgement
from harness.judging.known_defects import apply_known, expected_anyway
from harness.judging.references import References, baselines_for
from harness.profiles.cells import select_cells
from harness.profiles.known_defects import load_known
from harness.profiles.load import load_profile
from harness.reports.judge_run import assess
from harness.reports.junit import render_junit
from harness.reports.markdown import render_markdown
from harness.reports.summary import summarise_run
from harness.util.paths import REPOSITORY
from harness.workload.prepare import prepare
from tests.golden.oracle import BASELINES, RUNS
from tests.support.builders import (
    change_final,
    changed_profile,
    changed_rows,
    engine,
    evidence_of_test,
    finding,
    garbled,
    history,
    known_entry,
    lookups,
    observation,
    view,
    with_answers,
    with_profile,
    with_run,
)

LENGTHS = [31, 32, 40, 65]
ENTRY = known_entry()


def made(cells=("pd-none", "single-none"), wrong=("pd-none",), started="2026-01-01T00:00:00+00:00", version="0.32.0"):
    observations = []
    for cell in cells:
        for n in LENGTHS:
            o = observation(cell, n)
            observations.append(garbled(o, at=0) if cell in wrong and n == 40 else o)
    return with_run(history(observations), started=started, versions={"vllm": version})


def known(tmp_path: Path, *entries: dict):
    path = tmp_path / "known-defects.yaml"
    path.write_text(yaml.safe_dump({"format": 1, "defects": [deepcopy(e) for e in entries]}, sort_keys=False))
    return load_known(path)


def judged(h, the_list) -> Judgement:
    return apply_known(judge(h, lookups(LENGTHS)), the_list, h)


def test_finding_that_fits_is_known_and_does_not_fail_the_run(tmp_path):
    h = made()
    judgement = judged(h, known(tmp_path, ENTRY))
    assert judgement.verdict is Verdict.KNOWN and judgement.verdict.exit_code == 0
    assert {f.known for f in judgement.findings} == {"wrong-tokens"}
    assert judgement.by_cell() == {"pd-none": Verdict.KNOWN, "single-none": Verdict.PASS}
    assert "https://example.org/issues/1" in " ".join(judgement.notices)
    summary = summarise_run(h, judgement)
    assert "wrong-tokens" in summary.sentence and "KNOWN" in render_markdown(summary)
    xml = render_junit(summary)
    assert "<skipped" in xml and 'failures="0"' in xml


def test_what_a_run_with_a_fault_has_anyway_is_named_and_excuses_nothing(tmp_path):
    h, the_list = made(), known(tmp_path, ENTRY)
    broken = with_run(h, mutants=("M1",))
    judgement = judged(broken, the_list)
    assert judgement.verdict is Verdict.REGRESSION and not any(f.known for f in judgement.findings)
    assert set(expected_anyway(judgement, the_list, broken).values()) == {"wrong-tokens"}
    assert expected_anyway(judged(h, the_list), the_list, h) == {}
    summary = summarise_run(broken, judgement, None, expected_anyway(judgement, the_list, broken))
    assert "expected without the injected fault, too (wrong-tokens)" in summary.sentence


def test_nothing_known_changes_nothing(tmp_path):
    plain = judge(made(), lookups(LENGTHS))
    assert apply_known(plain, None, made()) is plain
    assert load_known(None) is None


@pytest.mark.parametrize(
    ("change", "history_changes"),
    [
        ({"added": date(2025, 10, 1), "expires": date(2025, 12, 31)}, {}),
        ({"classes": ["drafter-kv"]}, {}),
        ({"cells": ["pd-mtp"]}, {}),
        ({"strata": ["aligned"]}, {}),
        ({"prompts": ["turn-175"]}, {}),
        ({"scenarios": ["refill"]}, {}),
        ({"checks": ["transfer"]}, {}),
        ({}, {"version": "0.33.0"}),
        ({}, {"version": None}),
        ({"devices": ["gpu"]}, {}),
        ({"model_runners": ["V2"]}, {}),
    ],
)
def test_finding_that_does_not_fit_fails_as_before(tmp_path, change, history_changes):
    judgement = judged(made(**history_changes), known(tmp_path, {**ENTRY, **change}))
    assert judgement.verdict is Verdict.REGRESSION
    assert all(f.known is None for f in judgement.findings)
    assert any("expired on 2025-12-31" in n for n in judgement.notices) == ("expires" in change)


def test_an_entry_may_name_the_prompts_that_show_it(tmp_path):
    judgement = judged(made(), known(tmp_path, {**ENTRY, "prompts": ["p4?"]}))
    assert {f.prompt_id for f in judgement.findings if f.known} == {"p40"}


def test_entry_of_a_model_runner_covers_cells_of_its_engines_alone(tmp_path):
    cells = ("pd-none", "single-none", "pd-mtp", "single-mtp")
    h = made(cells, wrong=("pd-none", "pd-mtp"))
    v2 = engine("pd-none", "decode").model_copy(update={"model_runner": "V2"})
    judgement = judged(with_run(h, engines=(v2,)), known(tmp_path, {**ENTRY, "cells": ["*"], "model_runners": ["V2"]}))
    assert {f.cell for f in judgement.findings if f.known} == {"pd-none"}
    assert judgement.by_cell()["pd-mtp"] is Verdict.REGRESSION


@pytest.mark.parametrize(
    ("narrowed", "covered"),
    [
        ({"parameters": ["seed", "bad-words"]}, True),
        ({"parameters": ["seed"]}, False),
        ({"mistakes": ["used-late"]}, False),
        ({}, True),
    ],
)
def test_an_entry_of_a_parameter_covers_requests_with_it_alone(tmp_path, narrowed, covered):
    h = made()
    h = with_answers(h, [o.model_copy(update={"feature": "bad-words"}) for o in h.observations])
    before = judge(made(), lookups(LENGTHS))
    after = apply_known(before, known(tmp_path, {**ENTRY, **narrowed}), h)
    assert after.verdict is (Verdict.KNOWN if covered else Verdict.REGRESSION)


def test_what_shows_only_sometimes_is_not_called_fixed(tmp_path):
    for entry, said in ((ENTRY, True), ({**ENTRY, "sometimes": True}, False)):
        judgement = judged(made(wrong=()), known(tmp_path, entry))
        assert any("if it is fixed" in n for n in judgement.notices) is said
    covered = judged(made(), known(tmp_path, {**ENTRY, "sometimes": True}))
    assert covered.verdict is Verdict.KNOWN and any("KNOWN wrong-tokens" in n for n in covered.notices)


def test_an_entry_of_a_mistake_covers_such_hand_offs_alone(tmp_path):
    h, before = made(), judge(made(), lookups(LENGTHS))
    entry = {**ENTRY, "mistakes": ["used-late", "lost remote_host"]}
    for mistake, verdict in (
        ("lost remote_host", Verdict.KNOWN),
        ("used-late and lost tp_size", Verdict.KNOWN),
        ("lost tp_size", Verdict.REGRESSION),
        ("used-twice", Verdict.REGRESSION),
        (None, Verdict.REGRESSION),
    ):
        mistaken = with_answers(h, [o.model_copy(update={"mistake": mistake}) for o in h.observations])
        assert apply_known(before, known(tmp_path, entry), mistaken).verdict is verdict


def test_wider_than_the_entry_fails_and_says_so(tmp_path):
    cells = ("pd-none", "single-none", "pd-mtp", "single-mtp")
    judgement = judged(made(cells, wrong=("pd-none", "pd-mtp")), known(tmp_path, ENTRY))
    assert judgement.verdict is Verdict.REGRESSION and judgement.by_cell()["pd-none"] is Verdict.KNOWN
    assert any("wider than its entry" in n and "pd-mtp" in n for n in judgement.notices)


def test_entry_without_a_match_is_reported_as_fixed_with_its_lines(tmp_path):
    judgement = judged(made(wrong=()), known(tmp_path, {**ENTRY, "id": "other", "cells": ["pd-mtp"]}, ENTRY))
    assert judgement.verdict is Verdict.PASS
    (notice,) = [n for n in judgement.notices if "if it is fixed" in n]
    text = (tmp_path / "known-defects.yaml").read_text().splitlines()
    first = next(i for i, line in enumerate(text, 1) if "wrong-tokens" in line)
    assert f"lines {first} to {len(text)} of known-defects.yaml" in notice


def test_missing_evidence_is_never_known(tmp_path):
    """An UNKNOWN finding of a covered place stays UNKNOWN."""
    h = made(wrong=())
    judgement = judge(h, {})
    listed = known(tmp_path, {**ENTRY, "checks": ["*"], "cells": ["*"], "scenarios": ["cold"]})
    assert apply_known(judgement, listed, h).verdict is Verdict.UNKNOWN


def test_entry_for_one_stratum_does_not_cover_a_change_of_all(tmp_path):
    defect = known(tmp_path, {**ENTRY, "strata": ["aligned"]}).entries[0].defect
    for changed, covered in ((["aligned@0", "aligned@1"], True), (["all@0", "aligned@0"], False), ([], False)):
        found = finding("pd-none", None, evidence=evidence_of_test(changed))
        assert defect.covers_place(found) is covered


@pytest.mark.parametrize(
    ("lost_at", "changes", "covered"),
    [
        (-1, {}, True),
        (-2, {}, False),
        # The answer was cut, so that its last step looks at tokens of the prompt.
        (-1, {"finish_reason": "length"}, False),
        (-1, {"route": "local"}, False),
    ],
)
def test_entry_for_the_last_step_covers_no_other(tmp_path, lost_at, changes, covered):
    o = change_final(observation("pd-mtp", 96), finish_reason=changes.get("finish_reason", "stop"))
    o = o.model_copy(update={"route": changes.get("route", "cell")})
    recorded = lookups([96])
    steps = list(recorded["mtp"].baseline.rows[0].accepted)
    steps[lost_at] += 1
    recorded["mtp"] = changed_rows(recorded["mtp"], lambda _: {"accepted": tuple(steps)})
    cell = view(history([o]), "pd-mtp", recorded)
    (found,) = acceptance_baseline(cell).findings
    entry = {**ENTRY, "classes": ["drafter-kv"], "cells": ["pd-mtp"], "checks": ["acceptance-*"], "last_step": True}
    defect = known(tmp_path, entry).entries[0].defect
    assert defect.covers_place(found) is covered
    assert defect.model_copy(update={"last_step": False}).covers_place(found)
    assert not defect.covers_place(finding("pd-mtp", check="acceptance-single"))


@pytest.mark.parametrize(("tokens", "covered"), [((96, 97), True), ((130,), True), ((95, 96), False), ((), False)])
def test_entry_for_kv_of_answers_covers_none_of_a_prompt(tmp_path, tokens, covered):
    entry = {**ENTRY, "classes": ["drafter-kv"], "checks": ["kv-computed"], "answers_alone": True}
    defect = known(tmp_path, entry).entries[0].defect
    evidence = KVDifference(
        role="single", places=(), differing=0, tokens=tokens, prompt_tokens=96, by_layer=(), states=()
    )
    found = finding("pd-none", None, check="kv-computed", evidence=evidence)
    assert defect.covers_place(found) is covered
    assert defect.model_copy(update={"answers_alone": False}).covers_place(found)


@pytest.mark.parametrize(
    ("who", "late_s", "room", "covered"),
    [
        ("pd-none", 0.0, 0, True),
        # The answer that it is compared with has the damage.
        ("single-none", 0.0, 0, True),
        # The other one ended before it began, or ended before its context did.
        ("pd-none", 60.0, 0, False),
        ("pd-none", 0.0, 1, False),
        (None, 0.0, 0, False),
    ],
)
def test_entry_for_neighbours_of_a_full_context_covers_no_others(tmp_path, who, late_s, room, covered):
    h, most = made(), 65 + len(observation("pd-none", 65).output)
    began = {40: late_s, 65: 0.0}

    def together(o):
        size = len(o.sent_ids)
        if o.cell != who or size not in began:
            return o
        legs = tuple(leg.model_copy(update={"seconds": 1.0}) for leg in o.legs)
        at = {"started_at": 1000.0 + began[size], "concurrent": 2, "legs": legs, "sequence": size}
        return o.model_copy(update=at)

    h = with_answers(h, [together(o) for o in h.observations])
    h = with_profile(h, engine={"max_model_len": most + room})
    judgement = judged(h, known(tmp_path, {**ENTRY, "beside_full_context": True}))
    wrong = {f.known for f in judgement.findings if f.check.startswith("tokens-")}
    assert wrong == {"wrong-tokens" if covered else None}


def test_misspelt_list_is_refused(tmp_path):
    with pytest.raises(DataError, match="expected failures"):
        load_known(tmp_path / "typo.yaml")


def test_other_findings_of_the_same_cell_still_fail(tmp_path):
    h = made()
    broken = h.observations[0].model_copy(update={"error": "engine answered 500"})
    assert judged(with_answers(h, (broken, *h.observations[1:])), known(tmp_path, ENTRY)).verdict is Verdict.UNKNOWN


@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        ({"interrupted": True}, Verdict.UNKNOWN),
        ({"merged": Merged(parts=(), unsettled=True)}, Verdict.UNKNOWN),
        ({"mutants": ("M1",)}, Verdict.REGRESSION),
    ],
)
def test_run_that_cannot_pass_never_becomes_known(tmp_path, run, verdict):
    assert judged(with_run(made(), **run), known(tmp_path, ENTRY)).verdict is verdict


# --- entries stay narrow ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"checks": None}, "expected the key 'checks' (the checks whose findings it covers"),
        ({"at_most": None}, "expected the key 'at_most' (the most findings that it covers in one cell and scenario"),
        ({"added": None}, "expected the key 'added' (the day on which it was added or last renewed"),
        ({"cells": ["*"], "checks": ["*"]}, "covers all cells, scenarios and checks; say where the defect shows"),
        ({"cells": ["pd-x", "**"], "checks": ["?*"], "scenarios": ["*-*"]}, "covers all cells"),
        (
            {"expires": date(2026, 6, 30)},
            "(2026-03-01 to 2026-06-30), and at most 120 are allowed",
        ),
        ({"expires": date(2199, 1, 1)}, "it expires 63128 days after it was added"),
        ({"expires": date(2026, 2, 1)}, "it expires -28 days after it was added"),
        ({"added": date(2199, 1, 1), "expires": date(2199, 2, 1)}, "correct `added`, or this machine's clock"),
        ({"at_most": 0}, "expected a number of at least 1, found 0"),
        ({"checks": []}, "expected a list with at least 1 of them, found an empty list"),
    ],
)
def test_entry_that_is_too_wide_is_refused(tmp_path, change, words):
    entry = {key: value for key, value in {**ENTRY, **change}.items() if value is not None}
    with pytest.raises(DataError) as refused:
        known(tmp_path, entry)
    assert words in str(refused.value)


def test_a_misspelt_key_is_said_beside_those_that_are_missing(tmp_path):
    entry = {key: value for key, value in ENTRY.items() if key not in ("classes", "checks")}
    with pytest.raises(DataError) as refused:
        known(tmp_path, {**entry, "clases": ENTRY["classes"]})
    assert f"defects.{ENTRY['id']}.clases: unknown key; did you mean classes?" in str(refused.value)
    assert f"defects.{ENTRY['id']}.checks: expected this key, found none; add it" in str(refused.value)


def test_entry_for_everything_in_one_place_is_allowed(tmp_path):
    wide = {"cells": ["*"], "checks": ["*"]}
    assert known(tmp_path, {**ENTRY, **wide, "scenarios": ["cold"], "expires": date(2026, 6, 29)}) is not None


def test_more_findings_than_listed_are_not_covered(tmp_path):
    """One damaged prompt gives two findings, which the entry allows; two damaged prompts are more than it does."""
    assert judged(made(), known(tmp_path, {**ENTRY, "at_most": 2})).verdict is Verdict.KNOWN
    judgement = judged(made(), known(tmp_path, {**ENTRY, "at_most": 1}))
    assert judgement.verdict is Verdict.REGRESSION
    assert all(f.known is None for f in judgement.findings)
    assert any("covers nothing in pd-none: expected at most 1 findings, found 2" in n for n in judgement.notices)
    assert not any("if it is fixed" in n for n in judgement.notices)


def garbage(o, **changes):
    return change_final(o, output_ids=(9, 9, 9), usage_completion_tokens=3, **changes) if o.scenario == "sampled" else o


def test_shipped_entries_of_a_runner_hold_on_the_device_where_they_show():
    """On GPUs runner V2 recorded the baselines, so that it is V1 that accepts fewer drafts, in cells of gpu-ways."""
    shipped = {e.defect.id: e.defect for e in load_known(REPOSITORY / "known-defects.yaml").entries}
    ways = {c.id for c in select_cells(load_profile("gpu-ways"), [])}
    lone, two_p, against_v2 = (shipped[f"v1-drafter-at-chunk-ends{more}"] for more in ("", "-of-two-p", "-against-v2"))
    assert {(d.devices, d.model_runners) for d in (lone, two_p)} == {(("cpu",), ("V2",))}
    assert (against_v2.devices, against_v2.model_runners) == (("gpu",), ("V1",)) and ways >= set(against_v2.cells)
    for name in ("min-tokens-with-speculation", "min-tokens-in-a-trace"):
        assert shipped[name].model_runners == ("V1",)
    asked = {cell for cell in shipped["min-tokens-with-speculation"].cells if "+" in cell}
    assert len(asked) == 6 and asked <= ways


def test_shipped_entry_does_not_cover_an_answer_that_ended_in_an_error():
    """The answers of the known defect are wrong; they are whole all the same."""
    shipped = load_known(REPOSITORY / "known-defects.yaml")
    recorded = load_history(RUNS / "known")
    damaged = (garbage(o, finish_reason="error") if o.cell == "single-eagle3" else o for o in recorded.observations)
    broken = with_answers(recorded, damaged)
    assert apply_known(judge(recorded, baselines_for(recorded, BASELINES)), shipped, recorded).verdict is Verdict.KNOWN
    judgement = apply_known(judge(broken, baselines_for(broken, BASELINES)), shipped, broken)
    assert judgement.verdict is Verdict.REGRESSION
    assert "response-invariants" in {f.check for f in judgement.findings if f.verdict is Verdict.REGRESSION}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "format: 2\n",
        "format: 1\ndefects: 3\n",
        "format: 1\ndefects: [{id: x}]\n",
        yaml.safe_dump({"format": 1, "defects": [ENTRY, deepcopy(ENTRY)]}),
        yaml.safe_dump({"format": 1, "defects": [{**ENTRY, "vllm": "newest"}]}),
        yaml.safe_dump({"format": 1, "defects": [{**ENTRY, "link": "javascript:alert(1)"}]}),
        yaml.safe_dump({"format": 1, "defects": [{**ENTRY, "surprise": 1}]}),
        yaml.safe_dump({"format": 1, "defects": [{**ENTRY, "classes": ["infrastructure"]}]}),
        "format: 1\ndefects: [{id: x, expires: 2027-02-30}]\n",
        "format: 1\ndefects: []\ndefects: []\nmore: 1\n",
        "[]\n",
        "",
    ],
)
def test_damaged_list_is_refused(tmp_path, text):
    path = tmp_path / "known-defects.yaml"
    path.write_text(text)
    with pytest.raises(DataError, match="expected failures"):
        load_known(path)


def test_list_that_does_not_exist_is_refused_before_a_run(tmp_path):
    profile = changed_profile(tmp_path, lambda raw: raw.update(known_defects=str(tmp_path / "lost.yaml")))
    for planned in (False, True):
        with pytest.raises(DataError, match=r"lost\.yaml: there is no such file, .*; restore it"):
            prepare(profile, (), planned=planned)
    assert prepare(changed_profile(tmp_path, lambda raw: raw.pop("known_defects")), ("single-none",)).works


def test_recorded_run_is_judged_without_a_lost_list_and_says_so(tmp_path, monkeypatch):
    """Without the list more is red, never less. Another list may be named, and has to exist."""
    monkeypatch.chdir(tmp_path)
    h = with_profile(made(), known_defects=str(tmp_path / "lost.yaml"))
    for own in (True, False):
        judgement = assess(h.model_copy(update={"own": own})).judgement
        assert judgement.by_cell()["pd-none"] is Verdict.REGRESSION
        assert [n for n in judgement.notices if "lost.yaml, so no finding is expected" in n]
    with pytest.raises(DataError, match=r"named\.yaml: there is no such file"):
        assess(h, References(known=tmp_path / "named.yaml"))
    other = tmp_path / "other.yaml"
    other.write_text("format: 1\ndefects: []\n")
    judgement = assess(h, References(known=other)).judgement
    assert not [n for n in judgement.notices if "lost.yaml" in n]
