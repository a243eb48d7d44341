"""Parts of a night: merging and judging them gives what judging one recorded run of the same cells gives, and nothing
that is lost, damaged or foreign can make a night green."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import yaml

from harness.baselines.lookup import Lookup
from harness.commands.merge import MergeOptions, merge
from harness.commands.merge.load import find_runs
from harness.commands.missing_evidence import missing_evidence
from harness.errors import DataError, HarnessError, InfrastructureError, StorageError, UsageError
from harness.history.folder import History, load_history, write_run
from harness.history.layout import SECOND
from harness.history.plan import plan_key
from harness.history.records import RESCORE, Observation
from harness.history.token_ids import output_key
from harness.history.verdict import Verdict
from harness.judging.checks.registry import judge, tripped_once
from harness.judging.findings import Judgement
from harness.judging.references import load_stages
from harness.profiles.cells import CellName
from harness.profiles.load import load_profile
from harness.profiles.model import Profile
from harness.prompts.model import load_prompts
from harness.reports.judge_run import write_reports
from harness.reports.summary import summarise_run
from harness.workload.outputs import Outputs
from tests.golden.oracle import RUNS
from tests.support.builders import (
    change_final,
    engine,
    engines_of,
    garbled,
    history,
    identity,
    observation,
    plan_of,
    rescoring,
    with_run,
    written_run,
)
from tests.support.normal_tier import again, baselines, recorded, worse
from tests.support.program import run as cli
from tests.support.reseal import reseal as edited
from tests.support.run_files import answers

pytestmark = pytest.mark.computes

LENGTHS = list(range(32, 32 + 30))
CELLS = ("single-none", "pd-eagle3", "single-eagle3", "pd-mtp", "single-mtp")
PARTS = (("single-none", "pd-eagle3", "single-eagle3"), ("single-none", "pd-mtp", "single-mtp"))
PROFILE = load_profile("cpu")
LATER = "2026-01-01T02:00:00+00:00"
Accept = Callable[[int], tuple[int, ...]]
Change = Callable[[Observation], Observation]


def same(o: Observation) -> Observation:
    return o


def profile(tier: str, **judging: object) -> Profile:
    """A profile whose matrix is CELLS."""
    chosen = {"tier": tier, "permutations": 2000, "family_alpha": 0.05, "must_detect_points": 60}
    return Profile.model_validate(
        {
            **PROFILE.model_dump(mode="json"),
            "routes": ["client"],
            "methods": [m.model_dump(mode="json") for m in PROFILE.methods if m.kind in ("none", "eagle3", "mtp")],
            "exclude": [{"cells": "pd-none", "reason": "to keep it small"}],
            "scenarios": [],
            "witness": "off",
            "judging": {**chosen, "must_detect_stratum_points": None, "must_detect_alone_points": 100, **judging},
        }
    )


def night(tier: str = "normal", accept: dict[str, Accept] | None = None, change: Change = same, **judging) -> History:
    """One recorded run of all cells, re-scored by the plain engine."""
    observations = []
    for cell in CELLS:
        for n in LENGTHS:
            accepted = () if cell == "single-none" else (accept or {}).get(cell, recorded)(n)
            observations.append(change(observation(cell, n, accepted=accepted)))
    made = history(observations, engines=tuple(e for c in CELLS for e in engines_of(c)))
    made = with_run(
        made,
        profile={**profile(tier, **judging).model_dump(mode="json"), "source": "cpu"},
        rescore=True,
        run_id="whole",
        identities={m: identity(m).model_dump(mode="json") for m in ("none", "eagle3", "mtp")},
        hardware={**made.run.hardware, "platform": "Linux x86_64"},
    )
    return answering(made, (*made.observations, *scores(made.observations)))


def answering(made: History, observations: Iterable[Observation]) -> History:
    """The run with these observations; a copy of it would keep what it has looked up in its own."""
    return History(folder=made.folder, run=made.run, observations=tuple(observations), own=made.own)


def scores(observations: Iterable[Observation]) -> list[Observation]:
    """What the plain engine says of each distinct output: it would say the same."""
    outputs, known = Outputs(), {}
    for o in observations:
        outputs.add(o)
        known[o.prompt_id, output_key(o.final.output_ids)] = (o.prompt_id, o.sent_ids, o.final.output_ids)
    out = []
    for number, (cell, request) in enumerate(outputs.scored_by):
        prompt, _, part = request.partition("#0.")
        out.append(rescoring(*known[prompt, part], cell=cell, sequence=number))
    return out


def write(made: History, folder: Path, **changes: object) -> Path:
    written_run(folder, made, **changes)
    (folder / "logs").mkdir(exist_ok=True)
    for e in made.run.engines:
        (folder / "logs" / f"{e.group}.{e.role}.log").write_text(f"log of {e.group}\n")
    return folder


def part_of(made: History, own: Iterable[str], name: str, /, **changes: object) -> History:
    """The run as one part of the night would have recorded it: these cells, and the scores of their own outputs."""
    mine = [o for o in made.observations if o.cell in own and o.scenario != RESCORE]
    outputs = Outputs()
    for o in mine:
        outputs.add(o)
    asked = set(outputs.scored_by)
    scores_ = any(CellName.of(c).reference == c for c in own)
    kept = [o for o in made.observations if o.scenario == RESCORE and (o.cell, o.key) in asked and scores_]
    cells = tuple(c for c in made.run.cells if c.cell in own)
    engines = tuple(e for e in made.run.engines if e.group in own)
    update = {"run_id": name, "cells": cells, "engines": engines, "rescore": scores_, **changes}
    return with_run(answering(made, (*mine, *kept)), **update)


def split(made: History, tmp_path: Path, second: History | None = None) -> list[Path]:
    out = []
    for number, cells in enumerate(PARTS, 1):
        folder = write(part_of(made, cells, f"part-{number}"), tmp_path / f"part-{number}")
        if second is not None:
            write(part_of(second, cells, SECOND), folder / SECOND)
        out.append(folder)
    return out


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """The parts of a night that passes."""
    return split(night(), tmp_path)


def refused(words: str, folders: list[Path], out: Path, wanted: MergeOptions | None = None) -> None:
    with pytest.raises(UsageError, match=words):
        merge(folders, out, wanted)


def references() -> dict[str, Lookup]:
    known = baselines(LENGTHS)
    return {**known, "mtp": known["eagle3"]}


def judged(made: History) -> Judgement:
    return judge(made, references(), load_stages(made))


def said(judgement: Judgement) -> dict[tuple[str, str], str]:
    """Everything that is said of each cell: verdicts, findings, p-values."""
    return {(c.cell, c.scenario): c.model_dump_json() for c in judgement.cells}


NIGHTS: dict[str, dict[str, object]] = {
    "as recorded": {},
    "equal runs": {"accept": {"pd-eagle3": again, "single-mtp": again}},
    "one pair worse": {"accept": {"pd-mtp": worse}},
    "one method worse": {"accept": {"pd-mtp": worse, "single-mtp": worse}},
    "all worse": {"accept": dict.fromkeys(CELLS, worse)},
}


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", NIGHTS)
def test_merged_parts_are_judged_as_one_run_of_the_same_cells(tmp_path, name, stages):
    made = night(**NIGHTS[name], stages=stages)
    second = night(**NIGHTS[name], stages=stages) if stages == 2 else None
    write(made, tmp_path / "whole")
    if second is not None:
        write(second, tmp_path / "whole" / SECOND)
    one = judged(load_history(tmp_path / "whole"))
    several = judged(merge(split(made, tmp_path, second), tmp_path / "merged"))
    assert several.verdict is one.verdict and said(several) == said(one)
    assert {c.cell for c in one.cells} == set(CELLS)
    assert (one.verdict is Verdict.PASS) == (name in ("as recorded", "equal runs"))


def test_bitwise_night_with_a_wrong_token_is_judged_alike(tmp_path):
    def change(o: Observation) -> Observation:
        wrong = o.cell == "pd-mtp" and o.prompt_id == "p40"
        return garbled(o, at=0) if wrong else o

    made = night("bitwise", change=change)
    one = judged(load_history(write(made, tmp_path / "whole")))
    several = judged(merge(split(made, tmp_path), tmp_path / "merged"))
    assert one.verdict is several.verdict is Verdict.REGRESSION
    assert said(several) == said(one) and several.findings


def test_parts_trip_whatever_the_whole_family_trips(tmp_path):
    """A smaller family of Holm's rejects a superset: what a part ran again covers what the night needs."""
    made = night(accept={"pd-mtp": lambda n: worse(n) if n % 3 else recorded(n), "single-eagle3": again})
    whole = set(tripped_once(load_history(write(made, tmp_path / "whole")), references()).tests)
    parts = [load_history(p) for p in split(made, tmp_path)]
    assert whole and whole <= {t for p in parts for t in tripped_once(p, references()).tests}


