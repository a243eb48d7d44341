"""Shipped profiles: the schema for editors, the whole text, and what the nightly one plans."""

from __future__ import annotations

import json

import jsonschema
import pytest
import yaml

from harness.engines.inventory import Inventory, jobs_of
from harness.errors import ProfileError
from harness.judging.power import sensitivity
from harness.profiles.availability import references_of
from harness.profiles.cells import all_cells, excluded_cells
from harness.profiles.load import SHIPPED_PROFILES, load_profile, read_profile, shipped_profile_names
from harness.profiles.model import Profile
from harness.profiles.schema import SCHEMA_FILE, full_text, profile_schema, schema_text
from harness.scheduling.model import Device
from harness.scheduling.planning import simulate
from harness.util.paths import REPOSITORY
from harness.workload.prepare import prepare
from tests.support.builders import extending


def test_schema_is_current():
    command = f"harness plan --schema > {SCHEMA_FILE.relative_to(REPOSITORY)}"
    assert SCHEMA_FILE.read_text() == schema_text(), f"out of date; renew it with: {command}"


@pytest.fixture(scope="module")
def by_schema() -> jsonschema.Draft202012Validator:
    schema = profile_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("name", shipped_profile_names())
def test_shipped_profiles_are_valid_by_the_schema(by_schema, name):
    by_schema.validate(yaml.safe_load((SHIPPED_PROFILES / f"{name}.yaml").read_text()))


def test_schema_finds_what_is_misspelt(by_schema):
    raw = {"extends": "cpu", "name": "mine", "engine": {"blok_size": 16}}
    with pytest.raises(jsonschema.ValidationError, match="blok_size"):
        by_schema.validate(raw)


@pytest.mark.parametrize("name", shipped_profile_names())
def test_full_text_is_the_same_profile(name):
    whole = yaml.safe_load(full_text(name))
    assert "extends" not in whole
    assert Profile.model_validate(whole) == read_profile(name)


def test_more_scenarios_replace_those_with_their_ids_and_follow_the_others(tmp_path):
    changed = {"id": "recovery", "kind": "recovery", "prompts": ["long-210"]}
    new = {"id": "mine", "kind": "chunked-prefill", "prompts": ["long-210"]}
    mine = load_profile(extending(tmp_path, more_scenarios=[new, changed])).scenarios
    cpu = load_profile("cpu").scenarios
    assert [s.id for s in mine] == [*(s.id for s in cpu), "mine"]
    assert [s.id for s in mine if s not in cpu] == ["recovery", "mine"]


def test_a_profile_that_extends_another_has_a_name_of_its_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("extends: cpu\n")
    with pytest.raises(ProfileError, match=r"expected a name, found none: .* for profile cpu, .* \(name: mine\)"):
        load_profile(str(path))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (
            {"extends": "cpu", "more_scenarios": "recovery"},
            "more_scenarios: expected a list of scenarios, found 'recovery'",
        ),
        ({"more_scenarios": [{"id": "a"}]}, "more_scenarios: expected a profile that extends another"),
        (
            {"extends": "cpu", "without_scenarios": ["recover"]},
            r"expected ids of inherited scenarios, found 'recover'; did you mean recovery\?",
        ),
        ({"extends": "cpu", "without_scenarios": ["qqq"]}, "found 'qqq'; there are prefix-hit, .*, apis$"),
        ({"extends": "cpu", "scenarios": [], "without_scenarios": ["apis"]}, "found 'apis'; there are none$"),
        ({"extends": "cpu", "more_scenarios": [{"kind": "aged"}]}, "more_scenarios: expected an id in each scenario"),
        ({"extends": "cpu", "without_scenarios": [7]}, "without_scenarios: expected a list of ids"),
    ],
)
def test_scenarios_that_cannot_be_added_or_left_out_are_refused(tmp_path, raw, words):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump({"name": "mine", **raw}))
    with pytest.raises(ProfileError, match=words):
        load_profile(str(path))


def test_every_model_of_the_nightly_profile_is_pinned_to_a_commit():
    references = [r for part in read_profile("nightly").written_parts for r in references_of(part).values()]
    assert len({r.repo for r in references}) == 6
    assert all(r.pinned for r in references)


def test_nightly_covers_methods_and_axes_and_says_why_cells_are_left_out():
    profile = read_profile("nightly")
    cells = all_cells(profile)
    assert {c.method.kind for c in cells} == {"none", "eagle3", "dflash", "mtp"}
    parts = [p.engine for p in profile.written_parts]
    assert {e.block_size for e in parts} == {16, 32, 64, 544}
    assert {e.model_runner for e in parts} == {"V1", "V2"}
    assert {e.kv_buffer_device for e in parts} == {"cuda", "cpu"}
    assert {(e.tensor_parallel.prefill, e.tensor_parallel.decode) for e in parts} == {(1, 1), (2, 1), (1, 2)}
    assert len({e.attention_backend for e in parts}) == 3
    assert all(len(reason) > 20 for reason in excluded_cells(profile).values())
    # Each cell can be compared with a single engine and the plain one of its own variant.
    ids = {c.id for c in cells}
    assert all({c.name.single, c.name.reference} <= ids for c in cells)


def test_nightly_is_planned_without_models_and_fits_two_gpus():
    prepared = prepare("nightly", [], planned=True)
    assert prepared.lacking == {}
    devices = tuple(Device(f"gpu-{n}", "node", 80.0, n) for n in range(2))
    inventory = Inventory(devices, {}, shared=True)
    jobs = jobs_of(prepared.plan, prepared.works, prepared.profile, inventory, prepared.rescores)
    schedule = simulate(jobs, devices)
    assert schedule.refused == {} and len(schedule.slots) == len(prepared.plan.groups) > 50
    apart = {s.placement.job.id: len(s.placement.devices) for s in schedule.slots}
    assert apart["pd-eagle3+llama31-8b"] == 2 and apart["pd-eagle3+llama31-8b.together"] == 1
    inventory = Inventory(devices[:1], {}, shared=True)
    one = simulate(jobs_of(prepared.plan, prepared.works, prepared.profile, inventory, prepared.rescores), devices[:1])
    # Engines of two ranks need two GPUs; everything else runs on one.
    assert set(one.refused) == {g.id for g in prepared.plan.groups if g.variant.endswith(("p2d1", "p1d2"))}


def test_gpu_profile_puts_a_pair_onto_one_gpu():
    prepared = prepare("gpu", [], planned=True)
    devices = (Device("gpu-0", "node", 24.0, 0),)
    jobs = jobs_of(prepared.plan, prepared.works, prepared.profile, Inventory(devices, {}, shared=True), False)
    assert simulate(jobs, devices).refused == {}
    assert json.loads(schema_text())["title"]


def test_every_cell_of_the_nightly_profile_can_see_what_it_must(tmp_path):
    """Otherwise it would be UNKNOWN every night. With fewer prompts in each stratum the plan says so."""
    prepared = prepare("nightly", [], planned=True)
    assert sensitivity(prepared).blind() == {}
    few = extending(tmp_path, "nightly", workload={"recipe": {"per_stratum": 12}})
    prepared = prepare(few, [], planned=True)
    blind = sensitivity(prepared).blind()["a change by 20 points in their weakest stratum"]
    assert {c.id for c in prepared.plan.cells if c.method.draft_tokens} == set(blind)
