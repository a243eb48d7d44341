"""Baselines: round trips, refusals, what is recorded and what never is, and what changed in words."""

from __future__ import annotations

import gc
import json
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from harness.baselines import index
from harness.baselines.build import Recorded, new_baselines, references_in, rows_from
from harness.baselines.diff import diff
from harness.baselines.lookup import Limits, differing, free_place, look_up, minor_distance, unused
from harness.baselines.model import Again, Baseline
from harness.baselines.store import load_baseline, stored, with_rows, write_baseline
from harness.cli.app import app
from harness.commands.baseline import compare, overview
from harness.errors import DataError, UsageError
from harness.history.folder import History
from harness.history.identity import identity_in
from harness.judging.references import References, lookups_for
from harness.prompts.model import PromptHeader, PromptSet
from harness.util.byte_cache import ByteCache
from harness.util.files import sha256_bytes
from harness.util.paths import REPOSITORY
from tests.support.builders import (
    change_final,
    garbled,
    history,
    identity,
    observation,
    provenance,
    rows,
    speculation,
    with_answers,
    with_profile,
    with_run,
    written_run,
)

LIMITS = Limits(90, 2)
STARTED = "2026-01-02T00:00:00+00:00"
LENGTHS = [31, 32, 40]


def write(folder: Path, method: str = "eagle3", lengths: list[int] = LENGTHS, name: str = "", **changes) -> Path:
    path = folder / f"{name or method}.json"
    write_baseline(path, identity(method, **changes), provenance(), rows(lengths, method))
    return path


def found(folder: Path, method: str = "eagle3", started: str = STARTED, **changes):
    return look_up(folder, identity(method, **changes), "cpu", LIMITS, started)


def test_round_trip_and_identity(tmp_path):
    loaded = load_baseline(write(tmp_path))
    assert loaded.rows == tuple(rows(LENGTHS, "eagle3"))
    assert found(tmp_path).baseline == loaded
    assert "topology" not in loaded.header.identity.model_dump()
    assert loaded.header.summary["acceptance_length_pooled"] > 1
    assert loaded.header.summary["again"] is None


def test_what_equal_runs_differ_by_survives_a_round_trip(tmp_path):
    row = rows([40], "eagle3")[0]
    twice = row.model_copy(update={"again": Again(divergence=3, gap=0.25, steps=9, accepted_at=(4, 2, 1))})
    same = row.model_copy(
        update={"prompt_id": "q", "again": Again(divergence=None, gap=None, steps=9, accepted_at=(4, 2, 1))}
    )
    path = tmp_path / "eagle3.json"
    write_baseline(path, identity("eagle3"), provenance(), [twice, same])
    loaded = load_baseline(path)
    assert loaded.rows == (twice, same) and loaded.noise_floor_nats == 0.25
    assert loaded.header.summary["again"]["diverged"] == 1


def test_runner_ups_and_gaps_survive_a_round_trip_and_files_without_them_are_refused(tmp_path):
    (row,) = rows([40], "none")
    told = row.model_copy(
        update={
            "close": ((2, 0.25), (7, 0.5)),
            "runner_ups": ((7, 99),),
            "gaps": (9.125, None, 0.25),
            "again": Again(divergence=7, gap=0.5, steps=0, accepted_at=(), token=99),
        }
    )
    path = tmp_path / "none.json"
    write_baseline(path, identity(), provenance(), [told])
    assert load_baseline(path).rows == (told,)
    lines = path.with_suffix(".csv").read_text().splitlines()
    older = "".join(",".join(line.split(",")[:-2]) + "\n" for line in lines)
    with pytest.raises(DataError, match=r"expected the columns .*again_token, gaps, found .*; record it again"):
        with_rows(path, load_baseline(path).header, older)


