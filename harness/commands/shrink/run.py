"""Shrink a finding on real engines, which keep running while only the requests change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness.commands.export.case import Case, Right, cold_script
from harness.commands.repro import Target
from harness.commands.shrink.oracle import Oracle, Reference, Seen, Symptom
from harness.commands.shrink.search import fewest, smallest_length, smallest_number
from harness.commands.shrink.variant import Frame, Variant
from harness.engines.environment import EngineEnvironment, engines_for
from harness.engines.session import EngineGroupSession
from harness.errors import EXIT_PASS, EXIT_REGRESSION, EXIT_UNKNOWN, HandoffError, InfrastructureError, UsageError
from harness.history.folder import HistoryWriter
from harness.history.layout import SHRUNK
from harness.history.records import COLD
from harness.judging.diagnosis.law import rule_of_lengths
from harness.mutants.install import with_mutants
from harness.profiles.cells import Cell, EngineGroup, start_expected_s
from harness.profiles.methods import Method, NoSpeculation
from harness.runner.kv_scrub import Scrubber
from harness.runner.run import new_folder
from harness.util.files import write_json
from harness.util.progress import Reporter
from harness.util.text import counted
from harness.workload.prepare import Prepared

NAMES: dict[Symptom, str] = {
    "input": "the engine sees other prompt tokens",
    "tokens": "wrong tokens",
    "end": "right tokens, which end for another reason",
    "text": "right tokens, another text",
    "acceptance": "right tokens, different accepted drafts",
}
_FRESH = 12
"""Number of prompts with distinct prefixes from which on cycling through them makes scrubbing unnecessary."""
_PERIODS_ABOVE = 1
"""Number of blocks above the smallest failing prompt up to which lengths are swept, so that each residue occurs."""


@dataclass
class Shrunk:
    """The result so far; updated while the engines run."""

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
        """1 when the finding appeared, 0 when it did not, 2 when that could not be determined."""
        if self.symptom is not None:
            return EXIT_REGRESSION
        return EXIT_UNKNOWN if self.problem else EXIT_PASS

    @property
    def sentence(self) -> str:
        spent = f"{counted(self.engines, 'engine start')}, {counted(self.requests, 'request')}, {self.seconds:.0f} s"
        if self.symptom is None:
            why = f"UNKNOWN: {self.problem}" if self.problem else "not reproduced"
            return f"{self.target.words}: {why}; {spent}"
        subject = self.variant.subject
        others = len(self.variant.others)
        method = self.cell.method
        parts = [
            f"{NAMES[self.symptom]} from output token {self.position} on",
            f"prompt of {len(subject.prompt.ids)} tokens (was {len(self.before.subject.prompt.ids)})",
            counted(subject.max_tokens, "output token") if subject.max_tokens else "all output tokens",
            f"{method.kind} with k = {method.draft_tokens}" if method.draft_tokens else "no speculation",
            f"scenario {self.variant.scenario}" + (f" with {others} other requests" if others else ""),
        ]
        cut = f"; stopped early: {self.problem}" if self.problem else ""
        return "; ".join(parts) + f"{cut}; {spent}"

    def case(self, prepared: Prepared) -> Case:
        """Return the smallest case, for export. Raises UsageError when the finding did not appear."""
        if self.symptom is None or self.right is None:
            raise UsageError("--export: no case reproduced the finding, so nothing was written")
        return Case(
            f"{self.target.words}, shrunk: {NAMES[self.symptom]}",
            prepared.profile,
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
    engine_python: str | None,
    reporter: Reporter,
    starts: int,
) -> Shrunk:
    """Make the case of a finding as small as possible; engines are restarted at most ``starts`` times, for fewer draft
    tokens. On KeyboardInterrupt or engine failure, the result so far is returned.

    Raises UsageError for cells behind a router and for findings that name no request.
    """
    (work,) = prepared.works
    if work.cell.routed:
        raise UsageError(f"--shrink: {work.cell.id} is asked through a router; name the cell without one")
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
    write_json(folder / SHRUNK, result.as_json())
    return result


def first_variant(prepared: Prepared, target: Target) -> Variant:
    """Return the case as it was found. Raises UsageError when the target names no request."""
    (work,) = prepared.works
    # Of a crowd, the prompt of the finding comes first: what is smaller asks it alone.
    if len(work.items) > 1 and work.at_once is None:
        raise UsageError("--shrink: the finding is about a whole cell; choose one of its prompts with --prompt")
    script = cold_script(work.items[0].prompt) if work.items else work.scripts[0]
    parts = [s.part for s in script.sends]
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
        changed, mutation = with_mutants(group, self._prepared.profile, mutants, folder / "arming" / label, False)
        self._reporter.step(label, start_expected_s(group), start=True)
        self._result.engines += group.engines
        profile, logs, line = self._prepared.profile, folder / "logs" / label, self._reporter.line
        with EngineGroupSession(changed, profile, self._environment, logs, line, mutation) as session:
            session.switch(*mutants)
            yield session

    def _oracle(self, session: EngineGroupSession, cell: Cell, reference: Reference) -> Oracle:
        scrubber = Scrubber(session, self._prepared.prompts.prompts)
        profile = self._prepared.profile
        near = profile.judging.near_tie_assumed(profile.engine.dtype)
        return Oracle(session, cell, reference, near, scrubber, self._writer.append)

    def _reference(self, session: EngineGroupSession, stack: contextlib.ExitStack) -> Reference:
        """Return the answering engine, asked alone, as the reference if it is correct that way; else a plain one."""
        own = Reference(session)
        variant = self._result.variant
        alone = self._result.cell.topology == "single" and variant.scenario == COLD
        known = variant.subject.prompt.expected
        limit = variant.subject.max_tokens or self._prepared.profile.workload.max_tokens
        by_plain = variant.subject.feature is not None and not (self._result.target.check or "").startswith("accept")
        if not alone and not (by_plain and self._result.cell.method.draft_tokens):
            said = own.answer(variant.subject.prompt.ids, limit).output_ids
            self._result.requests += own.requests
            if known is None or said == known[:limit]:
                return own
        plain = next((m for m in self._prepared.profile.methods if m.kind == "none"), NoSpeculation(kind="none"))
        why = "the parameter says what is right" if by_plain else "the engine is wrong on its own, too"
        self._reporter.line(f"{why}; starting a plain engine as the reference")
        group = EngineGroup("single", plain, (Cell("single", plain),))
        return Reference(stack.enter_context(self._started(group, (), "reference")))

    @contextlib.contextmanager
    def _counted(self, oracle: Oracle) -> Iterator[None]:
        """Add the oracle's requests to the result, even when the block raises."""
        before = oracle.reference.requests
        try:
            yield
        finally:
            self._result.requests += oracle.requests + oracle.reference.requests - before

    # --- phases -----------------------------------------------------------------------------------------------------

    def _seen(self, oracle: Oracle, variant: Variant, scrub: bool = True) -> Seen | None:
        """Return what the oracle saw, or None when the requests failed, which is inconclusive."""
        try:
            return oracle.see(variant, scrub)
        except HandoffError as error:
            self._reporter.line(f"skipped a case whose requests failed: {error}")
            return None

    def _try(self, oracle: Oracle, variant: Variant, what: str) -> bool:
        """Return whether the variant shows the same symptom; if so, keep it as the smallest one."""
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
        write_json(result.folder / SHRUNK, result.as_json())

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
        fails = partial(self._length, oracle, start, ids)
        found = smallest_length(len(ids), min(self._frame.least, len(ids)), self._block, fails)
        if found < len(ids):
            result.variant = start.with_ids(self._frame.cut(ids, found))
            return
        # No truncated prompt shows the symptom, so it may depend on particular tokens.
        inner = self._frame.inner(ids)
        outer = [i for i in range(len(ids)) if i not in inner]

        def part_fails(kept: list[int]) -> bool:
            chosen = sorted([*outer, *kept])
            return self._try(oracle, start.with_ids([ids[i] for i in chosen]), "fewer prompt tokens")

        fewest(list(inner), part_fails)

    def _length(self, oracle: Oracle, start: Variant, ids: tuple[int, ...], tokens: int) -> bool:
        """Return whether the prompt, cut to ``tokens`` tokens, shows the symptom; keep the smallest that does."""
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
        likely = (at + 1, at + 2, at + 5)
        smallest_number(known, 1, likely, lambda n: self._try(oracle, start.asking(n), counted(n, "output token")))

    def _sweep(self, oracle: Oracle) -> None:
        """Try lengths around the smallest failing one, cut from other prompts in turn, with all output tokens."""
        result = self._result
        limit = self._prepared.profile.engine.max_model_len - self._prepared.profile.workload.max_tokens
        smallest = len(result.variant.subject.prompt.ids)
        longest = max(p.tokens for p in self._prepared.prompts.prompts)
        most = min(longest, limit, smallest + _PERIODS_ABOVE * self._block)
        start = result.variant.asking(self._prepared.profile.workload.max_tokens)
        # Up to the smallest failing length, cuts of the prompt itself have been tried.
        result.lengths = {n: f for n, f in result.lengths.items() if n <= smallest}
        for tokens in range(max(self._frame.least, smallest - self._block), most + 1):
            if tokens in result.lengths:
                continue
            self._reporter.step(f"prompt of {tokens} tokens", 1.0)
            ids, fresh = self._other_prompt(tokens)
            seen = self._seen(oracle, start.with_ids(ids), scrub=not fresh)
            if seen is not None:
                result.lengths[tokens] = seen.symptom == result.symptom
        rule = rule_of_lengths(result.lengths, self._block)
        method = result.cell.method
        drafts = f"with k = {method.draft_tokens}: " if method.draft_tokens else ""
        swept = [f for n, f in result.lengths.items() if n > smallest]
        none = "no longer prompt shows it: it hangs on this one's tokens"
        result.law = drafts + (rule.law.text if rule is not None and any(swept) else none)
        write_json(result.folder / SHRUNK, result.as_json())

    def _other_prompt(self, tokens: int) -> tuple[tuple[int, ...], bool]:
        """Return a prompt of ``tokens`` tokens, and whether none of the preceding prompts shares its prefix."""
        long_enough = [p.ids for p in self._prepared.prompts.prompts if p.tokens >= tokens]
        chosen = list({ids[self._frame.head : self._frame.least + 1]: ids for ids in long_enough}.values())
        return self._frame.cut(chosen[tokens % len(chosen)], tokens), len(chosen) >= _FRESH

    def _fewer_drafts(self, group: EngineGroup) -> None:
        """Find the fewest draft tokens that show the symptom, at lengths within a lookahead of the smallest prompt."""
        result = self._result
        if result.symptom is None or result.variant.subject.feature is not None:
            # Of a parameter's answer the engine with fewer drafts is no reference.
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
                result.steps.append({"what": f"k = {method.draft_tokens} is inconclusive: {error}"[:300]})
                self._reporter.line(f"k = {method.draft_tokens} is inconclusive: {error}")

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
    """Return the method with fewer draft tokens, fewest first; without drafts only if acceptance is not the symptom."""
    if isinstance(method, NoSpeculation):
        return []
    plain: list[Method] = [] if symptom == "acceptance" else [NoSpeculation(kind="none")]
    fewer = range(1, method.num_speculative_tokens)
    return [*plain, *(method.model_copy(update={"num_speculative_tokens": k}) for k in fewer)]


def expected_s(prepared: Prepared) -> float:
    """Return the rough wall time in seconds: two engine starts and the requests of a sweep."""
    (group,) = prepared.plan.groups
    return 2 * start_expected_s(group) + 3 * prepared.profile.engine.block_size * 1.6
