"""Lines of answers are read once with all doubts, and no key in them may stand there twice."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path

import pytest

from harness.errors import DataError
from harness.history.index import RecordedFile
from harness.history.records import Observation, Sibling, Streamed
from harness.util import json_io
from tests.support.builders import counted, observation

CELL = "pd-eagle3"
PLAIN = counted(observation(CELL, 40))
STREAMED = Streamed(tokens=(1,), characters=(1,), counted=(1,), ended_at=(0,), usages=1, closed=True)
RICH = PLAIN.model_copy(
    update={
        "fields": {"n": 2, "logit_bias": {"5": 1.0}},
        "shared_counters": {"decode": {"preemptions": 1.0}},
        "aged_by": {"decode": 3},
        "legs": (
            PLAIN.legs[0],
            PLAIN.legs[1].model_copy(
                update={
                    "text": 'he said: "a": 1  "b" :2',
                    "streamed": STREAMED,
                    "siblings": (Sibling(output_ids=(1,)),),
                    "top_logprobs": ({5: -1.0, 6: -2.0},),
                }
            ),
        ),
    }
)


def read(tmp_path: Path, line: str) -> RecordedFile:
    path = tmp_path / "observations.jsonl"
    path.write_text(line + "\n", encoding="utf-8")
    file = RecordedFile(path, CELL)
    file.read()
    return file


def lines(o: Observation) -> list[str]:
    return [o.model_dump_json(), json.dumps(o.model_dump(mode="json"))]


KEY = re.compile(r'(?<=[{ ,])"(\w+)" ?:')


def doubled(line: str) -> Iterator[str]:
    """Yield the line with each key of each object once more, before the first of that object."""
    for key, spaced in zip(KEY.finditer(line), cycle((" :", "  :", "\t:")), strict=False):
        value, _ = json.JSONDecoder().raw_decode(line[key.end() :].lstrip())
        for colon in (":", spaced):
            yield f"{line[: key.start()]}{json.dumps(key[1])}{colon}{json.dumps(value)}, {line[key.start() :]}"


@pytest.mark.parametrize("line", [line for o in (PLAIN, RICH) for line in lines(o)])
def test_a_key_that_stands_there_twice_is_damage_wherever_it_is(tmp_path: Path, line: str):
    assert read(tmp_path, line).seen.lines == 1
    found = list(doubled(line))
    assert len(found) > 100
    for damaged in found:
        with pytest.raises(DataError, match="each key once"):
            read(tmp_path, damaged)


@pytest.mark.parametrize("line", lines(PLAIN))
def test_a_usual_line_is_parsed_once(tmp_path: Path, line: str, monkeypatch: pytest.MonkeyPatch):
    def parsed_again(_: bytes) -> None:
        raise AssertionError("parsed again")

    monkeypatch.setattr(json_io, "require_each_key_once", parsed_again)
    assert read(tmp_path, line).seen.lines == 1


@pytest.mark.parametrize(
    ("text", "keys", "sure"),
    [
        ('{"a": 1, "b": {"c": 2}}', 3, True),
        ('{"a": 1, "a": 2}', 1, False),
        ('{"a": "b: c"}', 1, True),
        # A colon in a string stands for the second key.
        ('{"a": "x:", "a": 1}', 1, False),
        ('{"a": "\\":", "a" : 1}', 1, False),
        ('{"a" : 1, "a": ":"}', 1, False),
        ('{"a"\t: 1, "a": ":"}', 1, False),
        ('{"a"  : 1, "a": ":"}', 1, False),
    ],
)
def test_keys_are_counted_without_parsing_only_where_that_is_sure(text: str, keys: int, sure: bool):
    assert json_io.has_keys(text.encode(), keys) is sure