@pytest.mark.parametrize("drafted", [(), (3, 1)])
def test_logprobs_survive_a_round_trip_and_older_files_are_read_without(tmp_path, drafted):
    (row,) = rows([40], "none")
    told = row.model_copy(update={"logprobs": (-0.125, None, 0.0), "drafted": drafted, "accepted": drafted})
    path = tmp_path / "none.json"
    write_baseline(path, identity(), provenance(), [told])
    assert load_baseline(path).rows == (told,)
    write_baseline(path, identity(), provenance(), [row])
    assert "logprobs" not in path.with_suffix(".csv").read_text() and load_baseline(path).rows == (row,)


def test_committed_baselines_are_readable():
    for path in stored(REPOSITORY / "baselines" / "cpu"):
        assert load_baseline(path).rows


def test_files_are_stable_so_that_a_diff_is_short(tmp_path):
    one = write(tmp_path / "a"), write(tmp_path / "b")
    assert one[0].read_bytes() == one[1].read_bytes()
    changed = rows(LENGTHS, "eagle3")
    changed[1] = changed[1].model_copy(update={"accepted": (3, 3)})
    write_baseline(tmp_path / "b" / "eagle3.json", identity("eagle3"), provenance(), changed)
    before, after = ((tmp_path / d / "eagle3.csv").read_text().splitlines() for d in "ab")
    assert sum(a != b for a, b in zip(before, after, strict=True)) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts_sha256": "x"},
        {"target_sha256": "x"},
        {"drafter_sha256": "x"},
        {"block_size": 16},
        {"kv_dtype": "fp8"},
        {"hardware": "NVIDIA H200"},
        {"temperature": 1.0},
        {"extra_args": ["--quantization", "fp8"]},
        {"hf_overrides": {"rope_theta": 1.0}},
    ],
)
def test_other_identity_refuses_and_names_the_field_and_the_cure(tmp_path, changes):
    write(tmp_path)
    lookup = found(tmp_path, **changes)
    assert lookup.baseline is None and next(iter(changes)) in lookup.reason
    assert "harness baseline record --profile cpu" in lookup.reason


def test_what_an_engine_does_not_report_is_not_compared(tmp_path):
    write(tmp_path, attention_backend="CPU_ATTN")
    assert found(tmp_path).baseline is not None
    assert found(tmp_path, attention_backend="CPU_ATTN").baseline is not None
    assert "attention_backend" in found(tmp_path, attention_backend="FLASH").reason


def test_a_baseline_of_another_runner_is_used_where_the_profile_compares_across_it(tmp_path):
    path, across = write(tmp_path, model_runner="V1"), LIMITS._replace(across=("model_runner",))
    v2 = identity("eagle3", model_runner="V2")
    assert "model_runner" in look_up(tmp_path, v2, "cpu", LIMITS, STARTED).reason
    lookup = look_up(tmp_path, v2, "cpu", across, STARTED)
    assert lookup.path == path
    assert "this run has V2, the baseline V1" in lookup.notices[0]
    assert unused(tmp_path, [v2], across.across) == [] != unused(tmp_path, [v2])
    own = write(tmp_path, name="own", model_runner="V2")
    lookup = look_up(tmp_path, v2, "cpu", across, STARTED)
    assert (lookup.path, lookup.notices) == (own, ())


def test_missing_baseline_names_the_cure(tmp_path):
    assert "harness baseline record" in found(tmp_path).reason
    assert "harness baseline record" in found(tmp_path / "nowhere").reason


@pytest.mark.parametrize(
    ("ours", "theirs", "distance"),
    [
        ("0.32.0", "0.30.1", 2),
        ("0.33.0.dev12+gabc", "0.32.0", 1),
        ("1.0", "0.9", 91),
        (None, "0.1", None),
        ("x", "0.1", None),
    ],
)
def test_distance_of_versions(ours, theirs, distance):
    assert minor_distance(ours, theirs) == distance


