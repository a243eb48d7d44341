"""The JSON that ``--json`` prints: one shape per command, described in docs/command-line.md.

Keys are interfaces: they are added, and never changed. Rates and shares are fractions, times seconds, sizes bytes, and
what is not known is null.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness.baselines.model import Header
    from harness.commands.doctor import Examined
    from harness.judging.findings import Finding
    from harness.judging.power import Sensitivity
    from harness.profiles.hub import Hub
    from harness.profiles.model_survey import Convertible, Model
    from harness.reports.causes import Cause
    from harness.reports.compare import Comparison
    from harness.reports.summary import RunSummary
    from harness.reports.trend_model import Trend
    from harness.workload.prepare import Prepared


def finite(value: float | None) -> float | None:
    """Return a number that JSON has, or None."""
    return value if value is not None and math.isfinite(value) else None


def judged_run(summary: RunSummary) -> dict[str, Any]:
    """Return a judged run: of ``check``, ``report`` and ``merge``."""
    run, page = summary.history.run, summary.history.folder / "report.html"
    return {
        "verdict": summary.verdict.value,
        "exit_code": summary.exit_code,
        "sentence": summary.sentence,
        "next_step": summary.next_step or None,
        "run": {
            "id": run.run_id,
            "folder": str(summary.history.folder),
            "profile": run.asked_for.name,
            "vllm": run.versions.get("vllm"),
            "interrupted": run.interrupted,
            "seconds": finite(run.seconds.get("total")),
        },
        "injected_faults": list(summary.judgement.mutants),
        "inputs": summary.inputs.as_json() if summary.inputs is not None else None,
        "answers_checked": summary.exposure.answers,
        "notices": list(summary.judgement.notices),
        "cells": [_judged_cell(summary, cell) for cell in summary.cells],
        "causes": [cause(c) for c in summary.causes],
        "findings": [finding(f) for f in summary.judgement.findings],
        "report": str(page) if page.is_file() else None,
        "unwritten": summary.unwritten or None,
    }


def _judged_cell(summary: RunSummary, cell: str) -> dict[str, Any]:
    row = next((r for r in summary.acceptance if r.cell == cell), None)
    return {
        "cell": cell,
        "verdict": summary.cells[cell].value,
        "scenarios": {name: verdict.value for name, verdict in summary.scenario_grid.get(cell, {}).items()},
        "tokens_equal": summary.equal_tokens.get(cell),
        "acceptance": [finite(r) for r in row.ours.rates] if row is not None else [],
        "acceptance_of_baseline": list(row.baseline_rates or ()) if row is not None else [],
        "acceptance_length": finite(row.ours.length_pooled) if row is not None else None,
        "diagnoses": [c.diagnosis.text for c in summary.diagnosed if c.cell == cell and c.diagnosis is not None],
    }


def cause(c: Cause) -> dict[str, Any]:
    """Return what findings come from. ``expected_failure`` is the known defect that covers it, ``without_fault`` the
    one that would in a run without its injected fault."""
    from harness.reports.cause_words import sentence_of

    return {
        "sentence": sentence_of(c),
        "verdict": c.verdict.value,
        "damage": c.damage,
        "cells": list(c.cells),
        "scenarios": c.scenarios,
        "law": c.law.text if c.law is not None else None,
        "count": c.count,
        "command": c.command or None,
        "expected_failure": c.known,
        "without_fault": c.anyway,
    }


def finding(f: Finding) -> dict[str, Any]:
    """Return a finding; ``more`` counts those that differ only in their request and are not listed."""
    return {
        "id": f.id,
        "cell": f.cell,
        "scenario": f.scenario,
        "check": f.check,
        "verdict": f.verdict.value,
        "damage": f.damage,
        "prompt": f.prompt_id,
        "stratum": f.stratum,
        "message": f.message,
        "more": f.others,
        "expected_failure": f.known,
        "link": f.link,
    }


def compared_runs(comparison: Comparison) -> dict[str, Any]:
    """Return the difference of two runs: of ``report --compare``."""
    return {
        "sentence": comparison.sentence,
        "runs": [
            {"id": r.history.run.run_id, "folder": str(r.history.folder), "verdict": r.verdict.value}
            for r in comparison.runs
        ],
        "cells": [
            {
                "cell": c.cell,
                "verdicts": [v.value if v is not None else None for v in c.verdicts],
                "prompts": c.common,
                "same_tokens": c.equal,
                "acceptance": [
                    {
                        "position": position,
                        "rates": [finite(r) for r in d.rates],
                        "change": finite(d.effect),
                        "low": finite(d.low),
                        "high": finite(d.high),
                    }
                    for position, d in enumerate(c.positions)
                ],
            }
            for c in comparison.cells
        ],
        "differing": [{"name": name, "first": x, "second": y} for name, x, y in comparison.differing],
        "new": [{**finding(f), "count": count} for c in comparison.new for f, count in c.groups],
        "resolved": [{**finding(f), "count": count} for c in comparison.gone for f, count in c.groups],
        "new_causes": [cause(c) for c in comparison.new],
        "resolved_causes": [cause(c) for c in comparison.gone],
    }


def trend(found: Trend) -> dict[str, Any]:
    """Return many runs: of ``trend``."""
    ids = [r.run_id for r in found.runs]
    return {
        "sentence": found.sentence,
        "runs": [
            {
                "id": r.run_id,
                "started": r.started,
                "folder": str(r.folder),
                "verdict": r.verdict.value,
                "vllm": r.vllm,
                "hardware": r.hardware,
                "cells": {cell: verdict.value for cell, verdict in r.cells.items()},
            }
            for r in found.runs
        ],
        "acceptance": [
            {
                "run": ids[p.run],
                "cell": p.cell,
                "position": p.position,
                "rate": finite(p.rate),
                "change": finite(p.effect),
            }
            for p in found.points
        ],
        "drifts": [
            {
                "cell": d.cell,
                "position": d.position,
                "run": ids[d.run],
                "since": ids[d.since],
                "compared_with": ids[d.first],
                "change": finite(d.effect),
            }
            for d in found.drifts
        ],
        "wrong_answers": [
            {**w.engines._asdict(), "what": w.what, "runs": w.runs, "wrong": w.wrong, "checked": w.checked}
            for w in found.wrong_answers
        ],
        "suspects": [{"test": what, "runs": count} for what, count in found.suspects],
        "intermittent": [
            {
                **i.engines._asdict(),
                "runs": i.runs,
                "found": i.found,
                "chance_in_a_right_run": i.chance,
                "evidence": finite(i.evidence),
                "certain": i.certain,
            }
            for i in found.intermittent
        ],
        "left_out": list(found.left_out),
    }


def plan(prepared: Prepared, found: Sensitivity, effect_points: float, models: Sequence[Model]) -> dict[str, Any]:
    """Return a plan: of ``plan``. Differences of log-probs in ``rounding`` are in nats."""
    from harness.commands.plan_data import measured_rounding, missed_lengths, strata_of
    from harness.profiles.cells import excluded_cells
    from harness.workload.cells import group_expected_s

    profile = prepared.profile
    works = {w.cell.id: w for w in prepared.works}
    return {
        "profile": profile.name,
        "description": profile.description,
        "device": profile.engine.device,
        "tier": profile.judging.tier,
        "requests": prepared.requests,
        "engine_starts": prepared.plan.engines,
        "expected_seconds": round(prepared.expected_s, 1),
        "cells": [
            {
                "cell": c.id,
                "topology": c.topology,
                "method": c.method.kind,
                "route": c.route,
                "variant": c.variant,
                "lookahead": c.method.lookahead,
                "requests": works[c.id].requests,
                "cold_prompts": len(works[c.id].items),
            }
            for c in prepared.plan.cells
        ],
        "engines": [
            {
                "id": g.id,
                "roles": list(g.roles),
                "cells": [c.id for c in g.cells],
                "expected_seconds": round(group_expected_s(g, prepared.works), 1),
            }
            for g in prepared.plan.groups
        ],
        "detectable": [
            {
                "cell": row.cell,
                "scenario": row.scenario,
                "tests": len(row.tests) if found.normal else 0,
                "prompts": row.sample.prompts,
                "texts": row.sample.units,
                "smallest_change_points": finite(found.smallest(row)),
                "texts_needed": found.needed(row, effect_points),
                "exact": not found.normal,
            }
            for row in found.rows
        ],
        "left_out": dict(excluded_cells(profile)),
        "lacking": dict(prepared.lacking),
        "models": [model(m) for m in models],
        "strata": [
            {
                "variant": s.part.variant,
                "file": s.part.workload.prompts.name,
                "block_size": s.part.engine.block_size,
                "prompts": {method: {str(k): n for k, n in counts.items()} for method, counts in s.counts.items()},
            }
            for s in strata_of(prepared)
        ],
        "missed": [{"what": what, "cells": cells} for what, cells in missed_lengths(prepared).items()],
        "rounding": [
            {
                "lineup": lineup,
                "way": way,
                "tokens": measured.tokens,
                "median": measured.quantiles[0],
                "percentile_99": measured.quantiles[-1],
                "largest": measured.largest,
                "answers": measured.answers,
                "parted": measured.parted,
            }
            for lineup, rounding in measured_rounding(prepared).items()
            for way, measured in rounding.ways.items()
        ],
    }


def model(m: Model) -> dict[str, Any]:
    return {
        "role": m.role,
        "repository": m.reference.repo,
        "revision": m.reference.revision,
        "commit": m.commit,
        "size": m.size,
        "missing": m.missing,
        "cached": m.cached,
        "gated": m.gated,
        "error": str(m.error) if m.error is not None else None,
    }


def convertible(m: Convertible) -> dict[str, Any]:
    return {
        "role": m.role,
        "model": m.name,
        "file": m.file,
        "license": m.license,
        "source_size": m.source_size,
        "size": m.size,
        "cached": m.folder is not None,
        "folder": str(m.folder) if m.folder is not None else None,
        "error": str(m.error) if m.error is not None else None,
    }


def models(
    profile: str, found: Sequence[Model], made: Sequence[Convertible], hub: Hub, problems: Sequence[str]
) -> dict[str, Any]:
    """Return the models of a profile: of ``models``."""
    return {
        "profile": profile,
        "hub": hub.endpoint,
        "token": hub.has_token,
        "cache": str(hub.cache),
        "free": hub.free(),
        "models": [model(m) for m in found],
        "convertible": [convertible(m) for m in made],
        "problems": list(problems),
    }


def doctor(profile: str, items: Sequence[Examined]) -> dict[str, Any]:
    """Return what a machine has: of ``doctor``."""
    return {
        "profile": profile,
        "can_run": all(i.ok for i in items if i.needed),
        "items": [{**i._asdict(), "advice": None if i.ok else i.advice} for i in items],
    }


def baselines(rows: Sequence[tuple[str, Header]], problems: Sequence[str]) -> dict[str, Any]:
    """Return stored baselines: of ``baseline list``."""
    return {
        "baselines": [
            {
                "file": name,
                "method": header.identity.method,
                "prompts": header.summary.get("prompts"),
                "acceptance": header.summary.get("rates", []),
                "acceptance_length": header.summary.get("acceptance_length_pooled"),
                "diverged": again.get("diverged"),
                "repeated": again.get("prompts"),
                "vllm": header.identity.vllm,
                "hardware": header.identity.hardware,
                "recorded": header.provenance.recorded,
            }
            for name, header in rows
            for again in (header.summary.get("again") or {},)
        ],
        "problems": list(problems),
    }
