"""Profiles with axes: what varies, how the combinations are called, and that each is judged by its own evidence."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.commands import later_stages as operations
from harness.errors import ProfileError, UsageError
from harness.history.folder import History, write_run
from harness.history.identity import identity_of
from harness.history.layout import SECOND
from harness.judging.checks.model import RegisteredTest
from harness.judging.checks.registry import Tripped
from harness.judging.checks.rescored import applies
from harness.judging.evidence import Evidence, FoundOfCells
from harness.judging.references import load_stages
from harness.profiles.axes import part_of
from harness.profiles.cells import CellName, all_cells, excluded_cells, make_plan, select_cells
from harness.profiles.load import load_profile, read_profile
from harness.profiles.model import Judging, Profile
from harness.runner.options import RunOptions
from harness.util.progress import Reporter
from harness.workload.outputs import Outputs
from harness.workload.prepare import narrowed, prepare
from tests.support.builders import change_final, changed_profile, extending, history, observation, with_run
from tests.support.program import harness

AXES = {
    "runner": {"v1": {"engine": {"model_runner": "V1"}}, "v2": {"engine": {"model_runner": "V2"}}},
    "lease": {"lease30": {"engine": {"kv_lease_s": 30}}, "lease10": {"engine": {"kv_lease_s": 10}}},
    "plainest": {"all": {}, "few": {"methods": [{"kind": "none"}], "scenarios": []}},
}


def written(tmp_path: Path, **changes: object) -> str:
    return extending(tmp_path, **{"name": "axes", "axes": AXES, **changes})


def test_each_varies_one_thing_at_a_time(tmp_path):
    profile = load_profile(written(tmp_path))
    assert [p.variant for p in profile.parts] == ["v1", "v1.few", "v1.lease10", "v2", "v2.few", "v2.lease10"]
    part = profile.part("v2.lease10")
    assert (part.engine.model_runner, part.engine.kv_lease_s, part.axes) == ("V2", 10, {})
    assert profile.part("v1").engine.kv_lease_s == 30
    assert [m.kind for m in profile.part("v1.few").methods] == ["none"]
    assert profile.part("v2.few").scenarios == ()


def test_product_is_every_combination(tmp_path):
    profile = load_profile(written(tmp_path, combine="product"))
    assert len(profile.parts) == 8 and profile.part("v1.lease10.few").engine.kv_lease_s == 10


def test_a_profile_that_extends_another_keeps_the_rest(tmp_path):
    ours, cpu = load_profile(written(tmp_path)), load_profile("cpu")
    assert ours.target == cpu.target and ours.engine.block_size == cpu.engine.block_size
    assert ours.scenarios == cpu.scenarios and ours.name == "axes"


def test_ids_name_the_variant_and_are_read_back(tmp_path):
    cells = all_cells(load_profile(written(tmp_path)))
    assert len(cells) == len({c.id for c in cells})
    for cell in cells:
        assert CellName.of(cell.id) == cell.name
    name = CellName.of("pd-eagle3-router+v2.lease10")
    assert name == CellName("pd", "eagle3", "router", "v2.lease10")
    assert name.single == "single-eagle3+v2.lease10" and name.reference == "single-none+v2.lease10"
    assert (name.lineup, name.plain) == ("eagle3+v2.lease10", "none+v2.lease10")
    assert CellName.of_lineup(name.lineup).id == name.single


def test_groups_stay_within_a_variant_and_the_plain_one_is_last(tmp_path):
    profile = load_profile(written(tmp_path))
    plan = make_plan(profile, all_cells(profile))
    for group in plan.groups:
        assert {c.variant for c in group.cells} == {group.variant}
    for part in profile.parts:
        mine = [g for g in plan.groups if g.variant == part.variant]
        assert [g.rescores for g in mine] == [False] * (len(mine) - 1) + [True]
    assert {c.id for g in plan.groups for c in g.cells} == {c.id for c in all_cells(profile)}


def test_cells_are_chosen_and_left_out_by_variant(tmp_path):
    reason = "vLLM refuses it"
    excluded = [{"cells": "*-router+*", "reason": "one route is enough"}, {"cells": "*+v2.lease10", "reason": reason}]
    profile = load_profile(written(tmp_path, exclude=excluded))
    assert not [c for c in all_cells(profile) if c.variant == "v2.lease10" or c.routed]
    assert excluded_cells(profile)["pd-eagle3+v2.lease10"] == reason
    assert [c.id for c in select_cells(profile, ["*-none+v1"])] == ["pd-none+v1", "single-none+v1"]
    with pytest.raises(UsageError, match="there is no such cell"):
        select_cells(profile, ["*+v3"])


def test_one_variant_of_what_was_prepared_is_a_plain_profile(tmp_path):
    prepared = prepare(written(tmp_path), ["*-none+v1", "*-none+v2"], ["cold"])
    one = narrowed(prepared, "v2")
    assert one.profile.axes == {} and one.profile.engine.model_runner == "V2"
    assert [g.id for g in one.plan.groups] == ["pd-none+v2"]
    assert one.requests * 2 == prepared.requests


def test_recorded_data_of_a_variant_says_what_it_was_run_with(tmp_path):
    raw = load_profile(written(tmp_path)).model_dump(mode="json")
    assert part_of(raw, "v2.lease10")["engine"]["model_runner"] == "V2"
    assert part_of(raw, "v2.lease10")["engine"]["kv_lease_s"] == 10
    assert part_of({"target": "x"}, "") == {"target": "x"}


def test_outputs_are_scored_by_the_plain_engine_of_their_variant():
    outputs = Outputs()
    outputs.add(observation("pd-eagle3+v1", 40))
    outputs.add(observation("pd-eagle3+v2", 40))
    outputs.add(change_final(observation("single-none+v2", 40), output_ids=(9, 9)))
    assert (outputs.count("v1"), outputs.count("v2"), outputs.count("")) == (1, 2, 0)


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        ({"runner": {}}, "expected values by name"),
        ({"runner": {"v1": {"judging": {"tier": "normal"}}}}, "expected settings among"),
        ({"runner": {"a b": {}}}, "expected names of letters"),
        ({"runner": {16: {}}}, "quote it if YAML reads it as a number"),
        ({"one": {"x": {}}, "two": {"x": {}}}, "expected unique names"),
        ({"runner": {"v1": {"engine": {"model_runner": "V1"}}, "v2": {}}}, "expected it to set engine.model_runner"),
        ({"runner": {"v1": {"engine": {"model_runner": "V9"}}}}, "model_runner"),
        ({"runner": {"ok": {}, "bad": {"engine": {"block_size": 2}}}}, "block_size"),
        ({"models": {"here": {}, "gone": {"target": "nowhere"}}}, "expected a model folder"),
        (
            {"block": {name: {"engine": {"block_size": 32}} for name in ("b32", "b16")}},
            "axes: expected values that differ, found b32 and b16 with the same settings",
        ),
        ({"runner": AXES["runner"], "plainest": {"all": {}, "same": {}}}, "found v1 and v1.same"),
    ],
)
def test_axes_that_cannot_be_expanded_are_refused_in_words(tmp_path, axes, sentence):
    with pytest.raises(ProfileError, match=sentence):
        load_profile(written(tmp_path, axes=axes))


@pytest.mark.parametrize(
    ("parent", "sentence"),
    [("nothing", "extends: expected a shipped profile"), (3, "extends: expected the name"), ("loop.yaml", "itself")],
)
def test_profiles_that_extend_nothing_are_refused(tmp_path, parent, sentence):
    with pytest.raises(ProfileError, match=sentence):
        load_profile(extending(tmp_path, parent, "loop"))


def test_a_plan_says_which_variant_cannot_run(tmp_path):
    """P has one row for the requests that a scenario sends together."""
    values = {"alike": {}, "narrow": {"engine": {"prefill": {"max_num_seqs": 1}}}}
    source = changed_profile(tmp_path, lambda raw: raw.update(axes={"p": values}))
    printed = harness("plan", "--profile", source, "--cell", "pd-none*")
    assert printed.code == 0, printed.output
    assert "cannot run: pd-none+narrow: scenario concurrent cannot occur" in printed.output


@pytest.mark.parametrize(
    ("device", "tier", "said", "wanted"),
    [
        ("gpu", "bitwise", None, True),
        ("gpu", "auto", None, False),
        ("gpu", "auto", "1", True),
        ("gpu", "bitwise", "0", False),
        ("cpu", "bitwise", "1", False),
    ],
)
def test_kernels_are_batch_invariant_as_the_tier_or_the_profile_says(device, tier, said, wanted):
    profile = load_profile("gpu" if device == "gpu" else "cpu")
    engine = profile.engine.model_copy(update={"env": {} if said is None else {"VLLM_BATCH_INVARIANT": said}})
    judging = profile.judging.model_copy(update={"tier": tier})
    profile = profile.model_copy(update={"engine": engine, "judging": judging})
    assert profile.batch_invariant is wanted
    assert identity_of(profile, profile.methods[0], "p").batch_invariant is wanted


def test_the_kernels_of_the_crowds_are_variants_with_baselines_of_their_own():
    parts = {p.variant: p.batch_invariant for p in load_profile("smollm2-gpu-crowds").written_parts}
    assert parts == {"usual": False, "invariant": True}
    assert all(p.batch_invariant for p in read_profile("nightly-invariant").written_parts)


def test_an_unknown_variant_is_refused():
    with pytest.raises(UsageError, match="it has no axes"):
        load_profile("cpu").part("v2")


def test_a_part_is_a_valid_profile_of_its_own(tmp_path):
    for part in load_profile(written(tmp_path)).parts:
        assert Profile.model_validate(part.model_dump(mode="json")) == part


NORMAL = {"scenarios": [], "routes": ["client"], "exclude": [], "judging": {"tier": "normal", "stages": 1}}


def test_second_stage_of_one_variant_belongs_to_the_run_of_all(tmp_path):
    """It has the identities of what failed alone."""
    identities = {"none+v1": {"target": "a"}, "none+v2": {"target": "b"}}
    made = history([observation("single-none+v1", 40)], folder=tmp_path)
    first = with_run(made, identities=identities)
    (tmp_path / SECOND).mkdir()
    for lineup, target, belongs in (("none+v2", "b", True), ("none+v2", "c", False), ("none+v3", "b", False)):
        write_run(tmp_path / SECOND, made.run.model_copy(update={"identities": {lineup: {"target": target}}}))
        assert (load_stages(first).second is not None) is belongs


def test_second_stage_is_run_without_the_cells_that_cannot_run(tmp_path, monkeypatch):
    path = written(tmp_path, axes={"runner": AXES["runner"]}, **NORMAL)
    prepared = prepare(path, ["*-none", "*-eagle3"])._replace(lacking={"pd-eagle3+v1": "no drafter"})
    seen = []
    test = RegisteredTest("pd-eagle3+v2", "cold", "acceptance-single")
    monkeypatch.setattr(operations, "tripped_once", lambda *_: Tripped([test], []))
    monkeypatch.setattr(operations, "baselines_for", lambda *_: {})
    monkeypatch.setattr(operations, "record_into", lambda _folder, again, *_: seen.append(again))
    with Reporter(1.0) as reporter:
        made = history([observation("single-none+v2", 40)], folder=tmp_path)
        operations.later_stages(prepared, made, reporter, RunOptions())
    [again] = seen
    assert {w.cell.id for w in again.works} == {"pd-eagle3+v2", "single-eagle3+v2", "single-none+v2"}
    assert again.lacking == {}


def test_cells_without_requests_lack_nothing(tmp_path):
    """Single cells have nothing to do in scenarios that need a prefill engine."""
    methods = [{"kind": "none"}, {"kind": "eagle3", "drafter": {"repo": "a/b", "revision": "0" * 40}}]
    prepared = prepare(written(tmp_path, axes={}, methods=methods), [], ["late-pull"])
    assert set(prepared.lacking) == {"pd-eagle3"}
    assert set(prepared.lacking) <= {w.cell.id for w in prepared.works}


@pytest.mark.parametrize(
    ("axes", "sentence"),
    [
        ({"d": {"a": {"engine": {"device": "cpu"}}, "b": {"engine": {"device": "gpu"}}}}, "engine.device"),
        ({"r": {"a": {"workload": {"rescore": True}}, "b": {"workload": {"rescore": False}}}}, "workload.rescore"),
    ],
)
def test_what_belongs_to_the_whole_run_is_no_axis(tmp_path, axes, sentence):
    with pytest.raises(ProfileError, match=f"expected {sentence} to be the same for all values"):
        load_profile(written(tmp_path, axes=axes))


def test_a_setting_that_an_inherited_axis_overrides_is_refused(tmp_path):
    above = written(tmp_path)
    with pytest.raises(ProfileError, match=r"found engine\.kv_lease_s, which axis lease sets"):
        load_profile(extending(tmp_path, above, engine={"kv_lease_s": 20}))
    for whole in ({"prefill": 1}, 16):
        ranks = {"ranks": {"p2": {"engine": {"tensor_parallel": {"prefill": 2}}}}}
        with pytest.raises(ProfileError, match=r"found engine\.tensor_parallel.*, which axis ranks sets"):
            load_profile(extending(tmp_path, written(tmp_path, axes=ranks), engine={"tensor_parallel": whole}))
    above = written(tmp_path)
    own = {"lease": {"lease20": {"engine": {"kv_lease_s": 20}}}}
    assert load_profile(extending(tmp_path, above, engine={"block_size": 64}, axes=own)).axes.keys() >= {"lease"}


def test_outputs_are_to_be_rescored_where_the_variant_has_a_plain_engine():
    made = history([observation("pd-none", 40), observation("single-none", 40)])
    both = with_run(made, rescore=True)
    alone = with_run(both, cells=made.run.cells[:1])

    def asked(made: History) -> bool:
        [view] = [v for v in Evidence(made, {}, Judging(), FoundOfCells()).views() if v.id == "pd-none"]
        return applies(view)

    assert asked(both)
    assert not asked(alone)