def test_second_stage_that_no_part_ran_is_missing(tmp_path):
    folders = split(night(accept={"pd-mtp": worse}), tmp_path, night(accept={"pd-mtp": worse}))
    assert judged(merge(folders, tmp_path / "with")).verdict is Verdict.REGRESSION
    shutil.rmtree(folders[1] / SECOND)
    without = judged(merge(folders, tmp_path / "without"))
    # All P/D cells together have one stage, which shows it at a level of its own.
    assert without.result("pd-mtp", "acceptance-single").verdict is Verdict.UNKNOWN
    assert without.result("pd-mtp", "acceptance-pooled").verdict is Verdict.REGRESSION


def test_cell_that_no_part_ran_is_refused_or_unknown_with_that_reason(tmp_path, folders):
    with pytest.raises(InfrastructureError, match=r"completed 2 of 5.*\n  pd-mtp: no part ran it\n  single-mtp"):
        merge(folders[:1], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()
    merged = merge(folders[:1], tmp_path / "merged", MergeOptions(keep_going=True))
    lost = merged.cell("pd-mtp")
    assert lost.state == "failed" and lost.reason == "no part ran it"
    assert lost.planned == 1
    judgement = judged(merged)
    assert judgement.verdict is Verdict.UNKNOWN and judgement.by_cell()["pd-mtp"] is Verdict.UNKNOWN
    assert judgement.by_cell()["pd-eagle3"] is Verdict.PASS
    assert "no part ran pd-mtp, single-mtp" in judgement.notices
    chosen = merge(folders[:1], tmp_path / "chosen", MergeOptions(cells=("*-eagle3", "single-none")))
    assert judged(chosen).verdict is Verdict.PASS


def test_reports_of_a_merged_run_name_its_parts_and_show_logs(tmp_path):
    merged = merge(split(night(), tmp_path), tmp_path / "merged")
    write_reports(summarise_run(merged, judged(merged), references()), merged.folder)
    page = (merged.folder / "report.html").read_text()
    assert "part-1" in page and "part-2" in page and "cells used: pd-mtp, single-mtp" in page
    assert (merged.folder / "logs" / "pd-mtp.decode.log").is_file()
    said_ = "recorded by several parts, of which the first that completed the cell counts: single-none"
    assert said_ in (merged.folder / "summary.md").read_text()
    assert [p.run_id for p in merged.run.merged.parts] == ["part-1", "part-2"]
    assert merged.run.merged.parts[1].counted == ("pd-mtp", "single-mtp")


def test_notes_of_the_kv_come_along_and_are_sealed(tmp_path):
    parts = split(night(), tmp_path)
    for part in parts:
        made = load_history(part)
        (part / "witness").mkdir()
        (part / "witness" / "pd-mtp.decode.7.jsonl").write_text('{"error":"x"}\n')
        write_run(part, made.run)
    merged = merge(parts, tmp_path / "merged")
    (notes,) = (merged.folder / "witness").iterdir()
    assert notes.name == "pd-mtp.decode.7.jsonl"
    notes.write_text('{"error":"y"}\n')
    with pytest.raises(DataError, match="witness"):
        load_history(merged.folder)


# --- profiles with axes ----------------------------------------------------------------------------------------------


def in_variant(made: History, variant: str) -> History:
    """A run of the cells of one variant, with its own plain engine, identities and prompts."""

    def name(cell: str) -> str:
        return f"{cell}+{variant}"

    observations = [o.model_copy(update={"cell": name(o.cell)}) for o in made.observations if o.scenario != RESCORE]
    identities = {
        f"{m}+{variant}": identity(m, prompts_sha256=f"prompts of {variant}").model_dump(mode="json")
        for m in ("none", "eagle3", "mtp")
    }
    axes = {"lease": {v: {"engine": {"kv_lease_s": n}} for v, n in (("a", 10), ("b", 11))}}
    raw = {k: v for k, v in made.run.profile.items() if k != "source"}
    return with_run(
        answering(made, (*observations, *scores(observations))),
        cells=tuple(c.model_copy(update={"cell": name(c.cell), "group": name(c.group)}) for c in made.run.cells),
        engines=tuple(e.model_copy(update={"group": name(e.group)}) for e in made.run.engines),
        identities=identities,
        prompts_sha256=f"prompts of {variant}",
        profile={**Profile.model_validate({**raw, "axes": axes}).model_dump(mode="json"), "source": "cpu"},
        run_id=f"part-{variant}",
    )


def together(first: History, second: History) -> History:
    """The run that recorded what both did."""
    return with_run(
        answering(first, (*first.observations, *second.observations)),
        cells=(*first.run.cells, *second.run.cells),
        engines=(*first.run.engines, *second.run.engines),
        identities={**first.run.identities, **second.run.identities},
        run_id="whole",
    )


def judged_by_variant(made: History) -> Judgement:
    known = {f"{m}+{v}": found for m, found in references().items() for v in ("a", "b")}
    return judge(made, known, load_stages(made))


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", ["as recorded", "one pair worse", "one method worse"])
def test_variants_in_different_parts_are_judged_as_one_run_of_them(tmp_path, name, stages):
    """Each part knows the identities and prompts of its own variant alone."""
    variants = (in_variant(night(stages=stages), "a"), in_variant(night(**NIGHTS[name], stages=stages), "b"))
    whole = write(together(*variants), tmp_path / "whole")
    folders = [
        *(
            write(part_of(variants[0], [f"{c}+a" for c in own], f"part-a{n}"), tmp_path / f"part-a{n}")
            for n, own in enumerate(PARTS)
        ),
        write(variants[1], tmp_path / "part-b"),
    ]
    if stages == 2 and name != "as recorded":
        # Only what failed is run again, and says its own identities alone.
        for folder in (whole, folders[2]):
            write(variants[1], folder / SECOND, run_id=SECOND)
    one = judged_by_variant(load_history(whole))
    merged = merge(folders, tmp_path / "merged")
    several = judged_by_variant(merged)
    assert several.verdict is one.verdict and said(several) == said(one)
    assert (one.verdict is Verdict.PASS) == (name == "as recorded")
    assert merged.run.identities == together(*variants).run.identities
    assert merged.run.prompts_sha256 == "prompts of a"


def test_variants_that_fit_no_other_part_still_have_to_fit_where_they_overlap(tmp_path):
    made = in_variant(night(), "a")
    folders = [
        write(part_of(made, [f"{c}+a" for c in own], f"part-{n}"), tmp_path / f"part-{n}")
        for n, own in enumerate(PARTS)
    ]
    edited(folders[1], lambda r: r["identities"]["none+a"].update(target_sha256="x"))
    refused(r"identities\.none\+a\.target_sha256", folders, tmp_path / "merged")
    edited(folders[1], lambda r: r["identities"]["none+a"].update(target_sha256="t"))
    edited(folders[1], lambda r: r.update(prompts_sha256="others"))
    refused(r"prompts\.a: expected 'prompts of a', found 'others'", folders, tmp_path / "merged")


# --- models of the hub -----------------------------------------------------------------------------------------------

REFERENCE = {"repo": "a/drafter", "revision": "main"}


def hub_profile(tmp_path: Path) -> tuple[str, dict]:
    """Path and data of a profile that names a drafter on the hub."""
    raw = profile("bitwise").model_dump(mode="json", exclude={"sources"})
    next(m for m in raw["methods"] if m["kind"] == "mtp")["drafter"] = dict(REFERENCE)
    path = tmp_path / "hub.yaml"
    path.write_text(yaml.safe_dump(raw))
    return str(path), raw


def localised(raw: dict, folder: str, commit: str = "c" * 40) -> dict:
    """The profile as it is recorded where the drafter is in the cache."""
    methods = [{**m, "drafter": folder} if m["kind"] == "mtp" else m for m in raw["methods"]]
    return {**raw, "methods": methods, "sources": {"mtp": {**REFERENCE, "commit": commit}}, "source": "hub"}


def test_parts_that_had_a_model_of_the_hub_or_lacked_it_are_of_one_night(tmp_path):
    path, raw = hub_profile(tmp_path)
    made = night("bitwise")
    folders = []
    for number, own in enumerate(PARTS):
        recorded_as = localised(raw, f"/cache-{number}/mtp")
        folders.append(write(part_of(made, own, f"part-{number}", profile=recorded_as), tmp_path / f"part-{number}"))
    lacking = part_of(made, ("single-none",), "part-2", profile={**raw, "source": "hub"})
    folders.append(write(lacking, tmp_path / "part-2"))
    assert judged(merge(folders, tmp_path / "merged")).verdict is Verdict.PASS
    assert judged(merge(folders, tmp_path / "expected", MergeOptions(expect=path))).verdict is Verdict.PASS
    Path(path).write_text(Path(path).read_text().replace("a/drafter", "another/drafter"))
    moved = r"drafter\.repo: expected 'another/drafter', found 'a/drafter'"
    refused(moved, folders, tmp_path / "other", MergeOptions(expect=path))
    part = part_of(made, PARTS[1], "part-1", profile=localised(raw, "/cache/mtp", "d" * 40))
    shutil.rmtree(folders[1])
    write(part, folders[1])
    refused(r"models\.mtp: expected 'cccc", folders, tmp_path / "moved")


# --- the same cell twice ---------------------------------------------------------------------------------------------


def failed(made: History, cell: str) -> dict[str, object]:
    cells = tuple(
        c.model_copy(update={"state": "failed", "reason": "engine died"}) if c.cell == cell else c
        for c in made.run.cells
        if c.cell in PARTS[1]
    )
    return {"cells": cells}


def test_retry_fills_in_what_is_missing(tmp_path):
    made = night()
    first, _ = split(made, tmp_path)
    tried = part_of(made, PARTS[1], "try-1", **failed(made, "pd-mtp"))
    lacking = answering(tried, (o for o in tried.observations if o.cell != "pd-mtp"))
    folders = [
        first,
        write(lacking, tmp_path / "try-1"),
        write(part_of(made, PARTS[1], "try-2", started=LATER), tmp_path / "try-2"),
    ]
    merged = merge(folders, tmp_path / "merged")
    parts = {p.run_id: p for p in merged.run.merged.parts}
    assert parts["try-2"].counted == ("pd-mtp",) and parts["try-1"].counted == ("single-mtp",)
    assert judged(merged).verdict is Verdict.PASS


def test_retry_is_no_second_chance(tmp_path):
    """A whole recording that finds something stays, however well a later one looks."""
    first, bad = split(night(accept={"pd-mtp": worse}, stages=1), tmp_path)
    good = write(part_of(night(stages=1), PARTS[1], "try-2", started=LATER), tmp_path / "try-2")
    for order in ([first, bad, good], [good, bad, first]):
        merged = merge(order, tmp_path / f"merged-{order[0].name}")
        assert judged(merged).by_cell()["pd-mtp"] is Verdict.REGRESSION


def broken(made: History, cell: str, state: str = "complete") -> History:
    """The run with one request of a cell without an answer."""
    first = next(o for o in made.observations if o.cell == cell)
    cells = tuple(c.model_copy(update={"state": state}) if c.cell == cell else c for c in made.run.cells)
    lost = (o.model_copy(update={"error": "timeout"}) if o is first else o for o in made.observations)
    return with_run(answering(made, lost), cells=cells)


@pytest.mark.parametrize("state", ["complete", "failed"])
def test_finding_beside_a_lost_request_stays(tmp_path, state):
    """The only recording of a cell is judged as far as it got, and a complete one is not replaced by a retry."""
    made = broken(part_of(night(accept={"pd-mtp": worse}, stages=1), PARTS[1], "try-1"), "pd-mtp", state)
    folders = [split(night(stages=1), tmp_path)[0], write(made, tmp_path / "try-1")]
    if state == "failed":
        with pytest.raises(InfrastructureError, match="no part completed 1 of 5"):
            merge(folders, tmp_path / "refused")
    else:
        folders.append(write(part_of(night(stages=1), PARTS[1], "try-2", started=LATER), tmp_path / "try-2"))
    merged = merge(folders, tmp_path / "merged", MergeOptions(keep_going=True))
    assert judged(merged).by_cell()["pd-mtp"] is Verdict.REGRESSION


def test_engine_that_died_is_made_up_for_by_the_first_retry(tmp_path):
    """What an incomplete recording found is lost with it."""
    made = broken(part_of(night(accept={"pd-mtp": worse}, stages=1), PARTS[1], "try-1"), "pd-mtp", "failed")
    good, again_ = (
        part_of(night(stages=1), PARTS[1], name, started=f"2026-01-01T0{n}:00:00+00:00")
        for n, name in enumerate(("try-2", "try-3"), 2)
    )
    parts = (part_of(night(stages=1), PARTS[0], "part-1"), again_, good, made)
    merged = merge([write(p, tmp_path / p.run.run_id) for p in parts], tmp_path / "merged")
    assert {p.run_id: p.counted for p in merged.run.merged.parts}["try-2"] == ("pd-mtp",)
    assert judged(merged).verdict is Verdict.PASS


REFILL = next(s for s in PROFILE.scenarios if s.id == "refill")


def refilled() -> History:
    """A night of the bitwise tier with one scenario."""
    made = night("bitwise")
    more = [observation(c, n).model_copy(update={"scenario": REFILL.id}) for c in CELLS for n in LENGTHS[:4]]
    raw = {**made.run.profile, "scenarios": [REFILL.model_dump(mode="json")]}
    cells = tuple(c.model_copy(update={"scenarios": {REFILL.id: 4}}) for c in made.run.cells)
    return with_run(answering(made, (*made.observations, *more)), profile=raw, cells=cells)


# --- arguments under test ---------------------------------------------------------------------------------------------

FLAG = "--engine-arg=--my-flag"


def test_a_merged_run_says_what_was_under_test(tmp_path, folders):
    """Otherwise its baselines would pass for those of engines without."""
    for folder in folders:
        edited(folder, lambda raw: raw.update(engine_flags=[FLAG]))
    merged = merge(folders, tmp_path / "merged")
    assert merged.run.engine_flags == (FLAG,)
    assert any(FLAG in notice for notice in judged(merged).notices)


def test_parts_with_and_without_an_argument_under_test_are_no_parts_of_one_run(tmp_path, folders):
    edited(folders[1], lambda raw: raw.update(engine_flags=[FLAG]))
    refused("engine_flags.all: expected .*, found .*my-flag", folders, tmp_path / "merged")


def test_parts_may_lack_arguments_of_engines_that_they_do_not_have(tmp_path):
    """Only pairs have a P, and an argument for it is refused without one."""
    made = night()
    of_p = "--engine-arg=prefill:--my-flag"
    groups = (("single-none", "single-eagle3", "single-mtp"), ("pd-eagle3", "pd-mtp"))
    parts = [part_of(made, cells, f"part-{n}", engine_flags=(of_p,) * n) for n, cells in enumerate(groups)]
    merged = merge([write(p, tmp_path / p.run.run_id) for p in parts], tmp_path / "merged")
    assert merged.run.engine_flags == (of_p,)
    others = [
        part_of(made, (cell,), cell, engine_flags=flags) for cell, flags in (("pd-eagle3", ()), ("pd-mtp", (of_p,)))
    ]
    folders = [write(p, tmp_path / p.run.run_id) for p in others]
    refused("engine_flags.prefill: expected .*, found .*my-flag", folders, tmp_path / "refused")


# --- scores ----------------------------------------------------------------------------------------------------------


def rescored_of(judgement: Judgement, cell: str) -> Verdict:
    found = next(c for c in judgement.cells if c.cell == cell)
    return next(r.verdict for r in found.results if r.check == "rescored")


def without_scores(made: History, wanted: Callable[[Observation], bool] = lambda _: True) -> History:
    return answering(made, (o for o in made.observations if o.scenario != RESCORE or not wanted(o)))


def wrong_end(every: int) -> Change:
    """Outputs of one cell that end wrongly, at every so many lengths."""

    def change(o: Observation) -> Observation:
        if o.cell != "pd-mtp" or int(o.prompt_id[1:]) % every:
            return o
        return change_final(o, output_ids=(*o.final.output_ids[:-1], 9))

    return change


def test_part_without_scores_borrows_none_for_its_right_outputs_alone(tmp_path):
    """Right outputs are what other parts gave and scored; wrong ones are nobody else's."""
    bad, good = night(change=wrong_end(3), stages=1), night(stages=1)
    tried = without_scores(part_of(bad, PARTS[1], "try-1"))
    assert rescored_of(judged(load_history(write(tried, tmp_path / "alone"))), "pd-mtp") is Verdict.UNKNOWN
    parts = (part_of(good, PARTS[0], "part-1"), tried, part_of(good, PARTS[1], "try-2", started=LATER))
    merged = merge([write(p, tmp_path / p.run.run_id) for p in parts], tmp_path / "merged")
    assert rescored_of(judged(merged), "pd-mtp") is Verdict.UNKNOWN
    assert rescored_of(judged(merged), "single-mtp") is Verdict.PASS


def test_missing_scores_hide_no_wrong_outputs_and_are_no_pass():
    """In one run as in several parts."""
    made = night(stages=1)
    assert rescored_of(judge(made, references()), "pd-mtp") is Verdict.PASS
    lost = without_scores(made, lambda o: o.prompt_id == "p40")
    assert rescored_of(judge(lost, references()), "pd-mtp") is Verdict.UNKNOWN
    bad = night(change=wrong_end(1), stages=1)
    right = {
        (o.prompt_id, o.final.output_ids) for o in bad.observations if o.cell == "single-none" and o.scenario == "cold"
    }
    keys = {f"{p}#0.{output_key(out)}" for p, out in right}

    def scored(o: Observation) -> Observation:
        return (
            change_final(o, rescored=(0.0, 5.0, *o.final.rescored[2:]))
            if o.scenario == RESCORE and o.key not in keys
            else o
        )

    bad = answering(bad, map(scored, bad.observations))
    assert rescored_of(judge(bad, references()), "pd-mtp") is Verdict.REGRESSION
    lost = without_scores(bad, lambda o: o.prompt_id == "p40")
    assert rescored_of(judge(lost, references()), "pd-mtp") is Verdict.REGRESSION


def test_scores_of_all_parts_are_kept_once_each(tmp_path):
    made = night("bitwise")
    kept = [o for o in merge(split(made, tmp_path), tmp_path / "merged").observations if o.scenario == RESCORE]
    assert [o.sequence for o in kept] == list(range(len(kept)))
    assert {o.key for o in kept} == {o.key for o in made.observations if o.scenario == RESCORE}


def test_engines_of_two_parts_with_the_same_name_stay_apart(tmp_path):
    made = night()
    groups = {"pd-mtp": "pd-mtp", "single-mtp": "pd-mtp"}
    cells = tuple(c.model_copy(update={"group": groups.get(c.cell, c.group)}) for c in made.run.cells)
    made = with_run(made, cells=cells)
    folders = []
    for name, cell, size in (("a", "pd-mtp", 10), ("b", "single-mtp", 20)):
        own = part_of(made, (cell,), name, engines=(engine("pd-mtp", "decode", size),))
        folders.append(write(own, tmp_path / name))
    merged = merge(folders, tmp_path / "merged", MergeOptions(keep_going=True))
    of = {c.cell: c.group for c in merged.run.cells}
    sizes = {e.group: e.kv_blocks for e in merged.run.engines}
    assert (sizes[of["pd-mtp"]], sizes[of["single-mtp"]]) == (10, 20)
    assert (merged.folder / "logs" / f"{of['single-mtp']}.decode.log").is_file()


@pytest.mark.parametrize("sequence", [2**63, 99999999999999999999, -(2**63) - 1])
def test_numbers_that_no_column_takes_do_not_cost_the_night(tmp_path, folders, sequence):
    # Not of the cell that both parts have.
    lines = answers(folders[1], "pd-mtp")
    changed = re.sub(r'("cell":"pd-mtp".*?"sequence":)\d+', rf"\g<1>{sequence}", lines.read_text(), count=1)
    assert changed != lines.read_text()
    lines.write_text(changed)
    edited(folders[1])
    merged = merge(folders, tmp_path / "merged", MergeOptions(keep_going=True))
    assert load_history(tmp_path / "merged").run == merged.run
    assert any("only this copy is missing" in n for n in merged.notices)
    assert not list((tmp_path / "merged").glob("*.parquet"))


def test_logs_of_a_killed_part_are_merged_without_secrets(tmp_path, folders):
    (log,) = list((folders[0] / "logs").glob("*.log"))[:1]
    log.write_text("Authorization: Bearer abcdefghijklmnop\nthe rest")
    copied = "".join(p.read_text() for p in (merge(folders, tmp_path / "merged").folder / "logs").glob("*.log"))
    assert "Authorization: Bearer <redacted>\nthe rest" in copied and "abcdefghijklmnop" not in copied


# --- parts that cannot be taken --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda r: r["profile"]["judging"].update(near_tie_nats=9), "profile.judging.near_tie_nats"),
        (lambda r: r["profile"].update(name="other"), "profile.name: expected 'cpu', found 'other'"),
        (lambda r: r.update(prompts_sha256="1"), "prompts: expected '0', found '1'"),
        (lambda r: r["identities"]["mtp"].update(target_sha256="x"), "identities.mtp.target_sha256"),
        (lambda r: r["identities"].pop("mtp"), "identities.mtp: expected one, found none"),
        (lambda r: r["versions"].update(vllm="9"), "versions.vllm: expected '0', found '9'"),
        (lambda r: r.update(harness_version="9"), "versions.harness"),
        (lambda r: r["hardware"].update(platform="Linux aarch64"), "platform"),
        (lambda r: r.update(mutants=["M1"]), "injected faults (M1)"),
        (lambda r: r.update(interrupted=True), "was interrupted"),
        (lambda r: r.update(finished=None), "it was killed"),
        (lambda r: r.update(schema_version=99), "expected history schema"),
        (lambda r: r.update(cells=r["cells"] * 2), "stands there 2 times"),
        (lambda r: r.update(merged={"parts": []}), "this is a merged run, not a part"),
        (lambda r: r.pop("cells"), "is damaged"),
        (lambda r: r.update(hardware=7), "is damaged"),
    ],
)
def test_part_that_does_not_fit_is_refused_or_left_out_and_missed(tmp_path, folders, damage, sentence):
    edited(folders[1], damage)
    with pytest.raises(UsageError) as refused:
        merge(folders, tmp_path / "merged")
    assert sentence in str(refused.value)
    assert not (tmp_path / "merged").exists()
    judgement = judged(merge(folders, tmp_path / "merged", MergeOptions(keep_going=True)))
    assert judgement.verdict is Verdict.UNKNOWN, judgement.notices
    assert any("part" in n for n in judgement.notices)


