"""Every request of a run as a row: what was asked, what came back, and what the checks say of it.

A row passes only when its tokens were compared and equal the reference, no check found anything, and nothing about its
cell and scenario as a whole is in doubt. Sequences of tokens are kept once, however many cells gave them, because
answers that are right are all the same.
"""

from __future__ import annotations

import contextlib
import difflib
import json
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from harness.baselines.lookup import Lookup
from harness.errors import DataError
from harness.history.acceptance import Steps, begun_before, real_steps
from harness.history.folder import History
from harness.history.records import COLD, RESCORE, CellRecord, Leg, Observation
from harness.history.token_ids import common_prefix, parted_at
from harness.history.verdict import Verdict, worst
from harness.judging.figures import DraftsBeside, StepsDifference
from harness.judging.findings import Finding, Judgement
from harness.profiles.cells import CellName
from harness.prompts.lengths import classify
from harness.reports.strip import StepStrip, strip_of
from harness.util.files import tokenizer_hash
from harness.util.paths import REPOSITORY, recorded

MOST_ROWS = 20_000
"""Rows that a page has: of larger runs only those with findings, and of these the first ones."""
MOST_TOKENS = 400_000
"""Tokens whose text a page has; requests with findings come first."""
MOST_STRIPS = 1000
"""Strips of steps that a page has; those of the gravest findings come first."""
_LONGEST_FACT = 400
_COUNTED = {
    "prompt_tokens_external_kv_transfer": "prompt tokens from P",
    "prompt_tokens_local_compute": "prompt tokens computed",
    "prefix_hits": "prompt tokens from its own prefix cache",
    "nixl_transfers": "NIXL transfers",
    "nixl_bytes": "NIXL bytes",
    "nixl_descriptors": "NIXL descriptors",
    "nixl_failed_transfers": "failed NIXL transfers",
    "nixl_expired": "expired leases",
    "preemptions": "preemptions",
}
_ALWAYS = {
    "prefill": ("prompt_tokens_local_compute", "prefix_hits"),
    "decode": (
        "prompt_tokens_external_kv_transfer",
        "prompt_tokens_local_compute",
        "prefix_hits",
        "nixl_bytes",
        "nixl_descriptors",
    ),
    "single": ("prompt_tokens_local_compute", "prefix_hits"),
}
"""Counters that are shown even when they did not change."""

Place = tuple[str, str, str, str]
"""Cell, scenario, form and key of a request."""


class HandOffSide(NamedTuple):
    """What one engine reported about its part in a hand-off, as names and values for display."""

    name: str
    facts: tuple[tuple[str, str], ...]


class PromptRow(NamedTuple):
    place: Place
    prompt_id: str
    length: int
    """Prompt tokens."""
    stratum: str
    verdict: Verdict | None
    """None when no check found anything, and its tokens were not compared, or differ where that may be chance."""
    parted: int | None
    """The first output token that differs from the reference; None if none does, or there is no reference."""
    compared: bool
    accepted: float | None
    """Mean accepted drafts per step."""
    seconds: float
    gap: float | None
    """Log-probability gap in nats between the two best tokens at the difference."""
    block_size: int
    findings: tuple[Finding, ...]
    prompt: tuple[int, ...]
    expected: tuple[int, ...]
    output: tuple[int, ...]
    sides: tuple[HandOffSide, ...]
    """The engines that served the request, in order; empty where nothing was found."""
    error: str
    strip: StepStrip | None
    """The steps around the first that differs; None where no finding is about the drafts of the request."""

    @property
    def damaged(self) -> tuple[int, ...]:
        """Indices of the prompt's blocks that findings name."""
        return tuple(sorted({b for f in self.findings if f.location is not None for b in f.location.blocks}))


@dataclass
class Heat:
    """What came of the cold prompts of one cell that have the same length, or lie in the same stratum."""

    verdicts: list[Verdict] = field(default_factory=list)
    requests: int = 0
    prompts: int = 0
    """Requests sent as token ids, of which each prompt has one."""
    unequal: int = 0
    """Requests whose tokens differ from the reference, or were compared with nothing."""

    def add(self, row: PromptRow) -> None:
        self.requests += 1
        self.prompts += row.place[2] == "ids"
        self.unequal += not row.compared or row.parted is not None
        if row.verdict is not None:
            self.verdicts.append(row.verdict)

    def missing(self, finding: Finding) -> None:
        self.unequal += 1
        self.verdicts.append(finding.verdict)

    @property
    def verdict(self) -> Verdict | None:
        return worst(self.verdicts) if self.verdicts else None

    @property
    def damaged(self) -> int:
        return sum(v is not Verdict.PASS for v in self.verdicts)

    @property
    def symbol(self) -> str:
        """A dot where all is right; an equals sign where the tokens are, and something else was not tested."""
        if self.verdict in (None, Verdict.PASS):
            return "–" if self.verdict is None else "·"
        return "=" if self.verdict is Verdict.UNKNOWN and not self.unequal else self.verdict.symbol


