"""Every kind of scenario is whole, and the page says of each what its module does."""

from __future__ import annotations

import re
from functools import cache
from typing import get_args

import pytest

from harness.profiles.load import load_profile, shipped_profile_names
from harness.profiles.scenarios import Scenario
from harness.scenarios.base import Kind
from harness.scenarios.kinds import KINDS
from harness.util.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "scenarios.md").read_text()


def rows(header: str) -> list[list[str]]:
    """Return the cells of the table below a header, as far as its first column names something."""
    after = PAGE.split(header, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in after]


@cache
def shipped() -> dict[str, Scenario]:
    """Return the scenarios of the shipped profiles by id; the name of a kind means a scenario of that kind."""
    profiles = [load_profile(name) for name in shipped_profile_names()]
    found = [s for profile in profiles for part in profile.written_parts for s in part.scenarios]
    return {s.kind: s for s in found} | {s.id: s for s in found if s.id not in KINDS or s.id == s.kind}


def test_every_kind_has_a_module():
    kinds = {get_args(one.model_fields["kind"].annotation)[0] for one in get_args(get_args(Scenario)[0])}
    assert KINDS.keys() == kinds


def test_a_kind_without_a_proof_cannot_be_made():
    class Unproven(Kind):
        def stages(self, config, prompts, chosen):
            return []

        def impossible(self, config, profile, prompts):
            return None

    with pytest.raises(TypeError, match="gaps"):
        Unproven()


def test_the_page_tells_of_every_kind():
    named = {name for row in rows("| scenario | what is sent |") for name in re.findall(r"`([a-z-]+)`", row[0])}
    told = {shipped()[name].kind for name in named if name in shipped()}
    # Crowds and traces have sections of their own.
    assert KINDS.keys() - told == {"crowd"} and "| a crowd `proves` |" in PAGE


def test_the_page_says_where_each_scenario_runs():
    wrong = []
    for name, single, pd, *_ in rows("| scenario | single |"):
        for one in re.findall(r"`([a-z-]+)`", name):
            scenario = shipped()[one]
            if [single.startswith("✔"), pd.startswith("✔")] != [t in scenario.topologies for t in ("single", "pd")]:
                wrong.append(one)
    assert wrong == []