def test_damaged_observations_are_refused_and_a_torn_line_is_said(tmp_path, folders):
    lines = answers(folders[1], "pd-mtp")
    whole = lines.read_text()
    lines.write_text('{"cell": 1}\n' + whole)
    refused("changed or damaged", folders, tmp_path / "merged")
    edited(folders[1], lambda r: r.update(finished=None))
    refused("line 1", folders, tmp_path / "merged")
    lines.write_text(whole[:-20])
    merged = merge(folders, tmp_path / "merged", MergeOptions(keep_going=True))
    assert any("part-2 did not finish" in n for n in merged.run.merged.notices)
    assert judged(merged).verdict is Verdict.UNKNOWN


def test_part_with_a_damaged_second_stage_is_refused_or_missed(tmp_path):
    made = night(accept={"pd-mtp": worse})
    folders = split(made, tmp_path, made)
    (folders[1] / SECOND / "run.json").write_text("{")
    refused("part-2/second-stage/run.json: expected JSON", folders, tmp_path / "merged")
    judgement = judged(merge(folders, tmp_path / "merged", MergeOptions(keep_going=True)))
    assert judgement.verdict is Verdict.UNKNOWN and judgement.by_cell()["pd-mtp"] is Verdict.UNKNOWN


def test_interrupted_part_that_was_retried_wholly_costs_nothing(tmp_path):
    made = night()
    folders = split(made, tmp_path)
    edited(folders[1], lambda r: r.update(interrupted=True))
    alone = merge(folders, tmp_path / "alone", MergeOptions(keep_going=True))
    assert alone.run.interrupted and judged(alone).verdict is Verdict.UNKNOWN
    again_ = write(part_of(made, PARTS[1], "again", started=LATER), tmp_path / "again")
    mended = merge([*folders, again_], tmp_path / "mended", MergeOptions(keep_going=True))
    assert not mended.run.interrupted and judged(mended).verdict is Verdict.PASS


