"""JSON schemas of what a run writes: ``python -m harness.reports.schemas docs/schemas`` makes the files anew."""

from __future__ import annotations

import ast
import inspect
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.history.checksum import OWN_SHA256, SEAL, Seal
from harness.history.records import Observation, RunRecord
from harness.judging.findings import Judgement
from harness.reports.inputs import Inputs, ReferenceRun
from harness.util.files import write_atomic
from harness.util.strict import Strict

_TEXT, _COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
_HASH = {"type": "string", "pattern": "^[0-9a-f]+$"}
_EXPOSURE = {
    "description": "Answers whose tokens were checked one by one, and the rarest defect that would have shown.",
    "type": "object",
    "properties": {
        "answers": _COUNT,
        "handed_off": _COUNT,
        "excludes_one_in": {"anyOf": [_COUNT, {"type": "null"}]},
        "sentence": _TEXT,
    },
    "required": ["answers", "handed_off", "excludes_one_in", "sentence"],
    "additionalProperties": False,
}


def schemas() -> dict[str, dict[str, Any]]:
    """Return the schemas by name: ``run`` (run.json), ``observation`` (a line of observations.jsonl), ``judgement``."""
    run, judgement = _of(RunRecord), _of(Judgement)
    seal = _of(Seal)
    run["$defs"] |= seal.pop("$defs")
    whole = _HASH | {"description": "SHA-256 of the record without this key."}
    run["properties"] |= {SEAL: {"anyOf": [seal, {"type": "null"}]}, OWN_SHA256: whole}
    judgement["properties"] |= {"exposure": _EXPOSURE, "inputs": _inputs()}
    titled = {"run": run, "observation": _of(Observation), "judgement": judgement}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return {name: head | schema | {"title": f"kv-acceptance-harness {name}"} for name, schema in titled.items()}


def _inputs() -> dict[str, Any]:
    types: dict[str, dict[str, Any]] = {key: {"anyOf": [_TEXT, {"type": "null"}]} for key in Inputs._fields}
    types |= {
        "baselines": {"type": "object", "additionalProperties": _HASH},
        "dirty": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "harness": _TEXT,
        "against": {"anyOf": [_reference_run(), {"type": "null"}]},
    }
    return {
        "description": "What the judgement was made of, by hash.",
        "type": "object",
        "properties": types,
        "required": list(types),
        "additionalProperties": False,
    }


def _reference_run() -> dict[str, Any]:
    return {
        "description": "The run whose single engines stood for baselines: its id and the SHA-256 of its record.",
        "type": "object",
        "properties": {"run": _TEXT, "record": {"anyOf": [_HASH, {"type": "null"}]}},
        "required": list(ReferenceRun._fields),
        "additionalProperties": False,
    }


def _of(model: type[Strict]) -> dict[str, Any]:
    """Return the schema of a model, in which every field has the words that follow it in the source."""
    schema = model.model_json_schema()
    known = {cls.__name__: cls for cls in _reached(Strict) if cls.__module__.startswith("harness.")}
    schema.setdefault("$defs", {})
    for name, part in {model.__name__: schema, **schema["$defs"]}.items():
        for field, words in _words(known[name]).items() if name in known else ():
            if field in part.get("properties", {}):
                part["properties"][field].setdefault("description", words)
    return schema


def _reached(cls: type[Strict]) -> Iterator[type[Strict]]:
    for below in cls.__subclasses__():
        yield below
        yield from _reached(below)


def _words(cls: type) -> dict[str, str]:
    """Return the strings that follow the fields of a class in its source, and in those that it is derived from."""
    out: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not base.__module__.startswith("harness."):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, after in zip(body.body, body.body[1:], strict=False):
            match field, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                    out[name] = " ".join(words.split())
    return out


def text_of(schema: dict[str, Any]) -> str:
    """Return a schema as it is stored."""
    return json.dumps(schema, indent=1, sort_keys=True) + "\n"


if __name__ == "__main__":
    for name, schema in schemas().items():
        write_atomic(Path(sys.argv[1]) / f"{name}.schema.json", text_of(schema))
