"""What is wrong with a profile is said in plain words, with the key that was meant."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from harness.errors import ProfileError
from harness.profiles.load import load_profile


def said(folder: Path, **keys: object) -> str:
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"format": 1, "name": "mine", "extends": "cpu", **keys}))
    with pytest.raises(ProfileError) as refused:
        load_profile(str(path))
    return str(refused.value)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"topologies": "pd"}, "topologies: expected a list, found 'pd'"),
        ({"engine": {"kv_blocks": "many"}}, "engine.kv_blocks: expected a whole number, found 'many'"),
        ({"engine": {"max_num_seqs": 0}}, "engine.max_num_seqs: expected a number of at least 1, found 0"),
        ({"engine": {"enforce_eager": "perhaps"}}, "engine.enforce_eager: expected true or false, found 'perhaps'"),
        ({"engine": {"device": "gpuu"}}, "expected 'cpu' or 'gpu', found 'gpuu'; did you mean gpu?"),
        ({"engine": None}, "engine: expected keys with values, found nothing"),
        (
            {"engine": {"tensor_parallel": 8}},
            "engine.tensor_parallel: expected keys with values (prefill, decode), found 8",
        ),
        ({"workload": {"per_stratum": 1.5}}, "workload.per_stratum: expected a whole number, found 1.5"),
        ({"description": ["a"]}, "description: expected text, found a list"),
        ({"engine": {"block_sise": 16}}, "engine.block_sise: unknown key; did you mean block_size?"),
        ({"topologys": ["pd"]}, "topologys: unknown key; did you mean topologies?"),
        ({"workload": {"foo": 1}}, "workload.foo: unknown key; remove it or check its spelling"),
        # The key that another kind of scenario has is not meant.
        ({"scenarios": [{"kind": "prefix-hit", "id": "x", "wher": "p"}]}, "wher: unknown key; did you mean where?"),
        ({"scenarios": [{"kind": "prefix-hit", "id": "x"}]}, "pairs: expected this key, found none; add it"),
        (
            {"scenarios": [{"kind": "prefix-hitt", "id": "x"}]},
            "as 'kind', found 'prefix-hitt'; did you mean prefix-hit?",
        ),
        ({"methods": [{"kind": "eagle3", "draftr": "x"}]}, "  methods.eagle3.draftr: unknown key; did you mean dra"),
        ({"methods": [{"kind": "eagl3", "drafter": "x"}]}, "  methods.eagl3: expected none, eagle3, dflash, mtp, or a"),
        ({"methods": [{"kind": "eagl3", "drafter": "x"}]}, "found 'eagl3' without one; did you mean eagle3?"),
        ({"routes": []}, "routes: expected a list with at least 1 of them, found an empty list"),
        ({"exclude": [{"cells": "x"}]}, "  exclude.0.reason: expected this key, found none; add it"),
        (
            {"more_scenarios": [{"kind": "sampled", "id": "foo", "temperatur": 1.0}]},
            "  scenarios.foo.temperatur: unknown key; did you mean temperature?",
        ),
        (
            {"more_scenarios": [{"kind": "sampled", "id": "foo", "temperatur": 1.0}]},
            "  scenarios.foo.prompts: expected this key, found none; add it",
        ),
    ],
)
def test_problems_are_said_in_plain_words(tmp_path, keys, line):
    words = said(tmp_path, **keys)
    assert line in words, words
    assert "Input should" not in words and "Value error" not in words


@pytest.mark.parametrize(
    "keys", [{"routes": ["clent"]}, {"methods": [{"kind": "none", "k": 1}, {"kind": "eagle3", "draftr": "x"}]}]
)
def test_a_list_whose_elements_are_wrong_is_not_called_empty(tmp_path, keys):
    assert "expected a list with at least" not in said(tmp_path, **keys)


def test_elements_that_an_axis_replaces_are_not_called_by_the_names_of_others(tmp_path):
    few = {"scenarios": [{"kind": "sampled", "id": "mine", "temperatur": 1.0}]}
    words = said(tmp_path, axes={"states": {"all": {"scenarios": []}, "few": few}})
    assert "scenarios.0.sampled.temperatur: unknown key" in words, words


def test_what_a_validator_says_is_said_once(tmp_path):
    words = said(tmp_path, engine={"extra_args": {"port": 1}})
    assert "Value error" not in words and words.count("found") == 1, words