def test_armed_parts_merge_when_asked_and_never_pass(tmp_path, folders):
    for folder in folders:
        edited(folder, lambda r: r.update(mutants=["M1"]))
    assert judged(merge(folders, tmp_path / "merged", MergeOptions(armed=True))).verdict is Verdict.UNKNOWN


def test_other_commits_of_the_harness_are_refused(tmp_path, folders):
    for folder, commit in zip(folders, ("a" * 40, "b" * 40), strict=True):
        edited(folder, lambda r, commit=commit: r.update(git_commit=commit))
    refused("commit.harness: expected 'a.*, checkout of the harness and kind", folders, tmp_path / "merged")


def test_parts_without_a_known_commit_are_said(tmp_path, folders):
    assert (
        "recorded with an unknown commit of the harness: part-1, part-2"
        in merge(folders, tmp_path / "a").run.merged.notices
    )
    edited(folders[0], lambda r: r.update(git_commit="a" * 40, git_dirty=False))
    edited(folders[1], lambda r: r.update(git_commit="a" * 40, git_dirty=True))
    notices = merge(folders, tmp_path / "b").run.merged.notices
    assert "recorded with uncommitted changes of the harness: part-2" in notices
    assert not any("unknown commit" in n for n in notices)


def test_folders_of_runs_links_and_copies_count_once(tmp_path):
    folders = split(night(), tmp_path / "night", night())
    (tmp_path / "night" / "latest").symlink_to(folders[1].name)
    shutil.copytree(folders[0], tmp_path / "night" / "deep" / "copy")
    assert len(find_runs(tmp_path / "night")) == 3
    merged = merge([tmp_path / "night", folders[0]], tmp_path / "merged")
    assert [(p.run_id, len(p.counted)) for p in merged.run.merged.parts] == [
        ("part-1", 3),
        ("part-1", 0),
        ("part-2", 2),
    ]
    assert judged(merged).verdict is Verdict.PASS


