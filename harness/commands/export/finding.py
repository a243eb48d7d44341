"""Export a finding, or a prompt in a cell, as a standalone file and the text of an issue."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from harness.commands.export.case import Case, case_of, cold_script, engine_commands, right_answers, write_case
from harness.commands.repro import Target, find
from harness.engines.environment import EngineEnvironment, engines_for
from harness.errors import UsageError
from harness.history.folder import History, load_history
from harness.judging.diagnosis.diagnose import damage_name
from harness.judging.figures import TokenDifference
from harness.judging.findings import Diagnosis, Finding
from harness.judging.power import lookups_now
from harness.reports.judge_run import assess
from harness.reports.markdown import plain_cell
from harness.scheduling.hardware import hardware
from harness.util.files import write_atomic
from harness.workload.prepare import Prepared

_LINE = 100


class Smallest(NamedTuple):
    """The result of shrinking, for the issue."""

    law: str
    observed: tuple[int, ...]


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
) -> None:
    """Write a case to a file and, with ``issue``, the text of an issue next to it, without starting an engine.
    ``origin`` is the run and the finding that it comes from."""
    environment = engines_for(prepared.profile, prepared.plan, engine_python)
    run_dir, finding = origin
    history = load_history(run_dir) if run_dir is not None else None
    case = make(environment)
    if case.cell.topology == "single" and "/logprobs-" in (finding or ""):
        raise UsageError(
            f"{finding}: expected a finding that tokens or drafts show, found one of log-probs alone on a single "
            "engine; an exported file compares log-probs of P with those of D only: use `harness repro` alone"
        )
    write_case(case, environment, target)
    if issue:
        text = issue_text(case, environment, target.name, history, finding, smallest)
        write_atomic(target.with_suffix(".md"), text)


def issue_text(
    case: Case,
    environment: EngineEnvironment,
    file: str,
    history: History | None,
    wanted: str | None,
    smallest: Smallest | None = None,
) -> str:
    """Return the text of an issue: environment, commands, symptom and tokens, but no path of this machine."""
    found, diagnosis = _looked_up(history, wanted)
    method = case.cell.method
    topology = "a NIXL prefill/decode pair" if case.cell.topology == "pd" else "a single engine"
    draft = f"{method.kind}, {method.draft_tokens} draft tokens" if method.draft_tokens else "no speculation"
    damage = diagnosis.damage if diagnosis is not None else found.damage if found is not None else None
    what = damage_name(damage) if damage is not None else "an answer that differs from the recorded one"
    lines = [f"# {what}: {method.kind} on {topology}, {case.scenario} prompt, vLLM {environment.vllm}", ""]
    lines += ["## What happens", "", *_happens(case, found, diagnosis, smallest), ""]
    lines += ["## To reproduce", "", f"`{file}` needs vLLM, NIXL and the standard library:", ""]
    lines += ["```", f"python {file}      # exit code 1: the defect is there; 0: it is not; 2: cannot tell", "```", ""]
    lines += ["It starts:", "", "```"]
    lines += [f"{role}: {_shell(argv)}" for role, argv in engine_commands(case, environment).items()]
    lines += ["```", "", "## Environment", ""]
    machine = history.run.hardware if history is not None else hardware()
    gpus = plain_cell(", ".join(map(str, machine.get("gpus") or [])))
    processor = plain_cell(str(machine.get("processor")))
    lines += [
        f"- vLLM {environment.vllm} ({environment.vllm_build}), torch {environment.torch}, NIXL {environment.nixl}, "
        f"Python {environment.python}",
        f"- {processor}, {machine.get('cores')} cores, GPUs: {gpus or 'none'}",
        f"- {draft}; block size {case.profile.engine.block_size}; {case.profile.engine.dtype}",
    ]
    if case.mutants:
        lines += ["", f"**Injected faults: {', '.join(case.mutants)}. The defect is deliberate; not for upstream.**"]
    return "\n".join(lines) + "\n"


def _looked_up(history: History | None, wanted: str | None) -> tuple[Finding | None, Diagnosis | None]:
    if history is None or wanted is None:
        return None, None
    judgement = assess(history).judgement
    found = find(judgement, wanted)
    place = next((c for c in judgement.cells if (c.cell, c.scenario) == (found.cell, found.scenario)), None)
    return found, place.diagnosis if place is not None else None


def _happens(case: Case, found: Finding | None, diagnosis: Diagnosis | None, smallest: Smallest | None) -> list[str]:
    lines = []
    if smallest is not None and smallest.law:
        lines += [f"Prompt lengths, swept around the smallest failing one, {_plain(smallest.law)}.", ""]
    if diagnosis is not None:
        lines += [_plain(diagnosis.text), ""]
    if found is not None:
        lines += [f"- {_plain(found.message)}"]
        if found.law and (diagnosis is None or diagnosis.law is None):
            lines += [f"- law of lengths: {found.law}"]
        if found.location is not None:
            lines += [f"- where: {_plain(found.location.text)}"]
    for part, right in case.right.items():
        send = next(s for stage in case.stages for s in stage.sends if s.part == part)
        lines += [
            f"- `{part}`, a prompt of {len(send.prompt.ids)} tokens, must give:",
            "",
            "```",
            *_wrapped(right.tokens),
        ]
        lines += ["```", ""]
    if smallest is not None:
        return [*lines, "and gave:", "", "```", *_wrapped(smallest.observed), "```"]
    seen = found.evidence if found is not None else None
    if isinstance(seen, TokenDifference) and seen.found:
        lines += [f"and gave, from output token {seen.window_start} on:", "", "```", *_wrapped(seen.found), "```"]
    return lines


def _shell(argv: list[str]) -> str:
    """Quote a command for a shell that expands the names after a dollar sign."""
    return " ".join(a if a.startswith("$") else shlex.quote(a) for a in argv)


def _plain(text: str) -> str:
    """Return the text as one line, escaped for Markdown."""
    line = " ".join(text.split())
    for mark in "\\`*_<>[]|":
        line = line.replace(mark, "\\" + mark)
    return line


def _wrapped(tokens: object) -> list[str]:
    lines, line = [], ""
    for token in map(str, tokens if isinstance(tokens, (list, tuple)) else ()):
        if len(line) + len(token) >= _LINE:
            lines.append(line)
            line = ""
        line = f"{line} {token}".strip()
    return [*lines, line] if line else lines
