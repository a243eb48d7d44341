"""A profile as a run recorded it, and the one place that knows its keys.

A record holds every setting, defaults included, so a default of this module counts only for what an older schema did
not have. A recorded profile may come from any version of the harness, or from someone's hand: what is read of it here
is taken as it is, and validated where a value is used (``scenario``, ``judging``, ``as_profile``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from harness.profiles import connectors
from harness.profiles.axes import part_of
from harness.profiles.engine_args import PIPELINE, caches_prefixes, parallel_size
from harness.profiles.engine_config import TensorParallel
from harness.profiles.methods import Traits, traits_of
from harness.profiles.model import Judging, Profile
from harness.profiles.model_reference import TARGET, TOKENIZER, on_p_role
from harness.profiles.scenarios import AT_ONCE, Crowd, Scenario

ENGINE_DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "placement": "any",
    "kv_lease_s": 30,
    "kv_cache_dtype": "auto",
}
WITNESS_DEFAULT = "off"
JUDGING_DEFAULTS: dict[str, Any] = {"tier": "bitwise"}
BEFORE_ROUNDING = {"logprob_nats": 1e-5, "near_tie_nats": 0.02}
"""Bounds of records that say nothing of them: their defaults before rounding was measured. Later ones say None."""
_SCENARIO: TypeAdapter[Scenario] = TypeAdapter(Scenario)
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class RecordedEngine(NamedTuple):
    """The recorded settings of the engines of one variant."""

    settings: Mapping[str, Any]

    def asked(self, name: str) -> Any:
        """Return a setting; None if the record does not have it."""
        return self.settings.get(name)

    def of(self, role: str) -> RecordedEngine:
        """Return the settings of the engine with a role: P may have others than D."""
        own = self.asked("prefill") if role == "prefill" else None
        if not isinstance(own, Mapping):
            return self
        return RecordedEngine({**self.settings, **{name: value for name, value in own.items() if value is not None}})

    def _setting(self, name: str) -> Any:
        return self.settings.get(name, ENGINE_DEFAULTS[name])

    @property
    def dtype(self) -> str:
        """The type in which the engines compute."""
        return str(self._setting("dtype"))

    @property
    def kv_cache_dtype(self) -> str:
        """Data type of the KV cache; ``auto`` for that of the model."""
        return str(self._setting("kv_cache_dtype"))

    @property
    def placement(self) -> str:
        return str(self._setting("placement"))

    @property
    def kv_lease_s(self) -> float:
        """Seconds for which P keeps the blocks of a hand-off; vLLM's default unless the profile sets it."""
        return float(self._setting("kv_lease_s"))

    @property
    def on_gpu(self) -> bool:
        return bool(self.asked("device") == "gpu")

    @property
    def connector(self) -> str | None:
        """The KV connector by name, if not NIXL's own."""
        name: str | None = self.asked("kv_connector")
        return name

    @property
    def by_nixl(self) -> bool:
        """Whether NIXL moves the KV of a pair, and its counters prove it."""
        return connectors.by_nixl(self.connector, self.asked("kv_connector_extra_config") or {})

    @property
    def context_tokens(self) -> int | None:
        """Largest number of prompt and output tokens of a request; None if the record does not say."""
        most: int | None = self.asked("max_model_len")
        return most

    @property
    def kv_item_bytes(self) -> int:
        """Bytes of one number in the KV cache; 1 where the record does not say, which every size is a multiple of."""
        named = self.kv_cache_dtype
        return _ITEM_BYTES.get(self.settings.get("dtype", "") if named == "auto" else named, 1)

    @property
    def extra_args(self) -> tuple[str, ...]:
        return tuple(self.asked("extra_args") or ())

    @property
    def caches_prefixes(self) -> bool:
        """Whether engines have a prefix cache: unless the last word on it is no."""
        return caches_prefixes(self.extra_args)

    @property
    def prefix_cache_retention(self) -> int:
        """At which multiples of tokens a prefix cache keeps windows and states; 0: only where prompts end."""
        return int(self.asked("prefix_cache_retention") or 0)

    def ranks(self, role: str) -> int:
        """Return how many ranks of an engine hold KV of one request, each of which moves its own part."""
        tensor = TensorParallel.model_validate(self.asked("tensor_parallel") or {})
        return tensor.of(role) * parallel_size(self.extra_args, [PIPELINE])