def test_of_different_runs_of_one_name_the_first_counts(tmp_path, folders):
    twin = shutil.copytree(folders[1], tmp_path / "twin")
    lines = answers(twin, "pd-mtp")
    lines.write_text("".join(lines.read_text().splitlines(keepends=True)[1:]))
    edited(twin)
    assert judged(merge([*folders, twin], tmp_path / "merged")).verdict is Verdict.PASS
    assert judged(merge([twin, *folders], tmp_path / "other")).by_cell()["pd-mtp"] is Verdict.UNKNOWN


def test_the_first_part_says_which_run_it_is(tmp_path, folders):
    edited(folders[0], lambda r: r["versions"].update(vllm="9"))
    merged = merge(folders, tmp_path / "merged", MergeOptions(keep_going=True))
    assert merged.run.versions["vllm"] == "9" and merged.cell("pd-mtp").reason == "no part ran it"


def test_nothing_to_merge(tmp_path):
    refused("no such folder", [tmp_path / "nowhere"], tmp_path / "merged")
    with pytest.raises(InfrastructureError, match="there are no parts that can be merged"):
        merge([tmp_path / "nowhere"], tmp_path / "merged", MergeOptions(keep_going=True))
    folders = split(night(), tmp_path)
    refused("name a new or an empty one", folders, folders[0])


