"""Acceptance figures that others have published: shown beside results of the same models, never a gate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, model_validator

from harness import strict_yaml
from harness.config import REPOSITORY, describe_validation_error, part_of
from harness.errors import DataError
from harness.matrix import CellName
from harness.strict import Strict

PUBLISHED = REPOSITORY / "baselines" / "published" / "acceptance.yaml"
_ROUNDING = 0.0051
"""Lengths are published with two decimals."""


class Band(Strict):
    """One published row."""

    target: str
    drafter: str
    method: Literal["eagle3", "dflash", "mtp"]
    k: int | None = Field(default=None, ge=1)
    rates: tuple[float, ...] = ()
    complete: bool = True
    """Whether the rates of all positions are given."""
    length: float | None = Field(default=None, ge=1)
    """Acceptance length."""
    tolerance: float = Field(gt=0, lt=1)
    """Relative, as its publisher uses it."""
    origin: str

    @model_validator(mode="after")
    def _says_something(self) -> Band:
        if not self.rates and self.length is None:
            raise ValueError("expected rates or a length, found neither")
        if any(not 0 <= r <= 1 for r in self.rates) or list(self.rates) != sorted(self.rates, reverse=True):
            raise ValueError(f"expected falling rates between 0 and 1, found {list(self.rates)}")
        return self

    @property
    def consistent(self) -> bool | None:
        """Whether the length is 1 + the sum of the rates; None when that cannot be told."""
        if self.length is None or not self.rates or not self.complete:
            return None
        return abs(1 + sum(self.rates) - self.length) <= _ROUNDING

    def describe(self) -> str:
        """The row in words, with a remark when its figures do not belong together."""
        parts = [f"rates {' '.join(f'{r:.4g}' for r in self.rates)}"] if self.rates else []
        parts += [f"length {self.length:g}"] if self.length is not None else []
        words = f"published: {', '.join(parts)}, ±{100 * self.tolerance:g} % ({self.origin})"
        if self.consistent is False:
            words += f"; its figures are of different runs: 1 + Σ rates is {1 + sum(self.rates):.4g}"
        return words


class _File(Strict):
    format: Literal[1]
    bands: tuple[Band, ...]


def load_published(path: Path = PUBLISHED) -> tuple[Band, ...]:
    """All bands. Raises DataError naming the damage."""
    try:
        return _File.model_validate(strict_yaml.load(path)[1]).bands
    except ValidationError as error:
        raise DataError(f"published figures {path} are not valid:\n{describe_validation_error(error)}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"published figures {path}: expected YAML, but it cannot be read: {error}") from error


def published_for(bands: Iterable[Band], profile: dict[str, Any], lineup: str) -> list[Band]:
    """Bands of the models that a recorded profile names for a lineup."""
    name = CellName.of_lineup(lineup)
    return matching(bands, part_of(profile, name.variant), name.method)


def matching(bands: Iterable[Band], profile: dict[str, Any], method: str) -> list[Band]:
    """Bands of the models that a recorded profile names, on the hub or as a folder, which counts by its name."""
    raw: dict[str, Any] = next((m for m in profile.get("methods", ()) if m.get("kind") == method), {})
    hub = {role: source.get("repo") for role, source in profile.get("sources", {}).items()}
    target, drafter = hub.get("target", profile.get("target")), hub.get(method, raw.get("drafter"))
    k = raw.get("num_speculative_tokens")
    return [
        b
        for b in bands
        if b.method == method
        and _same(b.target, target)
        and _same(b.drafter, drafter)
        and (b.k is None or k is None or b.k == k)
    ]


def _same(published: str, ours: object) -> bool:
    if isinstance(ours, Mapping):
        ours = ours.get("repo") or ours.get("path")
    return ours is not None and published.rsplit("/", 1)[-1].lower() == str(ours).rstrip("/").rsplit("/", 1)[-1].lower()