def test_nearest_version_stands_in_with_a_notice(tmp_path):
    write(tmp_path, name="old", vllm="0.28.0")
    write(tmp_path, name="newer", vllm="0.31.0")
    lookup = found(tmp_path, vllm="0.32.0")
    assert lookup.path is not None and lookup.path.stem == "newer"
    assert "0.31.0" in lookup.notices[0] and "expired" not in lookup.notices[0]
    (tmp_path / "newer.json").unlink()
    (notice,) = found(tmp_path, vllm="0.32.0").notices
    assert "expired" in notice
    assert found(tmp_path, vllm="0.28.0").notices == ()
    (unknown,) = found(tmp_path, vllm="").notices
    assert unknown.endswith("this run has an unknown version: how far apart they are is not known")


def test_old_baseline_is_a_notice_by_the_date_of_the_run(tmp_path):
    write(tmp_path)
    assert found(tmp_path, started="2026-03-01T00:00:00").notices == ()
    (notice,) = found(tmp_path, started="2026-05-01T00:00:00").notices
    assert "120 days old: expired" in notice


def _shorten(folder: Path) -> None:
    table = folder / "eagle3.csv"
    table.write_text("\n".join(table.read_text().splitlines()[:-1]) + "\n")


@pytest.mark.parametrize(
    "damage",
    [
        _shorten,
        lambda f: (f / "eagle3.csv").unlink(),
        lambda f: (f / "eagle3.csv").write_text("x"),
        lambda f: (f / "eagle3.json").write_text("{"),
        lambda f: (f / "eagle3.json").write_text("[" * 10000),
        lambda f: (f / "eagle3.json").write_text("{}"),
        lambda f: (f / "eagle3.json").write_text((f / "eagle3.json").read_text().replace("baseline/2", "baseline/9")),
    ],
)
def test_damaged_baseline_is_no_baseline(tmp_path, damage):
    path = write(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError):
        load_baseline(path)
    lookup = found(tmp_path)
    assert lookup.baseline is None and "eagle3" in lookup.reason
    assert any("eagle3" in line for line in unused(tmp_path, [identity("eagle3")]))


def test_damaged_row_names_its_line(tmp_path):
    path = write(tmp_path)
    table = path.with_suffix(".csv")
    bad = table.read_text().replace("p32", "p32,7", 1)
    table.write_text(bad)
    text = path.read_text()
    path.write_text(text.replace(json.loads(text)["rows_sha256"], sha256_bytes(bad.encode())))
    with pytest.raises(DataError, match="line 3"):
        load_baseline(path)


# --- recording -------------------------------------------------------------------------------------------------------


def prompts(lengths: list[int] = LENGTHS, use: dict[int, str] | None = None) -> PromptSet:
    header = PromptHeader.model_construct(rows_sha256="0")
    items = [
        SimpleNamespace(id=f"p{n}", sha256=f"s{n}", expected=None, use=(use or {}).get(n, "cold")) for n in lengths
    ]
    return PromptSet.model_construct(header=header, prompts=tuple(items))


def run_of(lengths: list[int] = LENGTHS, methods: tuple[str, ...] = ("none", "eagle3"), **changes) -> History:
    made = history([observation(f"single-{m}", n) for m in methods for n in lengths])
    sent = changes.get("prompts_sha256", prompts().sha256)
    ids = {m: identity(m, prompts_sha256=sent).model_dump(mode="json") for m in methods}
    return with_run(made, **{"identities": ids, **changes})


def record_from(*given, **more) -> tuple[Recorded, ...]:
    return new_baselines(*given, **more).recorded


def with_cells(run: History, **changes) -> History:
    return with_run(run, cells=tuple(c.model_copy(update=changes) for c in run.run.cells))