class RecordedProfile(NamedTuple):
    """A recorded profile, with or without axes."""

    data: Mapping[str, Any]

    @property
    def name(self) -> str:
        return str(self.data["name"])

    @property
    def source(self) -> str:
        """The profile as ``--profile`` names it."""
        return str(self.data.get("source") or self.name)

    @property
    def file(self) -> str:
        """The file that it was read from, or the name of a shipped one; "" in records that do not say."""
        return str(self.data.get("source", ""))

    def part(self, variant: str) -> RecordedProfile:
        """Return the profile of one variant, without axes; a plain profile is unchanged."""
        return RecordedProfile(part_of(self.data, variant))

    def section(self, name: str) -> dict[str, Any]:
        """Return ``engine``, ``workload`` or ``judging`` as recorded."""
        return dict(self.data.get(name) or {})

    def setting(self, name: str) -> Any:
        """Return a setting of the profile itself, as recorded; None if the record does not have it."""
        return self.data.get(name)

    @property
    def baselines(self) -> Any:
        """The folder of baselines, as the profile names it."""
        return self.data.get("baselines", "baselines")

    @property
    def engine(self) -> RecordedEngine:
        found = self.data.get("engine")
        return RecordedEngine(found if isinstance(found, Mapping) else {})

    @property
    def max_tokens(self) -> int | None:
        """Most output tokens of a request; None if the record does not say."""
        found = self.section("workload").get("max_tokens")
        return None if found is None else int(found)

    @property
    def witness(self) -> str:
        """What of the engines' KV caches was to be noted: ``off`` or ``kv``."""
        return str(self.data.get("witness", WITNESS_DEFAULT))

    @property
    def tier(self) -> str:
        return str(self.section("judging").get("tier", JUDGING_DEFAULTS["tier"]))

    @property
    def near_tie_nats(self) -> float | None:
        """Gap of a near tie as it was set; None where it follows from what rounding was measured to move."""
        found: float | None = self._thresholds["near_tie_nats"]
        return found

    @property
    def judging(self) -> Judging:
        """The thresholds that the run was planned with. Raises ValidationError if they are damaged."""
        return Judging.model_validate(self._thresholds)

    @property
    def _thresholds(self) -> dict[str, Any]:
        return {**BEFORE_ROUNDING, **self.section("judging")}

    def scenario(self, name: str) -> Scenario | None:
        """Return a scenario by its id, or None. Raises ValidationError if it is damaged."""
        raw = next((s for s in self.data.get("scenarios", ()) if s.get("id") == name), None)
        if raw is None and name == AT_ONCE and self.at_once > 1:
            # Not a scenario of the profile, but what it sends like one of this kind.
            return Crowd(id=AT_ONCE, kind="crowd", prompts=self.at_once, together=self.at_once, proves=("batched",))
        return None if raw is None else _SCENARIO.validate_python(raw)

    @property
    def at_once(self) -> int:
        """Most cold prompts under way at once."""
        return int(self.section("workload").get("at_once", 1))

    def method(self, kind: str) -> Mapping[str, Any]:
        """Return the settings of a method; none if the profile lacks it."""
        return next((m for m in self._methods if m.get("kind") == kind), {})

    @property
    def _methods(self) -> tuple[Mapping[str, Any], ...]:
        found = self.data.get("methods")
        return tuple(m for m in found if isinstance(m, Mapping)) if isinstance(found, list | tuple) else ()

    def traits(self, kind: str) -> Traits:
        """Return the traits of a method, by its name where the profile lacks it."""
        config = self.method(kind).get("speculative_config") or {}
        return traits_of(str(config.get("method", kind)), config)

    @property
    def models(self) -> dict[str, Mapping[str, Any]]:
        """The models that are no plain folders by role, as resolved or else as named."""
        found = {**self._given, **self._sources}
        return {role: model for role, model in found.items() if isinstance(model, Mapping)}

    def named(self, role: str) -> Any:
        """Return what names the model of a role: its repository on the hub, or else what the profile says."""
        return self._sources.get(role, {}).get("repo", self._given.get(role))

    @property
    def _given(self) -> dict[str, Any]:
        """The models as the profile names them, by role."""
        drafters = {str(m.get("kind")): m.get("drafter") for m in self._methods}
        on_p = {on_p_role(str(m.get("kind"))): m["prefill_drafter"] for m in self._methods if m.get("prefill_drafter")}
        return {role: self.data.get(role) for role in (TARGET, TOKENIZER)} | drafters | on_p

    @property
    def _sources(self) -> Mapping[str, Any]:
        found = self.data.get("sources")
        return found if isinstance(found, Mapping) else {}

    @property
    def tokenizer(self) -> Any:
        """The folder of the tokenizer, or what stands for it in a profile that was not resolved."""
        return self.data.get(TOKENIZER) or self.data.get(TARGET)

    def as_profile(self) -> Profile:
        """Return the profile to work with. Raises ValidationError if this version cannot read it."""
        # The file that it was read from is added by the record.
        return Profile.model_validate({key: value for key, value in self.data.items() if key != "source"})
