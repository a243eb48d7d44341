"""Models as plain text: a folder where there is one, else a name on the hub."""

from __future__ import annotations

import pytest

from harness.errors import ProfileError
from harness.profiles.load import load_profile, read_profile
from harness.profiles.model_reference import named_on_hub
from harness.util.paths import REPOSITORY
from tests.support.builders import extending

COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"


@pytest.mark.parametrize(
    ("text", "repo", "revision", "pinned"),
    [
        ("Qwen/Qwen3-4B", "Qwen/Qwen3-4B", "main", None),
        ("Qwen/Qwen3-4B@v2", "Qwen/Qwen3-4B", "v2", None),
        (f"Qwen/Qwen3-4B@{COMMIT}", "Qwen/Qwen3-4B", COMMIT, COMMIT),
    ],
)
def test_names_stand_for_repositories_everywhere_in_a_profile(tmp_path, text, repo, revision, pinned):
    methods = [{"kind": "none"}, {"kind": "mtp", "drafter": text}]
    profile = read_profile(extending(tmp_path, target=text, methods=methods))
    for model in (profile.target, profile.methods[1].drafter):
        assert (model.repo, model.revision, model.pinned, model.trust_remote_code) == (repo, revision, pinned, False)
    axes = {"model": {"mine": {"target": text, "methods": methods}}}
    (part,) = read_profile(extending(tmp_path, axes=axes)).written_parts
    assert part.target == part.methods[1].drafter == profile.target


def test_a_folder_goes_before_a_name(tmp_path):
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert named_on_hub("org/name", tmp_path) is None
    assert named_on_hub("org/name", tmp_path / "org") == {"repo": "org/name", "revision": "main"}


@pytest.mark.parametrize(
    "text", ["name", "./org/name", "org/name/more", "/org/name", "org/name@", "../name", "org/na me"]
)
def test_other_texts_are_paths(tmp_path, text):
    assert named_on_hub(text, tmp_path) is None


def test_a_revision_that_is_none_is_refused(tmp_path):
    with pytest.raises(ProfileError, match="all 40 lower-case hex digits of the commit, found 7 digits"):
        read_profile(extending(tmp_path, target="Qwen/Qwen3-4B@0e9e39f"))


def test_a_name_that_is_not_here_says_how_to_get_it_and_that_it_may_be_a_path(tmp_path):
    profile = load_profile(
        extending(tmp_path, target="Qwen/Qwen3-4B", tokenizer=str(REPOSITORY / "models/probe/tokenizer"))
    )
    assert "mine.yaml --download`, or correct the path if it is a folder" in profile.target.reason


def test_missing_prompts_are_asked_for_by_the_file_that_wants_them(tmp_path):
    recipe = {"dataset": "a/b", "revision": COMMIT, "block_sizes": [32], "lookaheads": [4], "per_stratum": 1}
    path = extending(tmp_path, workload={"prompts": "none.jsonl", "recipe": recipe})
    with pytest.raises(ProfileError) as caught:
        read_profile(path, with_prompts=True)
    assert f"`harness prompts build recipe --profile {path}`" in str(caught.value)
