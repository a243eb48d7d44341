"""Infer the law of failures: which of what is known of requests tells those that fail from those that do not.

Tried are their lengths, how many requests came before (age), whether the prompt was sent before, whether another
request was under way, the parameter, and the form. "If and only if" is said only of a law that no request contradicts,
that hardly comes about by chance, and beside which the requests leave no other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import comb
from typing import NamedTuple

from harness.judging.diagnosis.law import IFF, rule_of_lengths
from harness.judging.findings import Law
from harness.util.text import counted, listed

_CHANCE = 0.01
"""Chance up to which a law counts as shown: that some law of its kind fits as many failures that are strewn at
random."""


_AGE = "number of earlier requests"


class Circumstances(NamedTuple):
    """A request that was compared, with what may decide whether it fails."""

    failed: bool
    tokens: int
    number: int
    """Its place among the requests of its cell, from 1."""
    form: str = "ids"
    repeated: bool = False
    """Whether the cell was sent the same prompt before."""
    together: bool = False
    """Whether another request was under way."""
    parameter: str = ""
    """What it was sent with that others were not; empty for nothing."""


class _Explanation(NamedTuple):
    """A law of one kind, with how well the requests bear it out."""

    kind: str
    clause: str
    """Follows "if and only if"."""
    inside: int
    """Requests of which it holds; those that fail are among them unless ``stray``."""
    stray: int
    """Requests that fail although it does not hold."""
    wrong: int
    """Requests that contradict it."""
    chance: float
    """That a law of this kind fits by chance, without a contradiction."""
    loose: float
    """That one of this kind holds, by chance, of all that fail."""
    law: Law | None = None
    """A law of lengths."""

    def said(self, text: str, exact: bool = True) -> Law:
        """Return it as a law with these words."""
        known = self.law if self.law is not None else Law(text=text)
        return known.model_copy(update={"text": text, "exact": exact, "of_age": self.kind == _AGE})


def law_of(requests: Sequence[Circumstances], block_size: int, noun: str = "request", cold: bool = True) -> Law | None:
    """Return the law of the requests that fail; None if nothing fails.

    ``noun`` says what the requests are: hand-offs, all of them. Of requests that are not cold, whose states differ in
    more than is tried, a law is returned only if it is shown.
    """
    bad = [r for r in requests if r.failed]
    by_length: dict[int, bool] = {}
    for r in requests:
        by_length[r.tokens] = by_length.get(r.tokens, False) or r.failed
    found = rule_of_lengths(by_length, block_size)
    if found is None:
        return None
    if len(bad) == len(requests):
        return found.law if cold else None
    if len(bad) == 1:
        text = f"only 1 of {len(requests)} requests fails: no law can be told from one"
        law = Law(text=text, tested=found.law.tested, exact=False) if found.law.exact else found.law
        return law if cold else None
    others = list(_others(requests, noun))
    lengths = _of_lengths(requests, by_length, found.law, found.rules) if found.law.text.startswith(IFF) else None
    tried = [lengths, *others] if lengths is not None else others
    exact = sorted((e for e in tried if not e.wrong), key=lambda e: e.chance)
    if len(exact) == 1 and exact[0].chance <= _CHANCE:
        return _only(exact[0], [e for e in tried if e.wrong], len(requests), no_length=lengths is None)
    shown = sorted((e for e in tried if not e.stray and e.loose <= _CHANCE), key=lambda e: e.loose)
    if exact and (cold or exact[0].chance <= _CHANCE):
        return _as_far_as_shown(exact)
    if shown and not exact:
        return _one_sided(shown[0], len(bad), len(requests))
    if not cold:
        return None
    if not found.law.exact:
        return found.law
    passing = counted(sum(not r.failed and by_length[r.tokens] for r in requests), "request")
    where = f"{lengths.clause} where it fails" if lengths is not None else "it fails at every tested length"
    return Law(
        text=f"no law explains it: {where}, and {passing} of these lengths pass", tested=found.law.tested, exact=False
    )


def _only(best: _Explanation, excluded: Sequence[_Explanation], total: int, no_length: bool) -> Law:
    """Return the law that is left alone, with the counts by which it is."""
    against = [f"{e.kind} ({counted(e.wrong, 'counterexample')})" for e in excluded]
    if no_length:
        against.insert(0, "prompt length (no rule fits)")
    text = f"{IFF}{best.clause}" if best.law is None else best.law.text
    counts = f"{best.inside} such requests fail, {total - best.inside} others pass"
    return best.said(f"{text}; {counts}" + (f"; ruled out: {listed(against, 'and')}" if against else ""))


def _as_far_as_shown(exact: Sequence[_Explanation]) -> Law:
    """Return the law that comes about by chance least, with the others that fit as well."""
    best, others = exact[0], exact[1:]
    also = f"also explained by: {', or '.join(e.clause for e in others)}" if others else "which may be chance"
    words = best.clause if best.law is None else best.law.text.removeprefix(IFF)
    head, mark, remarks = words.partition(";")
    return best.said(f"as far as these prompts show, fails if {head}; {also}{mark}{remarks}")


def _one_sided(best: _Explanation, failing: int, total: int) -> Law:
    """Return a law that holds of all that fail, and of some that pass."""
    return best.said(
        f"fails only if {best.clause}: {failing} of {best.inside} such requests, none of {total - best.inside} others",
        exact=False,
    )


def _of_lengths(requests: Sequence[Circumstances], by_length: dict[int, bool], law: Law, rules: int) -> _Explanation:
    failing = sum(by_length.values())
    inside = sum(by_length[r.tokens] for r in requests)
    bad = sum(r.failed for r in requests)
    return _Explanation(
        kind="prompt length",
        clause=law.text.removeprefix(IFF).partition(";")[0].partition(", which is where")[0],
        inside=inside,
        stray=0,
        wrong=inside - bad,
        chance=min(1.0, rules / comb(len(by_length), failing)),
        loose=min(1.0, rules * comb(inside, bad) / comb(len(requests), bad)),
        law=law,
    )


def _others(requests: Sequence[Circumstances], noun: str) -> Iterator[_Explanation]:
    """Yield the laws other than of lengths that the requests can tell."""
    bad = [r for r in requests if r.failed]
    first = min(r.number for r in bad)
    since = f"sent from the {_ordinal(first)} {noun} of this cell on"
    yield from _kind(_AGE, since, requests, [r.number >= first for r in requests])
    yield from _kind("repeated prompt", "the same prompt was sent before", requests, [r.repeated for r in requests])
    yield from _kind("overlap", "sent while another request runs", requests, [r.together for r in requests])
    yield from _kind("text form", "sent as text", requests, [r.form == "text" for r in requests])
    names = sorted({r.parameter for r in bad})
    if all(names):
        rules = 2 ** len({r.parameter for r in requests})
        holds = [r.parameter in names for r in requests]
        yield from _kind("parameter", f"sent with {listed(names, 'or')}", requests, holds, rules)


def _kind(
    kind: str, clause: str, requests: Sequence[Circumstances], holds: Sequence[bool], rules: int = 1
) -> Iterator[_Explanation]:
    """Yield a law that holds of some of the requests; nothing where all are alike."""
    inside, bad = sum(holds), sum(r.failed for r in requests)
    if kind != _AGE and not 0 < inside < len(requests):
        return
    wrong = sum(r.failed != held for r, held in zip(requests, holds, strict=True))
    stray = sum(r.failed and not held for r, held in zip(requests, holds, strict=True))
    ways = comb(len(requests), bad)
    chance, loose = min(1.0, rules / ways), min(1.0, rules * comb(inside, bad) / ways)
    yield _Explanation(kind, clause, inside, stray, wrong, chance, loose)


def _ordinal(n: int) -> str:
    ending = "th" if n % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(n % 10, "th")
    return f"{n}{ending}"
