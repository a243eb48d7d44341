"""What a judgement says of a run as a whole, beside its verdict: sentences about how it was recorded and judged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from harness.history.at_once import in_words
from harness.history.engine_interfaces import PER_REQUEST_FLAG, SERVER_INFO
from harness.history.folder import History
from harness.history.plan import ROUTER
from harness.history.records import RunRecord
from harness.history.run_kind import notices_of as kind_notices
from harness.judging.evidence import Evidence, judging_of
from harness.judging.rounding import notices as rounding_notices
from harness.observed.at_once import crowd_proof
from harness.profiles.cells import CellName
from harness.util.signals import ended_by
from harness.util.text import listed

INJECTED = "INJECTED FAULT"
"""How the notice begins that a run has a deliberate defect: it is louder than all others."""


def notices_of(evidence: Evidence) -> tuple[str, ...]:
    """Return the notices about a run, in the order of reports: what weighs most comes first, since a terminal shows
    two of them."""
    history = evidence.history
    run = history.run
    notices = [*_injected(run), *_on_trust(run), *_of_the_end(run)]
    notices += [
        f"{cell}: it has answers of {scenario}, which this run was not to ask there; the record was put together by "
        "hand"
        for cell, scenario in history.unplanned()
    ]
    if history.torn_line:
        notices.append("the last observation was cut off while being written and was left out")
    notices += [*history.notices, *(run.merged.notices if run.merged is not None else ())]
    notices += [*_of_engines(run), *_compared_in_total(history)]
    notices += [n for lookup in evidence.baselines.values() for n in lookup.notices]
    notices += [*(r.sentence for r in run.resumed), *kind_notices(run), *_shared_gpus(history)]
    if any(not c.texts and c.state == "complete" for c in run.cells):
        notices.append("the texts of answers are not judged, because they were not recorded")
    return (*notices, *_of_crowds(evidence), *rounding_notices(evidence, judging_of(history).tier))


def with_deciding(notices: Iterable[str], deciding: Iterable[str]) -> tuple[str, ...]:
    """Return notices with those that say what decides the verdict in front, behind that of an injected fault alone."""
    others = list(notices)
    first = int(bool(others) and others[0].startswith(INJECTED))
    return (*others[:first], *deciding, *others[first:])


def _injected(run: RunRecord) -> Iterator[str]:
    if run.all_mutants:
        yield (
            f"{INJECTED} {', '.join(run.all_mutants)}: this run has a deliberate defect, so it says nothing about "
            "vLLM and cannot pass"
        )


def _of_crowds(evidence: Evidence) -> Iterator[str]:
    """Yield which cells were asked cold prompts together and which one by one, where that had to be shown."""
    proofs = {v.id: found for v in evidence.views() if v.cold and (found := crowd_proof(v)) is not None and found.asked}
    if together := [cell for cell, found in proofs.items() if found.holds]:
        most = max(proofs[cell].asked for cell in together)
        yield (
            f"cold prompts were asked together in {listed(together, 'and')}, where the first ones, up to {most}, had "
            "the same answers alone and together"
        )
    for cell, found in proofs.items():
        if not found.holds:
            yield f"{cell}: {in_words(found)}"


def _of_the_end(run: RunRecord) -> Iterator[str]:
    if run.interrupted:
        yield f"the run was {'interrupted' if run.ended_by is None else ended_by(run.ended_by)} before its end"
    elif run.finished is None:
        # A merged run is unfinished if one of its parts is.
        remedy = "; `harness run --resume` resumes it" if run.merged is None and run.kind == "run" else ""
        yield f"the run never finished: it was killed, or is still running{remedy}"
    for cell in run.cells:
        for words in cell.left_over:
            doubt = "; a run whose engines may still be there cannot pass" if cell.left_running else ""
            yield f"{cell.cell}: left over when its engines ended: {words}; see `harness ps` and `harness clean`{doubt}"


def _compared_in_total(history: History) -> Iterator[str]:
    """Yield a sentence about the cells whose servers, which ran already, reported no acceptance per request."""
    if not history.run.attached:
        return
    cells = [
        c.cell
        for c in history.run.cells
        if c.draft_tokens
        and any(o.final is not None and o.final.speculation is None for o in history.of(c.cell).values())
    ]
    if cells:
        yield (
            f"acceptance is compared in total in {', '.join(cells)}; start the servers with `{PER_REQUEST_FLAG} "
            "detailed` to compare each step"
        )


def _on_trust(run: RunRecord) -> Iterator[str]:
    """Yield which servers that ran already do not tell their settings, and what that costs."""
    silent = [
        f"the {engine.role} server {' '.join(engine.argv[1:2])}"
        for engine in run.engines
        if engine.attached and engine.role != ROUTER and engine.step_tokens is None
    ]
    if silent and SERVER_INFO in run.lacking:
        verb = "does" if len(silent) == 1 else "do"
        yield f"{listed(silent, 'and')} {verb} not tell all settings: {run.lacking[SERVER_INFO]}"


def _of_engines(run: RunRecord) -> Iterator[str]:
    lacks = "the servers lack" if run.attached else f"vLLM {run.versions.get('vllm')} lacks"
    for name, cost in run.lacking.items():
        if run.attached and name == SERVER_INFO:
            continue
        yield f"{lacks} {name}: {cost}"
    if run.engine_flags:
        tested = "engines under test" if run.engines else "no engine became ready"
        yield f"{tested} with {' '.join(run.engine_flags)}; baselines were recorded without"


def _shared_gpus(history: History) -> list[str]:
    """Return a sentence about the pairs whose P and D shared a GPU although the profile asks for different ones."""
    given: dict[str, dict[str, set[str]]] = {}
    for engine in history.run.engines:
        named = engine.env.get("CUDA_VISIBLE_DEVICES", "")
        if engine.role in ("prefill", "decode") and named:
            given.setdefault(engine.group, {})[engine.role] = {f"{engine.node}/{gpu}" for gpu in named.split(",")}
    shared = [
        group
        for group, gpus in given.items()
        if len(gpus) == 2
        and gpus["prefill"] & gpus["decode"]
        and history.run.asked_for.part(CellName.of(group).variant).engine.placement == "apart"
    ]
    if not shared:
        return []
    return [
        f"P and D of {len(shared)} pairs ({shared[0]}{' …' if shared[1:] else ''}) shared a GPU, because there were "
        "too few to keep them apart (engine.placement): no KV went from one GPU to another there"
    ]
