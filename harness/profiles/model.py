"""Profiles: what a run consists of, as validated data that rejects unknown keys."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, field_validator, model_validator

from harness import redact
from harness.errors import UsageError
from harness.profiles.availability import localise
from harness.profiles.axes import Overrides, check_axes, merged, part_of, variants
from harness.profiles.engine_config import EngineConfig
from harness.profiles.methods import Method, OtherMethod
from harness.profiles.model_reference import (
    GgufSource,
    ModelPath,
    PackageSource,
    Source,
    local_folder,
)
from harness.profiles.scenarios import AT_ONCE, Scenario
from harness.stats.multiplicity import stage_alpha
from harness.util.names import ShortName, VariantName
from harness.util.strict import Strict

TopologyName = Literal["single", "pd"]
Route = Literal["client", "router"]
ROUTES: tuple[Route, ...] = ("client", "router")
Tier = Literal["bitwise", "normal", "auto"]


class Timeouts(Strict):
    """Limits in seconds."""

    start: float = Field(default=480.0, gt=0, le=2_592_000)
    """Limit until every engine of a group answers ``/health``; requests that warm up a hand-off come after it. There is
    much room, because compilation on a busy machine can take minutes."""
    request: float = Field(default=90.0, gt=0, le=2_592_000)
    handshake_attempts: int = Field(default=5, ge=1, le=1000)
    stop: float = Field(default=15.0, gt=0, le=86_400)
    cell: float | None = Field(default=None, gt=0, le=2_592_000)
    """Limit for all requests of one cell. None: ten times the expected time, at least 600 s; more on a machine on which
    engines start more slowly than expected."""
    run: float | None = Field(default=None, gt=0, le=2_592_000)
    """Limit for all groups of engines together. None: ten times the expected time, at least an hour."""


class Expected(Strict):
    """Rough times in seconds for plans, schedules and CI steps; no verdict depends on them. The defaults were measured
    with the probe models on two cores."""

    pair_start_s: float = Field(default=15.0, gt=0, le=86_400)
    single_start_s: float = Field(default=10.0, gt=0, le=86_400)
    pd_request_s: float = Field(default=0.25, gt=0, le=86_400)
    single_request_s: float = Field(default=0.25, gt=0, le=86_400)

    beside_share: float = Field(default=0.5, ge=0, le=10)
    """By what share of a request's own time each other one beside it makes it longer."""

    def start_s(self, topology: str) -> float:
        return self.pair_start_s if topology == "pd" else self.single_start_s

    def request_s(self, topology: str) -> float:
        return self.pd_request_s if topology == "pd" else self.single_request_s


class ScenarioPrompts(Strict):
    """Prompts of texts for scenarios: longer ones than a step, pairs with a common prefix, conversations, and three
    that share blocks behind different ones."""

    longer_than: int = Field(ge=16, le=8192)
    """Tokens of an engine step (``engine.max_num_batched_tokens``), which the long prompts exceed."""