def test_log_names_lead_nowhere(tmp_path, folders):
    """Groups and logs are called what a damaged record says; nothing is read or written beside the folders."""
    (tmp_path / "outside.decode.log").write_text("secret")

    def damage(raw: dict) -> None:
        for item in (*raw["cells"], *raw["engines"]):
            item["group"] = "../../outside"

    edited(folders[1], damage)
    refused("damaged", folders, tmp_path / "merged")
    merged = merge(folders, tmp_path / "merged-without", MergeOptions(keep_going=True))
    assert not any("secret" in p.read_text() for p in merged.folder.rglob("*.log"))
    write_reports(summarise_run(merged, judged(merged), references()), merged.folder)


def test_part_with_a_link_in_it_is_refused_or_left_out(tmp_path, folders):
    (tmp_path / "outside.decode.log").write_text("secret")
    (folders[1] / "logs").mkdir(exist_ok=True)
    group = json.loads((folders[1] / "run.json").read_text())["cells"][0]["group"]
    (folders[1] / "logs" / f"{group}.decode.log").unlink(missing_ok=True)
    (folders[1] / "logs" / f"{group}.decode.log").symlink_to(tmp_path / "outside.decode.log")
    refused("found a symbolic link; remove it", folders, tmp_path / "merged")
    merged = merge(folders, tmp_path / "merged-without", MergeOptions(keep_going=True))
    assert not any("secret" in p.read_text() for p in merged.folder.rglob("*.log"))


