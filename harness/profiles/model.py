"""Profiles: what a run consists of, as validated data that rejects unknown keys."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from harness import redact
from harness.errors import ProfileError, UsageError
from harness.profiles import at_rest, connectors, converted, packages, remote_code
from harness.profiles.engine_args import check_arguments, check_variables, keys_in, not_plain, parallel_size
from harness.profiles.hub import Hub, look_up
from harness.profiles.methods import Method as Method
from harness.profiles.methods import NoSpeculation as NoSpeculation
from harness.profiles.methods import OtherMethod
from harness.profiles.model_reference import (
    TARGET,
    TOKENIZER,
    FolderAtRest,
    GgufSource,
    Given,
    ModelFolder,
    ModelPath,
    ModelReference,
    PackagedModel,
    PackageSource,
    Source,
    UnresolvedModel,
    UnresolvedPackage,
    described_in,
    local_folder,
    named_on_hub,
)
from harness.profiles.scenarios import Scenario
from harness.stats.multiplicity import stage_alpha
from harness.util import json_io, yaml_io
from harness.util.names import ShortName, VariantName
from harness.util.paths import REPOSITORY as REPOSITORY
from harness.util.paths import joined
from harness.util.strict import Strict as Strict
from harness.util.strict import describe_validation_error

SHIPPED_PROFILES = Path(__file__).resolve().parent

TopologyName = Literal["single", "pd"]
Route = Literal["client", "router"]
ROUTES: tuple[Route, ...] = ("client", "router")
Tier = Literal["bitwise", "normal", "auto"]
_MOST_BYTES = 16 * json_io.MIB
"""Largest config.json of a model that is read."""
_NAMES_CODE = re.compile(r"auto_map|.*module_path|.*_file")
"""Keys of a model's config whose values name code or files."""
_VALUE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,39}")


class TensorParallel(Strict):
    """Number of devices that each engine is spread over."""

    prefill: int = Field(default=1, ge=1, le=64)
    decode: int = Field(default=1, ge=1, le=64)
    """Also applies to single engines, so that both have the same arithmetic."""

    def of(self, role: str) -> int:
        return self.prefill if role == "prefill" else self.decode