class PromptRecipe(Strict):
    """How ``harness prompts build recipe`` builds the prompt set of a profile. Plans use its numbers until the
    set exists."""

    dataset: str | None = None
    """Name of a dataset on the hub."""
    revision: str | None = Field(default=None, pattern=r"^[0-9a-f]{40}$")
    """Commit of the dataset."""
    file: Path | None = None
    """A file of texts instead of a dataset: .jsonl, .parquet, or one text a line."""
    config: str | None = None
    split: str = "train"
    column: str = "prompt"
    turns: Literal["first", "all"] = "first"
    """Of a conversation, the first turn of its user, or everything up to the last one, answers included."""
    block_sizes: tuple[int, ...] = Field(min_length=1)
    """Block sizes whose strata the set covers."""
    lookaheads: tuple[Annotated[int, Field(ge=0)], ...] = Field(min_length=1)
    """Lookaheads of the methods (DFlash: k + 1); each has its own stratum."""
    padded: bool = True
    """False: every text once as it is, cold, in an order by ``seed``, whatever strata the lengths fill."""
    per_stratum: int | None = Field(default=None, ge=1, le=5000)
    """Cold prompts for each stratum of each block size, and as many held-out ones, of padded texts."""
    plain: int = Field(default=0, ge=0, le=5000)
    """Texts to send as they are too, beside padded ones: so many cold, and as many held out."""
    echo: int = Field(default=0, ge=0, le=200)
    """Prompts for each stratum that ask to repeat words, whose right answer is known, and as many held out."""
    template: dict[str, bool] = Field(default_factory=dict)
    """Arguments for the chat template, such as ``enable_thinking: false`` for Qwen3."""
    texts: int | None = Field(default=None, ge=2)
    """Number of texts in the dataset. Plans then know how many prompts share one; without it, they take each for a text
    of its own."""
    max_blocks: int = Field(default=5, ge=1, le=64)
    padding: int | None = Field(default=None, ge=0, le=4096)
    """Most tokens that a text is padded by; None: fewer than the largest block has. With more, short texts reach
    ``max_blocks``, too."""
    scenarios: ScenarioPrompts | None = None
    """Prompts that scenarios name, beside those that are sent cold."""
    seed: int = 7

    @field_validator("block_sizes")
    @classmethod
    def _room_for_lookahead(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if any(not 8 <= size <= 1024 for size in value):
            raise ValueError("expected block sizes of 8 to 1024 tokens")
        return value

    @property
    def source(self) -> str:
        """Where the texts come from, in a word: the name of the dataset or of the file."""
        return self.dataset if self.dataset is not None else (self.file or Path()).name

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.dataset is None) == (self.file is None):
            raise ValueError(
                "expected dataset (with revision) or file, exactly one of the two, found "
                f"{'neither' if self.file is None else 'both'}"
            )
        if (self.revision is None) != (self.dataset is None):
            raise ValueError("expected revision, the commit, with a dataset and not with a file")
        return self

    @model_validator(mode="after")
    def _has_a_number(self) -> Self:
        if self.padded and self.per_stratum is None:
            raise ValueError("per_stratum is missing: the number of prompts of each stratum")
        if not self.padded and (self.texts is None or self.per_stratum is not None):
            raise ValueError("padded: false needs texts, the number of prompts, and excludes per_stratum")
        if not self.padded and (self.plain or self.echo):
            raise ValueError("padded: false excludes plain and echo")
        if self.texts is not None and self.plain > self.texts // 2:
            raise ValueError(f"expected plain of at most half of texts, {self.texts // 2}, found {self.plain}")
        return self


class Workload(Strict):
    """What each cell is sent."""

    prompts: Path
    recipe: PromptRecipe | None = None
    max_tokens: int = Field(default=192, ge=2)
    logprobs: int = Field(default=2, ge=2, le=5)
    text_prompts: int = Field(default=6, ge=0)
    """How many prompts are also sent as templated text, taken from the strata in turn."""
    per_stratum: int | None = Field(default=None, ge=1)
    """About how many prompts of each stratum are sent cold, in all cells; None sends every prompt of the set."""
    routed_per_stratum: int | None = Field(default=None, ge=1)
    """The same for cells behind a router, which changes who performs the hand-off and not what the engines compute."""
    at_once: int = Field(default=1, ge=1, le=256)
    """Most cold prompts that are under way at once. In the bitwise tier the first ones are asked alone and then
    together; the others go together if that changes no answer, else one by one. In the normal tier baselines are
    recorded in crowds, too, so that their A/A has the noise of crowds."""
    order_seed: int | None = 1
    """Seed of the order in which cold prompts are sent, the same in all cells; None sends them as the set has them, by
    length, so that a defect of long prompts cannot be told from one of old engines."""
    rescore: bool = True
    """Let the plain single engine score every distinct output afresh, if it is part of the run."""