class Prompts(NamedTuple):
    """All requests of a run, the gravest findings first."""

    rows: tuple[PromptRow, ...]
    left_out: int
    """Requests that have no row, because there are too many."""
    pieces: dict[int, str]
    """The text of each token that occurs; empty when the run's tokenizer is not here."""
    by_length: dict[str, dict[int, Heat]]
    """All cold prompts, by cell and length."""
    by_stratum: dict[str, dict[str, Heat]]
    """The same by cell and stratum."""

    def find(self, finding: Finding) -> PromptRow | None:
        """Return the row of the request that a finding is about."""
        place = place_of(finding)
        return next((r for r in self.rows if r.place == place), None)


def place_of(finding: Finding) -> Place:
    """Return the place of the request that a finding is about; its key is empty for findings about a cell."""
    key = finding.part or finding.prompt_id or ""
    return finding.cell, finding.scenario, "text" if finding.form == "text" else "ids", key


def prompts_of(history: History, judgement: Judgement, baselines: Mapping[str, Lookup]) -> Prompts:
    """Return the rows of all requests of a judged run."""
    found: dict[Place, list[Finding]] = defaultdict(list)
    for finding in judgement.findings:
        found[place_of(finding)].append(finding)
    doubtful = {
        (view.cell, view.scenario)
        for view in judgement.cells
        for result in view.results
        if any(not f.prompt_id for f in result.findings) or (result.verdict is Verdict.UNKNOWN and not result.findings)
    }
    count = 0
    telling: list[PromptRow] = []
    others: list[PromptRow] = []
    by_length: dict[str, dict[int, Heat]] = defaultdict(lambda: defaultdict(Heat))
    by_stratum: dict[str, dict[str, Heat]] = defaultdict(lambda: defaultdict(Heat))
    recorded_places: set[Place] = set()
    for record in history.run.cells:
        for row in _rows(history, record, found, baselines, doubtful):
            count += 1
            if row.place[1] == COLD:
                by_length[record.cell][row.length].add(row)
                by_stratum[record.cell][row.stratum].add(row)
            recorded_places.add(row.place)
            # The rows of a large run do not fit into memory together.
            kept = telling if row.findings else others
            if count <= MOST_ROWS or (row.findings and len(kept) < MOST_ROWS):
                kept.append(row)
    for place in found.keys() - recorded_places:
        for finding in found[place]:
            # A prompt that was not recorded has no row, and is no less missing for it.
            if finding.scenario == COLD and finding.stratum:
                by_stratum[finding.cell][finding.stratum].missing(finding)
    telling.sort(key=lambda r: -(r.verdict or Verdict.PASS).severity)
    rows = (*telling, *(others if count <= MOST_ROWS else ()))
    return Prompts(rows, count - len(rows), _pieces(history, rows), by_length, by_stratum)


def _rows(
    history: History,
    record: CellRecord,
    found: Mapping[Place, Sequence[Finding]],
    baselines: Mapping[str, Lookup],
    doubtful: Container[tuple[str, str]],
) -> Iterator[PromptRow]:
    """Yield the rows of a cell; ``doubtful`` are cells and scenarios that have a finding as a whole, or no evidence."""
    name = CellName.of(record.cell)
    tokens = _recorded(baselines.get(name.plain))
    # A baseline of a large run takes seconds to read.
    in_question = any(_about_drafts(findings) for place, findings in found.items() if place[0] == record.cell)
    drafts = _recorded(baselines.get(name.lineup)) if in_question else {}
    reference, single = _OtherCell(history, name.reference), _OtherCell(history, name.single)
    for o in history.in_order(record.cell):
        if o.scenario == RESCORE:
            continue
        place = (record.cell, o.scenario, o.form, o.key)
        findings = tuple(found.get(place, ()))
        leg = o.final if not o.cut_short else None
        output = leg.output_ids if leg is not None else None
        row = None if o.temperature or o.answered_otherwise else tokens.get(o.prompt_id)
        expected = row.output if row is not None else None
        if expected is None and record.cell != name.reference:
            other = reference.answer(o)
            expected = other.output_ids if other is not None else None
        expected = (expected or ())[: o.most_tokens]
        compared = output is not None and bool(expected)
        parted = parted_at(output or (), expected) if compared else None
        gaps = leg.top_gaps if leg is not None else None
        steps = real_steps(leg) if leg is not None and record.draft_tokens else None
        certain = any(f.verdict is not Verdict.UNKNOWN for f in findings)
        right = None
        if compared and parted is None:
            right = Verdict.UNKNOWN if place[:2] in doubtful else Verdict.PASS
        yield PromptRow(
            place,
            o.prompt_id,
            len(o.sent_ids),
            str(classify(len(o.sent_ids), record.block_size, record.lookahead)),
            worst(f.verdict for f in findings) if findings else right,
            parted,
            compared,
            sum(steps.accepted) / len(steps.accepted) if steps is not None and steps.accepted else None,
            sum(leg.seconds for leg in o.legs),
            gaps[parted] if gaps is not None and parted is not None and parted < len(gaps) else None,
            record.block_size,
            findings,
            o.sent_ids,
            tuple(expected),
            output or (),
            tuple(_side(o, leg) for leg in o.legs) if certain else (),
            o.error or "",
            _strip(o, leg, drafts.get(o.prompt_id), single, parted) if leg and _about_drafts(findings) else None,
        )


