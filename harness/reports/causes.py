"""Findings by cause: one for each class of damage with its law of lengths, whatever cells and scenarios show it.

A scenario has no law of its own. Its findings join the cause of the same class whose law they fit, so that a defect of
the hand-off is said once, not once per scenario. Every report reads the causes from ``RunSummary``; what they say in
words is in ``cause_words``.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from harness.history.folder import History
from harness.history.records import COLD, in_words
from harness.history.verdict import Verdict, worst
from harness.judging.diagnosis.diagnose import damage_name
from harness.judging.figures import TokenDifference
from harness.judging.findings import CellVerdict, Finding, Judgement, Law, how_many
from harness.reports.next_steps import can_be_tried, repro_line
from harness.reports.prompts import Place, place_of
from harness.util.text import cut, without_log

_NOT_A_CAUSE = ("nothing-tested", "baseline")
_REASON_CHARS = 160
"""Reasons that begin alike are one; what follows is the end of a log."""
_VARYING = re.compile(r"\b(?:pd|single)-[\w.@-]+|\d+")


@dataclass
class Cause:
    """Findings that one defect explains."""

    damage: str
    law: Law | None = None
    known: str | None = None
    link: str | None = None
    anyway: str | None = None
    """Id of the known defect that covers it in a run without the injected fault."""
    command: str = ""
    """The command that shows it again; empty where there is nothing to show."""
    findings: list[Finding] = field(default_factory=list)
    views: dict[tuple[str, str], CellVerdict] = field(default_factory=dict)
    """Cells and scenarios that show it."""

    @property
    def verdict(self) -> Verdict:
        return worst(f.verdict for f in self.findings)

    @property
    def count(self) -> int:
        return how_many(self.findings)

    @property
    def title(self) -> str:
        """The class of damage as text; of what broke, the reason."""
        if self.damage != "infrastructure":
            return damage_name(self.damage)
        return f"{damage_name(self.damage)}: {cut(self.reason, _REASON_CHARS)}"

    @property
    def reason(self) -> str:
        """Why something broke, or else the message of the first finding, without the lines of a log."""
        return without_log(next((f.reason for f in self.findings if f.reason), self.findings[0].message))

    @property
    def cells(self) -> dict[str, int]:
        """How many requests of each cell have a finding, in any scenario; 0 where findings are about the cell."""
        out: dict[str, set[Place]] = {}
        for f in self.findings:
            place = place_of(f)
            out.setdefault(f.cell, set()).update({place} if place[3] else ())
        more = {cell: max((f.others for f in self.findings if f.cell == cell), default=0) for cell in out}
        return {cell: len(places) + more[cell] for cell, places in out.items()}

    @cached_property
    def ids(self) -> frozenset[str]:
        """The ids of its findings."""
        return frozenset(f.id for f in self.findings)

    @property
    def scenarios(self) -> list[str]:
        return list(dict.fromkeys(f.scenario for f in self.findings))

    @property
    def strata(self) -> list[str]:
        return sorted({f.stratum for f in self.findings if f.stratum})

    @property
    def example(self) -> Finding:
        """The most telling finding: tokens that differ in the longest cold prompt whose damage could be located."""
        return max(
            self.findings,
            key=lambda f: (
                f.location is not None and isinstance(f.evidence, TokenDifference),
                f.location is not None,
                f.scenario == COLD,
                f.location.of if f.location is not None else 0,
            ),
        )

    @property
    def in_the_caches(self) -> Finding | None:
        """A finding on the KV itself, of the example's request if it has one; None if none is, or it is the example."""
        seen, example = [f for f in self.findings if f.kv_layers], self.example
        if not seen or example.kv_layers:
            return None
        return next((f for f in seen if place_of(f) == place_of(example)), seen[0])

    @property
    def place(self) -> tuple[str, str]:
        """The cell and scenario that its example is of."""
        return self.example.cell, self.example.scenario

    @property
    def tried(self) -> Finding | None:
        """The finding that its command shows again: the example, or else the first that can be shown."""
        return next((f for f in (self.example, *self.findings) if can_be_tried(f)), None)

    def among(self, keys: Container[tuple[str, ...]], history: History) -> Cause | None:
        """Return the cause with those of its findings alone whose group is among ``keys``; None without any."""
        some = [f for f in self.findings if group_key(f) in keys]
        places = {(f.cell, f.scenario) for f in some}
        views = {place: view for place, view in self.views.items() if place in places}
        return _with_command(replace(self, findings=some, views=views), history) if some else None

    @property
    def diagnoses(self) -> list[tuple[str, str]]:
        """What was diagnosed in each cell and scenario, where that is this damage."""
        return [
            (in_words(cell, scenario), view.diagnosis.text)
            for (cell, scenario), view in self.views.items()
            if view.diagnosis is not None and view.diagnosis.damage == self.damage
        ]

    @property
    def groups(self) -> list[tuple[Finding, int]]:
        """The first finding of each cell, scenario, check and verdict, and how many there are."""
        out: dict[tuple[str, ...], list[Finding]] = {}
        for f in self.findings:
            out.setdefault(group_key(f)[:4], []).append(f)
        return [(found[0], how_many(found)) for found in out.values()]

    @property
    def checks(self) -> dict[str, int]:
        """How many findings each check has."""
        return {
            c: how_many(f for f in self.findings if f.check == c) for c in dict.fromkeys(f.check for f in self.findings)
        }


