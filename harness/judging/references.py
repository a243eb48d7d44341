"""The references that a recorded run is judged against: baselines, known defects, its second stage or another run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from harness.baselines.build import references_in
from harness.baselines.index import BaselineIndex
from harness.baselines.lookup import Limits, Lookup, look_up, unused
from harness.errors import UsageError
from harness.history.folder import History, load_history, write_run
from harness.history.identity import identity_in
from harness.history.layout import CARRIED_BASELINES, CARRIED_KNOWN, REFERENCES, RUN, SECOND, rounds_below
from harness.history.records import COLD, COUNTED, RESCORE
from harness.judging.evidence import Stages, judging_of
from harness.judging.remedies import without_baseline
from harness.profiles.cells import CellName
from harness.util.files import sha256_bytes, write_atomic
from harness.util.json_io import MIB, read_text
from harness.util.paths import recorded
from harness.util.storage import writing
from harness.util.text import counted


class References(NamedTuple):
    """References that replace those named by the run's profile; None keeps the profile's."""

    baselines: Path | None = None
    known: Path | None = None
    against: Path | None = None
    """Another recorded run whose single cells serve as the reference."""
    of_both: bool = False
    """Whether two runs are judged by it and compared, of which it may be one."""
    record: str | None = None
    """The beginning of the hash that the record must have."""
    expect: str | None = None
    """Profile whose whole plan the run must have recorded; None asks for no more than the run planned itself."""


PROFILE_OWN = References()
_MOST_BYTES = 256 * MIB


def baselines_folder(history: History) -> Path | None:
    """Return the baseline folder of a run; None if the recorded path is one that judging may not read."""
    named = history.run.asked_for.baselines
    return Path(str(named)) if history.own else recorded(named, history.folder / CARRIED_BASELINES)


def out_of_reach(key: str, option: str, history: History) -> str:
    """Return a sentence that says why a path in a recorded run is not read, and what to do."""
    return (
        f"the recorded run names {key} outside of the repository and of the current folder "
        f"({history.run.asked_for.setting(key)}), which judging a recorded run does not read; name them with {option}"
    )


def unused_baselines(history: History, folder: Path | None = None) -> list[str]:
    """Return a sentence for each baseline in the folder that none of the run's methods can be compared with."""
    try:
        identities = [identity_in(history, method) for method in history.run.identities]
    except (ValidationError, KeyError):
        # ``baselines_for`` reports the damage.
        return []
    where = folder or baselines_folder(history)
    return unused(where, identities, judging_of(history).baseline_across) if where is not None else []


def baselines_for(history: History, folder: Path | None = None) -> dict[str, Lookup]:
    """Look up the baselines needed to judge the run: those of its methods, and of plain decoding for tokens. Raises
    UsageError when ``folder`` is none."""
    if folder is not None and not folder.is_dir():
        raise UsageError(f"--baselines {folder}: expected a folder of baselines, found none")
    where = folder or baselines_folder(history)
    out: dict[str, Lookup] = {}
    judging = judging_of(history)
    limits = Limits(judging.baseline_days, judging.baseline_minors, judging.baseline_across)
    index = BaselineIndex(where) if where is not None else None
    for method in history.run.identities:
        if where is None:
            out[method] = Lookup(None, out_of_reach("baselines", "--baselines", history))
            continue
        try:
            identity = identity_in(history, method)
            advice = partial(without_baseline, history, identity.prompts_sha256, CellName.of_lineup(method).variant)
            source = history.run.asked_for.source
            out[method] = look_up(where, identity, source, limits, history.run.started, index, advice)
        except (ValidationError, KeyError) as error:
            out[method] = Lookup(None, f"the run's identity of {method} is damaged: {error}")
    return out


def known_of(history: History) -> Path | None:
    """Return the path of a run's list of known defects; None without one (``unread_list`` says why)."""
    path = _listed(history)
    return path if path is not None and path.exists() else None


def unread_list(history: History) -> str | None:
    """Return a sentence about a list of known defects that the run names and judging does not read, or None."""
    named = history.run.asked_for.setting("known_defects")
    if not named or known_of(history) is not None:
        return None
    if _listed(history) is None:
        return out_of_reach("known_defects", "--known", history)
    return f"there is no list of expected failures {named}, so no finding is expected; name a list with --known"


def _listed(history: History) -> Path | None:
    """Return the recorded path, which need not exist; None if there is none, or judging may not read it."""
    named = history.run.asked_for.setting("known_defects")
    if not named:
        return None
    return Path(str(named)) if history.own else recorded(named, history.folder / CARRIED_KNOWN)


def load_stages(history: History, in_memory: int | None = None) -> Stages:
    """Load what was recorded after a run: its second stage, and the answers that were asked again. What is absent,
    unfinished, or belongs to another run is left out.

    ``in_memory`` is passed to ``load_history``.
    """
    rounds = [_stage(history, folder, in_memory) for folder in rounds_below(history.folder)]
    return Stages(_stage(history, history.folder / SECOND, in_memory), tuple(h for h in rounds if h is not None))


def _stage(history: History, folder: Path, in_memory: int | None) -> History | None:
    if not (folder / RUN).is_file():
        return None
    later = load_history(folder, in_memory)
    ours, theirs = history.run, later.run
    ended = theirs.finished is not None and not theirs.interrupted
    # A stage covers only the variants that failed, so its identities are a subset.
    same = bool(theirs.identities) and all(ours.identities.get(n) == i for n, i in theirs.identities.items())
    return later if same and theirs.mutants == ours.mutants and ended else None