# --- what should be there --------------------------------------------------------------------------------------------


def test_profile_that_was_expected_must_be_the_recorded_one(tmp_path, folders):
    refused("--expect cpu: the parts are of another profile", folders, tmp_path / "merged", MergeOptions(expect="cpu"))
    with pytest.raises(HarnessError, match="expected a shipped profile"):
        merge(folders, tmp_path / "merged", MergeOptions(expect="nowhere"))


def cold_part_of_cpu(tmp_path: Path, prompts_sha256: str) -> Path:
    made = history([observation(c, n) for c in ("single-none", "pd-none") for n in (40, 41)])
    raw = {**PROFILE.model_dump(mode="json"), "source": "cpu", "baselines": "/elsewhere"}
    return write(made, tmp_path / "part", profile=raw, prompts_sha256=prompts_sha256)


def test_cells_are_expected_with_all_their_requests(tmp_path):
    """With the profile's prompts at hand, what a part was not asked is missing too, and baselines are local ones."""
    prompts = load_prompts(PROFILE.workload.prompts)
    folder = cold_part_of_cpu(tmp_path, prompts.sha256)
    merged = merge([folder], tmp_path / "merged", MergeOptions(expect="cpu", keep_going=True))
    assert len(merged.run.cells) == 12 and merged.cell("pd-none").scenarios["late-pull"] > 0
    assert merged.cell("pd-mtp").planned == len(prompts.cold) + PROFILE.workload.text_prompts
    assert merged.run.profile["baselines"] == str(PROFILE.baselines)
    only = merge([folder], tmp_path / "cold", MergeOptions("cpu", scenarios=("cold",), keep_going=True))
    assert only.cell("pd-none").scenarios == {}
    odd = MergeOptions(expect="cpu", scenarios=("warm",))
    refused("there is no such scenario", [folder], tmp_path / "odd", odd)


def test_recorded_profile_that_cannot_be_read_is_said(tmp_path):
    folder = write(history([observation("single-none", 40)]), tmp_path / "part")
    refused("name it with --expect PROFILE", [folder], tmp_path / "merged")


def test_damaged_axes_of_a_recorded_profile_are_said(tmp_path):
    folder = write(in_variant(night(), "a"), tmp_path / "part")
    edited(folder, lambda r: r["profile"]["axes"]["lease"]["b"]["engine"].update(kv_lease_s="soon"))
    refused("name it with --expect PROFILE", [folder], tmp_path / "merged")
    code, output = cli("merge", str(folder), "--out", str(tmp_path / "merged"))
    assert code == 64 and "kv_lease_s" in output and "Traceback" not in output


