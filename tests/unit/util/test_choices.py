"""Names that are misspelt: the nearest ones are named, and what is only written otherwise is understood."""

from __future__ import annotations

import re

import pytest

from harness.errors import ProfileError, UsageError
from harness.mutants.catalogue import MUTANTS
from harness.profiles.cells import select_cells
from harness.profiles.load import load_profile, require_profile
from harness.util.choices import matching, named, nearest
from harness.util.text import listed
from harness.workload.cells import choose_scenarios

PROFILE = load_profile("cpu")
FAULTS = list(MUTANTS)


@pytest.mark.parametrize(
    ("pattern", "cells"),
    [
        ("pd-eagle3 ", ["pd-eagle3"]),
        ("PD-Eagle3", ["pd-eagle3"]),
        (" *-NONE", ["pd-none", "single-none"]),
        ("pd-eagle3*", ["pd-eagle3", "pd-eagle3-router"]),
    ],
)
def test_blanks_and_letter_case_do_not_matter(pattern, cells):
    assert [c.id for c in select_cells(PROFILE, [pattern])] == cells


def test_a_name_as_it_is_written_comes_before_one_in_other_letters():
    assert matching("A*", ["Ab", "ab"]) == ["Ab"]
    assert (named("-m", " m4", FAULTS, "fault", "list"), named("-m", "M1C", FAULTS, "fault", "list")) == ("M4", "M1c")
    assert require_profile("CPU") == require_profile(" cpu") == "cpu"


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("pd-eagel3", "there is no such cell of profile cpu; did you mean pd-eagle3 or pd-eagle3-router?"),
        ("pd-eagel*", "did you mean pd-eagle3"),
        ("nothing", "there are pd-none, pd-none-router, .*, single-mtp .`harness list cells -p cpu` lists all"),
        ("pd-none,single-none", "repeat the option: --cell pd-none --cell single-none"),
    ],
)
def test_the_nearest_cells_are_named(pattern, words):
    with pytest.raises(UsageError, match=words.replace("?", r"\?")):
        select_cells(PROFILE, [pattern])


def test_the_command_that_lists_all_names_the_profile_as_it_was_named():
    mine = PROFILE.model_copy(update={"name": "mine"})
    listing = re.escape("(`harness list cells -p 'my own.yaml'` lists all)")
    with pytest.raises(UsageError, match=rf"no such cell of profile mine; there are .* {listing}$"):
        select_cells(mine, ["nothing"], "my own.yaml")
    with pytest.raises(
        UsageError, match=r"did you mean prefix-hit .*\? \(`harness list scenarios -p a.yaml` lists all\)$"
    ):
        choose_scenarios(mine, ["prefx-hit"], "a.yaml")


def test_of_a_recorded_profile_whose_file_is_not_known_the_cells_alone_are_named():
    mine = PROFILE.model_copy(update={"name": "mine"})
    with pytest.raises(UsageError, match=r"there are pd-none, .* single-mtp$"):
        select_cells(mine, ["nothing"])


def test_the_nearest_scenario_profile_and_fault_are_named():
    with pytest.raises(UsageError, match=r"there is no such scenario of profile cpu; did you mean prefix-hit"):
        choose_scenarios(PROFILE, ["prefx-hit"])
    with pytest.raises(UsageError, match="repeat the option: --scenario cold --scenario prefix-hit"):
        choose_scenarios(PROFILE, ["cold,prefix-hit"])
    with pytest.raises(ProfileError, match=r"found 'gpuu', which is neither; did you mean gpu\?"):
        require_profile("gpuu")
    with pytest.raises(ProfileError, match=r"found 'gpu.yml': there is no such file; did you mean the shipped profile"):
        require_profile("gpu.yml")
    with pytest.raises(UsageError, match=r"--mutant 'M99': there is no such fault; did you mean M9"):
        named("--mutant", "M99", FAULTS, "fault", "harness list faults")


def test_a_path_without_a_file_is_no_misspelt_name(tmp_path):
    for path in (tmp_path / "m.yaml", tmp_path / "m"):
        with pytest.raises(ProfileError) as error:
            require_profile(str(path))
        assert str(error.value).endswith("there is no such file; correct the path")
    with pytest.raises(ProfileError, match="that is a folder; correct the path"):
        require_profile(str(tmp_path))


def test_a_long_list_is_cut():
    with pytest.raises(UsageError, match=rf"there are M1, .* and {len(FAULTS) - 12} more"):
        named("--mutant", "?", FAULTS, "fault", "harness list faults")


def test_what_is_like_nothing_has_no_nearest_name():
    assert nearest("zzz", FAULTS) == nearest("", FAULTS) == []
    assert (
        listed(["a"], "or") == "a"
        and listed(["a", "b"], "or") == "a or b"
        and listed(["a", "b", "c"], "or") == "a, b or c"
    )