def test_an_interrupted_run_gives_baselines_of_its_complete_cells(tmp_path):
    plain, drafting = (c.model_copy(update={"state": "complete"}) for c in run_of().run.cells)
    run = with_run(run_of(interrupted=True), cells=(plain, drafting.model_copy(update={"state": "interrupted"})))
    made = new_baselines(run, run_of(run_id="again"), {"": prompts()}, tmp_path)
    assert [r.method for r in made.recorded] == ["none"]
    assert made.left_out == {"single-eagle3": "the run left it interrupted; 3 of 3 prompts answered"}
    assert made.once == {}
    found = references_in(run, {m: identity_in(run, m) for m in ("none", "eagle3")})
    assert found["none"].baseline is not None
    assert "expected single-eagle3 to be complete" in found["eagle3"].reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"state": "interrupted", "reason": "by the user"}, "by the user; 3 of 3 prompts answered"),
        ({"left_over": ("decode: pid 7",)}, "its engines may still be running"),
    ],
)
def test_cells_that_are_not_complete_are_left_out(tmp_path, changes, reason):
    made = new_baselines(with_cells(run_of(interrupted=True), **changes), None, {"": prompts()}, tmp_path)
    assert made.recorded == () and list(tmp_path.iterdir()) == []
    assert made.left_out == {"single-none": reason, "single-eagle3": reason}


def test_a_repetition_that_is_not_complete_gives_no_noise(tmp_path):
    again = with_cells(run_of(run_id="again", interrupted=True), state="interrupted", reason="by the user")
    made = new_baselines(run_of(), again, {"": prompts()}, tmp_path)
    why = "by the user; 3 of 3 prompts answered"
    assert made.once == {"single-none": why, "single-eagle3": why} and made.left_out == {}
    assert all(r.again is None for item in made.recorded for r in load_baseline(item.path).rows)


def test_record_writes_every_single_cell_and_says_what_is_new(tmp_path):
    recorded = record_from(run_of(), run_of(run_id="again"), {"": prompts()}, tmp_path)
    assert [r.method for r in recorded] == ["none", "eagle3"]
    assert recorded[0].change == ("new: 3 prompts",)
    assert load_baseline(recorded[1].path).noise_floor_nats == 0.0
    assert record_from(run_of(), None, {"": prompts()}, tmp_path)[1].change == ()
    # Without a repetition the measured noise is kept.
    assert load_baseline(recorded[1].path).noise_floor_nats == 0.0


def test_accepting_a_matrix_run_keeps_prompts_that_it_did_not_send_cold(tmp_path):
    record_from(run_of(), None, {"": prompts()}, tmp_path)
    later = run_of([31, 32])
    the_set = prompts(use={40: "scenario"})
    with pytest.raises(
        UsageError, match=r"1 of 3 prompts were not sent cold, .* only; .*record .*harness baseline record -p test"
    ):
        record_from(later, None, {"": the_set}, tmp_path)
    with pytest.raises(UsageError, match=r"1 of 3 prompts were not sent cold.* has none; nothing"):
        record_from(later, None, {"": the_set}, tmp_path / "new", keep_unasked=True)
    # Rows of two versions of vLLM must not get into one baseline, which names one.
    newer = {m: {**i, "vllm": "0.33.0"} for m, i in later.run.identities.items()}
    with pytest.raises(UsageError, match=r"1 of 3 prompts were not sent cold.* has vLLM \?, 3 rows; nothing"):
        record_from(with_run(later, identities=newer), None, {"": the_set}, tmp_path, keep_unasked=True)
    recorded = record_from(later, None, {"": the_set}, tmp_path, keep_unasked=True)
    assert "1 prompts that the run did not send cold keep their rows" in recorded[0].change[-1]
    assert [r.prompt_id for r in load_baseline(recorded[0].path).rows] == ["p31", "p32", "p40"]
    with pytest.raises(UsageError, match="it was not sent"):
        record_from(later, None, {"": prompts()}, tmp_path, keep_unasked=True)