class Judging(Strict):
    """Bounds that the checks use."""

    tier: Tier = "bitwise"
    """``bitwise``: deterministic arithmetic, greedy, one request at a time; tokens and accepted counts must be equal
    step for step. ``normal``: equal runs may differ; every gate is a registered test with a stated error rate.
    ``auto``: bitwise if the plain engine, asked again in the run, gave the same tokens; else normal."""
    near_tie_nats: float | None = Field(default=None, ge=0)
    """Top-2 log-prob gap of the reference, in nats, up to which its runner-up counts as a near tie. None: in the
    bitwise tier what rounding was measured to move (``harness.judging.rounding``); in the normal tier 0.02 for float32
    and 0.36 for 16-bit types (published: 0.25 to 0.36), or the noise floor of the plain engine's A/A if it is
    larger."""
    logprob_nats: float | None = Field(default=None, gt=0)
    """Difference in nats from which a log-prob, or the distance of the two best, is another one (bitwise tier). None: a
    multiple of the largest that rounding was measured to make (``harness.judging.rounding``)."""
    recorded_nats: float | None = Field(default=None, gt=0)
    """The same against the baseline, which engines of another machine may have recorded. None: ``logprob_nats``."""
    rounding_nats: float = Field(default=3.0, gt=0)
    """By how many nats the plain engine may dislike an output token for no other reason than rounding (normal tier),
    where its own answers do not show it: P's token, and all tokens of a run with too few near ties. For P's token the
    gaps at which equal runs part (A/A) count if they are larger."""
    family_alpha: float = Field(default=1e-3, gt=0, le=0.1)
    """Chance that a whole run of unchanged engines fails, over all registered tests and both stages."""
    stages: Literal[1, 2] = 2
    """2: a failing test is repeated with held-out prompts on fresh engines before it counts."""
    floor_points: float = Field(default=0.5, ge=0, le=100)
    """Smallest change of an acceptance rate, in percentage points, that matters in practice; smaller ones never fail a
    run."""
    must_detect_points: float = Field(default=5.0, gt=0, le=100)
    """A cell whose evidence could not have shown a change of this size is UNKNOWN, not PASS."""
    must_detect_stratum_points: float | None = Field(default=20.0, gt=0, le=100)
    """The same for each stratum: a collapse at one alignment must not hide behind the other prompts. None sets no
    requirement for strata."""
    must_detect_alone_points: float = Field(default=50.0, gt=0, le=100)
    """The same for tests in which each prompt of one cell is right or wrong: damage to this share of its prompts, in
    this cell alone. What P/D cells share is looked for in all of them together, where ``must_detect_points`` holds."""
    power: float = Field(default=0.9, gt=0.5, lt=1)
    """Probability of detecting a detectable effect."""
    confidence: float = Field(default=0.99, gt=0.5, lt=1)
    """Level of the intervals."""
    permutations: int = Field(default=20_000, ge=100, le=1_000_000)
    """Random label swaps per test; more are drawn where its p-value is close to its level."""
    seed: int = 1
    """Seed of the permutations: the same seed gives the same verdict."""
    baseline_days: int = Field(default=90, ge=1)
    """Age in days from which a baseline is reported as expired."""
    baseline_minors: int = Field(default=2, ge=0)
    """Distance in minor vLLM releases from which a baseline is reported as expired."""
    baseline_across: tuple[Literal["model_runner", "attention_backend", "enforce_eager", "extra_args"], ...] = ()
    """Settings in which a baseline may differ from the run: what differs between the two is then a finding, as when
    runner V2 is to answer as V1 did."""

    def near_tie_assumed(self, dtype: str) -> float:
        """Return the gap of a near tie, in nats, as set or, without a measurement, as assumed for engines of a type."""
        if self.near_tie_nats is not None:
            return self.near_tie_nats
        return 0.02 if dtype == "float32" else 0.36

    @model_validator(mode="after")
    def _floor_below_must_detect(self) -> Judging:
        if self.floor_points > self.must_detect_points:
            raise ValueError(
                f"expected floor_points ({self.floor_points:g}) to be at most must_detect_points "
                f"({self.must_detect_points:g}): a change that must be detected cannot be too small to matter"
            )
        return self

    @property
    def stage_alpha(self) -> float:
        """Family level of the tests of single cells in one stage: a false alarm has to pass all stages, on independent
        prompts. They share one half of ``family_alpha``."""
        return stage_alpha(self.family_alpha / 2, self.stages)

    @property
    def single_alpha(self) -> float:
        """Chance that each of the two gates of single answers finds one SUSPECT in a run of unchanged engines."""
        return self.family_alpha / 2

    @property
    def pooled_alpha(self) -> float:
        """Level that the tests of wrong answers in many cells share, which have one stage: with that of drafts the
        other half of ``family_alpha``."""
        return self.family_alpha / 2 - self.drafts_alpha

    @property
    def drafts_alpha(self) -> float:
        """Level of the test of the drafts of all P/D cells: small, because it has thousands of requests, and each
        percent is missing where answers are few."""
        return self.family_alpha / 40


