"""Acceptance figures published elsewhere: shown beside results for the same models, never used as a gate."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, model_validator

from harness.errors import DataError
from harness.profiles.cells import CellName
from harness.profiles.methods import MethodName
from harness.profiles.recorded_profile import RecordedProfile
from harness.util import yaml_io
from harness.util.invalid_data import describe_validation_error
from harness.util.paths import REPOSITORY
from harness.util.strict import Strict

PUBLISHED = REPOSITORY / "baselines" / "published" / "acceptance.yaml"
_ROUNDING = 0.0051
"""Tolerance for rounding: lengths are published with two decimals."""


class Band(Strict):
    """One published row."""

    target: str
    drafter: str
    method: MethodName
    k: int | None = Field(default=None, ge=1)
    rates: tuple[float, ...] = ()
    complete: bool = True
    """Whether the rates of all positions were published."""
    length: float | None = Field(default=None, ge=1)
    """Mean acceptance length."""
    tolerance: float = Field(gt=0, lt=1)
    """Relative tolerance, as stated by the publisher."""
    origin: str

    @model_validator(mode="after")
    def _require_figures(self) -> Band:
        if not self.rates and self.length is None:
            raise ValueError("expected rates or a length, found neither")
        if any(not 0 <= r <= 1 for r in self.rates) or list(self.rates) != sorted(self.rates, reverse=True):
            raise ValueError(f"expected non-increasing rates between 0 and 1, found {list(self.rates)}")
        return self

    @property
    def consistent(self) -> bool | None:
        """Whether the length equals 1 + the sum of the rates; None if it cannot be checked."""
        if self.length is None or not self.rates or not self.complete:
            return None
        return abs(1 + sum(self.rates) - self.length) <= _ROUNDING

    def outside(self, rates: Sequence[float | None], length: float | None) -> list[str]:
        """Return the figures that a gate with this tolerance alone would refuse, by name; empty if it would pass."""
        ours: list[tuple[str, float | None, float | None]] = [
            (f"position {n}", rate, found) for n, (rate, found) in enumerate(zip(self.rates, rates, strict=False))
        ]
        ours.append(("length", self.length, length))
        return [
            name
            for name, wanted, found in ours
            if wanted is not None and (found is None or abs(found - wanted) > self.tolerance * wanted)
        ]

    def describe(self) -> str:
        """Return the row as text, with a remark if its figures are inconsistent."""
        parts = [f"rates {' '.join(f'{r:.4g}' for r in self.rates)}"] if self.rates else []
        parts += [f"length {self.length:g}"] if self.length is not None else []
        words = f"published: {', '.join(parts)}, ±{100 * self.tolerance:g} % ({self.origin})"
        if self.consistent is False:
            words += f"; its figures come from different runs: 1 + Σ rates is {1 + sum(self.rates):.4g}"
        return words


class _BandsFile(Strict):
    format: Literal[1]
    bands: tuple[Band, ...]


def load_published(path: Path = PUBLISHED) -> tuple[Band, ...]:
    """Load all bands. Raises DataError describing the damage."""
    try:
        return _BandsFile.model_validate(yaml_io.load(path)).bands
    except ValidationError as error:
        raise DataError(f"published figures {path} are not valid:\n{describe_validation_error(error)}") from error
    except (OSError, ValueError) as error:
        raise DataError(f"published figures {path}: expected YAML, but it cannot be read: {error}") from error


def published_for(bands: Iterable[Band], profile: RecordedProfile, lineup: str) -> list[Band]:
    """Return the bands for the models that a recorded profile uses for a lineup."""
    name = CellName.of_lineup(lineup)
    return matching(bands, profile.part(name.variant), name.method)


def matching(bands: Iterable[Band], profile: RecordedProfile, method: str) -> list[Band]:
    """Return the bands for the models that a recorded profile uses. Hub models and folders match by name."""
    asked = profile.method(method)
    target, drafter = profile.named("target"), profile.named(method)
    k = asked.get("num_speculative_tokens")
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
