"""Check of the text that users read: it is that of the answer's tokens."""

from __future__ import annotations

from collections.abc import Iterator

from harness.history.records import Leg, Observation
from harness.history.token_ids import common_prefix
from harness.history.verdict import Verdict
from harness.judging.evidence import CellView
from harness.judging.figures import OfEngine
from harness.judging.findings import CheckResult, Finding, conclude
from harness.util.text import counted

NAME = "text"
_NO_CHARACTER = "\ufffd"
"""What bytes that are no character are decoded as. Engines hold incomplete ones back, at the end for good."""
_SHOWN = 24


def applies(cell: CellView) -> bool:
    """Return whether texts were recorded, by what the record says or has."""
    return cell.record.texts or any(leg.text is not None for o in cell.all_observations() for leg in o.legs)


def texts(cell: CellView) -> CheckResult:
    """Check that the text of every answer is that of its tokens as the harness decodes them, up to a stop string.

    Where bytes that are no character stand within a text, streams and whole decoding may differ, so that it is only
    compared with what the plain engine's same tokens are decoded as.
    """
    plain = cell.answers_of(cell.name.reference)
    findings: list[Finding] = []
    judged = unclear = 0
    for o in cell.all_observations():
        for leg in o.legs:
            if leg.text is None or leg.own_text is None:
                findings.append(_missing(cell, o, leg))
                continue
            judged += 1
            unclear += _is_unclear(leg.own_text)
            findings += [
                cell.finding(
                    NAME, Verdict.REGRESSION, "text", f"{leg.role} engine: {words}", o, OfEngine(role=leg.role)
                )
                for words in _problems(o, leg, _twin(leg, plain.get(o.key)))
            ]
    note = f"{counted(unclear, 'text')} with bytes that are no character were not decoded" if unclear else ""
    return conclude(NAME, cell.id, judged, findings, note=note)


def _missing(cell: CellView, o: Observation, leg: Leg) -> Finding:
    if leg.text is None:
        message = f"expected the text of the {leg.role} engine's answer, found none"
    else:
        message = (
            f"expected the text of the {leg.role} engine's tokens by the profile's tokenizer, found none: it could not "
            "be loaded where the run was recorded, or the answer has no token ids"
        )
    return cell.untested(NAME, message, o)


def _is_unclear(text: str) -> bool:
    return _NO_CHARACTER in text.rstrip(_NO_CHARACTER)


def _twin(leg: Leg, plain: Observation | None) -> Leg | None:
    """Return the plain engine's answer if it has the same tokens after the same prompt."""
    other = plain.final if plain is not None else None
    same = other is not None and (other.echoed_ids, other.output_ids) == (leg.echoed_ids, leg.output_ids)
    return other if same else None


def _problems(o: Observation, leg: Leg, twin: Leg | None) -> Iterator[str]:
    """Yield how an answer's text is not that of its tokens."""
    asked = o.feature in ("stop-string", "include-stop")
    text, own, stop = leg.text or "", leg.own_text or "", leg.stop_reason
    if twin is not None and twin.own_text is not None and (twin.own_text, twin.stop_reason) != (own, stop):
        yield "the same tokens have another text than on the plain engine"
    if isinstance(stop, int) and leg.output_ids and leg.output_ids[-1] != stop:
        yield f"expected the answer to end with its stop token {stop}, found {leg.output_ids[-1]}"
    if stop is not None and leg.finish_reason != "stop":
        yield f"{stop!r} is in the answer, which ended by {leg.finish_reason} instead of stopping there"
    if isinstance(stop, str):
        if not asked:
            yield f"the answer stopped at {stop!r}, though the request has no stop string"
        if stop not in own:
            yield f"expected the stop string {stop!r} in the text of the tokens, found none"
        before, string, _ = own.partition(stop)
        own = before + string if o.fields.get("include_stop_str_in_output") else before
    wanted, found = own.rstrip(_NO_CHARACTER), text.rstrip(_NO_CHARACTER)
    # A parser that tells reasoning or a call apart takes its marks out.
    parsed = leg.reasoning is not None or (o.feature == "tool" and found in wanted)
    if found != wanted and not parsed and not _is_unclear(leg.own_text or ""):
        at = common_prefix(found, wanted)
        yield (
            f"the text is not that of its tokens from character {at} on: {found[at : at + _SHOWN]!r} instead of "
            f"{wanted[at : at + _SHOWN]!r}"
        )