class Exclude(Strict):
    """Cells to leave out of the matrix."""

    cells: str
    """A shell pattern over cell ids, with or without their variant."""
    reason: Annotated[str, Field(min_length=1), AfterValidator(redact.text)]
    """Free text, shown and recorded without secrets."""


class Profile(Strict):
    """One matrix: targets × topologies × methods, and how they are run and judged."""

    format: Literal[1]
    name: ShortName
    description: str = ""
    target: ModelPath
    """A folder, a name on the hub, or a file in a package; use ``target_folder`` to load it."""
    tokenizer: ModelPath | None = None
    """Tokenizer and chat template, if not the target's."""
    sources: dict[str, Source | PackageSource | GgufSource] = Field(default_factory=dict)
    """Origin of the models that were no folders for engines, by role; filled in by ``localise``."""
    topologies: tuple[TopologyName, ...] = Field(min_length=1)
    methods: tuple[Method, ...] = Field(min_length=1)
    routes: tuple[Route, ...] = Field(default=("client",), min_length=1)
    """``client``: the harness sends requests to each engine itself. ``router``: to a router in front of them."""
    axes: dict[str, dict[str, Overrides]] = Field(default_factory=dict)
    """Settings that are varied: per axis its values, each with what it changes; the first value is the default."""
    combine: Literal["each", "product"] = "each"
    """``each``: every value of the first axis with the defaults of the others, and with one of them changed at a time.
    ``product``: every combination."""
    variant: VariantName = ""
    """Which combination this is, in a part of a profile with axes: the value of the first axis and every other value
    that is not its axis's default."""
    exclude: tuple[Exclude, ...] = ()
    engine: EngineConfig
    workload: Workload
    scenarios: tuple[Scenario, ...] = ()
    """States beyond cold prompts that every cell of a suitable topology is put into."""
    judging: Judging = Judging()
    timeouts: Timeouts = Timeouts()
    expected: Expected = Expected()
    witness: Literal["off", "kv"] = "off"
    """``kv``: a plugin in the engines notes what their KV caches hold, by request, layer and head, which checks compare
    with what P held and with what the plain engine computed."""
    share_engines: bool = True
    """Run ``single`` cells on the decode engine of the pair with the same method, without a hand-off."""
    baselines: Path
    known_defects: Path | None = None
    """List of findings that have been reported already; see ``harness.judging.known_defects``."""

    @property
    def target_folder(self) -> Path:
        """Folder of the target. Raises ModelUnavailableError for a reference that is not in the local cache."""
        return local_folder(self.target, "target")

    @property
    def batch_invariant(self) -> bool:
        """Whether GPU engines use kernels whose results do not depend on the batch, as the bitwise tier asks for, or
        as ``engine.env`` says."""
        said = self.engine.env.get("VLLM_BATCH_INVARIANT", "1" if self.judging.tier == "bitwise" else "0")
        return self.engine.device == "gpu" and said == "1"

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer. Raises ModelUnavailableError for a reference that is not in the local cache."""
        return self.target_folder if self.tokenizer is None else local_folder(self.tokenizer, "tokenizer")

    @property
    def parts(self) -> tuple[Profile, ...]:
        """One plain profile per variant, with models as folders of the local caches; a profile without axes is its only
        part."""
        return _parts(self._as_json) if self.axes else (self,)

    @property
    def written_parts(self) -> tuple[Profile, ...]:
        """Like ``parts``, but with models as the profile names them."""
        return _written_parts(self._as_json) if self.axes else (self,)

    @cached_property
    def _as_json(self) -> str:
        return self.model_dump_json()

    def part(self, variant: str) -> Profile:
        """Return the plain profile of a variant. Raises UsageError for an unknown name."""
        found = {p.variant: p for p in self.parts}
        if variant not in found:
            raise UsageError(
                f"profile {self.name}: expected a variant ({', '.join(found) or 'it has no axes'}), found {variant!r}"
            )
        return found[variant]

    @model_validator(mode="before")
    @classmethod
    def _with_defaults(cls, raw: Any) -> Any:
        """Give settings that only axes name the value of each axis's default."""
        if isinstance(raw, dict) and isinstance(raw.get("axes"), dict) and raw["axes"]:
            check_axes(raw["axes"])
            for values in raw["axes"].values():
                raw = merged(raw, next(iter(values.values())))
        return raw

    @field_validator("topologies", "methods", "routes")
    @classmethod
    def _no_repeats(cls, value: tuple[Any, ...]) -> tuple[Any, ...]:
        names = [v if isinstance(v, str) else v.kind for v in value]
        if len(set(names)) != len(names):
            raise ValueError(f"expected each name once, found {', '.join(names)}")
        return value

    @model_validator(mode="after")
    def _fits(self) -> Profile:
        ids = [s.id for s in self.scenarios]
        if len(set(ids)) != len(ids) or {"cold", AT_ONCE} & {*ids}:
            raise ValueError(f"scenarios: expected unique ids other than 'cold' and 'at-once', found {', '.join(ids)}")
        if self.engine.pushes and "router" in self.routes:
            raise ValueError(
                "routes: expected client alone with engine.kv_transfer push, since a router hides P's counters"
            )
        if self.judging.tier == "bitwise":
            _check_remembers_nothing(self.methods)
        if not self.engine.by_nixl and "router" in self.routes:
            raise ValueError(
                f"routes: expected client alone with engine.kv_connector {self.engine.kv_connector}, since the router "
                "hands off by NIXL"
            )
        largest = max(m.lookahead for m in self.methods)
        smallest = min(self.engine.of(role).block_size for role in ("prefill", "decode"))
        if largest >= smallest:
            raise ValueError(f"lookahead {largest} must be smaller than block_size {smallest}")
        return self