def unused_stages(history: History, stages: Stages) -> list[str]:
    """Return a notice for each stage in the run's folder that is not used."""
    used = {h.folder for h in (stages.second, *stages.again) if h is not None}
    return [
        f"{folder.relative_to(history.folder)} is not used: it is no finished stage of this run with its injected "
        "faults and identities; remove the folder, or run the cells that failed again"
        for folder in (history.folder / SECOND, *rounds_below(history.folder))
        if (folder / RUN).is_file() and folder not in used
    ]


def lookups_for(history: History, references: References) -> dict[str, Lookup]:
    """Return the baselines needed to judge the run, by lineup."""
    if references.against is None:
        return baselines_for(history, references.baselines)
    other = load_history(references.against)
    found = references_in(other, {m: identity_in(history, m) for m in history.run.identities})
    return {**found, **_completed(history, references.against, found)}


def nothing_comparable(history: History, other: History | None, found: Mapping[str, Lookup]) -> str | None:
    """Return why no cell of a run can be compared with another run (``--against``), or None: one can, or there is no
    other run."""
    names = [CellName.of(c.cell) for c in history.run.cells]
    # Tokens of a method are compared with plain decoding, too.
    wanted = [found[m] for m in dict.fromkeys(m for n in names for m in (n.lineup, n.plain)) if m in found]
    if other is None or not wanted or any(lookup.found for lookup in wanted):
        return None
    first, *rest = dict.fromkeys(lookup.reason for lookup in wanted)
    more = f"; and {counted(len(rest), 'more reason')}" if rest else ""
    return f"nothing in {other.folder} can be compared with this run (--against): {first}{more}"


def _completed(history: History, other: Path, found: Mapping[str, Lookup]) -> dict[str, Lookup]:
    """Return lookups with rows of the baselines for prompts that are never sent cold and that the other run's single
    engines were not asked, such as those of scenarios for pairs alone. One notice says which."""
    asked = [o for c in history.run.cells for o in history.in_order(c.cell) if o.scenario != RESCORE]
    warm = {o.prompt_id for o in asked} - {o.prompt_id for o in asked if o.scenario == COLD}
    lacking = {m: warm - k.baseline.by_prompt().keys() for m, k in found.items() if k.baseline is not None}
    if not any(lacking.values()):
        return {}
    out: dict[str, Lookup] = {}
    stored = baselines_for(history)
    for method, prompts in lacking.items():
        mine, base = found[method].baseline, stored[method].baseline
        rows = [r.model_copy(update={"again": None}) for r in base.rows if r.prompt_id in prompts] if base else []
        if mine is not None and rows:
            names = ", ".join(sorted(r.prompt_id for r in rows)[:6])
            what = f"{counted(len(rows), 'prompt')} ({names}) that single engines of {other} were not asked"
            notice = f"{what}: compared with the baseline"
            out[method] = Lookup(mine.model_copy(update={"rows": (*mine.rows, *rows)}), "", () if out else (notice,))
    return out


def carry(history: History, references: References) -> History:
    """Copy the baselines and known defects that a run is judged by into its folder, to be judged alike elsewhere, and
    return the run with their hashes on record. Raises StorageError."""
    lookups = lookups_for(history, references).values() if references.against is None else ()
    baselines = [file for k in lookups if k.path is not None for file in (k.path, k.path.with_suffix(".csv"))]
    known = references.known or known_of(history)
    copies = {history.folder / CARRIED_BASELINES / file.name: file for file in baselines}
    if known is not None:
        copies[history.folder / CARRIED_KNOWN] = known
    hashes = {}
    for target, source in copies.items():
        with writing(target):
            text = read_text(source, _MOST_BYTES)
        write_atomic(target, text)
        hashes[target.relative_to(history.folder).as_posix()] = sha256_bytes(text.encode())
    if any(c.plan == COUNTED or c.emptied_s == {} for c in history.run.cells):
        # A record of an earlier version stays as it is: migrated, it would lack what this one has.
        return history
    run = history.run.model_copy(update={"references": hashes})
    return history.model_copy(update={"run": run, "sha256": write_run(history.folder, run)})


def changed_copies(history: History, references: References) -> str | None:
    """Return why the copies by which a run is judged are not those that it was recorded with, or None."""
    recorded = history.run.references
    folders = [] if references.baselines is not None or references.against is not None else [baselines_folder(history)]
    used = [f for f in folders if f is not None] + ([] if references.known is not None else [known_of(history)])
    if not recorded or not any(p is not None and p.is_relative_to(history.folder / REFERENCES) for p in used):
        return None
    for name, sha256 in recorded.items():
        try:
            found = sha256_bytes(read_text(history.folder / name, _MOST_BYTES).encode())
        except (OSError, ValueError):
            found = "none"
        if found != sha256:
            return (
                f"{name}: the run's own copy was changed or is gone, so its verdict says nothing; restore it, or "
                "name baselines and known defects with --baselines and --known"
            )
    return None


def standing_in(history: History, references: References) -> list[str]:
    """Return notices when a run is judged by copies that it carries, or by what this installation has in the place of
    what the run names."""
    used = {
        ("baselines", "baselines"): baselines_folder(history)
        if references.baselines is None and references.against is None
        else None,
        ("known defects", "known_defects"): known_of(history) if references.known is None else None,
    }
    found: dict[str, list[str]] = {}
    for (name, key), path in used.items():
        if path is None or path == Path(str(history.run.asked_for.setting(key) or key)):
            continue
        ours = path.is_relative_to(history.folder / REFERENCES)
        found.setdefault("the copies stored in the run" if ours else "those of this installation", []).append(name)
    return [f"{' and '.join(n)}: using {what}" for what, n in found.items()]