class EngineConfig(Strict):
    """Settings of every engine of the profile."""

    device: Literal["cpu", "gpu"]
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    block_size: int = Field(default=32, ge=8, le=1024)
    max_model_len: int = Field(default=512, ge=64)
    max_num_seqs: int = Field(default=4, ge=1)
    kv_cache_gib: int = Field(default=1, ge=1)
    """Memory of the KV pool. On a GPU it is set, not measured: engines that start on one GPU at the same time would
    mistake each other's allocations for their own."""
    kv_blocks: int | None = Field(default=None, ge=8)
    """Blocks of the KV pool (``--num-gpu-blocks-override``); None lets vLLM use all memory that it is given. A small
    pool reuses blocks that hold other prompts' KV, where those of a fresh one are all zeros."""
    max_num_batched_tokens: int | None = Field(default=None, ge=32)
    """Most tokens of one engine step; a longer prompt is prefilled in chunks. None keeps vLLM's default."""
    kv_buffer_device: Literal["cpu", "cuda"] = "cpu"
    gpu_memory_utilization: float = Field(default=0.4, gt=0, le=0.95)
    """Fraction of a GPU's memory for one engine, weights and KV included; two of 0.45 fit on one GPU."""
    tensor_parallel: TensorParallel = TensorParallel()
    placement: Literal["together", "apart", "any"] = "any"
    """GPUs of a pair: P and D on the same ones, on different ones, or as it packs best. With fewer GPUs than different
    ones need, P and D share them, which is said."""
    enforce_eager: bool = True
    """Disable compilation and CUDA graphs: starts are several times faster, and arithmetic is the same in every
    topology. Most users run with False."""
    attention_backend: str | None = Field(default=None, pattern=r"^[A-Z0-9_]+$")
    """``--attention-backend``; None lets vLLM choose."""
    model_runner: Literal["V1", "V2"] | None = None
    """``VLLM_USE_V2_MODEL_RUNNER``; None lets vLLM choose."""
    nixl_threads: int | None = Field(default=None, ge=0)
    """Threads of the NIXL agent (``num_threads`` of the connector's extra config); None keeps vLLM's default of 4."""
    kv_roles: Literal["both", "split"] = "both"
    """``kv_role`` of a pair's engines: ``kv_both`` for each, or ``kv_producer`` for P and ``kv_consumer`` for D."""
    kv_transfer: Literal["pull", "push"] = "pull"
    """Who moves KV: D reads from P (``NixlConnector``), or P writes into D's blocks (``NixlPushConnector``)."""
    kv_connector: str | None = Field(default=None, pattern=r"^[A-Za-z0-9_]+$")
    """vLLM's connector of a pair; None: the one of NIXL that ``kv_transfer`` says. Without NIXL, alone or among those
    of a ``MultiConnector``, nothing proves what was moved, and pairs cannot pass."""
    kv_connector_extra_config: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the connector, such as the ``connectors`` of a ``MultiConnector``."""
    kv_load_failure_policy: Literal["fail", "recompute"] = "fail"
    """What D does with a request whose KV it cannot fetch: answer with an error, or compute the prompt by itself."""
    kv_lease_s: int = Field(default=30, ge=6)
    """Seconds that P keeps the blocks of an answered request for D (``kv_lease_duration``; vLLM's default is 30)."""
    kv_cache_dtype: str = "auto"
    """``--kv-cache-dtype``; ``auto`` keeps the model's."""
    hf_overrides: dict[str, Any] = Field(default_factory=dict)
    """``--hf-overrides``: values that replace those in the target's ``config.json``, or are added to it."""
    extra_args: tuple[str, ...] = ()
    """Further arguments for vLLM, of those that ``harness.profiles.engine_args`` allows."""
    env: dict[str, str] = Field(default_factory=dict)

    @field_validator("env")
    @classmethod
    def _allowed_variables(cls, value: dict[str, str]) -> dict[str, str]:
        hidden = sorted(k for k in value if k.startswith("KV_HARNESS_"))
        if hidden:
            raise ValueError(f"{', '.join(hidden)} would silently inject a fault; use `harness run --mutant FAULT`")
        check_variables(value)
        return value

    @field_validator("hf_overrides")
    @classmethod
    def _plain_overrides(cls, value: dict[str, Any]) -> dict[str, Any]:
        if code := next((key for key in keys_in(value) if _NAMES_CODE.fullmatch(key)), None):
            raise ValueError(f"expected no {code}, found it; it names code or a file, and a profile is only data")
        if problem := not_plain(value):
            raise ValueError(problem)
        return value

    @field_validator("extra_args")
    @classmethod
    def _allowed_arguments(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        check_arguments(value)
        parallel_size(value)
        return value

    def devices_of(self, role: str) -> int:
        """Return how many devices an engine is spread over: tensor × pipeline × data parallel size."""
        return self.tensor_parallel.of(role) * parallel_size(self.extra_args)

    @property
    def pushes(self) -> bool:
        """Whether P writes KV into D's blocks, and counts it."""
        return self.kv_transfer == "push" or connectors.pushes(self.kv_connector, self.kv_connector_extra_config)

    @property
    def read_back_s(self) -> float:
        """Seconds for which D keeps the blocks of an answer, from where P may read them for the next turn; 0: it does
        not keep them."""
        extra = self.kv_connector_extra_config
        return float(extra.get("decoder_kv_blocks_ttl", 480)) if extra.get("bidirectional_kv_xfer") else 0.0

    @property
    def by_nixl(self) -> bool:
        """Whether NIXL moves the KV of a pair, and counts it."""
        return connectors.by_nixl(self.kv_connector, self.kv_connector_extra_config)

    @model_validator(mode="after")
    def _connects(self) -> Self:
        if self.kv_connector is not None and self.kv_transfer == "push":
            raise ValueError(
                f"expected kv_connector or kv_transfer: push, found both; name NixlPushConnector, or one with it, as "
                f"kv_connector, instead of {self.kv_connector}"
            )
        for problem in connectors.problems(self.kv_connector, self.kv_connector_extra_config):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _offered_on_cpu(self) -> Self:
        if self.device == "cpu" and "--async-scheduling" in self.extra_args:
            raise ValueError(
                "expected no --async-scheduling with device cpu, where vLLM schedules synchronously without saying so, "
                "found it; leave it out"
            )
        return self


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
    """How ``harness prompts build --for-profile`` builds the prompt set of a profile. Plans use its numbers until the
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
            raise ValueError("expected per_stratum, the number of prompts of each stratum, found none")
        if not self.padded and (self.texts is None or self.per_stratum is not None):
            raise ValueError("expected texts, the number of prompts, and no per_stratum beside padded: false")
        if not self.padded and (self.plain or self.echo):
            raise ValueError("expected plain and echo beside padded texts only, found padded: false")
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
    rounding_nats: float = Field(default=3.0, gt=0)
    """By how many nats the plain engine may dislike an output token for no other reason than rounding (normal tier):
    one answer beyond it is a finding by itself. The gaps at which equal runs part (A/A) count if they are larger."""
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
    def pooled_alpha(self) -> float:
        """Level of the test of all P/D cells together, which has one stage: the other half of ``family_alpha``."""
        return self.family_alpha / 2


Overrides = dict[str, Any]
"""The settings of a profile that an axis value changes."""
VARIABLE = frozenset(
    {"target", "tokenizer", "topologies", "methods", "routes", "engine", "workload", "scenarios", "expected"}
)
"""Keys of a profile that the values of an axis may set."""


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
        """Whether GPU engines use kernels whose results do not depend on the batch, as the bitwise tier asks for."""
        return self.engine.device == "gpu" and self.judging.tier == "bitwise"

    @property
    def tokenizer_folder(self) -> Path:
        """Folder of the tokenizer. Raises ModelUnavailableError for a reference that is not in the local cache."""
        return self.target_folder if self.tokenizer is None else local_folder(self.tokenizer, "tokenizer")

    @property
    def parts(self) -> tuple[Profile, ...]:
        """One plain profile per variant, with models as folders of the local caches; a profile without axes is its only
        part."""
        return _parts(self.model_dump_json()) if self.axes else (self,)

    @property
    def written_parts(self) -> tuple[Profile, ...]:
        """Like ``parts``, but with models as the profile names them."""
        return _written_parts(self.model_dump_json()) if self.axes else (self,)

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
        if len(set(ids)) != len(ids) or "cold" in ids:
            raise ValueError(f"scenarios: expected unique ids other than 'cold', found {', '.join(ids)}")
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
        if largest >= self.engine.block_size:
            raise ValueError(f"lookahead {largest} must be smaller than block_size {self.engine.block_size}")
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
                    f"{'none' if found is None else found}: suffix decoding drafts from earlier answers otherwise, so "
                    "that acceptance depends on what was asked before"
                )


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``base`` with ``changes``: mappings are merged key by key; everything else is replaced.

    Models are replaced too: half of one name and half of another make no model.
    """
    out = dict(base)
    for key, value in changes.items():
        old = out.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping) and key not in MODEL_KEYS:
            out[key] = merged(old, value)
        else:
            out[key] = value
    return out


def _leaves(value: Mapping[str, Any], above: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    """Return the paths of the settings in a mapping."""
    out: set[tuple[str, ...]] = set()
    for key, inner in value.items():
        deep = isinstance(inner, Mapping) and key not in MODEL_KEYS
        out |= _leaves(inner, (*above, str(key))) if deep else {(*above, str(key))}
    return out


def check_axes(axes: Mapping[str, Any]) -> None:
    """Raise ValueError, with a sentence for the user, when axes cannot be expanded."""
    seen: dict[str, str] = {}
    for axis, values in axes.items():
        if not isinstance(values, Mapping) or not values:
            raise ValueError(f"axis {axis}: expected values by name, each with what it changes, found {values!r}")
        for name, changes in values.items():
            if not isinstance(name, str) or not _VALUE.fullmatch(name):
                raise ValueError(
                    f"axis {axis}: expected names of letters, digits, '-' and '_', in quotes where YAML would read a "
                    f"number, found {name!r}"
                )
            if not isinstance(changes, Mapping) or set(changes) - VARIABLE:
                raise ValueError(
                    f"axis {axis}, value {name}: expected settings among {', '.join(sorted(VARIABLE))}, found "
                    f"{changes!r}"
                )
            if name in seen:
                raise ValueError(f"axis {axis}: expected unique names, found {name}, which axis {seen[name]} has too")
            seen[name] = axis
        first = next(iter(values))
        for name, changes in values.items():
            missing = _leaves(values[first]) - _leaves(changes)
            if missing:
                what = ", ".join(".".join(path) for path in sorted(missing))
                raise ValueError(f"axis {axis}, value {name}: expected it to set {what}, as the default {first} does")


def variants(axes: Mapping[str, Mapping[str, Any]], combine: str) -> list[str]:
    """Return the names of all combinations; for each value of the first axis, the one with all defaults comes first."""
    first, *others = [list(values) for values in axes.values()]
    out = []
    for lead in first:
        for chosen in product(*others):
            changed = [v for v, values in zip(chosen, others, strict=True) if v != values[0]]
            if combine == "product" or len(changed) <= 1:
                out.append(".".join([lead, *changed]))
    return sorted(out, key=lambda v: (first.index(v.split(".")[0]), v.count(".")))


def part_of(data: Mapping[str, Any], variant: str) -> dict[str, Any]:
    """Return a profile as data with the settings of one variant and without axes; a plain profile is unchanged."""
    axes: Mapping[str, Mapping[str, Any]] = data.get("axes") or {}
    if not variant or not axes:
        return dict(data)
    named = variant.split(".")
    out: dict[str, Any] = {**data, "axes": {}, "variant": variant}
    for values in axes.values():
        out = merged(out, next((values[n] for n in named if n in values), {}))
    return out


MODEL_KEYS = frozenset({"target", "tokenizer", "drafter"})
"""Keys of a profile whose values are models: a path, or a name on the hub."""
PATH_KEYS = MODEL_KEYS | {"prompts", "baselines", "known_defects"}
"""Keys of a profile whose values are paths."""


def _is_path(key: str, value: Any, above: str) -> bool:
    """Return whether a key's value is a path: that of a path key, the ``path`` of a model, or the texts of a recipe."""
    inside = (key == "path" and above in MODEL_KEYS) or (key == "file" and above == "recipe")
    return isinstance(value, str) and (key in PATH_KEYS or inside)


def _resolve(value: Any, base: Path, key: str = "") -> Any:
    """Make the paths of a raw profile absolute, relative to ``base``, and plain names of models on the hub references.
    Raises ValueError as ``joined`` does."""
    if isinstance(value, dict):
        return {k: _located(v, base, k) if _is_path(k, v, key) else _resolve(v, base, k) for k, v in value.items()}
    if isinstance(value, list):
        return [_resolve(v, base, key) for v in value]
    return value


def _located(text: str, base: Path, key: str) -> str | dict[str, str]:
    named = named_on_hub(text, base) if key in MODEL_KEYS else None
    return named or str(joined(base, text))


@lru_cache(maxsize=16)
def _written_parts(profile: str) -> tuple[Profile, ...]:
    """Return the parts of a profile with axes, given as JSON."""
    raw = json.loads(profile)
    return tuple(Profile.model_validate(part_of(raw, v)) for v in variants(raw["axes"], raw["combine"]))


@lru_cache(maxsize=16)
def _parts(profile: str) -> tuple[Profile, ...]:
    return tuple(localise(p, p.name) for p in _written_parts(profile))


def models_of(profile: Profile, method: Method) -> dict[str, ModelPath | None]:
    """Return the models that an engine of a method loads, by role."""
    return {"target": profile.target, "tokenizer": profile.tokenizer, f"drafter of {method.kind}": method.drafter}


# --- models that have no folder for engines yet ---------------------------------------------------------------------


def given_models(profile: Profile) -> dict[str, Given | None]:
    """Return the models of a profile by role: target, tokenizer, or the kind of a method."""
    return {TARGET: profile.target, TOKENIZER: profile.tokenizer} | {m.kind: m.drafter for m in profile.methods}


def references_of(profile: Profile) -> dict[str, ModelReference]:
    """Return the models on the hub that have no folder yet, by role."""
    return {role: value for role, value in given_models(profile).items() if isinstance(value, ModelReference)}


def makeable(profile: Profile) -> dict[str, PackagedModel | FolderAtRest]:
    """Return the models of a profile as written, by role, that can be made without the hub: those in packages, and
    folders at rest."""
    out: dict[str, PackagedModel | FolderAtRest] = {}
    for role, value in given_models(profile).items():
        folder = described_in(value)
        if isinstance(value, PackagedModel | FolderAtRest):
            out[role] = value
        elif folder is not None and at_rest.is_at_rest(folder):
            trusted = isinstance(value, ModelFolder) and value.trust_remote_code
            out[role] = FolderAtRest(path=folder, trust_remote_code=trusted, reason="not looked up")
    return out


def unavailable(profile: Profile) -> dict[str, str]:
    """Return, by role, why models of a localised profile cannot be used."""
    return {
        role: value.reason
        for role, value in given_models(profile).items()
        if isinstance(value, UnresolvedModel | UnresolvedPackage | FolderAtRest)
    }


def made_later(profile: Profile) -> set[str]:
    """Return the roles of models of a localised profile that a run makes before it starts."""
    return makeable(profile).keys() & unavailable(profile).keys()


def reason_for(profile: Profile, kind: str) -> str | None:
    """Return which missing model keeps a method of a localised profile from running, in words, or None."""
    missing = unavailable(profile)
    return next((missing[role] for role in (TARGET, TOKENIZER, kind) if role in missing), None)


def localise(profile: Profile, name: str = "", hub: Hub | None = None) -> Profile:
    """Replace references, models in packages and folders at rest by folders of the caches, and note their origin in
    ``sources``.

    This contacts nobody, makes nothing and never raises: what has no folder keeps its name, with the reason, and using
    it raises ModelUnavailableError. ``name`` is what the user calls the profile.
    """
    references, others = references_of(profile), makeable(profile)
    if not references and not others:
        return profile
    found: dict[str, tuple[Given, Source | PackageSource | GgufSource | None]] = {}
    called_so = name or profile.name
    if references:
        hub = hub or Hub()
    for role, reference in references.items():
        # Without its own tokenizer, the profile uses the target's.
        also_tokenizer = role == TARGET and profile.tokenizer is None
        found[role] = _of_hub(reference, look_up(hub or Hub(), reference, role, also_tokenizer, called_so))
    command = f"harness models --profile {shlex.quote(called_so)} --download"
    for role, value in others.items():
        found[role] = _made(value, command)
    folders = {role: folder for role, (folder, _) in found.items()}
    sources = profile.sources | {role: source for role, (_, source) in found.items() if source is not None}
    changes: dict[str, Any] = {r: folders[r] for r in (TARGET, TOKENIZER) if r in folders}
    methods = tuple(
        m.model_copy(update={"drafter": folders[m.kind]}) if m.kind in folders else m for m in profile.methods
    )
    return profile.model_copy(update={**changes, "methods": methods, "sources": sources})


def _of_hub(reference: ModelReference, found: Path | str) -> tuple[Given, Source | None]:
    """Return a model of the hub with its origin, or with the reason why it has no folder."""
    if isinstance(found, str):
        return UnresolvedModel(**reference.model_dump(exclude={"reason"}), reason=found), None
    trusted = reference.trust_remote_code
    source = Source(repo=reference.repo, revision=reference.revision, commit=found.name)
    return ModelFolder(path=found, trust_remote_code=trusted) if trusted else found, source


def _made(value: PackagedModel | FolderAtRest, command: str) -> tuple[Given, PackageSource | GgufSource | None]:
    """Return a model of a package or at rest with its origin, or with the reason why it has no folder."""
    if isinstance(value, PackagedModel):
        folder = packages.found(value)
        if folder is not None:
            return folder, packages.source_of(value)
        known = value.model_dump(exclude={"reason"})
        return UnresolvedPackage(**known, reason=packages.why_not(value, command)), None
    try:
        folder = at_rest.expanded(value.path)
        source = at_rest.source_of(value.path)
    except OSError as error:
        return value.model_copy(update={"reason": f"{value.path}: cannot be read ({error.strerror})"}), None
    if folder is not None:
        trusted = value.trust_remote_code
        return ModelFolder(path=folder, trust_remote_code=trusted) if trusted else folder, source
    reason = (
        f"expected {value.path / at_rest.WEIGHTS} expanded in the cache {converted.root()}, found it at rest alone; "
        f"run `{command}`, which needs no network for that"
    )
    return value.model_copy(update={"reason": reason}), None


def forget_parts() -> None:
    """Look up models of profiles with axes again: some were made."""
    _parts.cache_clear()


# --- loading ---------------------------------------------------------------------------------------------------------


def shipped_profile_names() -> list[str]:
    return sorted(p.stem for p in SHIPPED_PROFILES.glob("*.yaml"))


def load_profile(name_or_path: str) -> Profile:
    """Load a shipped profile by name or any profile by path, with models of the hub as folders of the local cache.

    Paths inside a profile are relative to the profile's folder; those of shipped profiles to the repository. A profile
    may name another one that it ``extends``: its own keys override those of the other, mappings key by key, everything
    else as a whole; ``more_scenarios`` are added to the other's, or replace those of the same id, and those named in
    ``without_scenarios`` are left out.

    Raises ProfileError with one sentence per problem. A model of the hub that is missing from the cache is not such a
    problem: see ``localise``.
    """
    profile, path = _read(name_or_path)
    for part in profile.written_parts:
        # A variant without prompts is UNKNOWN while the others run, and prompts of a recipe can be planned unbuilt.
        check_paths(part, path, with_prompts=not profile.axes and part.workload.recipe is None)
    if profile.axes:
        return profile
    local = localise(profile, name_or_path)
    for problem in _model_problems(local):
        raise ProfileError(f"profile {path}: {problem}")
    return local


def read_profile(name_or_path: str, with_prompts: bool = False) -> Profile:
    """Read a profile as written, with its references to the hub. Raises ProfileError.

    Its models need not be on this machine; its prompts must be if ``with_prompts`` is true.
    """
    profile, path = _read(name_or_path)
    for part in profile.written_parts:
        check_paths(part, path, with_prompts)
    return profile


def require_profile(name_or_path: str) -> None:
    """Raise ProfileError unless there is such a profile; nothing of it is read."""
    _profile_path(name_or_path, Path())


def profile_of(text: str, folder: Path) -> Profile:
    """Return the profile that a text would be in a file of this folder. Raises ProfileError."""
    return _validated(_resolve(yaml_io.parse(text), folder), folder / "(not written yet)")


def _read(name_or_path: str) -> tuple[Profile, Path]:
    path = _profile_path(name_or_path, Path())
    return _validated(_with_parents(path, ()), path), path


def _validated(raw: Mapping[str, Any], path: Path) -> Profile:
    try:
        profile = Profile.model_validate(raw)
        # Every part is validated before anything runs.
        parts = profile.written_parts
    except ValidationError as error:
        raise ProfileError(f"profile {path} is not valid:\n{describe_validation_error(error)}") from error
    for key, values in (
        ("engine.device", {p.engine.device for p in parts}),
        ("workload.rescore", {p.workload.rescore for p in parts}),
    ):
        if len(values) > 1:
            raise ProfileError(
                f"profile {path}: axes: expected {key} to be the same for all values, found "
                f"{', '.join(sorted(map(str, values)))}: it applies to the whole run; write a profile for each value"
            )
    return profile


def _profile_path(name_or_path: str, base: Path, source: str = "") -> Path:
    """Return the file of a shipped profile, or a path relative to ``base``."""
    if name_or_path in shipped_profile_names():
        return SHIPPED_PROFILES / f"{name_or_path}.yaml"
    path = base / name_or_path
    if not path.is_file():
        raise ProfileError(
            f"{source}expected a shipped profile ({', '.join(shipped_profile_names())}) or the path of a YAML file, "
            f"found {name_or_path!r}, which is neither"
        )
    return path


def _with_parents(path: Path, children: tuple[Path, ...]) -> dict[str, Any]:
    """Return a profile as data with absolute paths, merged with the profiles that it extends."""
    if path.resolve() in children:
        raise ProfileError(f"profile {path}: expected profiles to extend others, found one that extends itself")
    try:
        _, raw = yaml_io.load(path)
    except (ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        raise ProfileError(f"profile {path}: expected YAML, but it cannot be read: {reason}") from error
    if not isinstance(raw, dict):
        raise ProfileError(f"profile {path}: expected a mapping at the top level, found {type(raw).__name__}")
    if "sources" in raw:
        raise ProfileError(f"profile {path}: sources: unknown key; only runs record it; remove it")
    parent = raw.pop("extends", None)
    is_shipped = path.resolve().parent == SHIPPED_PROFILES
    folder = path.resolve().parent
    try:
        raw = _resolve(raw, REPOSITORY if is_shipped else folder)
        if isinstance(parent, str) and parent not in shipped_profile_names():
            joined(folder, parent)
    except ValueError as error:
        raise ProfileError(f"profile {path}: {error}") from error
    changes = {key: raw.pop(key) for key in (MORE, WITHOUT) if key in raw}
    if parent is None:
        if changes:
            raise ProfileError(
                f"profile {path}: {next(iter(changes))}: expected a profile that extends another, found none"
            )
        return dict(raw)
    if not isinstance(parent, str):
        raise ProfileError(f"profile {path}: extends: expected the name or path of a profile, found {parent!r}")
    above = _profile_path(parent, folder, f"profile {path}: extends: ")
    inherited = _with_parents(above, (*children, path.resolve()))
    _check_not_overridden(path, raw, inherited)
    whole = merged(inherited, raw)
    if changes:
        whole["scenarios"] = _changed_scenarios(path, whole.get("scenarios") or [], **changes)
    return whole


MORE, WITHOUT = "more_scenarios", "without_scenarios"
"""Keys of a profile that change the list of scenarios that it inherits."""


def _changed_scenarios(
    path: Path, inherited: list[Any], more_scenarios: Any = (), without_scenarios: Any = ()
) -> list[Any]:
    """Return the inherited scenarios with others added, or in place of those with their ids, and without some. Raises
    ProfileError for what is no list of scenarios, or of ids that are inherited."""
    ids = [s.get("id") for s in inherited]
    for key, values, kind, what in (
        (MORE, more_scenarios, dict, "scenarios"),
        (WITHOUT, without_scenarios, str, "ids"),
    ):
        if not isinstance(values, (list, tuple)) or not all(isinstance(value, kind) for value in values):
            raise ProfileError(f"profile {path}: {key}: expected a list of {what}, found {values!r}")
    if strange := [i for i in without_scenarios if i not in ids]:
        raise ProfileError(f"profile {path}: {WITHOUT}: expected ids among {', '.join(ids)}, found {strange[0]!r}")
    named = {s.get("id"): s for s in (*inherited, *more_scenarios)}
    return [scenario for name, scenario in named.items() if name not in without_scenarios]


def _check_not_overridden(path: Path, raw: Mapping[str, Any], inherited: Mapping[str, Any]) -> None:
    """Raise ProfileError for settings of a profile that an inherited axis would silently override."""
    own = _leaves({k: v for k, v in raw.items() if k in VARIABLE})
    for axis, values in (inherited.get("axes") or {}).items():
        if axis in (raw.get("axes") or {}) or not isinstance(values, Mapping):
            continue
        taken = {leaf for changes in values.values() if isinstance(changes, Mapping) for leaf in _leaves(changes)}
        if lost := sorted(".".join(leaf) for leaf in own & taken):
            raise ProfileError(
                f"profile {path}: expected settings that no inherited axis sets, found {', '.join(lost)}, which axis "
                f"{axis} sets; give the axis its values here (axes: {axis})"
            )


def check_paths(profile: Profile, source: Path, with_prompts: bool = True) -> None:
    """Raise ProfileError when a model or prompt path of the profile does not exist or is not a model.

    References to the hub and models in packages are checked where they are looked up.
    """
    models = {"target": profile.target} | {
        f"drafter of {m.kind}": m.drafter for m in profile.methods if m.drafter is not None
    }
    for role, model in models.items():
        # One that was looked up says why it has none where it is used.
        if (folder := described_in(model)) is None:
            continue
        config = folder / "config.json"
        if not config.is_file():
            raise ProfileError(
                f"profile {source}: {role}: expected a model folder with config.json at {folder}, found none. "
                "Correct the path, or restore models/probe from version control for the probe models"
            )
        try:
            json_io.loads(json_io.read_text(config, _MOST_BYTES))
        except (ValueError, OSError) as error:
            raise ProfileError(f"profile {source}: {role}: {config} is not JSON ({error})") from error
    tokenizer = described_in(profile.tokenizer if profile.tokenizer is not None else profile.target)
    if tokenizer is not None and not (tokenizer / "tokenizer_config.json").is_file():
        raise ProfileError(
            f"profile {source}: tokenizer: expected a folder with tokenizer_config.json at "
            f"{tokenizer}, found none; correct the path"
        )
    for problem in _model_problems(profile):
        raise ProfileError(f"profile {source}: {problem}")
    if with_prompts and not profile.workload.prompts.is_file():
        how = f" --for-profile {called(source)}" if profile.workload.recipe is not None else ""
        raise ProfileError(
            f"profile {source}: workload.prompts: expected a prompt set at {profile.workload.prompts}, found none. "
            f"Correct the path, or run `harness prompts build{how}`"
        )


def called(source: Path) -> str:
    """Return how a command line names the profile in a file: a shipped one by name, others by path."""
    return source.stem if source.parent == SHIPPED_PROFILES else shlex.quote(str(source))


def _model_problems(profile: Profile) -> Iterator[str]:
    """Yield why the models of a plain profile must not be loaded, as far as they are on this machine."""
    for method in profile.methods:
        yield from remote_code.problems(models_of(profile, method))
