"""Methods as data: any name with what vLLM's ``--speculative-config`` takes; the short forms stay as they are."""

from __future__ import annotations

import json
import shutil

import pytest

from harness.errors import ProfileError
from harness.history.identity import identity_of
from harness.profiles.cells import CellName, all_cells
from harness.profiles.load import load_profile
from harness.profiles.methods import SHORT_FORMS, modules_of
from harness.profiles.recorded_profile import RecordedProfile
from harness.util.paths import REPOSITORY
from harness.workload.prepare import prepare
from tests.support.builders import extending
from tests.support.engines import command_of, option

NGRAM = {"kind": "ngram", "num_speculative_tokens": 5, "speculative_config": {"prompt_lookup_max": 4}}
EAGLE3 = str(REPOSITORY / "models" / "probe" / "eagle3")


def written(tmp_path, *methods: dict, **changes) -> str:
    return extending(tmp_path, **{"scenarios": [], "methods": [{"kind": "none"}, *methods], **changes})


def given_to_vllm(source: str, kind: str) -> dict:
    return json.loads(option(command_of("decode", source, kind), "--speculative-config"))


def test_a_method_without_a_drafter_has_cells_and_engines(tmp_path):
    source = written(tmp_path, NGRAM)
    assert given_to_vllm(source, "ngram") == {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}
    assert {"pd-ngram", "single-ngram"} <= {c.id for c in all_cells(load_profile(source))}
    (method,) = [m for m in load_profile(source).methods if m.kind == "ngram"]
    assert (method.lookahead, method.traits.up_to, method.drafter_path) == (0, True, None)


def test_what_vllm_was_given_can_be_pasted(tmp_path):
    pasted = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4, "some_new_key": [1, "word"]}
    source = written(tmp_path, {"kind": "lookup-4", "speculative_config": pasted})
    assert given_to_vllm(source, "lookup-4") == pasted
    assert CellName.of("pd-lookup-4-router") == CellName("pd", "lookup-4", "router")


def test_a_drafter_under_a_name_of_its_own(tmp_path):
    parallel = {
        "kind": "p-eagle",
        "drafter": EAGLE3,
        "num_speculative_tokens": 3,
        "prefill_num_speculative_tokens": 1,
        "speculative_config": {"method": "eagle3", "parallel_drafting": True},
    }
    source = written(tmp_path, {"kind": "eagle3", "drafter": EAGLE3}, parallel)
    assert given_to_vllm(source, "p-eagle") == {
        "method": "eagle3",
        "model": EAGLE3,
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }
    method = load_profile(source).methods[2]
    assert (method.lookahead, method.traits.drops_block, method.on_prefill.draft_tokens) == (3, True, 1)


def test_two_drafters_of_one_kind_have_baselines_of_their_own(tmp_path):
    source = written(tmp_path, NGRAM, {**NGRAM, "kind": "longer", "speculative_config": {"method": "ngram"}})
    profile = load_profile(source)
    one, two = (identity_of(profile, m, "p") for m in profile.methods[1:])
    assert one.speculative_config == {"method": "ngram", "prompt_lookup_max": 4}
    assert (one.method, two.method) == ("ngram", "longer")


@pytest.mark.parametrize("kind", SHORT_FORMS)
def test_identities_of_the_short_forms_have_no_new_key(kind):
    profile = load_profile("cpu")
    method = next(m for m in profile.methods if m.kind == kind)
    recorded = json.loads((REPOSITORY / "baselines" / "cpu" / f"{kind}.json").read_text())["identity"]
    ours = identity_of(profile, method, recorded["prompts_sha256"], recorded["vllm"]).model_dump(mode="json")
    assert ours.keys() == recorded.keys()
    assert RecordedProfile(profile.model_dump(mode="json")).traits(kind) == method.traits


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ({"kind": "ngram"}, "expected none, eagle3, dflash, mtp, or a name of your own with speculative_config"),
        ({**NGRAM, "num_speculative_tokens": 0}, "expected a number of at least 1, found 0"),
        ({"kind": "ngram", "speculative_config": {}}, "num_speculative_tokens: expected this key, found none"),
        (
            {**NGRAM, "kind": "none"},
            "kind: none cannot name a method; names end in no -router and are none of none, target, tokenizer",
        ),
        ({**NGRAM, "kind": "ngram-router"}, "kind: ngram-router cannot name a method"),
        ({**NGRAM, "kind": "n/gram"}, "kind: expected text of the form"),
        ({**NGRAM, "drafter": EAGLE3}, "expected no `drafter`, since ngram drafts without a model"),
        ({**NGRAM, "kind": "mine"}, "expected `method`, the method of vLLM that mine stands for"),
        ({**NGRAM, "kind": "draft_model"}, "expected `drafter`, the model of draft_model"),
        ({**NGRAM, "speculative_config": {"model": "org/name"}}, "expected no model.*name the model as `drafter`"),
        ({**NGRAM, "speculative_config": {"method": "custom_class"}}, "runs code that the profile names"),
        ({**NGRAM, "speculative_config": {"x": ["/etc/passwd"]}}, "neither paths nor code, found '/etc/passwd'"),
        (
            {**NGRAM, "speculative_config": {"num_speculative_tokens": 4}},
            "expected one number, found 5 and, in speculative_config, 4",
        ),
        (
            {"kind": "suffix", "num_speculative_tokens": 8, "speculative_config": {}},
            "expected suffix_decoding_max_cached_requests: 0 in the speculative_config of suffix, found none",
        ),
    ],
)
def test_methods_that_make_no_sense_are_refused(tmp_path, method, words):
    with pytest.raises(ProfileError, match=words):
        load_profile(written(tmp_path, method))


