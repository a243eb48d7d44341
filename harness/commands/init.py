"""``harness init``: writes a short profile for a model and its drafter, to be read and changed by hand."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from harness.errors import HarnessError, ProfileError, UsageError
from harness.profiles.drafter_models import misplaced
from harness.profiles.engine_config import BLOCK_MULTIPLES, DeviceKind, misfit_block
from harness.profiles.hub import Hub
from harness.profiles.load import check_paths, profile_of, shipped_profile_names
from harness.profiles.methods import KNOWN_METHODS, MOST_DRAFTS, SHORT_FORMS, traits_of
from harness.profiles.model import Profile
from harness.profiles.model_reference import TARGET, TOKENIZER, ModelReference, described_in, named_on_hub
from harness.prompts.datasets import read_texts
from harness.util.choices import nearest
from harness.util.invalid_data import refused_as
from harness.util.paths import REPOSITORY, beneath
from harness.util.text import listed

_DRAFTS = 3
"""k, unless it is given."""
_LOOKUP = {
    "ngram": {"prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"suffix_decoding_max_cached_requests": 0},
}
"""Keys that a method without a model is used with."""
_ENGINE = {
    "gpu": """\
  device: gpu
  dtype: bfloat16
  block_size: {block_size}
  max_model_len: 4096
  max_num_seqs: 16
  max_num_batched_tokens: 8192
  # P and D share a GPU if both fit: each needs the weights of target and drafter, and its KV pool.
  kv_cache_gib: 8
  gpu_memory_utilization: 0.42
  enforce_eager: false
  kv_buffer_device: cuda
""",
    "cpu": """\
  device: cpu
  dtype: float32
  block_size: {block_size}
  max_model_len: 1024
  max_num_seqs: 4
  max_num_batched_tokens: 1024
  kv_cache_gib: 2
  nixl_threads: 0
""",
}
_JUDGING = {
    "gpu": """\
# The run measures whether equal requests get equal answers, alone and in a crowd: then every token is compared, and
# log-probs within the rounding that `harness baseline record` measured; else the gates are statistical tests.
judging: {{tier: auto}}
timeouts: {{start: 900, request: 180}}
# Guesses, in seconds; a run corrects them as it goes. Only plans and limits depend on them.
expected: {{pair_start_s: 180, single_start_s: 120, pd_request_s: 2.2, single_request_s: 2.0}}
""",
    "cpu": """\
# The run measures whether equal requests get equal answers, alone and in a crowd: then every token is compared, and
# log-probs within the rounding that `harness baseline record` measured; else the gates are statistical tests.
judging: {{tier: auto}}
timeouts: {{start: 900, request: 300}}
# Guesses, in seconds, by the size of the model; a run corrects them as it goes. Only plans and limits depend on them.
expected: {{pair_start_s: 40, single_start_s: 30, pd_request_s: {request_s:g}, single_request_s: {request_s:g}}}
""",
}
_TEXT = """\
# {name}: written by `harness init`; docs/profiles.md has every key. Next: harness run -p {file} --prepare
format: 1
name: {name}
description: {description}
# A folder, or a name on the hub; {pin}.
{models}
topologies: [pd, single]
methods:
  - {{kind: none}}  # the plain engine, whose tokens are right by definition
{method}\
engine:
{engine}\
workload:
  # {texts}, padded to lengths on and around the ends of KV blocks; see `harness plan` for their power.
  prompts: prompts/{name}.jsonl
  recipe:
{source}    block_sizes: [{block_size}]
    lookaheads: [{lookahead}]
    texts: {count}
    per_stratum: {per_stratum}
    max_blocks: 6
  max_tokens: {max_tokens}
  text_prompts: 4
{judging}\
baselines: baselines/{name}
"""
_COLUMN = "prompt"
"""Key of a JSON line, or column of a table, that has the text of a question."""
_MT_BENCH = """\
    # Where the hub does not answer, questions that come with the harness take their place; `file: FILE` names your own.
    dataset: HuggingFaceH4/mt_bench_prompts
    revision: e3a795c5e9a82ee40611c416b8a7786c73198991