_SUFFIX_CACHE = "suffix_decoding_max_cached_requests"


def _check_remembers_nothing(methods: Iterable[Method]) -> None:
    """Raise ValueError for a method whose drafts depend on earlier requests, which equal runs must not."""
    for method in methods:
        if isinstance(method, OtherMethod) and method.vllm_method == "suffix":
            found = method.speculative_config.get(_SUFFIX_CACHE)
            if found != 0:
                raise ValueError(
                    f"methods: expected {_SUFFIX_CACHE}: 0 in the speculative_config of {method.kind}, found "
                    f"{'none' if found is None else found}: with it, suffix decoding drafts from earlier answers, and "
                    "acceptance depends on what was asked before"
                )


@lru_cache(maxsize=16)
def _written_parts(profile: str) -> tuple[Profile, ...]:
    """Return the parts of a profile with axes, given as JSON."""
    raw = json.loads(profile)
    return tuple(Profile.model_validate(part_of(raw, v)) for v in variants(raw["axes"], raw["combine"]))


@lru_cache(maxsize=16)
def _parts(profile: str) -> tuple[Profile, ...]:
    return tuple(localise(p, p.name) for p in _written_parts(profile))


def forget_parts() -> None:
    """Look up models of profiles with axes again: some were made."""
    _parts.cache_clear()