def test_suffix_decoding_without_a_memory_is_deterministic(tmp_path):
    config = {"suffix_decoding_max_cached_requests": 0}
    source = written(tmp_path, {"kind": "suffix", "num_speculative_tokens": 8, "speculative_config": config})
    assert load_profile(source).methods[1].traits.up_to


def test_the_example_of_lookup_can_be_planned_wherever_it_is_copied_to(tmp_path):
    prepared = prepare(shutil.copy(REPOSITORY / "examples" / "ngram.yaml", tmp_path), [])
    assert prepared.profile.baselines == tmp_path / "baselines" / "ngram"
    assert {c.id for c in prepared.plan.cells} == {"pd-ngram", "single-ngram", "pd-none", "single-none"}
    assert all(work.scripts for work in prepared.works)


@pytest.mark.parametrize(
    ("kind", "drafter", "k", "target", "own", "modules"),
    [
        ("mtp", "x", 3, 1, 3, 3),
        ("mtp", "x", 2, 1, 3, 2),
        ("mtp", "x", 4, 1, 2, 2),
        ("mtp", "x", 3, 3, None, 1),
        ("mtp", None, 3, 2, None, 2),
        ("mtp", "x", 3, 1, 0, 1),
        ("mtp", "x", 3, 1, "3", 1),
        ("eagle3", "x", 3, 3, 3, 1),
        ("none", None, None, 3, None, 1),
    ],
)
def test_modules_are_those_of_the_config_that_the_drafter_has(kind, drafter, k, target, own, modules):
    method = next(m for m in load_profile("cpu").methods if m.kind == kind)
    if kind != "none":
        changes = {"num_speculative_tokens": k} | ({} if drafter else {"drafter": None})
        method = method.model_copy(update=changes)
    key = "num_nextn_predict_layers"
    assert modules_of(method, {key: target}, {} if own is None else {key: own}) == modules


@pytest.mark.parametrize(
    ("config", "modules"),
    [
        ({"num_nextn_predict_layers": 3, "architectures": ["MiMoV2FlashForCausalLM"]}, 1),
        ({"num_nextn_predict_layers": 3, "architectures": ["ExaoneMoEForCausalLM"]}, 3),
        ({"mtp_config": {"num_nextn_predict_layers": 2}}, 2),
        ({"mtp_config": None}, 1),
        ({"mtp_config": [3]}, 1),
        ({"architectures": 3, "num_nextn_predict_layers": 3}, 3),
        ({"architectures": ["Step3p7ForConditionalGeneration"], "text_config": {"num_nextn_predict_layers": 3}}, 3),
        # Of others, vLLM looks at the outer config alone.
        ({"architectures": ["KimiK3ForCausalLM"], "text_config": {"num_nextn_predict_layers": 3}}, 1),
    ],
)
def test_modules_that_vllm_reckons_otherwise_than_by_the_usual_key(config, modules):
    method = next(m for m in load_profile("cpu").methods if m.kind == "mtp")
    assert modules_of(method.model_copy(update={"drafter": None}), config, {}) == modules


@pytest.mark.parametrize(("on_p", "on_d"), [(1, 3), (3, 1)])
def test_several_modules_need_as_many_drafts_on_p_as_on_d(tmp_path, on_p, on_d):
    drafter = str(REPOSITORY / "models" / "probe" / "mtp3")
    drafts = {"num_speculative_tokens": on_d, "prefill_num_speculative_tokens": on_p}
    unlike = {**drafts, "speculative_config": {"method": "mtp"}}
    methods = [{"kind": "none"}, {"kind": "mtp3", "drafter": drafter, **unlike}]
    prepared = prepare(extending(tmp_path, "cpu-mtp3", methods=methods), [], ["cold"])
    assert list(prepared.lacking) == ["pd-mtp3"]
    assert "as many drafts on P as on D" in prepared.lacking["pd-mtp3"]
    assert f"found {on_p} and {on_d}" in prepared.lacking["pd-mtp3"]


def test_modules_of_a_method_with_a_name_of_its_own():
    method = next(m for m in load_profile("cpu-hybrid-mtp").methods if m.kind == "hybrid-mtp")
    assert modules_of(method, {}, {"num_nextn_predict_layers": 3}) == 3
