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
        ({"methods": [{"kind": "eagle3", "draftr": "x"}]}, "draftr: unknown key; did you mean drafter?"),
    ],
)
def test_problems_are_said_in_plain_words(tmp_path, keys, line):
    words = said(tmp_path, **keys)
    assert line in words, words
    assert "Input should" not in words and "Value error" not in words


def test_what_a_validator_says_is_said_once(tmp_path):
    words = said(tmp_path, engine={"extra_args": {"port": 1}})
    assert "Value error" not in words and words.count("found") == 1, words