def test_scenarios_that_no_part_was_asked_for_are_missing_without_the_prompts(tmp_path):
    """Their ids are in the profile; how many requests they have is not known here."""
    made = night("bitwise")
    raw = {**made.run.profile, "scenarios": [s.model_dump(mode="json") for s in PROFILE.scenarios]}
    folders = split(with_run(made, profile=raw), tmp_path)
    merged = merge(folders, tmp_path / "merged")
    assert {"refill", "late-pull"} <= set(merged.cell("pd-mtp").scenarios)
    assert "late-pull" not in merged.cell("single-mtp").scenarios
    judgement = judged(merged)
    assert judgement.verdict is Verdict.UNKNOWN
    found = [f.message for f in judgement.findings if f.cell == "pd-mtp" and f.scenario == "refill"]
    assert any("no part planned its requests for" in m and "refill" in m for m in found)
    assert next(c.verdict for c in judgement.cells if c.cell == "pd-mtp" and c.scenario == "cold") is Verdict.PASS
    only = merge(folders, tmp_path / "cold", MergeOptions(scenarios=("cold",)))
    assert only.cell("pd-mtp").scenarios == {} and judged(only).verdict is Verdict.PASS


def test_cold_prompts_that_no_part_was_asked_for_are_missing_without_the_prompts(tmp_path):
    made = refilled()
    kept = tuple(o for o in made.observations if o.scenario == REFILL.id)
    plans = {c.cell: plan_of([o for o in kept if o.cell == c.cell]) for c in made.run.cells}
    cells = tuple(c.model_copy(update={"planned": 0, "plan": plan_key(plans[c.cell])}) for c in made.run.cells)
    made = with_run(answering(made, kept), cells=cells, plans={plan_key(rows): rows for rows in plans.values()})
    merged = merge(split(made, tmp_path), tmp_path / "merged")
    assert merged.cell("pd-mtp").planned == 1
    cold = {c.cell: c.verdict for c in judged(merged).cells if c.scenario == "cold"}
    assert cold == dict.fromkeys(CELLS, Verdict.UNKNOWN)
    assert (
        merge(split(made, tmp_path / "b"), tmp_path / "only", MergeOptions(scenarios=("refill",)))
        .cell("pd-mtp")
        .planned
        == 0
    )


# --- a part by itself ------------------------------------------------------------------------------------------------


def test_part_says_what_trying_again_could_mend(tmp_path):
    made = night()

    def part(change: Change | None = same, **changes: object) -> History:
        own = part_of(made, PARTS[1], "part", **changes)
        return answering(
            own, (o if change is None else change(o) for o in own.observations if change or o.scenario != RESCORE)
        )

    assert missing_evidence(part()) == []
    assert missing_evidence(part(interrupted=True)) == ["the run was interrupted"]
    assert "requests failed" in missing_evidence(part(lambda o: o.model_copy(update={"error": "timeout"})))[0]
    assert missing_evidence(part(**failed(made, "pd-mtp"))) == ["pd-mtp is failed: engine died"]
    assert missing_evidence(part(None)) == [f"{len(LENGTHS)} outputs were not re-scored by the plain engine"]
    folder = write(part(), tmp_path / "part")
    write(part(**failed(made, "pd-mtp")), folder / SECOND)
    assert missing_evidence(load_history(folder)) == ["second-stage: pd-mtp is failed: engine died"]


@pytest.mark.parametrize("name", ["known", "M1", "plan-rows", "normal-tier"])
def test_run_that_an_earlier_version_recorded_is_merged_as_it_is_judged(tmp_path, name):
    """Those of schema 4 have no plans, those before schema 6 do not say when the KV pools were empty; one has a second
    stage."""
    merged = merge([RUNS / name], tmp_path / "merged", MergeOptions(armed=True, keep_going=True))
    assert merged.answered == load_history(RUNS / name).answered
    assert (load_stages(merged).second is None) is (name != "normal-tier")


def test_merged_run_that_cannot_be_written_leaves_the_folder_to_another_try(tmp_path, folders, monkeypatch):
    def full(*_: object) -> None:
        raise StorageError("no space left")

    out = tmp_path / "merged"
    monkeypatch.setattr("harness.commands.merge.write.write_run", full)
    with pytest.raises(StorageError, match="no space left"):
        merge(folders, out)
    assert list(out.iterdir()) == []
    monkeypatch.undo()
    assert merge(folders, out).run.run_id == "merged"


# --- the command -----------------------------------------------------------------------------------------------------


def test_command_judges_once_and_exits_with_the_verdict(tmp_path):
    folders = [str(f) for f in split(night("bitwise"), tmp_path)]
    code, output = cli("merge", folders[0], "--out", str(tmp_path / "merged"))
    assert code == 2 and "pd-mtp: no part ran it" in output and "Traceback" not in output
    code, output = cli("merge", *folders, "--out", str(tmp_path / "merged"), "--baselines", str(tmp_path))
    assert code == 2 and "UNKNOWN" in output
    assert {"report.html", "junit.xml", "summary.md"} <= {p.name for p in (tmp_path / "merged").iterdir()}


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["merge", "--help"], 0, "a retry is not"),
        (["merge", "--out", "/nowhere/x"], 64, "DIR"),
        (["merge", "/nowhere", "--out", "/nowhere/x"], 64, "no such folder"),
        (["merge", "/nowhere", "--keep-going", "--out", "/nowhere/x"], 2, "no parts that can be merged"),
        (["run", "--part", "--mutant", "M1"], 64, "--part and --mutant exclude each other"),
    ],
)
def test_bad_input(arguments, code, sentence):
    found, output = cli(*arguments)
    assert found == code, output
    assert sentence in output
