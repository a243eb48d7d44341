"""YAML as plain data: a bounded file without anchors, aliases, merge keys, duplicate keys or custom tags."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import yaml

try:
    from yaml import CSafeLoader as _Base
except ImportError:  # PyYAML built without libyaml
    from yaml import SafeLoader as _Base  # type: ignore[assignment]

from harness.util.json_io import MIB, read_text

MOST_BYTES = MIB
"""Largest YAML file that is read; those of the repository have a few KiB."""
_DEPTH = 40
_VALUES = 50_000
"""Most values of a document; a profile has a few hundred."""
_BITS = 1 << 63
_LONG_NUMBER = re.compile(r"[-+]?[0-9][0-9_:.]{64,}")
_CONSTRUCTION_ERRORS = (AttributeError, LookupError, TypeError, ArithmeticError)
"""Raised by PyYAML for tags that do not fit their values: AttributeError for ``!!timestamp x``, KeyError for
``!!bool x``."""


def load(path: Path) -> Any:
    """Return the data of a YAML file. Raises ValueError and OSError."""
    return parse(text_of(path))


def text_of(path: Path) -> str:
    """Read the text of a YAML file. Raises ValueError and OSError."""
    return read_text(path, MOST_BYTES)


def nodes(text: str) -> yaml.Node | None:
    """Return the nodes of a document that ``parse`` has taken, with their places in the text."""
    return yaml.compose(text, Loader=_Base)


def parse(text: str) -> Any:
    """Parse one YAML document. Raises ValueError for anything but plain data within bounds."""
    try:
        _check_events(text)
        loader = _Loader(text)
        try:
            return loader.get_single_data()
        finally:
            loader.dispose()
    except (yaml.YAMLError, *_CONSTRUCTION_ERRORS) as error:
        # PyYAML names what it read, which is no file to it.
        raise ValueError(" ".join(str(error).replace(_UNNAMED, "at ").split())[:500]) from error


def _check_events(text: str) -> None:
    """Refuse anchors, aliases and deep nesting before the loader, which recurses, builds anything."""
    depth = values = 0
    for event in yaml.parse(text, Loader=_Base):
        if isinstance(event, yaml.NodeEvent):
            values += 1
            if values > _VALUES:
                raise ValueError(f"expected at most {_VALUES} values, found more")
            if event.anchor:
                raise ValueError(
                    f"expected values written out in full, found the anchor or alias {event.anchor[:80]!r}; repeat the "
                    "value where it is needed"
                )
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > _DEPTH:
                raise ValueError(f"expected at most {_DEPTH} levels, found more")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


_UNNAMED = 'in "<unicode string>", '


class _Loader(_Base):
    """PyYAML's safe loader for mappings, lists, text, finite numbers, 64-bit integers, truth values, dates and null."""

    yaml_constructors = {  # noqa: RUF012 (as PyYAML declares it)
        tag: construct
        for tag, construct in _Base.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] not in ("binary", "omap", "pairs", "set")
    }

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Refuse keys that are not text and duplicate keys; PyYAML would merge ``<<`` here."""
        keys: set[str] = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise ValueError(
                    f"expected keys that are text, found {key.value!r:.80}; quote it if YAML reads it as a number or "
                    "the like, and write out what `<<` would merge"
                )
            if key.value in keys:
                raise ValueError(f"expected each key once, found {key.value[:80]!r} twice")
            keys.add(key.value)

    def construct_yaml_str(self, node: yaml.ScalarNode) -> str:
        """Return the text. Raises ValueError for a lone surrogate, which cannot be written anywhere."""
        value = str(self.construct_scalar(node))
        value.encode()
        return value

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """Return a 64-bit integer; its length is checked first, since base 60 (``1:1:1``) takes quadratic time."""
        value = None if _LONG_NUMBER.fullmatch(node.value) else super().construct_yaml_int(node)
        if value is None or not -_BITS <= value < _BITS:
            raise ValueError("expected 64-bit integers, found a larger one")
        return value

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        """Return a finite number."""
        value = None if _LONG_NUMBER.fullmatch(node.value) else super().construct_yaml_float(node)
        if value is None or not math.isfinite(value):
            raise ValueError(f"expected finite numbers of fewer than 64 digits, found {node.value[:40]}")
        return value


for _kind in ("str", "int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", getattr(_Loader, f"construct_yaml_{_kind}"))
