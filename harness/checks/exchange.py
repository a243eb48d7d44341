"""Was everything asked, did the server see our prompt, and does each response agree with itself?"""

from __future__ import annotations

from harness.checks.evidence import CellView
from harness.findings import CheckResult, Finding, Verdict, conclude
from harness.history import Leg, Observation
from harness.sequences import common_prefix


def complete(cell: CellView) -> CheckResult:
    """Every planned observation exists and ended without an error."""
    name = "complete"
    observations = cell.every()
    findings = [
        cell.finding(name, Verdict.UNKNOWN, "infrastructure", f"the exchange broke: {o.error}", o)
        for o in observations
        if o.error is not None
    ]
    missing = cell.planned - len(observations)
    if missing > 0 or cell.record.state != "complete":
        reason = cell.record.reason or "no reason was recorded"
        findings.append(
            cell.finding(
                name,
                Verdict.UNKNOWN,
                "infrastructure",
                f"expected {cell.planned} observations of a complete cell, found {len(observations)} of a "
                f"cell that is {cell.record.state}: {reason}",
                reason=reason,
            )
        )
    return conclude(name, cell.id, len(observations), findings)


def echoed_prompt(cell: CellView) -> CheckResult:
    """Every leg's echoed prompt ids equal ours (a second BOS or another template shows here)."""
    name = "echoed-prompt"
    findings: list[Finding] = []
    judged = 0
    for o in cell.every():
        for leg in o.legs:
            judged += 1
            problem = _echo_problem(cell, o, leg)
            if problem is not None:
                findings.append(problem)
    return conclude(name, cell.id, judged, findings)


def _echo_problem(cell: CellView, o: Observation, leg: Leg) -> Finding | None:
    name = "echoed-prompt"
    if leg.echoed_ids is None:
        return cell.finding(
            name,
            Verdict.UNKNOWN,
            "input",
            f"expected the {leg.role} engine to echo the prompt ids (return_token_ids), found none",
            o,
        )
    if leg.echoed_ids == o.sent_ids:
        return None
    at = common_prefix(leg.echoed_ids, o.sent_ids)
    return cell.finding(
        name,
        Verdict.REGRESSION,
        "input",
        f"expected the {leg.role} engine to see the {len(o.sent_ids)} prompt ids that were sent, found "
        f"{len(leg.echoed_ids)} ids that differ from position {at} on "
        f"(sent {list(o.sent_ids[at : at + 4])}, seen {list(leg.echoed_ids[at : at + 4])})",
        o,
        role=leg.role,
        position=at,
        sent=list(o.sent_ids[: at + 8]),
        seen=list(leg.echoed_ids[: at + 8]),
    )


def response_invariants(cell: CellView) -> CheckResult:
    """Counts within one response agree: usage, ids, log-probs, one end token, finish reason, acceptance sums."""
    name = "response-invariants"
    findings: list[Finding] = []
    judged = 0
    for o in cell.every():
        for leg in o.legs:
            judged += 1
            for problem, evidence in _leg_problems(o, leg):
                findings.append(
                    cell.finding(
                        name,
                        Verdict.REGRESSION,
                        "sampler",
                        f"{leg.role} engine: {problem}",
                        o,
                        role=leg.role,
                        **evidence,
                    )
                )
    return conclude(name, cell.id, judged, findings)


def _process(o: Observation, leg: Leg) -> str:
    """The engine that answered a leg, by the role of its process: a pair's decode engine may answer alone."""
    return leg.role if leg.role in o.engine_roles else "decode"


def _leg_problems(o: Observation, leg: Leg) -> list[tuple[str, dict[str, object]]]:
    if leg.output_ids is None:
        return [("expected output token ids (return_token_ids), found none", {})]
    out: list[tuple[str, dict[str, object]]] = []
    produced = len(leg.output_ids)
    if produced == 0:
        out.append(("expected at least one output token, found none", {}))
    if leg.usage_completion_tokens != produced:
        out.append((f"expected usage to count {produced} output tokens, found {leg.usage_completion_tokens}", {}))
    if leg.echoed_ids is not None and leg.usage_prompt_tokens != len(leg.echoed_ids):
        out.append(
            (
                f"expected usage to count {len(leg.echoed_ids)} prompt tokens, found {leg.usage_prompt_tokens}",
                {},
            )
        )
    for label, values in (("log-probs", leg.chosen_logprobs), ("top log-probs", leg.top_gaps)):
        if values is not None and len(values) != produced:
            out.append((f"expected one entry of {label} per output token ({produced}), found {len(values)}", {}))
    if leg.role == "prefill" and o.route == "cell" and produced != 1:
        out.append((f"expected exactly one token from the prefill leg, found {produced}", {}))
    if leg.finish_reason not in ("stop", "length"):
        out.append((f"expected finish reason stop or length, found {leg.finish_reason!r}", {}))
    if leg.finish_reason == "stop" and leg.output_ids and leg.output_ids[-1] in leg.output_ids[:-1]:
        out.append(
            (
                "expected the token that stopped the request once, at the end, found it earlier too",
                {"token": leg.output_ids[-1]},
            )
        )
    spec = leg.speculation
    if spec is not None and leg.role != "prefill":
        if sum(spec.per_step_accepted) != spec.num_accepted or sum(spec.per_step_drafted) != spec.num_drafted:
            out.append(("expected the per-step counts to add up to the request's totals, found another sum", {}))
        if any(a > d for a, d in zip(spec.per_step_accepted, spec.per_step_drafted, strict=False)):
            out.append(("expected no step to accept more than it drafted, found one", {}))
        # The first token comes from the prefill, and so does one more each time that a preempted request is resumed.
        prefilled = 1 + int(o.shared_counters.get(_process(o, leg), {}).get("preemptions", 0))
        if sum(a + 1 for a in spec.per_step_accepted) < produced - prefilled:
            out.append((f"expected the verify steps to account for {produced} output tokens, found fewer", {}))
    return out


def _echoes(o: Observation) -> list[tuple[int, ...] | None]:
    """The prompt ids that each engine saw."""
    return [leg.echoed_ids for leg in o.legs]


def text_form(cell: CellView) -> CheckResult:
    """Prompts sent as templated text give the same output as the same prompts sent as ids."""
    name = "text-form"
    ids = cell.answered("ids")
    findings: list[Finding] = []
    judged = 0
    for prompt_id, o in cell.answered("text").items():
        twin = ids.get(prompt_id)
        if twin is None or twin.final is None or o.final is None:
            continue
        judged += 1
        ours, theirs = o.final.output_ids or (), twin.final.output_ids or ()
        if ours != theirs:
            at = common_prefix(ours, theirs)
            # Equal input that gives other output is no matter of how it was sent.
            same = _echoes(o) == _echoes(twin) and None not in _echoes(o)
            findings.append(
                cell.finding(
                    name,
                    Verdict.REGRESSION,
                    "target-kv" if same else "input",
                    f"expected the same output for the prompt as text and as ids, found a difference at output token "
                    f"{at}; "
                    + ("the engines saw the same prompt ids both times" if same else "compare the echoed ids"),
                    o,
                    position=at,
                    as_text=list(ours[at : at + 6]),
                    as_ids=list(theirs[at : at + 6]),
                )
            )
    return conclude(name, cell.id, judged, findings)
