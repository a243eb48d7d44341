"""What a cause says: one sentence with its numbers, and where in the prompt's KV the damage is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from harness.history.records import COLD, in_words
from harness.history.verdict import Verdict
from harness.judging.diagnosis.diagnose import damage_name
from harness.judging.figures import AcceptanceFigures
from harness.judging.findings import CellVerdict, CheckResult, Law
from harness.profiles.cells import CellName
from harness.reports.causes import Cause
from harness.util.text import abridged, counted, listed, without_log

_KV = ("target-kv", "drafter-kv")
_NAMED = 3
"""Cells that are named; of more, the first one and how many there are."""
_POSITIONS = 6
BRIEF = 240
"""Characters of a message in a sentence that has to be short."""
_TOKENS = ("tokens-reference", "tokens-baseline", "tokens-single")


def sentence_of(cause: Cause, most: int | None = None) -> str:
    """Return a cause as one sentence: where it shows, what is wrong, by how much, and at which prompt lengths; without
    such numbers, an example's message, or ``most`` characters of it."""
    parts = [_head(cause, most), _numbers(cause) or _message(cause, most)]
    if cause.anyway is not None:
        parts.append(f"expected without the injected fault, too ({cause.anyway})")
    return f"{_where(cause)}: {'; '.join(filter(None, parts))}"


def _numbers(cause: Cause) -> str:
    if cause.verdict is Verdict.UNKNOWN:
        return ""
    return ", ".join(filter(None, (_acceptance(cause), _tokens(cause), _lengths(cause.law))))


def detail_of(cause: Cause) -> str:
    """Return what was diagnosed in the cell and scenario of its example, or else its message, without what its sentence
    says; empty where that is nothing."""
    if cause.verdict is Verdict.UNKNOWN:
        return ""
    found = _diagnosed(cause) or (_message(cause, BRIEF) if _numbers(cause) else "")
    return f"{in_words(*cause.place)}: {found}" if found else ""


def _diagnosed(cause: Cause) -> str:
    view = cause.views.get(cause.place)
    diagnosis = view.diagnosis if view is not None else None
    if diagnosis is None or diagnosis.damage != cause.damage:
        return ""
    law = diagnosis.law if diagnosis.law is not None and diagnosis.law.exact else None
    rest = diagnosis.text.partition("; ")[2]
    if law is not None and rest.startswith(law.text):
        rest = rest.removeprefix(law.text).removeprefix("; ")
    return "; ".join(filter(None, (_remark(law), rest)))


def _message(cause: Cause, most: int | None) -> str:
    if cause.damage == "infrastructure":
        # Its head has the reason.
        return ""
    return _within(without_log(cause.example.message), most)


def _within(text: str, most: int | None) -> str:
    return text if most is None else abridged(text, most)


def _remark(law: Law | None) -> str:
    """Return what a law says of its lengths; empty where it says nothing."""
    what = law.text.partition(", which is where ")[2].partition(";")[0] if law is not None else ""
    return f"at these lengths, {what}" if what else ""


def _head(cause: Cause, most: int | None) -> str:
    """Return the class of damage, and whether all that it shows in are hand-offs; of what broke, the reason."""
    if cause.damage == "infrastructure":
        return f"{damage_name(cause.damage)}: {_within(cause.reason, most)}"
    handed_off = cause.damage in _KV and all(CellName.of(cell).topology == "pd" for cell in cause.cells)
    return cause.title + (" after a hand-off" if handed_off else "")


def _where(cause: Cause) -> str:
    """Return the cells and scenarios as text: ``pd-eagle3 (also in 17 scenarios)``."""
    cells, scenarios = list(cause.cells), cause.scenarios
    where = listed(cells, "and") if len(cells) <= _NAMED else f"{cells[0]} and {counted(len(cells) - 1, 'more cell')}"
    warm = [s for s in scenarios if s != COLD]
    if not warm:
        return where
    states = warm[0] if len(warm) == 1 else counted(len(warm), "scenario")
    return f"{where} (also in {states})" if COLD in scenarios else f"{where} in {states}"


def _acceptance(cause: Cause) -> str:
    """Return acceptance per position, of the reference and then of the example's cell, if that is what changed."""
    view = cause.views.get(cause.place)
    figures = next(filter(None, map(_changed, view.results if view is not None else ())), None)
    if figures is None or not figures.reference.rates or not figures.ours.rates:
        return ""
    of = f" of {in_words(*cause.place)}" if len(cause.views) > 1 else ""
    return f"acceptance{of} {_rates(figures.reference.rates, figures.ours.rates)}"


def _changed(result: CheckResult) -> AcceptanceFigures | None:
    changed = any(f.verdict is not Verdict.UNKNOWN for f in result.findings)
    return result.figures if changed and isinstance(result.figures, AcceptanceFigures) else None


def _rates(before: Sequence[float], after: Sequence[float]) -> str:
    """Return rates per position before and after, with digits that show what changed: ``0.92/0.84 → 0.00/0.00``."""
    pairs = list(zip(before, after, strict=False))[:_POSITIONS]
    digits = next((d for d in (2, 3) if all(a == b or f"{a:.{d}f}" != f"{b:.{d}f}" for a, b in pairs)), 4)
    more = "/…" if len(before) > _POSITIONS else ""
    return " → ".join("/".join(f"{rate:.{digits}f}" for rate in side) + more for side in zip(*pairs, strict=True))


def _tokens(cause: Cause) -> str:
    """Return how many answers have wrong tokens where the cause shows; empty where none was compared."""
    compared = [_of_tokens(view) for view in cause.views.values()]
    judged = sum(of for _, of in compared)
    wrong = sum(some for some, _ in compared)
    if not judged:
        return ""
    return f"{wrong:,} of {counted(judged, 'answer')} with wrong tokens" if wrong else "tokens right"


def _of_tokens(view: CellVerdict) -> tuple[int, int]:
    """Return how many answers of a cell in a scenario have wrong tokens, and of how many."""
    results = [r for r in view.results if r.check in _TOKENS and r.verdict is not Verdict.UNKNOWN]
    return max(((min(_wrong(r), r.judged), r.judged) for r in results), default=(0, 0))


def _wrong(result: CheckResult) -> int:
    return sum(1 + f.others for f in result.findings if f.verdict is not Verdict.UNKNOWN)


def _lengths(law: Law | None) -> str:
    """Return a law without its remarks; empty where it is none."""
    if law is None or not law.exact:
        return ""
    rule = law.text.partition(";")[0].partition(", which is")[0].partition(" (")[0]
    return rule.replace("every tested length fails", "at every tested length").replace(
        "fails if and only if", "only if"
    )


def headline_of(causes: Iterable[Cause], most: int | None = None) -> str:
    """Return the gravest cause as a sentence (see ``sentence_of``), and how many more were found; empty without a
    cause."""
    found = [c for c in causes if c.verdict is not Verdict.UNKNOWN] or list(causes)
    if not found:
        return ""
    more = f"; {counted(len(found) - 1, 'more cause')}" if len(found) > 1 else ""
    return f"{sentence_of(found[0], most)}{more}"
