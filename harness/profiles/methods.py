"""Speculation methods of a profile: four short forms, and whatever vLLM's ``--speculative-config`` takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self, cast

from pydantic import Discriminator, Field, StringConstraints, Tag, ValidationError, model_validator

from harness.profiles.engine_args import not_plain
from harness.profiles.model_reference import TARGET, TOKENIZER, ModelPath, local_folder
from harness.util.choices import nearest
from harness.util.invalid_data import describe_validation_error
from harness.util.strict import Strict
from harness.util.text import listed

_K = "num_speculative_tokens"
MOST_DRAFTS = 64
_NOT_IN_CONFIG = {
    "model": "name the model as `drafter`, a folder or a repository on the hub, which is checked before it is loaded",
    "draft_load_config": "weights are loaded as safetensors, because other formats can run code",
    "code_revision": "code of a drafter runs only with `drafter: {…, trust_remote_code: true}`",
}
"""Keys of vLLM's configuration that a profile may not have in ``speculative_config``, with what to do instead."""


class Traits(NamedTuple):
    """What the harness has to know of a method of vLLM (as of 0.32.0), beyond its name and k."""

    drafter: Literal["needed", "optional", "none"] = "optional"
    """Whether it loads a model of its own; ``optional``: it may be part of the target."""
    reserves: bool = True
    """Whether the scheduler reserves KV slots for drafts (``num_lookahead_tokens``)."""
    bonus_slot: bool = False
    """Whether it reserves one more, for the bonus token."""
    drops_block: bool = False
    """Whether a prefix hit loses its last block (``use_eagle_block_drop``), for drafters that read hidden states of the
    target."""
    own_layers: bool = False
    """Whether the drafter certainly has a KV cache of its own, which a hand-off moves, too."""
    up_to: bool = False
    """Whether a step may draft fewer than k tokens, and a step without drafts is not counted as one."""
    by_crowd: bool = False
    """Whether how many it drafts depends on the requests beside it, and not on the text alone."""
    pads: bool = True
    """Whether vLLM pads a step that has one token of a prompt left with placeholder drafts."""
    nested: bool = True
    """Whether a step with fewer drafts has the first of those that it would have had with more."""


_NONE = Traits("none", reserves=False)
_STATES = Traits("needed", drops_block=True, own_layers=True)
_LOOKUP = Traits("none", reserves=False, up_to=True)
_HEADS = Traits("needed", reserves=False)
_BY_METHOD = {
    "eagle": _STATES,
    "eagle3": _STATES,
    "dflash": _STATES._replace(bonus_slot=True, nested=False),
    "dspark": Traits(drops_block=True, nested=False),
    "mtp": Traits(drops_block=True),
    "draft_model": Traits("needed", own_layers=True),
    "medusa": _HEADS,
    "mlp_speculator": _HEADS,
    "ngram": _LOOKUP,
    "ngram_gpu": _LOOKUP,
    "suffix": _LOOKUP,
}

_ONE_MODULE = {"MiMoV2ForCausalLM", "MiMoV2OmniForCausalLM", "MiMoV2FlashForCausalLM"}
"""Models of which vLLM 0.32.0 loads the first module alone, whatever their config says."""
_MODULES = "num_nextn_predict_layers"
_MODULES_IN_TEXT = {
    "BailingMoeV3VLForConditionalGeneration",
    "NemotronH_Omni_Reasoning_V3",
    "NemotronH_Super_Omni_Reasoning_V3",
    "Step3p7ForConditionalGeneration",
}
"""Models whose modules vLLM 0.32.0 counts in their ``text_config`` (``SpeculativeConfig.hf_config_override``)."""

KNOWN_METHODS = tuple(sorted(_BY_METHOD))


def traits_of(method: str, config: Mapping[str, Any]) -> Traits:
    """Return the traits of a method of vLLM with this configuration; of one that is not known, the usual ones."""
    if method == "none":
        return _NONE
    found = _BY_METHOD.get("mtp" if method.endswith("_mtp") else method, Traits())
    if config.get("disable_eagle_block_drop"):
        found = found._replace(drops_block=False)
    if config.get("num_speculative_tokens_per_batch_size"):
        found = found._replace(pads=False)
    if config.get("num_speculative_tokens_per_batch_size") or config.get("enable_adaptive_verification"):
        found = found._replace(up_to=True, by_crowd=True)
    return found


class NoSpeculation(Strict):
    """Plain decoding."""

    kind: Literal["none"]
    drafter: ClassVar[None] = None
    prefill_drafter: ClassVar[None] = None
    drafter_path: ClassVar[Path | None] = None
    traits: ClassVar[Traits] = _NONE
    draft_tokens: ClassVar[int] = 0
    lookahead: ClassVar[int] = 0
    """KV slots that the scheduler reserves past the scheduled tokens (vLLM 0.32 ``num_lookahead_tokens``)."""

    @property
    def on_prefill(self) -> Self:
        """The method as P is started with it."""
        return self

    @property
    def vllm_method(self) -> str:
        """What vLLM calls the method."""
        return self.kind

    @property
    def given_config(self) -> dict[str, Any]:
        return {}


