"""The code's structure: what a person must know to find a thing."""

from __future__ import annotations

import re

from tools import structure


def test_a_class_name_means_one_thing():
    assert structure.names_used_twice() == {}


def test_a_kind_of_scenario_is_told_apart_at_home_alone():
    """What a kind does differently is a method of its class."""
    assert structure.kinds_told_apart() == []


def test_only_code_counts_as_logic():
    source = (
        '"""Doc."""\n\nimport os\n\n\ndef f():\n    """Doc\n    again."""\n    # why\n    return [\n        1,\n    ]\n'
    )
    assert structure.logic_lines(source) == 4


def test_places_are_found_outside_their_home():
    (only,) = structure.found(re.compile(r"^class Verdict\b"), but="nowhere")
    assert only.startswith("harness/history/verdict.py:")
    assert structure.found(re.compile(r"^class Verdict\b"), but="history") == []
