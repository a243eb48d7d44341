"""What is wrong with data that a model refuses, in plain words: where it is, what was expected, what was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError

from harness.errors import HarnessError
from harness.util.choices import nearest
from harness.util.names import NAME_PATTERN, NAME_WORDS
from harness.util.strict import Strict, shortened

_SAID: dict[str, str] = {
    **dict.fromkeys(("list_type", "tuple_type", "set_type", "frozen_set_type"), "a list"),
    **dict.fromkeys(("string_type", "path_type"), "text"),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "true or false"),
    **dict.fromkeys(("model_type", "dict_type", "model_attributes_type", "mapping_type"), "keys with values"),
    **dict.fromkeys(("literal_error", "enum"), "{expected}"),
    "finite_number": "a finite number",
    "greater_than": "a number above {gt}",
    "greater_than_equal": "a number of at least {ge}",
    "less_than": "a number below {lt}",
    "less_than_equal": "a number of at most {le}",
    "string_pattern_mismatch": "text of the form {pattern}",
    "string_too_long": "text of at most {max_length} characters",
    "string_too_short": "text of at least {min_length} characters",
    "too_long": "a list with at most {max_length} of them",
    "too_short": "a list with at least {min_length} of them",
    "union_tag_invalid": "one of {expected_tags} as {discriminator}",
    "union_tag_not_found": "the key {discriminator}",
}
"""What is expected, by pydantic's name of the error; its own words are those of Python."""
_FEW_KEYS = 6
"""So many keys are worth naming where a mapping is expected."""
_PYTHON = "Value error, "
"""What pydantic puts in front of the message of a ValueError."""
_Place = Sequence[int | str]


def describe_validation_error(error: ValidationError, data: Any = None) -> str:
    """Return one line per problem: where it is, what was expected and what was found. With the ``data`` as a file has
    it, or a part of it, places in it are named as there."""
    root = next((model for model in _models_below(Strict) if model.__name__ == error.title), None)
    items = [item for item in error.errors() if not _long_enough(item)]
    return "\n".join(f"  {_place(item, data) or '(top level)'}: {_problem(item, root)}" for item in items)


@contextmanager
def refused_as(kind: type[HarnessError], what: str) -> Iterator[None]:
    """Raise an error of this kind, which begins with ``what``, for data that a model refuses within the block."""
    try:
        yield
    except ValidationError as error:
        raise kind(f"{what}:\n{describe_validation_error(error)}") from error


def _long_enough(item: Mapping[str, Any]) -> bool:
    """Return whether a list is too short for pydantic alone, which does not count elements that are wrong."""
    found = item.get("input")
    return item["type"] == "too_short" and isinstance(found, (list, tuple)) and len(found) >= item["ctx"]["min_length"]


def _place(item: Mapping[str, Any], data: Any) -> str:
    """Return the keys to a problem, with elements of lists by their ids, and without tags of unions."""
    names: list[str] = []
    place, inside, in_list = item["loc"], data, False
    for depth, part in enumerate(place, 1):
        missing = item["type"] == "missing" and depth == len(place)
        if in_list and isinstance(inside, Mapping) and part not in inside and not missing:
            in_list = False
            continue
        in_list = isinstance(inside, list) and isinstance(part, int) and part < len(inside)
        known = in_list or (isinstance(inside, Mapping) and part in inside)
        inside = inside[part] if known else None
        names.append(_called(inside, part) if in_list else str(part))
    return ".".join(names)


def _called(element: Any, number: int | str) -> str:
    """Return the name of an element of a list, or else its number."""
    name = element.get("id", element.get("kind")) if isinstance(element, Mapping) else None
    return name if isinstance(name, str) else str(number)


def _problem(item: Mapping[str, Any], root: type[BaseModel] | None) -> str:
    kind, found, details = item["type"], item.get("input"), item.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(item["loc"], root)
    if kind == "missing":
        return "expected this key, found none; add it"
    if kind == "string_pattern_mismatch" and details["pattern"] == NAME_PATTERN:
        return f"expected {NAME_WORDS}, found {shown(found)}"
    if kind in _SAID:
        value = found.get(_key(details)) if kind == "union_tag_invalid" and isinstance(found, dict) else found
        which = _few_keys(item["loc"], root) if kind in ("model_type", "model_attributes_type") else ""
        return f"expected {_SAID[kind].format_map(details)}{which}, found {shown(value)}{_meant(kind, value, details)}"
    text = str(item["msg"]).removeprefix(_PYTHON)
    told = "found" in text or isinstance(found, (dict, list))
    return text if told else f"{text}, found {shown(found)}"


def _key(details: Mapping[str, Any]) -> str:
    return str(details.get("discriminator", "")).strip("'")


def shown(value: Any) -> str:
    """Return a value of YAML or JSON in words, without names of Python."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "keys with values" if value else "no keys"
    if isinstance(value, (list, tuple)):
        return "a list" if value else "an empty list"
    return "nothing" if value is None else shortened(repr(value))


def _meant(kind: str, value: Any, details: Mapping[str, Any]) -> str:
    """Return the nearest of the allowed values as a question; "" where there is none."""
    if not isinstance(value, str) or kind not in ("literal_error", "enum", "union_tag_invalid"):
        return ""
    allowed = str(details.get("expected", details.get("expected_tags", ""))).replace(" or ", ", ").split(", ")
    near = nearest(value, [name.strip("'") for name in allowed])
    return f"; did you mean {near[0]}?" if near else ""


def _few_keys(place: _Place, root: type[BaseModel] | None) -> str:
    """Return the keys of a mapping in brackets; "" where they are many or not known."""
    keys = list(_keys_at(root, (*place, ""))) if root is not None else []
    return f" ({', '.join(keys)})" if 0 < len(keys) <= _FEW_KEYS else ""


def _unknown_key(place: _Place, root: type[BaseModel] | None) -> str:
    near = nearest(str(place[-1]), list(_keys_at(root, place))) if root is not None else []
    return f"unknown key; did you mean {near[0]}?" if near else "unknown key; remove it or check its spelling"


def _keys_at(root: type[BaseModel], place: _Place) -> Iterator[str]:
    """Yield the keys that the mapping at a place may have. In a place, the tag of a union stands beside the keys."""
    models = {root}
    for part in place[:-1]:
        inner = {
            found
            for model in models
            if part in model.model_fields
            for found in _in(model.model_fields[part].annotation)
        }
        models = inner or {model for model in models if part in _tags(model)} or models
    for model in models:
        yield from model.model_fields


def _tags(model: type[BaseModel]) -> set[Any]:
    return {tag for field in model.model_fields.values() for tag in _literals(field.annotation)} | {model.__name__}


def _literals(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) is Literal else ()


def _in(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield the models that an annotation names."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
        return
    for part in get_args(annotation):
        yield from _in(part)


def _models_below(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for derived in model.__subclasses__():
        yield derived
        yield from _models_below(derived)