@pytest.mark.parametrize(
    ("run", "sentence"),
    [
        (run_of(mutants=("M8",)), r"injected faults \(M8\)"),
        (run_of(prompts_sha256="other"), "found a run with different ones"),
        (run_of([31]), "it was not sent"),
    ],
)
def test_nothing_is_recorded_from_a_run_that_is_no_reference(tmp_path, run, sentence):
    with pytest.raises(UsageError, match=sentence):
        record_from(run, None, {"": prompts()}, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("again", "sentence"),
    [
        (run_of(), "this is the run itself"),
        (run_of(run_id="again", prompts_sha256="x"), "with different prompts"),
        (run_of(run_id="again", mutants=("M1",)), r"injected faults \(M1\)"),
        (
            run_of(
                run_id="again",
                identities={"none": identity("none", dtype="bfloat16", prompts_sha256="0").model_dump(mode="json")},
            ),
            "found a run of something else .dtype",
        ),
    ],
)
def test_repetition_must_be_one(tmp_path, again, sentence):
    with pytest.raises(UsageError, match=sentence):
        record_from(run_of(), again, {"": prompts()}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_speculation_alone_needs_a_known_answer(tmp_path):
    made = new_baselines(run_of(methods=("eagle3",)), None, {"": prompts()}, tmp_path)
    assert made.recorded == () and "expected single-none in the same run" in made.left_out["single-eagle3"]


def test_speculation_alone_is_verified_by_the_stored_baseline_of_the_plain_engine(tmp_path):
    """Servers that run already are recorded one by one."""
    record_from(run_of(methods=("none",)), None, {"": prompts()}, tmp_path)
    (made,) = new_baselines(run_of(methods=("eagle3",)), None, {"": prompts()}, tmp_path).recorded
    assert made.method == "eagle3"


def test_the_stored_baseline_of_the_plain_engine_of_another_vllm_verifies_nothing(tmp_path):
    record_from(run_of(methods=("none",)), None, {"": prompts()}, tmp_path)
    other = identity("eagle3", prompts_sha256="0").model_copy(update={"vllm": "0.99.0"}).model_dump(mode="json")
    run = run_of(methods=("eagle3",), identities={"eagle3": other})
    assert (
        "its baseline of the same vLLM" in new_baselines(run, None, {"": prompts()}, tmp_path).left_out["single-eagle3"]
    )


def test_speculation_with_other_tokens_than_the_stored_plain_engine_is_refused(tmp_path):
    record_from(run_of(methods=("none",)), None, {"": prompts()}, tmp_path)
    before = {p.name for p in tmp_path.iterdir()}
    right = run_of(methods=("eagle3",))
    wrong = [
        o.model_copy(update={"legs": (o.final.model_copy(update={"output_ids": o.final.output_ids[::-1]}),)})
        for o in right.of("single-eagle3").values()
    ]
    made = history(wrong)
    ids = {"eagle3": identity("eagle3", prompts_sha256="0").model_dump(mode="json")}
    with pytest.raises(UsageError, match="has other tokens than on the plain engine"):
        new_baselines(with_run(made, identities=ids), None, {"": prompts()}, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == before


def test_changed_rows_do_not_keep_the_old_noise(tmp_path):
    record_from(run_of(), run_of(run_id="again"), {"": prompts()}, tmp_path)
    changed = [
        change_final(o, speculation=speculation((0,) * (len(o.final.output_ids) - 1)))
        if (o.cell, o.prompt_id) == ("single-eagle3", "p32")
        else o
        for o in run_of().observations
    ]
    recorded = record_from(with_answers(run_of(), changed), None, {"": prompts()}, tmp_path)
    assert [r.again is None for r in load_baseline(recorded[1].path).rows] == [False, True, False]


def test_wrong_answers_and_missing_metrics_are_never_recorded():
    good = history([observation("single-none", 32)])
    output = observation("single-none", 32).final.output_ids
    assert len(rows_from(good, "single-none", {"p32": "h"}, {"p32": output})) == 1
    with pytest.raises(UsageError, match="expected the known answer"):
        rows_from(good, "single-none", {"p32": "h"}, {"p32": (5, 6)})
    blind = history([change_final(observation("single-eagle3", 32), speculation=None)])
    with pytest.raises(UsageError, match="accepted drafts per step"):
        rows_from(blind, "single-eagle3", {"p32": "h"}, {})


def test_speculation_that_changes_tokens_is_never_recorded(tmp_path):
    run = run_of()
    wrong = [garbled(o, at=0) if o.cell == "single-eagle3" else o for o in run.observations]
    with pytest.raises(UsageError, match="has other tokens than on the plain engine"):
        record_from(with_answers(run, wrong), None, {"": prompts()}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_run_is_a_reference_without_files():
    other = run_of()
    found_there = references_in(other, {m: identity(m, prompts_sha256="0") for m in ("none", "eagle3", "mtp")})
    assert len(found_there["eagle3"].baseline.rows) == 3 and found_there["mtp"].baseline is None
    assert "single-mtp" in found_there["mtp"].reason
    assert references_in(other, {"eagle3": identity("eagle3", block_size=16)})["eagle3"].baseline is None


def test_prompts_of_scenarios_are_compared_with_the_longest_plain_answer_of_the_other_run():
    """Their rows are in a baseline, which asks everything cold; in another run they are in its scenarios."""
    whole = observation("single-none", 64, scenario="refill", max_tokens=192)
    short = observation("single-none", 64, scenario="pressure", max_tokens=2)
    short = change_final(short, output_ids=whole.final.output_ids[:2])
    odd = garbled(observation("single-none", 64, scenario="features", feature="grammar", max_tokens=192))
    other = history([observation("single-none", 32), garbled(observation("single-none", 32, scenario="refill")), whole])
    other = with_answers(other, (*other.observations, short, odd))
    other = with_run(other, identities={"none": identity("none").model_dump(mode="json")})
    rows = references_in(other, {"none": identity("none")})["none"].baseline.by_prompt()
    assert {p: r.output_ids for p, r in rows.items()} == {
        o.prompt_id: o.final.output_ids for o in (observation("single-none", 32), whole)
    }


def test_what_the_other_run_asked_of_pairs_alone_is_compared_with_the_baseline(tmp_path):
    ids = {"none": identity("none", prompts_sha256=prompts().sha256).model_dump(mode="json")}
    whole = [observation("single-none", 32), observation("pd-none", 32), observation("pd-none", 40, scenario="append")]
    run = with_profile(with_run(history(whole), identities=ids), baselines=str(tmp_path / "stored"))
    run = run.model_copy(update={"own": True})
    other = tmp_path / "other"
    written_run(other, run, run_id="other")
    found = lookups_for(run, References(against=other))["none"]
    assert list(found.baseline.by_prompt()) == ["p32"] and found.notices == ()
    record_from(run_of(), run_of(run_id="again"), {"": prompts()}, tmp_path / "stored")
    found = lookups_for(run, References(against=other))["none"]
    assert [(r.prompt_id, r.again) for r in found.baseline.rows] == [("p32", None), ("p40", None)]
    assert found.notices == (
        f"1 prompt (p40) that single engines of {other} were not asked: compared with the baseline",
    )


def test_other_settings_get_a_file_of_their_own(tmp_path):
    write(tmp_path)
    assert free_place(tmp_path, identity("mtp")).name == "mtp.json"
    assert free_place(tmp_path, identity("eagle3", block_size=16)).name.startswith("eagle3-")
    assert differing(identity("eagle3"), identity("eagle3", vllm="9.9")) == []


def test_profiles_may_share_a_folder_of_baselines(tmp_path):
    assert overview("cpu", None)[1] == overview("cpu-dynamic-k", None)[1] == []
    shutil.copytree(REPOSITORY / "baselines" / "cpu", tmp_path / "own")
    (sentence,) = overview("cpu", tmp_path / "own")[1]
    assert sentence.endswith("dynamic-eagle3.json is unused: no cell of profile cpu uses dynamic-eagle3")


def test_unused_and_orphaned_baselines_are_reported(tmp_path):
    write(tmp_path)
    write(tmp_path, "mtp")
    write(tmp_path, name="eagle3-16", block_size=16)
    (tmp_path / "lost.csv").write_text("")
    text = "\n".join(unused(tmp_path, [identity("eagle3")]))
    assert "eagle3-16.json is unused: it differs in block_size" in text
    assert "lost.csv are orphaned" in text
    # Another profile may have the folder, or other cells of the same one the method.
    assert "baseline eagle3.json" not in text and "mtp.json" not in text


# --- diff ------------------------------------------------------------------------------------------------------------


def changed(path: Path) -> Baseline:
    base = load_baseline(path)
    new = list(base.rows)
    new[0] = new[0].model_copy(update={"accepted": (0,) * len(new[0].accepted)})
    new[1] = new[1].model_copy(update={"output_ids": (9, *new[1].output_ids[1:])})
    return base.model_copy(update={"rows": tuple(new)})


def test_diff_says_it_in_words(tmp_path):
    base = load_baseline(write(tmp_path))
    assert diff(base, base) == []
    text = "\n".join(diff(base, changed(tmp_path / "eagle3.json")))
    assert "tokens of 1 of 3 prompts" in text and "accepted drafts of 1 of 3 prompts: p31" in text
    assert "points, 99 % interval" in text and "acceptance length (pooled)" in text


def test_diff_of_engines_that_draft_otherwise_has_no_figure_that_is_none(tmp_path):
    plain = load_baseline(write(tmp_path / "plain", "none"))
    base = load_baseline(write(tmp_path / "eagle3"))
    both = [*diff(plain, base), *diff(base, plain)]
    assert "draft_tokens: 0 → 3" in both and any("accepted drafts of 3 of 3" in line for line in both)
    assert not any("nan" in line or line.startswith("position") for line in both)
    # Positions that only one of them drafts are not compared.
    fewer = changed(tmp_path / "eagle3" / "eagle3.json")
    only = fewer.header.identity.model_copy(update={"draft_tokens": 2})
    fewer = fewer.model_copy(update={"header": fewer.header.model_copy(update={"identity": only})})
    assert [line.partition(":")[0] for line in diff(fewer, base) if "points" in line] == ["position 0", "position 1"]
    # Of a single prompt there is no interval.
    one = [b.model_copy(update={"rows": b.rows[:1]}) for b in (base, fewer)]
    (first, *_) = (line for line in diff(*one) if line.startswith("position"))
    assert first.endswith("points)") and "interval" not in first and "nan" not in first


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("nowhere", "a", "there is no baseline, and no folder of them, at {old}; correct the path"),
        ("a", "nowhere.json", "there is no baseline, and no folder of them, at {new}; correct the path"),
        ("a", "a/eagle3.json", "one is a file and the other a folder"),
        ("bad.jsonl", "a/eagle3.json", "{old}: expected the .json file of a baseline"),
        ("a", "empty", "there are no baselines in {new}; correct the path"),
        ("empty", "a", "there are no baselines in {old}; correct the path"),
    ],
)
def test_diff_of_what_are_no_baselines_says_what_is_wrong(tmp_path, old, new, sentence):
    write(tmp_path / "a")
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.jsonl").touch()
    with pytest.raises(UsageError) as refused:
        compare(tmp_path / old, tmp_path / new)
    assert sentence.format(old=tmp_path / old, new=tmp_path / new) in str(refused.value)


def test_diff_command(tmp_path):
    old, new = write(tmp_path / "a"), tmp_path / "b" / "eagle3.json"
    base = changed(old)
    write_baseline(new, base.header.identity, base.header.provenance, base.rows)
    run = CliRunner()
    same = run.invoke(app, ["baseline", "diff", str(old), str(old)])
    assert (same.exit_code, same.output.strip()) == (0, "no difference")
    other = run.invoke(app, ["baseline", "diff", str(tmp_path / "a"), str(tmp_path / "b")])
    assert other.exit_code == 1 and "accepted drafts of 1 of 3" in other.output


def test_again_of_a_run_that_parts(tmp_path):
    again = run_of(run_id="again")
    parted = [
        change_final(
            o, output_ids=(*o.final.output_ids[:5], 9), speculation=speculation((1, 1)) if "eagle" in o.cell else None
        )
        for o in again.observations
    ]
    again = with_answers(again, parted)
    row = load_baseline(record_from(run_of(), again, {"": prompts()}, tmp_path)[0].path).rows[0]
    assert row.again is not None
    assert (row.again.divergence, row.again.gap) == (5, 9.0)


def _baselines_of_variants(folder: Path, count: int) -> list[Path]:
    """One baseline for each of so many block sizes, all of one method."""
    out = []
    for size in range(1, count + 1):
        path = folder / f"eagle3-{size:02d}.json"
        write_baseline(path, identity("eagle3", block_size=size), provenance(), rows([31, 32, 40 + size], "eagle3"))
        out.append(path)
    return out


def test_rows_are_read_of_the_baseline_that_fits_and_headers_once(tmp_path, monkeypatch):
    _baselines_of_variants(tmp_path, 6)
    headers, tables = [], []
    load_header, read_table = index.load_header, index.read_table
    monkeypatch.setattr(index, "load_header", lambda path: headers.append(path.name) or load_header(path))
    monkeypatch.setattr(index, "read_table", lambda path, header: tables.append(path.name) or read_table(path, header))
    ours = index.BaselineIndex(tmp_path)
    assert (len(headers), tables) == (6, [])
    for size in range(1, 7):
        found = look_up(tmp_path, identity("eagle3", block_size=size), "cpu", LIMITS, STARTED, ours)
        assert found.path is not None and found.path.name == f"eagle3-{size:02d}.json"
    assert tables == [f"eagle3-{size:02d}.json" for size in range(1, 7)]
    # Each is verified once more when its rows are read, and never for another one.
    assert sorted(headers) == sorted(2 * tables)
    assert not look_up(tmp_path, identity("eagle3", block_size=99), "cpu", LIMITS, STARTED, ours).found
    assert len(tables) == 6


def test_rows_of_lineups_that_are_not_judged_are_forgotten(tmp_path, monkeypatch):
    monkeypatch.setattr(index, "_CACHE", ByteCache(0, 2))
    _baselines_of_variants(tmp_path, 6)
    lookups = [found(tmp_path, block_size=size) for size in range(1, 7)]
    held = []
    for lookup in lookups:
        baseline = lookup.baseline
        assert baseline is not None and baseline.rows[2].prompt_id == f"p{40 + baseline.header.identity.block_size}"
        held.append(weakref.ref(baseline))
        del baseline
    gc.collect()
    assert [r() is not None for r in held] == [False] * 4 + [True] * 2
    assert lookups[0].baseline == load_baseline(tmp_path / "eagle3-01.json")


def test_a_stored_baseline_that_changes_while_it_is_judged_is_not_judged_on(tmp_path, monkeypatch):
    lookup = found(write(tmp_path).parent)
    monkeypatch.setattr(index, "_CACHE", ByteCache(0, 2))
    write_baseline(tmp_path / "eagle3.json", identity("eagle3"), provenance(), rows([31, 32], "eagle3"))
    with pytest.raises(DataError, match="was changed while it was read"):
        _ = lookup.baseline


def test_a_damaged_baseline_does_not_hide_the_next_nearest(tmp_path):
    for name, version in (("eagle3", "0.32.0"), ("eagle3-2", "0.31.0")):
        write_baseline(
            tmp_path / f"{name}.json", identity("eagle3", vllm=version), provenance(), rows(LENGTHS, "eagle3")
        )
    (tmp_path / "eagle3.csv").write_text("x")
    assert found(tmp_path, vllm="0.32.0").path == tmp_path / "eagle3-2.json"
    (tmp_path / "eagle3-2.csv").write_text("x")
    assert "do not match the hash" in found(tmp_path, vllm="0.32.0").reason
