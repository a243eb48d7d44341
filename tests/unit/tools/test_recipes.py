"""The recipes of CONTRIBUTING: their places are there, and a walk tells which of them a tool names."""

from __future__ import annotations

import shutil

import pytest

from harness.util.paths import REPOSITORY
from tools.recipes import __main__ as program
from tools.recipes.places import Raised, Renewed, Written
from tools.recipes.walk import Complaint, Recipe, walk

RECIPES = program.RECIPES.values()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_every_place_of_a_recipe_is_there(recipe, tmp_path):
    for place in recipe.places:
        if isinstance(place, Renewed):
            assert (REPOSITORY / place.under).exists()
            continue
        target = tmp_path / place.path
        if not target.exists() and (REPOSITORY / place.path).exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / place.path, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        assert place.put(tmp_path) == (place.path,)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: r.name)
def test_contributing_says_what_a_recipe_costs(recipe):
    """The whole row is compared where the recipe is walked."""
    (row,) = (line for line in contributing() if line.startswith(f"| {recipe.name} |"))
    files = {place.path for place in recipe.places if not isinstance(place, Renewed)}
    assert len(files) <= recipe.most_files
    assert row.startswith(f"| {recipe.name} | {len(files)} | {len(recipe.places)} |")


def contributing() -> list[str]:
    return (REPOSITORY / "CONTRIBUTING.md").read_text().split(program.HEADER, 1)[1].splitlines()


# --- places ----------------------------------------------------------------------------------------------------------


def test_text_is_put_in_front_of_other_text_at_the_end_or_into_a_new_file(tmp_path):
    (tmp_path / "a").write_text("one\nthree\n")
    Written("a", "", (), "two\n", before="three").put(tmp_path)
    Written("a", "", (), "four\n").put(tmp_path)
    Written("b", "", (), "new\n").put(tmp_path)
    assert (tmp_path / "a").read_text() == "one\ntwo\nthree\nfour\n"
    assert (tmp_path / "b").read_text() == "new\n"


def test_a_number_is_raised_by_one(tmp_path):
    (tmp_path / "a").write_text("1 of 49 bugs, 49 cats\n")
    Raised("a", "", (), r"(\d+) bugs").put(tmp_path)
    assert (tmp_path / "a").read_text() == "1 of 50 bugs, 49 cats\n"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Written("a", "", (), "x", before="gone"), "a: expected 'gone' once, found it 0 times"),
        (Written("a", "", (), "x", before="o"), "found it 2 times"),
        (Raised("a", "", (), r"(\d+)"), "found nothing like it"),
    ],
)
def test_a_place_that_is_not_there_is_refused(place, words, tmp_path):
    (tmp_path / "a").write_text("foo")
    with pytest.raises(LookupError, match=words):
        place.put(tmp_path)


# --- the walk --------------------------------------------------------------------------------------------------------

FIRST, NAMED, MUTE = (Written(name, "", (), name) for name in ("first", "named", "mute"))
OLD = Complaint("tests", "FAILED: was so before, and says named")


def said_of(root, recipe):
    """A tool that wants the file ``named`` once ``first`` is there, and always has the same complaint."""
    wants = (root / "first").exists() and not (root / "named").exists()
    return [OLD, Complaint("mypy", "a.py:1: error: expected named")][: 1 + wants]


def test_a_walk_tells_who_names_a_place(tmp_path):
    recipe = Recipe("toy", (FIRST, MUTE, NAMED), (), most_files=3, most_renewed=0)
    found = walk(recipe, tmp_path, said_of)
    assert [(s.place, s.named_by and s.named_by.tool) for s in found.steps] == [
        (FIRST, None),
        (NAMED, "mypy"),
        (MUTE, None),
    ]
    assert [s.place for s in found.unnamed] == [MUTE] and not found.holds
    assert found.edited == ("first", "mute", "named")
    assert "mute: \n    NAMED BY NOBODY" in program.told(found)
    assert program.table([found]).splitlines()[2:] == ["| toy | 3 | 3 | 1 | 0 | 0 | 1 | 0 |"]


@pytest.mark.parametrize(("most", "holds"), [(2, True), (1, False)])
def test_a_walk_holds_when_every_place_is_named_and_few_files_change(most, holds, tmp_path):
    assert walk(Recipe("toy", (FIRST, NAMED), (), most, 0), tmp_path, said_of).holds is holds


def test_a_place_that_the_recipe_does_not_list_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"with all places there, found\n  mypy: a\.py:1"):
        walk(Recipe("toy", (FIRST,), (), 1, 0), tmp_path, said_of)


def test_an_unknown_recipe_is_a_usage_error(capsys):
    assert program.main(["scenery"]) == 64
    assert "expected recipes among scenario, check, mutant, found scenery" in capsys.readouterr().err