"""
_BYTES_PER_S = {"cpu": 15e9}
"""What two cores read of the weights in a second, about; a token takes all of them."""
_UNKNOWN_REQUEST_S = 10.0


class InitOptions(NamedTuple):
    """What the user said."""

    target: str
    drafter: str | None
    method: str
    drafts: int | None
    device: DeviceKind
    block_size: int | None
    name: str | None = None
    tokenizer: str | None = None
    questions: Path | None = None
    """A file of texts for the prompts, instead of a dataset of the hub."""


class Written(NamedTuple):
    text: str
    notes: tuple[str, ...]
    """What the user has to know, such as models that are not pinned."""


def new_profile(wanted: InitOptions, out: Path | None, hub: Hub) -> Written:
    """Return the text of a profile, and notes; the hub is asked for commits, and may be out of reach. Raises UsageError
    for what does not fit together, and ProfileError for models that do not exist."""
    for problem in _problems(wanted, out):
        raise UsageError(problem)
    folder = out.absolute().parent if out is not None else Path.cwd()
    file = str(out) if out is not None else "FILE"
    target, *notes = _model(wanted.target, TARGET, "--target", hub, file, folder)
    drafter, more = None, []
    models = {TARGET: target}
    if wanted.tokenizer is not None:
        models[TOKENIZER], *others = _model(wanted.tokenizer, TOKENIZER, "--tokenizer", hub, file, folder)
        notes += others
    if wanted.drafter is not None:
        drafter, *more = _model(wanted.drafter, wanted.method, "--drafter", hub, file, folder)
    drafts = (wanted.drafts or _DRAFTS) if wanted.method != "none" else 0
    size = wanted.block_size or BLOCK_MULTIPLES[wanted.device]
    traits = traits_of(wanted.method, {})
    name = wanted.name or name_of(wanted.target)
    method = f" with {wanted.method}, k = {drafts}," if drafts else ""
    max_tokens = 256 if wanted.device == "gpu" else 64
    texts, source, count = recipe_of(wanted.questions, folder)
    text = _TEXT.format(
        name=name,
        file=file,
        description=_scalar(f"{wanted.target}{method} on {wanted.device} engines"),
        pin=_pin([*notes, *more], file),
        models=_scalar(models),
        method=_method(wanted, drafter, drafts),
        engine=_ENGINE[wanted.device].format(block_size=size),
        block_size=size,
        lookahead=drafts + traits.bonus_slot if traits.reserves else 0,
        per_stratum=per_stratum(wanted),
        max_tokens=max_tokens,
        texts=texts,
        source=source,
        count=count,
        judging=_JUDGING[wanted.device].format(request_s=_request_s(wanted, max_tokens)),
    )
    profile = profile_of(text, folder)
    for problem in misplaced(profile):
        raise UsageError(problem)
    _require_tokenizer(profile, wanted)
    check_paths(profile, out or Path("(standard output)"), with_prompts=False)
    return Written(text, (*notes, *more))


def _require_tokenizer(profile: Profile, wanted: InitOptions) -> None:
    """Raise UsageError when the target's folder has no tokenizer, and none was named."""
    folder = described_in(profile.target)
    if wanted.tokenizer is None and folder is not None and not (folder / "tokenizer_config.json").is_file():
        raise UsageError(
            f"--target {wanted.target}: the folder has no tokenizer (tokenizer_config.json); name one with --tokenizer "
            "MODEL, a folder or a name on the hub"
        )


def _problems(wanted: InitOptions, out: Path | None) -> Iterator[str]:
    method, drafter, drafts = wanted.method, wanted.drafter, wanted.drafts
    if out is not None and out.exists():
        yield f"--out {out}: this file exists already; name another one, or remove it"
    if out is not None and not out.absolute().parent.is_dir():
        yield f"--out {out}: there is no folder {out.absolute().parent}; make it, or name another file"
    if method not in ("none", *KNOWN_METHODS):
        near = nearest(method, KNOWN_METHODS)
        hint = f"did you mean {listed(near, 'or')}?" if near else f"it knows none, {', '.join(KNOWN_METHODS)}."
        yield (
            f"--method {method}: `init` knows no such method; {hint} For another method of vLLM, write its "
            "speculative_config into the profile by hand (docs/profiles.md)"
        )
    traits = traits_of(method, {})
    if method == "none" and (drafter is not None or drafts is not None):
        found = "--drafter" if drafter is not None else "-k"
        yield f"{found} needs --method NAME, the method that drafts; add one of vLLM's"
    if traits.drafter == "needed" and drafter is None:
        yield f"--method {method} needs --drafter MODEL, the model that drafts; add it"
    if traits.drafter == "none" and method != "none" and drafter is not None:
        yield f"--method {method} drafts without a model; leave --drafter {drafter} out"
    most = 16 if method in SHORT_FORMS else MOST_DRAFTS
    if drafts is not None and not 1 <= drafts <= most:
        yield f"-k {drafts}: expected 1 to {most} drafts a step"
    size = wanted.block_size or BLOCK_MULTIPLES[wanted.device]
    if misfit := misfit_block(size, wanted.device):
        yield f"--block-size: {misfit}"
    reserved = (drafts or _DRAFTS) + traits.bonus_slot if traits.reserves and method != "none" else 0
    if reserved >= size:
        yield (
            f"--block-size {size}: expected more than the {reserved} KV slots that {method} reserves for its drafts; "
            "give a larger one, or a smaller -k"
        )
    if wanted.name is not None and name_of(wanted.name) != wanted.name:
        yield f"--name {wanted.name}: expected lower-case letters, digits and dashes, such as {name_of(wanted.name)}"
    name = wanted.name or name_of(wanted.target)
    if name in shipped_profile_names():
        yield f"--name: expected one that no shipped profile has, found {name}; give another, such as my-{name}"


