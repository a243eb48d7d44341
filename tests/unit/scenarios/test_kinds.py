"""Every kind of scenario is whole, and what lacks one of its places is told which."""

from __future__ import annotations

import re
from functools import cache
from typing import get_args

import pytest

from harness.profiles import scenarios
from harness.profiles.load import load_profile, shipped_profile_names
from harness.profiles.scenarios import Scenario
from harness.scenarios.base import Kind
from harness.scenarios.kinds import KINDS, _name_of
from harness.util.paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "scenarios.md").read_text()
CONFIGS = get_args(get_args(Scenario)[0])
PROOFS = "tests/unit/workload/test_scenarios.py"
SENT, RUN = "| scenario | what is sent |", "| scenario | single |"
OWN_SECTIONS = {"crowd"}
"""Kinds that the page has sections for, instead of rows."""


def rows(header: str) -> list[list[str]]:
    """Return the cells of the table below a header, as far as its first column names something."""
    after = PAGE.split(header, 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in after]


def names_in(header: str) -> list[str]:
    return [name for row in rows(header) for name in re.findall(r"`([a-z-]+)`", row[0])]


@cache
def shipped() -> dict[str, Scenario]:
    """Return the scenarios of the shipped profiles by id; the name of a kind means a scenario of that kind."""
    profiles = [load_profile(name) for name in shipped_profile_names()]
    found = [s for profile in profiles for part in profile.written_parts for s in part.scenarios]
    return {s.kind: s for s in found} | {s.id: s for s in found if s.id not in KINDS or s.id == s.kind}


def kinds_in(header: str) -> set[str]:
    """Return the kinds of the scenarios that a table names, by their ids or by the kind itself."""
    return {shipped()[name].kind if name in shipped() else name for name in names_in(header)}


def test_every_configuration_is_in_the_union():
    """Otherwise no profile can name it."""
    lost = [one.__name__ for one in scenarios._Scenario.__subclasses__() if one not in CONFIGS]
    assert lost == [], f"harness/profiles/scenarios.py: expected the union Scenario to have {', '.join(lost)}"


def test_every_kind_has_a_module():
    kinds = {get_args(one.model_fields["kind"].annotation)[0] for one in CONFIGS}
    lost = [f"harness/scenarios/{kind.replace('-', '_')}.py" for kind in sorted(kinds - KINDS.keys())]
    assert lost == [], f"{', '.join(lost)}: expected a class derived from Kind"
    assert KINDS.keys() == kinds


def test_a_kind_is_named_by_its_configuration():
    assert {_name_of(type(kind)) for kind in KINDS.values()} == KINDS.keys()
    assert type(KINDS["appended-token"]).__module__ == "harness.scenarios.appended_token"


def test_a_kind_without_a_proof_cannot_be_made():
    class Unproven(Kind):
        def stages(self, config, prompts, chosen):
            return []

        def impossible(self, config, profile, prompts):
            return None

    with pytest.raises(TypeError, match="gaps"):
        Unproven()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_in_a_shipped_profile(kind):
    assert kind in shipped(), f"harness/profiles/cpu-full.yaml: expected a scenario of the kind {kind}, found none"


@pytest.mark.parametrize("kind", KINDS)
def test_the_proof_of_every_kind_is_tested(kind):
    tested = f'"kind": "{kind}"' in (REPOSITORY / PROOFS).read_text()
    assert tested, f"{PROOFS}: expected a test of the proof of {kind}"


@pytest.mark.parametrize(("header", "title"), [(SENT, "what is sent"), (RUN, "Which combinations run")])
@pytest.mark.parametrize("kind", sorted(KINDS.keys() - OWN_SECTIONS))
def test_the_page_tells_of_every_kind(kind, header, title):
    assert kind in kinds_in(header), f"docs/scenarios.md: expected a row for {kind} in the table '{title}'"


def test_the_page_has_a_section_on_crowds():
    assert {"crowd"} == OWN_SECTIONS and "| a crowd `proves` |" in PAGE


def test_the_page_says_where_each_scenario_runs():
    wrong = []
    for name, single, pd, *_ in rows(RUN):
        for one in re.findall(r"`([a-z-]+)`", name):
            scenario = shipped()[one]
            if [single.startswith("✔"), pd.startswith("✔")] != [t in scenario.topologies for t in ("single", "pd")]:
                wrong.append(one)
    assert wrong == []