class _Recorded(NamedTuple):
    """What a baseline has of one prompt, without what a page does not show."""

    output: tuple[int, ...]
    steps: Steps


def _recorded(lookup: Lookup | None) -> dict[str, _Recorded]:
    # A baseline that changed since the run was judged counts as none, so that a page cannot lose the verdict.
    with contextlib.suppress(DataError):
        baseline = lookup.baseline if lookup is not None else None
        if baseline is not None:
            rows = baseline.by_prompt()
            return {key: _Recorded(row.output_ids, row.steps) for key, row in rows.items()}
    return {}


class _OtherCell:
    """The answers of another cell of the run. Those of a scenario are looked up once, because each access to the
    answers of a large run reads them anew."""

    def __init__(self, history: History, cell: str) -> None:
        self.cell = cell
        self._history = history
        self._by_scenario: dict[str, dict[str, Observation]] = {}

    def answer(self, o: Observation) -> Leg | None:
        """Return the answer to the same request there, or None."""
        if o.scenario not in self._by_scenario:
            self._by_scenario[o.scenario] = self._history.of(self.cell, scenario=o.scenario)
        other = self._by_scenario[o.scenario].get(o.key)
        return other.final if other is not None else None


def _about_drafts(findings: Iterable[Finding]) -> bool:
    return any(isinstance(f.evidence, StepsDifference | DraftsBeside) for f in findings)


def _strip(
    o: Observation, leg: Leg, recorded: _Recorded | None, single: _OtherCell, parted: int | None
) -> StepStrip | None:
    """Return the steps of an answer beside those of its baseline, or else of the single engine of its method.

    The baseline is one of whole answers, without a grammar.
    """
    references: list[tuple[str, Steps]] = []
    if recorded is not None and not (o.drafts_filtered or o.answered_otherwise):
        steps = recorded.steps
        if o.most_tokens is not None and steps.drafted is None:
            steps = steps._replace(accepted=begun_before(steps.accepted, o.most_tokens))
        references.append(("the baseline", steps))
    other = single.answer(o) if single.cell != o.cell else None
    theirs = real_steps(other) if other is not None else None
    if theirs is not None:
        references.append((single.cell, theirs))
    return strip_of(leg, references, parted)


def _side(o: Observation, leg: Leg) -> HandOffSide:
    """Describe what an engine handed over and counted; "0" is a counter that was read and did not change."""
    handed = [(f"handed over: {name}", _short(value)) for name, value in (leg.kv_transfer_params or {}).items()]
    counters, alone = leg.counters, ""
    if not counters and leg.role in o.shared_counters:
        counters, alone = o.shared_counters[leg.role], f" (of {o.concurrent} concurrent requests)"
    counted = [
        (f"counted: {words}{alone}", f"{counters[key]:,.0f}" if key in counters else "0")
        for key, words in _COUNTED.items()
        if counters and (key in counters or key in _ALWAYS[leg.role])
    ]
    name = {"prefill": "P", "decode": "D", "single": "the engine"}[leg.role]
    return HandOffSide(name, (*handed, *(counted or [("counted", "not read for this request")])))