def per_stratum(wanted: InitOptions) -> int:
    """Return so many prompts that the tests of a GPU profile could show what it must detect."""
    if wanted.device == "cpu":
        return 4
    # Without slots for drafts, there is no stratum of lengths at which they take one more block.
    strata = 4 if traits_of(wanted.method, {}).reserves else 3
    return (240 if wanted.method != "none" else 480) // strata


def _pin(notes: list[str], file: str) -> str:
    if notes:
        return f"@COMMIT behind it, which `harness models --profile {file}` shows, pins what it stands for"
    return "@COMMIT pins what it stands for"


def name_of(text: str) -> str:
    """Return a name for a profile that is made of the last part of a path or a name on the hub."""
    last = text.partition("@")[0].rstrip("/").rsplit("/", 1)[-1]
    return re.sub(r"[^a-z0-9]+", "-", last.lower()).strip("-")[:40].strip("-") or "mine"


def _scalar(value: Any) -> str:
    """Return a value on one line of YAML."""
    block = isinstance(value, dict)
    return (
        str(yaml.safe_dump(value, default_flow_style=not block, sort_keys=False, width=10_000, allow_unicode=True))
        .split("\n...")[0]
        .rstrip()
    )


def _method(wanted: InitOptions, drafter: str | None, drafts: int) -> str:
    if not drafts:
        return ""
    raw: dict[str, Any] = {"kind": wanted.method}
    raw |= {"drafter": drafter} if drafter is not None else {}
    raw["num_speculative_tokens"] = drafts
    if wanted.method not in SHORT_FORMS:
        raw["speculative_config"] = _LOOKUP.get(wanted.method, {})
    line = str(yaml.safe_dump(raw, default_flow_style=True, sort_keys=False, width=10_000)).rstrip()
    return f"  - {line}\n"


def recipe_of(questions: Path | None, folder: Path) -> tuple[str, str, int]:
    """Return what the prompts are made of, the lines of the recipe that name it, and the number of its texts. Raises
    DataError for a file that has none."""
    if questions is None:
        return "Questions of MT-Bench", _MT_BENCH, 80
    advice = f"call the one with the texts {_COLUMN}"
    count = len(read_texts(questions, _COLUMN, "all", "--questions", advice).rows)
    if count < 2:
        raise UsageError(
            f"--questions {questions}: {count} of the two texts that are needed, one for each half; add some"
        )
    lines = f"    file: {_scalar(seen_from(questions, folder))}\n    turns: all\n"
    return f"The texts of {questions.name}", lines, count


def seen_from(path: Path, folder: Path) -> str:
    """Return how a profile in ``folder`` names a path: from there if it may, so that both can be moved together."""
    home = REPOSITORY if beneath(folder, REPOSITORY) else folder.resolve()
    there = path.resolve()
    if not there.is_relative_to(home):
        return str(there)
    near = os.path.relpath(there, folder.resolve())
    return near if near.startswith("../") else f"./{near}"


def _request_s(wanted: InitOptions, max_tokens: int) -> float:
    """Return about how long a request takes on a CPU: a token reads all weights, which are float32 there."""
    files = list(Path(wanted.target).glob("*.safetensors")) if wanted.device == "cpu" else []
    if not files:
        return _UNKNOWN_REQUEST_S
    # Weights are stored in 16 bits, mostly; those that are not make the guess too long.
    seconds = max_tokens * 2 * sum(f.stat().st_size for f in files) / _BYTES_PER_S[wanted.device]
    return float(f"{max(seconds, 0.2):.2g}")


def _model(given: str, role: str, option: str, hub: Hub, file: str, beside: Path) -> list[str]:
    """Return how the profile names a model, and a note if it is not pinned. Raises UsageError when it is neither a
    folder nor a name on the hub, and ProfileError when the hub does not have it."""
    folder = Path(given)
    if folder.is_dir():
        return [seen_from(folder, beside)]
    raw = named_on_hub(given, Path.cwd())
    if raw is None:
        raise UsageError(
            f"{option} {given} is no folder, and no name on the hub (ORGANISATION/NAME, with @REVISION where it is "
            "not main); correct it"
        )
    with refused_as(UsageError, f"{option} {given}: not a name on the hub"):
        reference = ModelReference.model_validate(raw)
    if reference.pinned:
        return [given]
    commit, why = _commit(reference, role, hub)
    if commit is not None:
        return [f"{reference.repo}@{commit}"]
    return [
        given,
        f"{given} is not pinned: append @COMMIT to its name; `harness models --profile {file}` shows it once the hub "
        f"answers ({why})",
    ]


def _commit(reference: ModelReference, role: str, hub: Hub) -> tuple[str | None, str]:
    """Return the commit that a reference has now, by the hub or else by the cache; or None and the reason."""
    try:
        return hub.look(reference, role).commit, ""
    except ProfileError:
        raise
    except HarnessError as error:
        cached = hub.cached(reference, role)
        return (cached.name, "") if cached is not None else (None, str(error).removeprefix(f"{reference}: "))
