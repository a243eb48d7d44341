"""How far log-probs may lie apart for no other reason than rounding, whether equal runs give equal tokens, and how many
tokens rounding may decide.

All are measured (``harness.history.rounding``): by ``harness baseline record``, or, where a baseline has no
measurement, by the plain engine of the run itself. Constants are left where nothing was measured, for what the record
cannot resolve, and for baselines of another machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from harness.baselines.lookup import Lookup
from harness.history.folder import History
from harness.history.records import Observation
from harness.history.rounding import MULTIPLE, RESOLUTION_NATS, Rounding, WayName, in_words
from harness.judging.evidence import CellView, Evidence
from harness.profiles.cells import CellName
from harness.profiles.model import Judging, Tier
from harness.scheduling.gpus import gpu_name
from harness.util.text import listed

OTHERWISE_NATS = 1e-3
"""Bound where sums may be added in another order and nobody measured by how much: on another machine, or without a
measurement."""
DECIDED_BY_ROUNDING = 1e-3
"""Largest share of the plain engine's tokens that rounding may decide in a run that is judged bit for bit. Near ties of
tokens are proven one by one, but those of drafts are not recorded, and where rounding decides more, right drafts differ
every night (docs/checks.md)."""
_MACHINE = ("processor", "processor_model")
"""What makes machines of one kind for CPU engines, as runs record it."""
_BY_ITSELF: tuple[WayName, ...] = ("again", "hit", "prefill", "crowd")
"""What a plain engine shows by itself."""


class Bounds(NamedTuple):
    """By how many nats log-probs of the same token may differ."""

    alone: float
    """For requests that have the engines to themselves. In which way a token is computed, nobody knows: a prompt may be
    computed in chunks, or behind a hit. So the largest of all ways counts, that of crowds among them."""
    beside: float
    """For requests beside others."""
    recorded: float
    """Against the baseline."""
    source: str
    """Where they come from."""
    doubt: str = ""
    """Why nothing can be judged by them; empty if it can."""


def rounding_of(cell: CellView) -> Rounding:
    """Return what was measured for a cell: in the baselines of the plain engine and of its method. If they are of
    another kind of machine, or have no measurement, what the plain engine of this run shows counts as well."""
    recorded, here = Rounding(), cell.history.rounding_of(cell.name.variant) or Rounding()
    for lineup in dict.fromkeys((cell.name.plain, cell.lineup)):
        header = cell.header_or_reason(lineup)
        if not isinstance(header, str) and header.rounding is not None:
            recorded |= header.rounding
    if _same_machine(cell) and recorded.largest(*_BY_ITSELF) is not None:
        return recorded
    return here | recorded


def bounds(cell: CellView) -> Bounds:
    """Return the bounds for a cell."""
    found: Bounds | None = cell.own.get("bounds")
    return found if found is not None else cell.noted("bounds", lambda: _bounds(cell))


def _bounds(cell: CellView) -> Bounds:
    given = cell.judging.logprob_nats
    if given is not None:
        recorded = cell.judging.recorded_nats or given
        return Bounds(given, max(given, OTHERWISE_NATS), max(recorded, OTHERWISE_NATS), "the profile")
    found = rounding_of(cell)
    seen = found.largest(*get_args(WayName))
    if seen is None:
        return Bounds(OTHERWISE_NATS, OTHERWISE_NATS, OTHERWISE_NATS, "a default: no rounding was measured")
    same = _same_machine(cell)
    alone = _room(seen)
    if not same and cell.history.rounding_of(cell.name.variant) is None:
        # Nobody measured the kernels of this machine.
        alone = max(alone, OTHERWISE_NATS)
    beside = alone if "crowd" in found.ways else max(alone, OTHERWISE_NATS)
    recorded = beside if same else max(beside, OTHERWISE_NATS)
    doubt = _beyond_rounding(seen, cell.settings.dtype)
    return Bounds(alone, beside, recorded, f"{MULTIPLE} times the largest measured rounding", doubt)


def _beyond_rounding(seen: float, dtype: str) -> str:
    """Return that what was measured is more than rounding moves numbers of a type, so that bounds which follow from it
    would excuse damage; "" where it is not. The plain engine that shows how it rounds may be the one that is wrong."""
    most = Judging().near_tie_assumed(dtype)
    if seen <= most:
        return ""
    return (
        f"expected the plain engine to find the same tokens as probable when they are computed another way, but for "
        f"rounding, by {most:g} nats of {dtype} at most, found {seen:.3g}: the bound that follows, {_room(seen):.3g} "
        "nats, would excuse damage; record baselines on this machine (`harness baseline record`), or set "
        "judging.logprob_nats"
    )


def _room(seen: float) -> float:
    """Return the bound that follows from the largest difference that was seen, in nats."""
    return max(RESOLUTION_NATS, MULTIPLE * seen)


def allowed(cell: CellView, *observations: Observation | None) -> float:
    """Return by how many nats answers of this run may differ: more where one of them was beside other requests."""
    known = bounds(cell)
    for o in observations:
        if o is not None and o.concurrent > 1:
            return known.beside
    return known.alone


def near_tie_in_crowds(cell: CellView) -> float:
    """Return the gap, in nats, up to which the same prompts, asked together, were seen to part; 0 if they did not."""
    crowd = rounding_of(cell).ways.get("crowd")
    if crowd is None or not crowd.parted:
        return 0.0
    return cell.judging.near_tie_assumed(cell.settings.dtype) if crowd.parted_nats is None else crowd.parted_nats


def _same_machine(cell: CellView) -> bool:
    """Return whether the baselines of a cell were recorded on a machine of the same kind: for CPU engines, processors
    of one name differ in their model, and with it in the kernels that are chosen for them; for GPU engines, kernels
    come with torch, and the processor computes nothing."""
    return all(_of_same_machine(cell, lineup) for lineup in (cell.name.plain, cell.lineup))


def _of_same_machine(cell: CellView, lineup: str) -> bool:
    found, run = cell.header_or_reason(lineup), cell.history.run
    if isinstance(found, str):
        return False
    theirs, ours = found.provenance, run.hardware
    if cell.settings.on_gpu:
        torch = run.versions.get("torch")
        return _kind(theirs.hardware) == _kind(ours) and torch is not None and torch == theirs.versions.get("torch")
    return all(theirs.hardware.get(key) == ours.get(key) for key in _MACHINE)


def _kind(hardware: Mapping[str, Any]) -> str:
    """Return the kind of GPU that a run used, which is that of the first one."""
    return gpu_name(hardware.get("gpus") or ())


def records_log_probs(cell: CellView) -> bool:
    """Return whether the log-probs of a baseline say what those of this run should be. In numbers of 16 bits, those of
    another kind of machine, or on GPUs of another torch, do not: its kernels add in another order, which moves them by
    as much as damage does."""
    missing = isinstance(cell.header_or_reason(cell.lineup), str)
    return missing or cell.settings.dtype == "float32" or _of_same_machine(cell, cell.lineup)


class Repeatability(NamedTuple):
    """What a run shows of its plain engines: whether equal requests give equal tokens, and how far that reaches."""

    alone: bool | None
    """Whether they give the same tokens again; None if it was not measured."""
    decided: float | None
    """Largest share of their tokens whose two best are no farther apart than the bound; None without log-probs."""
    sentence: str

    @property
    def bitwise(self) -> bool:
        """Whether answers can be compared bit for bit."""
        return bool(self.alone) and self.decided is not None and self.decided <= DECIDED_BY_ROUNDING


def repeatability(evidence: Evidence) -> Repeatability:
    """Return what the run shows of its plain engines, or, of those that it did not ask, their baselines. It reads all
    answers of theirs, once for a judgement."""
    return evidence.once(
        "repeatability", lambda: _repeatability(evidence.judging, evidence.history, evidence.baselines)
    )


def _repeatability(judging: Judging, history: History, baselines: Mapping[str, Lookup]) -> Repeatability:
    names = dict.fromkeys(CellName.of(CellName.of(c.cell).reference) for c in history.run.cells)
    measured = {name: _rounding_shown(name, history, baselines) for name in names}
    alone = _all(m.repeats for m in measured.values())
    decided, said = None, _said_again(alone, list(measured.values()))
    if alone:
        nats = {name: _bound_shown(judging, found) for name, found in measured.items()}
        shares = [_share_below(nats[name], _gaps(name, history, baselines)) for name in names]
        decided = None if None in shares else max(s for s in shares if s is not None)
        if decided is None:
            said += "; without log-probs nobody knows how many tokens rounding decides"
        elif decided > DECIDED_BY_ROUNDING:
            said += (
                f"; but {100 * decided:.3g} % of its tokens have a second best within {max(nats.values()):.2g} nats, "
                "as far as rounding may move them"
            )
    return Repeatability(alone, decided, said)


def _rounding_shown(plain: CellName, history: History, baselines: Mapping[str, Lookup]) -> Rounding:
    found = history.rounding_of(plain.variant) or Rounding()
    lookup = baselines.get(plain.lineup)
    if found.repeats is None and lookup is not None and lookup.source is not None:
        return lookup.source.header.rounding or Rounding()
    return found


def _said_again(alone: bool | None, measured: Sequence[Rounding]) -> str:
    again = [m.ways["again"] for m in measured if "again" in m.ways]
    crowd = [m.ways["crowd"] for m in measured if "crowd" in m.ways]
    answers, parted = sum(w.answers for w in again), sum(w.parted for w in again)
    if alone is None:
        said = "it was not measured whether the plain engine repeats its answers"
    elif alone:
        said = f"the plain engine gave the same tokens again in {answers} of {answers} answers"
    else:
        said = f"the plain engine gave other tokens in {parted} of {answers} answers when it was asked again"
    if crowd:
        same = sum(w.answers - w.parted for w in crowd)
        said += f", and among other requests in {same} of {sum(w.answers for w in crowd)}"
    return said


def _bound_shown(judging: Judging, found: Rounding) -> float:
    """Return by how many nats rounding may move a token of an engine that rounds so."""
    if judging.logprob_nats is not None:
        return judging.logprob_nats
    return _room(found.largest(*get_args(WayName)) or 0.0)


def _gaps(plain: CellName, history: History, baselines: Mapping[str, Lookup]) -> list[float]:
    """Return the distances of the two best tokens in the plain engine's answers, in nats: in this run, else in its
    baseline."""
    answers = (o.final for o in history.first_answers(plain.id).values())
    found = [g for leg in answers if leg is not None for g in leg.top_gaps or () if g is not None]
    lookup = baselines.get(plain.lineup)
    if not found and lookup is not None and lookup.baseline is not None:
        found = [g for row in lookup.baseline.rows for g in row.gaps if g is not None]
    return found


def _share_below(nats: float, gaps: Sequence[float]) -> float | None:
    return sum(gap <= nats for gap in gaps) / len(gaps) if gaps else None


def _all(values: Iterable[bool | None]) -> bool | None:
    found = list(values)
    return None if not found or None in found else all(found)


def resolved(evidence: Evidence) -> Evidence:
    """Return the evidence with the tier that ``auto`` comes to in the run."""
    if evidence.judging.tier != "auto":
        return evidence
    tier = "bitwise" if repeatability(evidence).bitwise else "normal"
    return evidence._replace(judging=evidence.judging.model_copy(update={"tier": tier}))


def notices(evidence: Evidence, tier: Tier) -> Iterator[str]:
    """Yield what a reader has to know about the tier that was chosen and the bounds that were measured. ``tier`` is the
    one that the profile asked for."""
    if tier == "auto":
        found = repeatability(evidence)
        yield f"tier {evidence.judging.tier}, by measurement (auto): {found.sentence}"
    others = [v.id for v in evidence.views() if evidence.judging.tier == "bitwise" and not records_log_probs(v)]
    if others:
        on_gpus = any(v.settings.on_gpu for v in evidence.views())
        yield (
            f"the log-probs of {listed(sorted(set(others)), 'and')} are compared within the run alone: baselines are "
            f"of another kind of {'GPU, or of another torch' if on_gpus else 'machine'}, which rounds 16-bit numbers "
            "otherwise; record them here to have both"
        )
    if evidence.judging.tier == "bitwise" and evidence.judging.logprob_nats is None:
        most = max((bounds(view) for view in evidence.views()), key=lambda b: (b.alone, b.beside), default=None)
        if most is not None:
            yield (
                f"log-probs may differ by {most.alone:.1e} nats, by {most.beside:.1e} among other requests, and by "
                f"{most.recorded:.1e} from the baseline ({most.source})"
            )


def measurement(found: Rounding) -> list[tuple[str, str]]:
    """Return each way that was measured, with its figures."""
    return [
        (
            in_words(way),
            f"{w.tokens} tokens, median {w.quantiles[0]:.1e}, 99 % below {w.quantiles[-1]:.1e}, largest "
            f"{w.largest:.1e} nats" + (f"; {w.parted} of {w.answers} answers part" if w.parted else ""),
        )
        for way, w in found.ways.items()
    ]