def group_key(f: Finding) -> tuple[str, ...]:
    """Return what findings have in common that are listed as one."""
    return f.cell, f.scenario, f.check, f.verdict, f.damage


def causes_of(
    history: History,
    judgement: Judgement,
    lengths: Mapping[Place, int],
    anyway: Mapping[str, str] = MappingProxyType({}),
) -> list[Cause]:
    """Return the causes, gravest first, with the commands that show them again; of equal ones what broke, then what was
    found in most requests.

    ``lengths`` are the prompt tokens of each request. ``anyway`` are the findings, by id, that known defects cover in a
    run without its injected fault.
    """
    return [_with_command(cause, history) for cause in _grouped(judgement, lengths, anyway)]


def _with_command(cause: Cause, history: History) -> Cause:
    return replace(cause, command=repro_line(history, cause.tried) if cause.tried is not None else "")


def _grouped(judgement: Judgement, lengths: Mapping[Place, int], anyway: Mapping[str, str]) -> list[Cause]:
    causes: dict[tuple[str, ...], Cause] = {}
    later: list[tuple[CellVerdict, Finding]] = []
    changed: list[tuple[CellVerdict, Finding]] = []
    for view in judgement.cells:
        for result in view.results:
            for finding in result.findings:
                if finding.id in anyway and finding.verdict is not Verdict.UNKNOWN:
                    of = anyway[finding.id]
                    _add(causes.setdefault(("anyway", of), Cause(finding.damage, anyway=of)), view, finding)
                elif finding.known or finding.verdict is Verdict.UNKNOWN:
                    _add(causes.setdefault(_plain_key(finding), _plain(finding)), view, finding)
                elif finding.damage == "engine-changed":
                    changed.append((view, finding))
                elif finding.law is not None and view.diagnosis is not None and view.diagnosis.law is not None:
                    _add(_under_law(causes, finding, view.diagnosis.law), view, finding)
                else:
                    later.append((view, finding))
    with_law = [c for c in causes.values() if c.law is not None]
    for view, finding in later:
        place = place_of(finding)
        fitting = [c for c in with_law if c.damage == finding.damage and _fits(c.law, lengths.get(place))]
        cause = next(
            (c for c in fitting if any(cell == finding.cell for cell, _ in c.views)), next(iter(fitting), None)
        )
        _add(cause or causes.setdefault(("found", finding.damage), Cause(finding.damage)), view, finding)
    by_request = {place_of(f): c for c in causes.values() for f in c.findings if f.verdict is not Verdict.UNKNOWN}
    for view, finding in changed:
        # Another answer has other drafts: what changed in a request that is wrong needs no cause of its own.
        cause = by_request.get(place_of(finding)) if finding.prompt_id else None
        _add(cause or causes.setdefault(("found", finding.damage), Cause(finding.damage)), view, finding)
    return sorted(
        causes.values(),
        key=lambda c: (
            c.damage in _NOT_A_CAUSE,
            -c.verdict.severity,
            c.anyway is not None,
            c.damage != "infrastructure",
            -c.count,
        ),
    )


def _add(cause: Cause, view: CellVerdict, finding: Finding) -> None:
    cause.findings.append(finding)
    cause.views[view.cell, view.scenario] = view


def _plain_key(f: Finding) -> tuple[str, ...]:
    if f.known:
        return "known", f.known
    # What is missing for one reason differs in names of cells, and in numbers such as those of processes and ports.
    reason = _VARYING.sub("#", _words(f.reason or f.message))[:_REASON_CHARS]
    return "missing", f.damage, reason


def _words(text: str) -> str:
    return " ".join(text.split())


def _plain(f: Finding) -> Cause:
    return Cause(f.damage, known=f.known, link=f.link)


def _under_law(causes: dict[tuple[str, ...], Cause], finding: Finding, law: Law) -> Cause:
    """Return the cause of this damage whose law is the same as far as both were tested."""
    for cause in causes.values():
        if cause.damage == finding.damage and cause.law is not None and _same(cause.law, law):
            if len(law.tested) > len(cause.law.tested):
                cause.law = law
            return cause
    return causes.setdefault(("law", finding.damage, law.text), Cause(finding.damage, law))


def _same(a: Law, b: Law) -> bool:
    if a.residues is None or b.residues is None:
        return a.text == b.text
    return (
        a.modulus == b.modulus
        and {*a.residues} & {*b.tested} == {*b.residues} & {*a.tested}
        and _threshold(a) == _threshold(b)
    )


def _threshold(law: Law) -> str:
    return law.text.partition(" and N is more than ")[2].partition(";")[0]


def _fits(law: Law | None, length: int | None) -> bool:
    """Return whether a law says that this length fails; it contradicts no finding about a whole cell."""
    if law is None or length is None or law.residues is None or law.modulus is None:
        return law is not None
    return length % law.modulus in law.residues


def consequences(causes: Iterable[Cause]) -> tuple[list[Cause], list[Cause]]:
    """Divide the causes of an UNKNOWN run into what broke and what was not tested because of it.

    Where nothing broke, what was not tested is all that there is to say.
    """
    found = list(causes)
    first = [c for c in found if c.damage not in _NOT_A_CAUSE]
    return (first, [c for c in found if c.damage in _NOT_A_CAUSE]) if first else (found, [])
