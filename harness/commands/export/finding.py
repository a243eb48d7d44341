"""Export a finding, or a prompt in a cell, as a standalone program and the text of an issue."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.commands.export import archive_of
from harness.commands.export.case import Case, case_of, cold_script, right_answers, server_commands, write_case
from harness.commands.repro import Target, find
from harness.engines.environment import EngineEnvironment, engines_for
from harness.errors import UsageError
from harness.history.folder import History, load_history
from harness.history.verdict import Verdict
from harness.judging.diagnosis.diagnose import damage_name
from harness.judging.figures import KVDifference, LogprobDifference, StepsDifference, TokenDifference
from harness.judging.findings import Diagnosis, Finding
from harness.judging.power import lookups_now
from harness.profiles.known_defects import load_known
from harness.prompts.lengths import spills
from harness.reports.judge_run import assess
from harness.reports.markdown import plain_cell
from harness.scheduling.hardware import hardware
from harness.util.files import write_atomic
from harness.util.text import counted
from harness.workload.prepare import Prepared

_NAMES = {"none": "vLLM", "dflash": "DFlash", "ngram": "n-gram drafts"}


class Smallest(NamedTuple):
    """The result of shrinking, for the issue."""

    law: str
    observed: tuple[int, ...]


class DefectSeen(NamedTuple):
    """What is known of the defect beside the case: a finding with its diagnosis, or the smallest case."""

    finding: Finding | None = None
    diagnosis: Diagnosis | None = None
    smallest: Smallest | None = None
    beside: tuple[Finding, ...] = ()
    """What else was found about the same request."""

    @property
    def right_tokens(self) -> bool:
        """Whether the request of the finding got the right tokens."""
        found = (self.finding, *self.beside)
        return self.smallest is None and self.finding is not None and not any(f and _of_tokens(f) for f in found)

    @property
    def only_in_kv(self) -> bool:
        """Whether nothing but the KV itself shows it, which no answer has."""
        found = [f for f in (self.finding, *self.beside) if f is not None]
        return bool(found) and all(isinstance(f.evidence, KVDifference) for f in found)

    @property
    def in_answers(self) -> bool:
        """Whether the tokens or the accepted drafts of its request show it, so that log-probs need not."""
        found = [f.evidence for f in (self.finding, *self.beside) if f is not None]
        # A program does not compare the last step.
        return self.smallest is not None or any(
            isinstance(e, TokenDifference) or (isinstance(e, StepsDifference) and not e.last_alone) for e in found
        )

    @property
    def by_residue(self) -> bool:
        """Whether it depends on where in a block a prompt ends."""
        law = self.diagnosis.law if self.diagnosis is not None else None
        return bool(law is not None and law.residues) or (self.smallest is not None and " mod " in self.smallest.law)


def case_from(
    prepared: Prepared, target: Target, environment: EngineEnvironment, mutants: tuple[str, ...] = ()
) -> Case:
    """Return the case of a prompt or a scenario, with the recorded answers as the right ones. Raises UsageError when no
    right answer is known."""
    (work,) = prepared.works
    # One run through a scenario, or one cold prompt.
    script = work.scripts[0] if work.scripts else cold_script(work.items[0].prompt)
    lookups = lookups_now(prepared, environment.vllm)
    plain, own = (lookups.get(m) for m in (work.cell.name.plain, work.cell.name.lineup))
    known = plain.baseline.by_prompt() if plain is not None and plain.baseline is not None else {}
    steps = own.baseline.by_prompt() if own is not None and own.baseline is not None else {}
    tokens = {p.id: known[p.id].output_ids if p.id in known else p.expected for p in prepared.prompts.prompts}
    right = right_answers(
        script.sends,
        {k: v for k, v in tokens.items() if v},
        {k: r.accepted for k, r in steps.items()},
        prepared.profile.workload.max_tokens,
    )
    config = next((s for s in prepared.profile.scenarios if s.id == target.scenario), None)
    case = case_of(target.words, prepared.profile, work.cell, script, right)
    slack = config.acceptance_slack if config is not None else 0.0
    return case._replace(slack=slack, tries=target.goal.tries, seen=target.goal.words, mutants=mutants)


def export(
    make: Callable[[EngineEnvironment], Case],
    prepared: Prepared,
    origin: tuple[Path | None, str | None],
    target: Path,
    issue: bool,
    engine_python: str | None,
    smallest: Smallest | None = None,
    in_place: bool = False,
) -> str:
    """Write a case to a file and, with ``issue``, the text of an issue next to it, without starting an engine.
    ``origin`` is the run and the finding that it comes from; with ``in_place`` the models stay where they are."""
    environment = engines_for(prepared.profile, prepared.plan, engine_python)
    run_dir, finding = origin
    history = load_history(run_dir) if run_dir is not None else None
    case = make(environment)
    if case.cell.topology == "single" and "/logprobs-" in (finding or ""):
        raise UsageError(
            f"{finding} is about log-probs of a single engine, and an exported file compares log-probs of P with "
            "those of D only; use `harness repro` alone"
        )
    seen = _looked_up(history, finding)._replace(smallest=smallest)
    if seen.only_in_kv and smallest is None:
        raise UsageError(
            f"{finding} is about KV alone: the answer is right, and an exported file sees nothing but answers; use "
            "`harness repro` alone"
        )
    reported = report_of(case, seen.finding) if seen.finding is not None else ""
    case = case._replace(title=headline(case, seen), by_logprobs=not seen.in_answers)
    case = case._replace(reported=reported, in_place=in_place)
    write_case(case, environment, target)
    if issue:
        machine = history.run.hardware if history is not None else hardware()
        write_atomic(target.with_suffix(".md"), issue_text(case, environment, target, seen, machine))
    return reported


def headline(case: Case, seen: DefectSeen) -> str:
    """Return what a user sees, in a line: who drafts, what is wrong, and of which requests."""
    method, first = case.cell.method, next(s for s in case.sends if s.part in case.right)
    where = "after a P/D hand-off of" if case.cell.topology == "pd" else "on a single server for"
    beside = [f"at temperature {first.temperature:g}"] if first.temperature else []
    if len(case.sends) > 1 or first.between:
        beside.append("with other requests" if max(len(stage.sends) for stage in case.stages) > 1 else "after others")
    who = _NAMES.get(method.kind, method.kind.upper())
    prompt = _prompt(len(first.prompt.ids), case.profile.engine.block_size, method.lookahead, seen.by_residue)
    return f"{who}: {_symptom(case, seen)} {where} {', '.join([prompt, *beside])}"


def _prompt(tokens: int, block: int, lookahead: int, by_residue: bool) -> str:
    """Describe a prompt by its length, or by where in a block it ends."""
    after = tokens % block
    if by_residue and after == 0:
        return "a prompt that ends at a block boundary"
    if by_residue and spills(tokens, block, lookahead):
        return f"a prompt that ends {counted(block - after, 'token')} before a block boundary"
    return f"a prompt of {tokens} tokens"


def _symptom(case: Case, seen: DefectSeen) -> str:
    """Return what differs, as somebody sees it who knows nothing of checks."""
    evidence = seen.finding.evidence if seen.finding is not None else None
    if seen.smallest is not None:
        right = next(iter(case.right.values())).tokens
        return "other drafts accepted" if seen.smallest.observed == right else "wrong tokens"
    if isinstance(evidence, TokenDifference):
        return "wrong tokens" if evidence.differing_tokens > 1 else f"a wrong token at output {evidence.position}"
    if isinstance(evidence, StepsDifference):
        if not evidence.found_mean:
            return "no draft accepted"
        return f"{'fewer' if evidence.found_mean < evidence.expected_mean else 'more'} drafts accepted"
    if isinstance(evidence, LogprobDifference):
        return "log-probs that moved, and right tokens,"
    return damage_name(seen.finding.damage) if seen.finding is not None else "another answer than recorded"


_COPIES = (
    "The model is tiny and was trained to do one thing, to repeat the words of its prompt, so an answer is right or "
    "wrong without another engine to compare with. A right answer is the prompt's words in their order and an end "
    "token: output token j is prompt token j + 2. Its best two tokens are several nats apart, so rounding explains no "
    "other token, and a wrong one names the prompt position whose KV was not read as it was written."
)
_RECORDED = (
    "A right answer is that of the same engine alone, without speculation and recorded beforehand. A first difference "
    "where the best two tokens nearly tie counts as none. Accepted drafts are compared with those of the engine alone "
    "with the same drafter."
)


def report_of(case: Case, finding: Finding) -> str:
    """Return where an expected failure is reported, or that nobody has; empty for any other finding."""
    if not finding.known or not finding.link:
        return ""
    known = load_known(case.profile.known_defects)
    named = {entry.defect.id: entry.defect.reported for entry in known.entries} if known is not None else {}
    if named.get(finding.known or "", True):
        return f"already reported: {finding.link}"
    return f"known ({finding.known}), and reported by nobody yet; the nearest thread: {finding.link}"


def issue_text(
    case: Case, environment: EngineEnvironment, file: Path, seen: DefectSeen, machine: Mapping[str, Any]
) -> str:
    """Return the text of an issue: symptom, tokens, how to reproduce it and environment, but no path of a machine."""
    method = case.cell.method
    variables, commands = server_commands(case, environment, file)
    draft = f"{method.kind}, {method.draft_tokens} draft tokens" if method.draft_tokens else "no speculation"
    gpus = plain_cell(", ".join(map(str, machine.get("gpus") or [])))
    lines = [case.reported, ""] if case.reported else []
    lines += [f"# {plain_cell(case.title)}", "", "## What happens", "", *_happens(case, seen), ""]
    lines += [_COPIES if case.copies else _RECORDED, "", "## To reproduce", ""]
    beside = "the models in the folders below" if case.in_place else f"`{archive_of(file).name}` beside it"
    lines += [f"`{file.name}` needs {beside}, vLLM, NIXL and the standard library:", ""]
    lines += [*_block([f"python {file.name}      # exit code 1: the defect shows; 0: it does not; 2: cannot tell"]), ""]
    lines += ["It starts these servers, asks them and stops them:", ""]
    lines += [*_block([variables, *(line for text in commands.values() for line in ("", text))]), ""]
    lines += ["## Environment", ""]
    lines += [
        f"- vLLM {environment.vllm} ({environment.vllm_build}), torch {environment.torch}, NIXL {environment.nixl}, "
        f"Python {environment.python}",
        f"- {plain_cell(str(machine.get('processor')))}, {machine.get('cores')} cores, GPUs: {gpus or 'none'}",
        f"- {draft}; block size {case.profile.engine.block_size}; {case.profile.engine.dtype}",
    ]
    if case.mutants:
        lines += ["", f"**Injected faults: {', '.join(case.mutants)}. The defect is deliberate; not for upstream.**"]
    return "\n".join(lines) + "\n"


def _of_tokens(finding: Finding) -> bool:
    return isinstance(finding.evidence, TokenDifference) or finding.check.startswith("tokens-")


def _looked_up(history: History | None, wanted: str | None) -> DefectSeen:
    """Return what a run says of a finding; nothing without either."""
    if history is None or wanted is None:
        return DefectSeen()
    judgement = assess(history).judgement
    found = find(judgement, wanted)
    place = next((c for c in judgement.cells if (c.cell, c.scenario) == (found.cell, found.scenario)), None)
    request = (found.cell, found.scenario, found.prompt_id, found.part, found.form)
    alike = [f for f in judgement.findings if (f.cell, f.scenario, f.prompt_id, f.part, f.form) == request]
    return DefectSeen(
        found,
        place.diagnosis if place is not None else None,
        beside=tuple(f for f in alike if f is not found and f.verdict is not Verdict.UNKNOWN),
    )


_OURS = re.compile(r"\bsingle-none of this run\b|\bthe baseline(?= has\b)")
"""What findings call the engine that gave the right answer."""


def _happens(case: Case, seen: DefectSeen) -> list[str]:
    lines = []
    if seen.smallest is not None and seen.smallest.law:
        lines += [f"Prompt lengths, swept around the smallest failing one, {_plain(seen.smallest.law)}.", ""]
    if seen.diagnosis is not None:
        lines += [f"{_failing(seen.diagnosis)}.", ""]
    if seen.finding is not None:
        lines += [f"- {_plain(_OURS.sub('a single server without speculation', seen.finding.message))}"]
        if seen.finding.law and (seen.diagnosis is None or seen.diagnosis.law is None):
            lines += [f"- law of lengths: {seen.finding.law}"]
        if seen.finding.location is not None:
            lines += [f"- where: {_plain(seen.finding.location.text)}"]
    for part, right in case.right.items():
        tokens = len(next(s for s in case.sends if s.part == part).prompt.ids)
        gives = "gives the right tokens" if seen.right_tokens else "must give"
        lines += [f"- `{part}`, a prompt of {tokens} tokens, {gives}:", "", *_tokens(right.tokens), ""]
    if seen.smallest is not None:
        return [*lines, "and gave:", "", *_tokens(seen.smallest.observed)]
    evidence = seen.finding.evidence if seen.finding is not None else None
    if isinstance(evidence, TokenDifference) and evidence.found:
        lines += [f"and gave, from output token {evidence.window_start} on:", "", *_tokens(evidence.found)]
    return lines if lines[-1:] != [""] else lines[:-1]


def _failing(diagnosis: Diagnosis) -> str:
    """Return how many requests of the run failed, and by which law: the diagnosis's own text also names one of them,
    and the issue is about another."""
    what = f"{diagnosis.failed} of {counted(diagnosis.judged, 'request')}"
    law = f"; {diagnosis.law.text}" if diagnosis.law is not None else ""
    return _plain(f"{what}: {damage_name(diagnosis.damage)}{law}")


def _plain(text: str) -> str:
    """Return the text as one line, escaped for Markdown."""
    return re.sub(r"([\\`*_<>\[\]|])", r"\\\1", " ".join(text.split()))


def _tokens(tokens: Sequence[int]) -> list[str]:
    return _block(textwrap.wrap(" ".join(map(str, tokens)), 100))


def _block(lines: Sequence[str]) -> list[str]:
    return ["```", *lines, "```"]
