"""Shrinking a finding on real engines: engines are kept while only the requests change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.config import Method, NoSpeculation
from harness.engine.environment import EngineEnvironment
from harness.engine.topology import EngineGroupSession
from harness.errors import EXIT_PASS, EXIT_REGRESSION, EXIT_UNKNOWN, HandoffError, InfrastructureError, UsageError
from harness.export.case import Case, Right, cold_stage
from harness.files import write_json
from harness.history import COLD, HistoryWriter
from harness.locate.law import law_of_lengths
from harness.matrix import Cell, EngineGroup, start_expected_s
from harness.operations import Prepared, engines_for, new_folder
from harness.progress import Reporter
from harness.repro import Target
from harness.runner import armed
from harness.scrub import Scrubber
from harness.shrink.oracle import Oracle, Reference, Seen, Symptom
from harness.shrink.search import fewest, smallest_length, smallest_number
from harness.shrink.variant import Frame, Variant

NAMES: dict[Symptom, str] = {
    "input": "the engine sees other prompt tokens",
    "tokens": "wrong tokens",
    "acceptance": "right tokens, other accepted drafts",
}
_FRESH = 12
"""Prompts that begin otherwise, from which on taking them in turn needs no scrubbing."""
_PERIODS_ABOVE = 1
"""Blocks above the smallest failing prompt up to which lengths are swept: each residue at least once, most twice."""


@dataclass
class Shrunk:
    """What was found so far. Grows while the engines run."""

    target: Target
    folder: Path
    before: Variant
    variant: Variant
    cell: Cell
    mutants: tuple[str, ...] = ()
    symptom: Symptom | None = None
    position: int | None = None
    right: Right | None = None
    observed: tuple[int, ...] = ()
    lengths: dict[int, bool] = field(default_factory=dict)
    law: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)
    engines: int = 0
    requests: int = 0
    seconds: float = 0.0
    problem: str = ""

    @property
    def exit_code(self) -> int:
        """1 when the finding showed, 0 when it did not, 2 when that could not be told."""
        if self.symptom is not None:
            return EXIT_REGRESSION
        return EXIT_UNKNOWN if self.problem else EXIT_PASS

    @property
    def sentence(self) -> str:
        spent = f"{self.engines} engine starts, {self.requests} requests, {self.seconds:.0f} s"
        if self.symptom is None:
            why = f"UNKNOWN: {self.problem}" if self.problem else "not shown again"
            return f"{self.target.words}: {why}; {spent}"
        subject = self.variant.subject
        others = len(self.variant.others)
        method = self.cell.method
        parts = [
            f"{NAMES[self.symptom]} from output token {self.position} on",
            f"prompt of {len(subject.prompt.ids)} tokens (was {len(self.before.subject.prompt.ids)})",
            f"{subject.max_tokens or 'all'} output tokens",
            f"{method.kind} with k = {method.draft_tokens}" if method.draft_tokens else "no speculation",
            f"scenario {self.variant.scenario}" + (f" with {others} other requests" if others else ""),
        ]
        cut = f"; stopped early: {self.problem}" if self.problem else ""
        return "; ".join(parts) + f"{cut}; {spent}"

    def case(self, prepared: Prepared) -> Case:
        """The smallest case, to be exported. Raises UsageError when nothing showed."""
        if self.symptom is None or self.right is None:
            raise UsageError("--export: expected a case that shows the finding, found none: nothing was written")
        profile = prepared.profile
        title = f"{self.target.words}, shrunk: {NAMES[self.symptom]}"
        return Case(
            title,
            profile,
            self.cell,
            self.variant.scenario,
            self.variant.stages,
            {self.variant.part: self.right},
            mutants=self.mutants,
        )

    def as_json(self) -> dict[str, Any]:
        subject = self.variant.subject
        return {
            "target": self.target.words,
            "symptom": self.symptom,
            "position": self.position,
            "cell": self.cell.id,
            "draft_tokens": self.cell.method.draft_tokens,
            "scenario": self.variant.scenario,
            "requests_of_case": self.variant.requests,
            "prompt": list(subject.prompt.ids),
            "max_tokens": subject.max_tokens,
            "expected": list(self.right.tokens) if self.right is not None else [],
            "observed": list(self.observed),
            "law": self.law,
            "lengths": {str(n): f for n, f in sorted(self.lengths.items())},
            "steps": self.steps,
            "engine_starts": self.engines,
            "requests": self.requests,
            "seconds": round(self.seconds, 1),
            "problem": self.problem,
        }


def shrink(
    prepared: Prepared,
    target: Target,
    mutants: tuple[str, ...],
    out: Path,
    engine_python: str,
    reporter: Reporter,
    starts: int,
) -> Shrunk:
    """Make the case of a finding as small as it gets; engines are started again at most ``starts`` times, for fewer
    draft tokens. KeyboardInterrupt and broken engines keep what was found.

    Raises UsageError for cells behind a router and for what no request shows.
    """
    (work,) = prepared.works
    if work.cell.routed:
        raise UsageError(f"--shrink: expected a cell whose engines are asked directly, found {work.cell.id}")
    environment = engines_for(prepared.profile, prepared.plan, engine_python)
    folder = new_folder(out, prepared.profile, "shrink")
    before = first_variant(prepared, target)
    result = Shrunk(target, folder, before, before, work.cell, mutants)
    begun = time.monotonic()
    try:
        with HistoryWriter(folder) as writer:
            _Shrinker(prepared, mutants, environment, reporter, result, writer, starts).run()
    except KeyboardInterrupt:
        result.problem = "interrupted"
    except InfrastructureError as error:
        result.problem = str(error)
    result.seconds = time.monotonic() - begun
    write_json(folder / "shrink.json", result.as_json())
    return result


def first_variant(prepared: Prepared, target: Target) -> Variant:
    """The case as it was found. Raises UsageError when the target names no request."""
    (work,) = prepared.works
    if work.items:
        item = work.items[0]
        if len(work.items) > 1:
            raise UsageError("--shrink: expected one prompt, found a finding about a whole cell; name one (--prompt)")

        return Variant(COLD, (cold_stage(item.prompt),), "subject")
    script = work.scripts[0]
    parts = [s.part for stage in script.stages for s in stage.sends if s.judged]
    named = (target.key or "").rpartition(".")[2]
    wanted = named if named in parts else "subject" if "subject" in parts else parts[-1]
    return Variant(script.scenario, script.stages, wanted)


class _Shrinker:
    """The phases, in order: scenario, other requests, prompt, output, law of lengths, draft tokens."""

    def __init__(
        self,
        prepared: Prepared,
        mutants: tuple[str, ...],
        environment: EngineEnvironment,
        reporter: Reporter,
        result: Shrunk,
        writer: HistoryWriter,
        starts: int,
    ) -> None:
        self._starts = starts
        self._prepared = prepared
        self._mutants = mutants
        self._environment = environment
        self._reporter = reporter
        self._result = result
        self._writer = writer
        self._block = prepared.profile.engine.block_size
        self._frame = Frame.of(prepared.prompts.prompts)

    def run(self) -> None:
        (group,) = self._prepared.plan.groups
        with contextlib.ExitStack() as stack:
            session = stack.enter_context(self._started(group, self._mutants))
            oracle = self._oracle(session, self._result.cell, self._reference(session, stack))
            with self._counted(oracle):
                first = self._seen(oracle, self._result.variant)
                if first is None or first.symptom is None:
                    return
                self._take(self._result.variant, first, "as found")
                self._smaller_requests(oracle)
                self._sweep(oracle)
        self._fewer_drafts(group)

    @contextlib.contextmanager
    def _started(self, group: EngineGroup, mutants: tuple[str, ...], name: str = "") -> Iterator[EngineGroupSession]:
        folder = self._result.folder
        label = name or group.id
        changed, arming = armed(group, self._prepared.profile, mutants, folder / "arming" / label, False)
        self._reporter.step(label, start_expected_s(group))
        self._result.engines += group.engines
        profile, logs, line = self._prepared.profile, folder / "logs" / label, self._reporter.line
        with EngineGroupSession(changed, profile, self._environment, logs, None, line, arming) as session:
            session.switch(*mutants)
            yield session

    def _oracle(self, session: EngineGroupSession, cell: Cell, reference: Reference) -> Oracle:
        scrubber = Scrubber(session, self._prepared.prompts.prompts)
        near = self._prepared.profile.judging.near_tie_nats
        return Oracle(session, cell, reference, near, scrubber, self._writer.append)

    def _reference(self, session: EngineGroupSession, stack: contextlib.ExitStack) -> Reference:
        """The answering engine itself, asked alone, where it is right that way; else a plain single engine."""
        own = Reference(session)
        variant = self._result.variant
        alone = self._result.cell.topology == "single" and variant.scenario == COLD
        known = variant.subject.prompt.expected
        limit = variant.subject.max_tokens or self._prepared.profile.workload.max_tokens
        if not alone:
            said = own.answer(variant.subject.prompt.ids, limit).output_ids
            self._result.requests += own.requests
            if known is None or said == known[:limit]:
                return own
        plain = next((m for m in self._prepared.profile.methods if m.kind == "none"), NoSpeculation(kind="none"))
        self._reporter.line("the engine is wrong alone too: a plain one is started as the reference")
        group = EngineGroup("single", plain, (Cell("single", plain),))
        return Reference(stack.enter_context(self._started(group, (), "reference")))

    @contextlib.contextmanager
    def _counted(self, oracle: Oracle) -> Iterator[None]:
        """Adds what the oracle asked to the result, also when it is left by an exception."""
        before = oracle.reference.requests
        try:
            yield
        finally:
            self._result.requests += oracle.requests + oracle.reference.requests - before

    # --- phases -----------------------------------------------------------------------------------------------------

    def _seen(self, oracle: Oracle, variant: Variant, scrub: bool = True) -> Seen | None:
        """None when the requests broke: such a case says nothing."""
        try:
            return oracle.see(variant, scrub)
        except HandoffError as error:
            self._reporter.line(f"a case broke and is left out: {error}")
            return None

    def _try(self, oracle: Oracle, variant: Variant, what: str) -> bool:
        """Whether the variant shows the same symptom; then it is the smallest one."""
        seen = self._seen(oracle, variant)
        same = seen is not None and seen.symptom == self._result.symptom
        if same and seen is not None:
            self._take(variant, seen, what)
        return same

    def _take(self, variant: Variant, seen: Seen, what: str) -> None:
        result = self._result
        result.variant, result.symptom, result.position = variant, seen.symptom, seen.position
        accepted = None
        if seen.symptom == "acceptance" and seen.right.speculation is not None:
            accepted = seen.right.speculation.per_step_accepted
        result.right = Right(seen.right.output_ids or (), accepted)
        result.observed = seen.leg.output_ids or ()
        tokens = len(variant.subject.prompt.ids)
        result.steps.append({"what": what, "prompt_tokens": tokens, "requests": variant.requests})
        self._reporter.line(f"{what}: {NAMES[seen.symptom] if seen.symptom else ''}, prompt of {tokens} tokens")
        write_json(result.folder / "shrink.json", result.as_json())

    def _smaller_requests(self, oracle: Oracle) -> None:
        result = self._result
        if result.variant.scenario != COLD:
            plain = self._try(oracle, result.variant.alone(), "as a cold prompt")
            if not plain and result.variant.others:
                start = result.variant
                fewest(start.others, lambda kept: self._try(oracle, start.only(kept), f"{len(kept)} other requests"))
        self._shorter_prompt(oracle)
        self._shorter_output(oracle)

    def _shorter_prompt(self, oracle: Oracle) -> None:
        result = self._result
        start = result.variant
        ids = start.subject.prompt.ids

        def fails(tokens: int) -> bool:
            return self._length(oracle, start, ids, tokens)

        found = smallest_length(len(ids), min(self._frame.least, len(ids)), self._block, fails)
        if found < len(ids):
            result.variant = start.with_ids(self._frame.cut(ids, found))
            return
        # No prompt cut short shows it: it may hang on some of the tokens.
        inner = self._frame.inner(ids)
        outer = [i for i in range(len(ids)) if i not in inner]

        def part_fails(kept: list[int]) -> bool:
            chosen = sorted([*outer, *kept])
            return self._try(oracle, start.with_ids([ids[i] for i in chosen]), "fewer prompt tokens")

        fewest(list(inner), part_fails)

    def _length(self, oracle: Oracle, start: Variant, ids: tuple[int, ...], tokens: int) -> bool:
        """Whether the prompt, cut to so many tokens, shows it; the smallest one that does is kept."""
        lengths = self._result.lengths
        if tokens not in lengths:
            variant = start.with_ids(self._frame.cut(ids, tokens))
            seen = self._seen(oracle, variant)
            if seen is None:
                return False
            lengths[tokens] = seen.symptom == self._result.symptom
            if lengths[tokens] and tokens < len(self._result.variant.subject.prompt.ids):
                self._take(variant, seen, "shorter prompt")
        return lengths[tokens]

    def _shorter_output(self, oracle: Oracle) -> None:
        result = self._result
        start = result.variant
        known = start.subject.max_tokens or len(result.right.tokens if result.right is not None else ()) or 1
        at = result.position or 0

        def fails(tokens: int) -> bool:
            return self._try(oracle, start.asking(tokens), f"{tokens} output tokens")

        smallest_number(known, 1, (at + 1, at + 2, at + 5), fails)

    def _sweep(self, oracle: Oracle) -> None:
        """Lengths around the smallest failing one, cut from other prompts in turn, with all output tokens."""
        result = self._result
        limit = self._prepared.profile.engine.max_model_len - self._prepared.profile.workload.max_tokens
        smallest = len(result.variant.subject.prompt.ids)
        longest = max(p.tokens for p in self._prepared.prompts.prompts)
        most = min(longest, limit, smallest + _PERIODS_ABOVE * self._block)
        start = result.variant.asking(self._prepared.profile.workload.max_tokens)
        # Below the smallest failing length, cuts of the prompt itself have been tried.
        result.lengths = {n: f for n, f in result.lengths.items() if n <= smallest}
        for tokens in range(max(self._frame.least, smallest - self._block), most + 1):
            if tokens in result.lengths:
                continue
            self._reporter.step(f"prompt of {tokens} tokens", 1.0)
            ids, fresh = self._other_prompt(tokens)
            seen = self._seen(oracle, start.with_ids(ids), scrub=not fresh)
            if seen is not None:
                result.lengths[tokens] = seen.symptom == result.symptom
        law = law_of_lengths(result.lengths, self._block)
        method = result.cell.method
        drafts = f"with k = {method.draft_tokens}: " if method.draft_tokens else ""
        swept = [f for n, f in result.lengths.items() if n > smallest]
        said = (
            law.text if law is not None and any(swept) else "no longer prompt shows it: it hangs on this one's tokens"
        )
        result.law = drafts + said
        write_json(result.folder / "shrink.json", result.as_json())

    def _other_prompt(self, tokens: int) -> tuple[tuple[int, ...], bool]:
        """A prompt of so many tokens, and whether none of the last ones began like it."""
        long_enough = [p.ids for p in self._prepared.prompts.prompts if p.tokens >= tokens]
        starts = {ids[self._frame.head : self._frame.least + 1]: ids for ids in long_enough}
        chosen = list(starts.values())
        return self._frame.cut(chosen[tokens % len(chosen)], tokens), len(chosen) >= _FRESH

    def _fewer_drafts(self, group: EngineGroup) -> None:
        """The fewest draft tokens with which it shows, at the smallest prompt or one up to a lookahead away from it."""
        result = self._result
        if result.symptom is None:
            return
        for method in _smaller(result.cell.method, result.symptom)[: self._starts]:
            cell = result.cell._replace(method=method)
            fewer = group._replace(method=method, cells=(cell,))
            try:
                with self._started(fewer, self._mutants, f"k{method.draft_tokens}") as session:
                    oracle = self._oracle(session, cell, Reference(session))
                    with self._counted(oracle):
                        if self._shows_nearby(oracle, cell):
                            return
            except InfrastructureError as error:
                result.steps.append({"what": f"k = {method.draft_tokens} cannot be told: {error}"[:300]})
                self._reporter.line(f"k = {method.draft_tokens} cannot be told: {error}")

    def _shows_nearby(self, oracle: Oracle, cell: Cell) -> bool:
        result = self._result
        smallest = len(result.variant.subject.prompt.ids)
        near = result.cell.method.lookahead + 1
        start = result.variant
        variants = [(start, True)]
        for tokens in range(max(self._frame.least, smallest - near), smallest + near + 1):
            ids, fresh = self._other_prompt(tokens)
            variants.append((start.with_ids(ids), not fresh))
        for variant, scrub in variants:
            seen = self._seen(oracle, variant, scrub)
            if seen is not None and seen.symptom == result.symptom:
                result.cell = cell
                self._take(variant, seen, f"k = {cell.method.draft_tokens}")
                return True
        result.steps.append({"what": f"k = {cell.method.draft_tokens} does not show it", "requests": len(variants)})
        return False


def _smaller(method: Method, symptom: Symptom | None) -> list[Method]:
    """The method with fewer draft tokens, fewest first; none at all only where drafts are not what is wrong."""
    if isinstance(method, NoSpeculation):
        return []
    plain: list[Method] = [] if symptom == "acceptance" else [NoSpeculation(kind="none")]
    fewer = range(1, method.num_speculative_tokens)
    return [*plain, *(method.model_copy(update={"num_speculative_tokens": k}) for k in fewer)]


def expected_s(prepared: Prepared) -> float:
    """Rough wall time in seconds: one start, a sweep of two blocks, and one more start with fewer drafts."""
    (group,) = prepared.plan.groups
    return 2 * start_expected_s(group) + 3 * prepared.profile.engine.block_size * 1.6
