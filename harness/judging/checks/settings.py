"""Check that the engines run with the settings that the profile asked for: vLLM replaces some of them and says so only
in its log, or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.history.records import EngineRecord
from harness.judging.evidence import CellView
from harness.judging.findings import CheckResult, Finding, conclude
from harness.profiles.at_rest import is_expansion
from harness.profiles.model_reference import TARGET

NAME = "engine-as-asked"
REPEATS = "engines-repeat"
READ_BACK = ("model_runner", "attention_backend", "kv_blocks")
"""Settings of ``engine`` in a profile that an engine tells, by the name of both."""
_STEP = "max_num_batched_tokens"
_IF_TOLD = "block_size"
"""Another one that some versions do not tell."""


def engine_as_asked(cell: CellView) -> CheckResult:
    """Check what each engine was started with, and what it says of itself, where the profile sets it."""
    roles = sorted(cell.engine_roles)
    findings = [
        found
        for role in roles
        if (engine := cell.engine(role)) is not None
        for found in (*_otherwise(cell, engine), *_started_otherwise(cell, engine))
    ]
    return conclude(NAME, cell.id, len(roles), findings)


def _started_otherwise(cell: CellView, engine: EngineRecord) -> Iterator[Finding]:
    """Yield findings about a command line that is not the profile's. Servers that ran already have none."""
    if engine.attached:
        return
    given = _options(engine.argv)
    wanted = {option: cell.settings.of(engine.role).asked(name) for option, name in OPTIONS.items()}
    target = cell.profile.setting(TARGET)
    wanted["--model"] = target if isinstance(target, str) else None
    for option, asked in wanted.items():
        if asked is not None and not _same(given.get(option), str(asked)):
            yield _other_command(cell, engine, f"{option} {asked}", given.get(option))
    if engine.role in _OF_A_PAIR and "--kv-transfer-config" not in given:
        yield _other_command(cell, engine, "--kv-transfer-config", None)
    method = cell.profile.method(cell.name.method)
    k, drafter = cell.record.draft_tokens, method.get("drafter")
    found = _json(given.get("--speculative-config"))
    if engine.role == "prefill":
        on_p, drafter = method.get("prefill_num_speculative_tokens"), method.get("prefill_drafter") or drafter
        k = k if on_p is None else on_p
    if found.get("num_speculative_tokens", 0) != k:
        yield _other_command(cell, engine, f"--speculative-config with {k} drafts a step", found or None)
    elif k and isinstance(drafter, str) and not _same(found.get("model"), drafter):
        yield _other_command(cell, engine, f"--speculative-config with the drafter {drafter}", found)


def _same(found: object, asked: str) -> bool:
    """Return whether these are the same value, or folders of one name: parts of a run may come from machines with other
    paths, and what is in the folders is hashed by identities. A profile with axes names a folder at rest as it is
    written, and its engines are given the expanded one."""
    if not isinstance(found, str) or found == asked or "/" not in asked:
        return found == asked
    return Path(found).name == Path(asked).name or is_expansion(found, asked)


_OF_A_PAIR = ("prefill", "decode")
OPTIONS = {
    "--dtype": "dtype",
    "--block-size": "block_size",
    "--max-model-len": "max_model_len",
    "--max-num-seqs": "max_num_seqs",
    "--num-gpu-blocks-override": "kv_blocks",
    "--max-num-batched-tokens": _STEP,
    "--attention-backend": "attention_backend",
}
"""Options of vLLM that carry a setting of ``engine`` in a profile."""


def _options(argv: Sequence[str]) -> dict[str, str]:
    """Return the options of a command line that have a value; of one given twice the last, as vLLM takes it."""
    return {
        name: value
        for name, value in pairwise(argv)
        if name.startswith("--") and not (value.startswith("--") and " " not in value)
    }


def _json(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text) if text is not None else {}
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _other_command(cell: CellView, engine: EngineRecord, wanted: str, found: object) -> Finding:
    message = (
        f"expected the {engine.role} engine to be started with {wanted}, as the profile has it, found "
        f"{'nothing of it' if found is None else found}: what was to be tested was not; record the cell again"
    )
    return cell.untested(NAME, message)


def _otherwise(cell: CellView, engine: EngineRecord) -> Iterator[Finding]:
    asked_for = cell.settings.of(engine.role)
    budget = asked_for.asked(_STEP)
    other = budget is not None and engine.step_tokens is not None and not budget / 2 <= engine.step_tokens <= budget
    if other and not _holds_each_prompt(cell, engine, budget):
        message = (
            f"expected the {engine.role} engine to run with engine.{_STEP}: {budget}, of which speculation may take "
            f"some, found {engine.step_tokens}: prompts are not cut into steps as they were to be; see "
            f"logs/{engine.log}"
        )
        yield cell.untested(NAME, message)
    # Of a server that ran already, states that need a pool of this size prove themselves that they occurred.
    told = [name for name in READ_BACK if not (engine.attached and name == "kv_blocks")]
    for name in (*told, *([_IF_TOLD] if engine.block_size is not None else [])):
        asked, found = asked_for.asked(name), getattr(engine, name)
        if asked is not None and found != asked:
            given = "that it does not say" if found is None else f"{found}"
            message = (
                f"expected the {engine.role} engine to run with engine.{name}: {asked}, found {given}: what was to be "
                f"tested was not; see logs/{engine.log}, or ask for what this vLLM has"
            )
            yield cell.untested(NAME, message)


def _holds_each_prompt(cell: CellView, engine: EngineRecord, budget: Any) -> bool:
    """Return whether a step of a server that ran already holds each prompt of the cell, as one of the profile's does:
    then its size changes no answer. What is sent together was looked at before anything was asked."""
    step = min(engine.step_tokens or 0, budget)
    return engine.attached and all(len(o.sent_ids) <= step for o in cell.history.in_order(cell.id))


def needs_repeats(cell: CellView) -> bool:
    """Return whether a cell is in a state whose answers only equal runs can judge, chosen by a profile with the tier
    ``auto``."""
    config = cell.config
    return (
        cell.history.run.asked_for.tier == "auto"
        and config is not None
        and not (config.drawn and config.max_tokens is None)
    )


def engines_repeat(cell: CellView) -> CheckResult:
    """Say that such a state is not judged, since the engines of this run do not repeat their answers."""
    message = (
        f"expected engines whose answers are equal bit for bit, by which {cell.scenario} is judged, found others in "
        "this run (tier auto): they do not repeat themselves, or rounding decides too many tokens; use batch-invariant "
        "kernels, or scenarios with prompts by number"
    )
    return conclude(REPEATS, cell.id, 0, [cell.untested(REPEATS, message)])