def _short(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST_FACT else text[:_LONGEST_FACT] + " …"


# --- text ------------------------------------------------------------------------------------------------------------


def _pieces(history: History, rows: Sequence[PromptRow]) -> dict[int, str]:
    """Return the text of every token in the rows, if a tokenizer with the recorded hash is on this machine."""
    wanted = {str(i.get("tokenizer_sha256")) for i in history.run.identities.values()}
    named = history.run.asked_for.tokenizer
    folder = Path(named) if history.own and isinstance(named, str) else recorded(named, history.folder / "tokenizer")
    for place in (folder, REPOSITORY / "models" / "probe" / "tokenizer"):
        # Only a file whose hash the record names is read: its path may come from anywhere.
        if place is not None and (place / "tokenizer.json").is_file() and wanted == {tokenizer_hash(place)}:
            return _decoded(place / "tokenizer.json", rows)
    return {}


def _decoded(path: Path, rows: Sequence[PromptRow]) -> dict[int, str]:
    try:
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(path))
    except Exception:
        # Ids say less, but they are all that there is; the library raises nothing narrower.
        return {}
    used = {i for r in rows for i in (*r.prompt, *r.expected, *r.output)}
    size = tokenizer.get_vocab_size()
    return {i: tokenizer.decode([i], skip_special_tokens=False) for i in sorted(used) if 0 <= i < size}


class Stretch(NamedTuple):
    """A stretch of an answer: kept, or removed from the expected tokens, or added by the engine."""

    kind: str
    """``same``, ``del`` or ``ins``."""
    at: int
    """Index of the first token, in the expected tokens unless it was added."""
    ids: tuple[int, ...]


def _edits(expected: Sequence[int], output: Sequence[int]) -> Sequence[tuple[str, int, int, int, int]]:
    """Return the edit that turns the expected tokens into the output, as ``difflib`` gives it for what follows the
    tokens that both begin with: an answer that repeats itself would align with itself further on."""
    n = common_prefix(expected, output)
    rest = difflib.SequenceMatcher(None, expected[n:], output[n:], autojunk=False).get_opcodes()
    return [("equal", 0, n, 0, n)] * (n > 0) + [(kind, i + n, j + n, k + n, m + n) for kind, i, j, k, m in rest]


def changes(expected: Sequence[int], output: Sequence[int]) -> list[Stretch]:
    """Return the edit that turns the expected tokens into the output, as stretches in order."""
    out = []
    for kind, i, j, k, m in _edits(expected, output):
        if kind == "equal":
            out.append(Stretch("same", i, tuple(expected[i:j])))
            continue
        if j > i:
            out.append(Stretch("del", i, tuple(expected[i:j])))
        if m > k:
            out.append(Stretch("ins", k, tuple(output[k:m])))
    return out


# --- data of the page ------------------------------------------------------------------------------------------------


def page_data(prompts: Prompts, tried: Mapping[str, str]) -> dict[str, Any]:
    """Return the rows for the page's script. ``tried`` has the command that repeats a finding, by the finding's id."""
    pool = _Pool()
    rows = [_as_json(row, pool, tried) for row in prompts.rows]
    strips = [(row.strip, values) for row, values in zip(prompts.rows, rows, strict=True) if row.strip is not None]
    for strip, values in strips[:MOST_STRIPS]:
        values["drafts"] = strip
    return {
        "rows": rows,
        "sequences": pool.sequences,
        "pieces": prompts.pieces,
    }


class _Pool:
    """Sequences of tokens, each kept once, until there are too many."""

    def __init__(self) -> None:
        self.sequences: list[tuple[int, ...]] = []
        self._index: dict[tuple[int, ...], int] = {}
        self._tokens = 0

    def __call__(self, ids: tuple[int, ...]) -> int | None:
        if ids not in self._index:
            if self._tokens + len(ids) > MOST_TOKENS:
                return None
            self._tokens += len(ids)
            self._index[ids] = len(self.sequences)
            self.sequences.append(ids)
        return self._index[ids]


def _as_json(row: PromptRow, pool: _Pool, tried: Mapping[str, str]) -> dict[str, Any]:
    cell, scenario, form, key = row.place
    values: dict[str, Any] = {
        "cell": cell,
        "scenario": scenario,
        "form": form,
        "key": key,
        "length": row.length,
        "block": row.block_size,
        "stratum": row.stratum,
        "verdict": row.verdict,
        "tokens": row.parted if row.parted is not None else ("equal" if row.compared else "not compared"),
        "accepted": None if row.accepted is None else round(row.accepted, 3),
        "seconds": round(row.seconds, 3),
        "prompt": pool(row.prompt),
        "expected": pool(row.expected),
        "output": pool(row.output),
    }
    if row.findings:
        values["findings"] = [[f.check, f.verdict, f.message, tried.get(f.id, "")] for f in row.findings]
        values["where"] = next((f.location.text for f in row.findings if f.location is not None), "")
        values["damaged"] = row.damaged
        values["sides"] = row.sides
        values["gap"] = row.gap
        if row.parted is not None:
            values["diff"] = [[i, j, k, m] for _, i, j, k, m in _edits(row.expected, row.output)]
    if row.error:
        values["error"] = row.error[:_LONGEST_FACT]
    return {k: v for k, v in values.items() if v is not None}
