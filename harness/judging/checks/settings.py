"""Check that the engines run with the settings that the profile asked for: vLLM replaces some of them and says so only
in its log, or not at all."""

from __future__ import annotations

from collections.abc import Iterator

from harness.history.records import EngineRecord
from harness.judging.evidence import CellView
from harness.judging.findings import CheckResult, Finding, conclude

NAME = "engine-as-asked"
REPEATS = "engines-repeat"
READ_BACK = ("model_runner", "attention_backend", "kv_blocks")
"""Settings of ``engine`` in a profile that an engine tells, by the name of both."""
_IF_TOLD = "block_size"
"""Another one that some versions do not tell."""


def engine_as_asked(cell: CellView) -> CheckResult:
    """Check model runner, attention backend, KV pool and block size of each engine, where the profile sets them."""
    roles = sorted(cell.engine_roles)
    findings = [f for role in roles if (engine := cell.engine(role)) is not None for f in _otherwise(cell, engine)]
    return conclude(NAME, cell.id, len(roles), findings)


def _otherwise(cell: CellView, engine: EngineRecord) -> Iterator[Finding]:
    for name in (*READ_BACK, *([_IF_TOLD] if engine.block_size is not None else [])):
        asked, found = cell.settings.asked(name), getattr(engine, name)
        if asked is not None and found != asked:
            given = "that it does not say" if found is None else f"{found}"
            message = (
                f"expected the {engine.role} engine to run with engine.{name}: {asked}, found {given}: what was to be "
                f"tested was not; see logs/{engine.log}, or ask for what this vLLM has"
            )
            yield cell.untested(NAME, message)


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
        f"expected engines that give the same tokens again, by which {cell.scenario} is judged, found none in this run "
        "(tier auto); use batch-invariant kernels (judging.tier: bitwise), or scenarios with prompts by number"
    )
    return conclude(REPEATS, cell.id, 0, [cell.untested(REPEATS, message)])
