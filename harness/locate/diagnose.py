"""What the findings of a cell in a scenario say together: class, law of lengths, location."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.acceptance import real_steps
from harness.checks.evidence import CellView
from harness.checks.tokens import compare
from harness.findings import CheckResult, DamageClass, Diagnosis, Finding, Law, Verdict
from harness.history import COLD
from harness.locate.law import law_of_lengths
from harness.locate.location import request_of
from harness.scenarios.config import Sampled

_TOKEN_CHECKS = ("tokens-reference", "tokens-baseline")
_STEP_CHECKS = ("acceptance-single", "acceptance-baseline")


def diagnose(cell: CellView, results: Sequence[CheckResult]) -> Diagnosis | None:
    """Class, law of lengths and location of a cell's findings; None when there are none."""
    findings = [f for r in results for f in r.findings]
    if not findings:
        return None
    damage = _damage(cell, findings)
    mine = [f for f in findings if _supports(f, damage)] or findings
    keys = {f.part or f.prompt_id for f in mine if f.prompt_id}
    judged = {o.key: len(o.sent_ids) for o in cell.every() if o.error is None and o.route == "cell"}
    law = None
    if cell.cold and keys:
        failed: dict[int, bool] = {}
        for key, tokens in judged.items():
            failed[tokens] = failed.get(tokens, False) or key in keys
        law = law_of_lengths(failed, cell.record.block_size)
    chosen = _most_telling(cell, mine)
    located = chosen.location
    return Diagnosis(
        damage=damage,
        failed=len(keys),
        judged=len(judged),
        law=law,
        location=located,
        text=_words(cell, damage, chosen, len(keys), len(judged), law),
    )


def state_law(results: Sequence[CheckResult], diagnosis: Diagnosis | None) -> list[CheckResult]:
    """The results with the law of lengths in every finding that is evidence of it."""
    if diagnosis is None or diagnosis.law is None:
        return list(results)
    law = diagnosis.law.text
    out = []
    for result in results:
        found = [
            f.model_copy(update={"law": law}) if f.prompt_id and _supports(f, diagnosis.damage) else f
            for f in result.findings
        ]
        out.append(result.model_copy(update={"findings": tuple(found)}))
    return out


def _most_telling(cell: CellView, findings: Sequence[Finding]) -> Finding:
    """The located finding of the longest prompt, which has the most blocks to tell apart; else the first one."""
    located = [f for f in findings if f.location is not None]
    return max(located, key=lambda f: _tokens(cell, f)) if located else findings[0]


def _supports(finding: Finding, damage: DamageClass) -> bool:
    """Whether a finding is evidence of the class that the cell's findings were given."""
    if damage in ("input", "nothing-tested", "routing"):
        return finding.damage == damage
    if damage == "drafter-kv":
        return finding.check in _STEP_CHECKS and finding.verdict is not Verdict.UNKNOWN
    return finding.damage == damage or finding.check in (*_TOKEN_CHECKS, *_STEP_CHECKS)


def _damage(cell: CellView, findings: Sequence[Finding]) -> DamageClass:
    """The class that explains the findings: a wrong input makes wrong tokens, wrong tokens other acceptance."""
    certain = [f for f in findings if f.verdict is not Verdict.UNKNOWN]
    if any(f.damage == "input" for f in certain):
        return "input"
    wrong_tokens = [f for f in certain if f.check in _TOKEN_CHECKS and f.verdict is Verdict.REGRESSION]
    if wrong_tokens or any(f.damage == "target-kv" for f in certain):
        return "sampler" if _same_without(cell, _TOKEN_CHECKS) or _only_when_sampled(cell) else "target-kv"
    fewer = [f for f in certain if f.check in _STEP_CHECKS]
    if fewer:
        if all(f.verdict is Verdict.IMPROVED for f in fewer):
            return "engine-changed"
        return "sampler" if _same_without(cell, _STEP_CHECKS) or _only_when_sampled(cell) else "drafter-kv"
    if certain:
        return Counter(f.damage for f in certain).most_common(1)[0][0]
    for damage in ("nothing-tested", "infrastructure", "baseline"):
        if any(f.damage == damage for f in findings):
            return damage
    return findings[0].damage


def _only_when_sampled(cell: CellView) -> bool:
    """Whether the prompts of a ``sampled`` scenario are answered rightly at temperature zero, by the same way through
    the same engines: their KV is right then."""
    if not isinstance(cell.config, Sampled):
        return False
    cold = cell._replace(scenario=COLD)
    asked = {o.prompt_id for o in cell.answered().values()}
    known = [r for o in cold.answered().values() if o.prompt_id in asked and (r := request_of(cold, o)) and r.expected]
    return bool(known) and all((r.leg.output_ids or ()) == tuple(r.expected) for r in known)


def _same_without(cell: CellView, checks: Sequence[str]) -> bool:
    """Whether a cold prompt on one engine, which meets no KV but its own, goes wrong in the same way.

    Only a speculative engine can: plain decoding that goes wrong alone has no sampler of drafts.
    """
    plain = cell if cell.cold and not cell.handed_off else cell.sibling("single", "cold")
    if plain is None or not plain.speculative:
        return False
    for o in plain.answered().values():
        request = request_of(plain, o)
        if request is None or not request.expected:
            continue
        if checks is _TOKEN_CHECKS:
            near = plain.evidence.judging.near_tie_nats
            at = compare(request.leg.output_ids or (), request.expected, request.leg.top_gaps, near)
            if at is not None and not at.near_tie:
                return True
        steps = real_steps(request.leg)
        if checks is _STEP_CHECKS and steps is not None and request.steps and steps.accepted != request.steps:
            return True
    return False


_NAMES: dict[str, str] = {
    "input": "wrong input",
    "target-kv": "wrong KV of the target",
    "drafter-kv": "wrong KV of the drafter",
    "sampler": "drafting or verification",
    "nothing-tested": "nothing tested",
    "engine-changed": "the engine changed",
    "infrastructure": "infrastructure",
    "routing": "the router hands nothing off",
    "baseline": "no baseline",
}


def damage_name(damage: str) -> str:
    """A damage class in words."""
    return _NAMES.get(damage, damage)


def _words(
    cell: CellView,
    damage: DamageClass,
    chosen: Finding,
    failed: int,
    judged: int,
    law: Law | None,
) -> str:
    parts = [f"{damage_name(damage)} in {failed} of {judged} requests" if failed else damage_name(damage)]
    if damage in ("target-kv", "drafter-kv", "sampler", "input") and law is not None:
        parts.append(law.text)
    if chosen.location is not None:
        name = chosen.part or chosen.prompt_id
        parts.append(f"{name} ({_tokens(cell, chosen)} tokens): {chosen.location.text}")
    elif not cell.cold or damage in ("routing", "nothing-tested", "infrastructure", "baseline"):
        parts.append(" ".join(chosen.message.split())[:240])
    return "; ".join(parts)


def _tokens(cell: CellView, finding: Finding) -> int:
    key = finding.part or finding.prompt_id
    o = {**cell.observations("text"), **cell.observations("ids")}.get(key or "")
    return len(o.sent_ids) if o else 0