class _Speculative(Strict):
    kind: str
    drafter: ModelPath | None
    num_speculative_tokens: int = Field(default=3, ge=1, le=16)
    prefill_num_speculative_tokens: int | None = Field(default=None, ge=0, le=16)
    """Drafts per step on P, which drafts nothing that counts but has the drafter's KV to compute; None: as on D, 0: P
    has no drafter."""
    prefill_drafter: ModelPath | None = None
    """P's drafter, if it is another one than D's."""
    prefill_speculative_config: dict[str, Any] = Field(default_factory=dict)
    """Keys of vLLM's configuration that P has instead of D's, or beside them."""

    def __hash__(self) -> int:
        # A configuration has no hash.
        return hash((self.kind, self.drafter, self.num_speculative_tokens))

    @property
    def on_prefill(self) -> Method:
        """The method as P is started with it."""
        if self.prefill_num_speculative_tokens == 0:
            return NoSpeculation(kind="none")
        drafts, drafter = self.prefill_num_speculative_tokens, self.prefill_drafter
        changes: dict[str, Any] = {_K: drafts} if drafts is not None else {}
        changes |= {"drafter": drafter} if drafter is not None else {}
        mine = cast("Method", self.model_copy(update=changes) if changes else self)
        if not self.prefill_speculative_config:
            return mine
        config = {"method": mine.vllm_method, **mine.given_config, **self.prefill_speculative_config}
        own = {"kind": self.kind, "drafter": mine.drafter, _K: mine.draft_tokens, "speculative_config": config}
        return OtherMethod.model_validate(own)

    @model_validator(mode="after")
    def _p_makes_sense(self) -> Self:
        given = {"prefill_drafter": self.prefill_drafter, "prefill_speculative_config": self.prefill_speculative_config}
        if self.prefill_num_speculative_tokens == 0 and (named := [name for name, value in given.items() if value]):
            raise ValueError(
                f"prefill_num_speculative_tokens: expected at least 1 with {listed(named, 'and')}, found 0, with which "
                "P has no drafter; leave one of them out"
            )
        if self.prefill_drafter is not None and self.traits.drafter == "none":
            raise ValueError(
                f"prefill_drafter: expected none, since {self.vllm_method} drafts without a model, found "
                f"{self.prefill_drafter}; leave it out"
            )
        try:
            # What P may not have is refused as for D.
            _ = self.on_prefill
        except ValidationError as error:
            raise ValueError(f"prefill_speculative_config: {describe_validation_error(error)}") from error
        return self

    @property
    def draft_tokens(self) -> int:
        return self.num_speculative_tokens

    @property
    def vllm_method(self) -> str:
        """What vLLM calls the method."""
        return self.kind

    @property
    def given_config(self) -> dict[str, Any]:
        """What the profile says of ``--speculative-config`` beside drafter and k."""
        return {}

    @property
    def traits(self) -> Traits:
        return traits_of(self.vllm_method, self.given_config)

    @property
    def lookahead(self) -> int:
        """KV slots that the scheduler reserves past the scheduled tokens (vLLM 0.32 ``num_lookahead_tokens``)."""
        return self.num_speculative_tokens + self.traits.bonus_slot if self.traits.reserves else 0

    @property
    def drafter_path(self) -> Path | None:
        """Folder of the drafter. Raises ModelUnavailableError for a reference that is not in the local cache."""
        return None if self.drafter is None else local_folder(self.drafter, f"drafter of {self.kind}")


class Eagle3(_Speculative):
    """EAGLE3 drafter: one layer that reads three target streams."""

    kind: Literal["eagle3"]
    drafter: ModelPath


class Mtp(_Speculative):
    """Multi-token prediction layers of a drafter checkpoint or of the target itself."""

    kind: Literal["mtp"]
    drafter: ModelPath | None = None
    """None: they are part of the target."""


class DFlash(_Speculative):
    """DFlash drafter: all drafts in one bidirectional pass, with one more slot reserved for the bonus token."""

    kind: Literal["dflash"]
    drafter: ModelPath


SHORT_FORMS = ("none", "eagle3", "dflash", "mtp")
_TAKEN = ("none", TARGET, TOKENIZER)
MethodName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,39}$")]


def _meant(kind: Any) -> str:
    """Return the method whose name is most like a misspelt one, as a question; "" where there is none."""
    names = (*SHORT_FORMS, *KNOWN_METHODS)
    near = nearest(kind, names) if isinstance(kind, str) and kind not in names else []
    return f"; did you mean {near[0]}?" if near else ""


class OtherMethod(_Speculative):
    """Any other method, under a name of its own: what vLLM's ``--speculative-config`` takes, as data."""

    kind: MethodName
    """Its name in cells and baselines: ``pd-NAME``."""
    drafter: ModelPath | None = None
    """The drafter's model; None for a method without one."""
    num_speculative_tokens: int = Field(ge=1, le=MOST_DRAFTS)
    """k: the most drafts of a step."""
    prefill_num_speculative_tokens: int | None = Field(default=None, ge=0, le=MOST_DRAFTS)
    speculative_config: dict[str, Any]
    """Further keys for vLLM, as it names them. ``method`` may be left out where the name is one of vLLM's."""

    @model_validator(mode="before")
    @classmethod
    def _k_from_config(cls, raw: Any) -> Any:
        """Take k from the configuration, so that what vLLM was given can be pasted."""
        if not isinstance(raw, Mapping):
            return raw
        given = raw.get("speculative_config")
        if given is None:
            raise ValueError(
                f"expected {', '.join(SHORT_FORMS)}, or a name of your own with speculative_config (what vLLM's "
                f"--speculative-config takes), found {raw.get('kind')!r} without one{_meant(raw.get('kind'))}"
            )
        if not isinstance(given, Mapping) or _K not in given:
            return raw
        k = given[_K]
        if raw.get(_K, k) != k:
            raise ValueError(f"{_K}: expected one number, found {raw[_K]} and, in speculative_config, {k}")
        return {**raw, _K: k, "speculative_config": {name: v for name, v in given.items() if name != _K}}

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        for problem in self._problems():
            raise ValueError(problem)
        return self

    def _problems(self) -> Iterator[str]:
        config, method = self.speculative_config, self.vllm_method
        if self.kind in _TAKEN or self.kind.endswith("-router"):
            taken = ", ".join(_TAKEN)
            yield f"kind: {self.kind} cannot name a method; names end in no -router and are none of {taken}"
        for key in config.keys() & _NOT_IN_CONFIG.keys():
            yield f"speculative_config: expected no {key}, found {config[key]!r}; {_NOT_IN_CONFIG[key]}"
        if method == "custom_class":
            yield (
                "speculative_config: expected a method of vLLM's own, found custom_class, which runs code that the "
                "profile names; a profile is only data"
            )
        if method == self.kind and method not in _BY_METHOD and not method.endswith("_mtp"):
            yield (
                f"speculative_config: expected `method`, the method of vLLM that {self.kind} stands for "
                f"({', '.join(KNOWN_METHODS)} or another), found none"
            )
        if problem := not_plain(config):
            yield f"speculative_config: {problem}"
        if self.traits.drafter == "needed" and self.drafter is None:
            yield f"expected `drafter`, the model of {self.kind}, which {method} needs, found none"
        if self.traits.drafter == "none" and self.drafter is not None:
            yield f"expected no `drafter`, since {method} drafts without a model, found {self.drafter}; leave it out"

    @property
    def vllm_method(self) -> str:
        return str(self.speculative_config.get("method", self.kind))

    @property
    def given_config(self) -> dict[str, Any]:
        return {**self.speculative_config, "method": self.vllm_method}


def _form(value: Any) -> str:
    """Return which class of methods a value belongs to: a short form unless it has a configuration."""
    if isinstance(value, Mapping):
        kind, given = value.get("kind"), "speculative_config" in value
    else:
        kind, given = getattr(value, "kind", None), isinstance(value, OtherMethod)
    return str(kind) if kind in SHORT_FORMS and not given else "other"


Method = Annotated[
    Annotated[NoSpeculation, Tag("none")]
    | Annotated[Eagle3, Tag("eagle3")]
    | Annotated[DFlash, Tag("dflash")]
    | Annotated[Mtp, Tag("mtp")]
    | Annotated[OtherMethod, Tag("other")],
    Discriminator(_form),
]
"""A method in a profile."""


def modules_of(method: Method, target: Mapping[str, Any], drafter: Mapping[str, Any]) -> int:
    """Return how many modules of multi-token prediction a method drafts with, by the configs of target and drafter; a
    method without a drafter of its own has them in the target (vLLM 0.32.0 ``use_multi_module_mtp``)."""
    config = target if method.drafter is None else drafter
    named = config.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if not method.vllm_method.endswith("mtp") or architecture in _ONE_MODULE:
        return 1
    part = config.get("text_config" if architecture in _MODULES_IN_TEXT else "mtp_config")
    told = part if isinstance(part, Mapping) and _MODULES not in config else config
    found = told.get(_MODULES, 1)
    return min(max(found, 1), method.draft_tokens) if isinstance(found, int) else 1


def engine_config(method: Method) -> dict[str, Any] | None:
    """Return vLLM's ``--speculative-config`` for a method; None without speculation."""
    if isinstance(method, NoSpeculation):
        return None
    drafter = {"model": str(method.drafter_path)} if method.drafter is not None else {}
    return {**method.given_config, "method": method.vllm_method, **drafter, _K: method.num_speculative_tokens}
