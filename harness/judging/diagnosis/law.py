"""Infer the law of lengths: the rule that says which prompt lengths fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.judging.findings import Law
from harness.prompts.lengths import spills

_MOST_LOOKAHEAD = 8


def law_of_lengths(failed: Mapping[int, bool], block_size: int) -> Law | None:
    """Return the simplest rule on prompt lengths that explains the failures; None if nothing failed.

    ``failed`` maps each tested length to whether it failed. Rules are tried in this order: all lengths; lengths above
    or below a threshold; residues modulo the block size. A law with exceptions says so.
    """
    bad = sorted(n for n, f in failed.items() if f)
    good = sorted(n for n, f in failed.items() if not f)
    if not bad:
        return None
    tested = tuple(sorted({n % block_size for n in failed}))
    if len(bad) == 1 and good:
        text = f"only the length {bad[0]} fails of {len(bad) + len(good)} tested: no law can be told from one"
        return Law(text=text, tested=tested, exact=False)
    if not good:
        which = f"{len(bad)} from {bad[0]} to {bad[-1]}" if len(bad) > 1 else f"{bad[0]} alone"
        return Law(text=f"every tested length fails ({which})", tested=tested)
    if bad[0] > good[-1]:
        return Law(text=f"fails if and only if the prompt has more than {good[-1]} tokens", tested=tested)
    if bad[-1] < good[0]:
        return Law(text=f"fails if and only if the prompt has fewer than {good[0]} tokens", tested=tested)
    residues = tuple(sorted({n % block_size for n in bad}))
    exceptions = [n for n in good if n % block_size in residues]
    if exceptions:
        return _threshold_on_residues(bad, good, residues, block_size, tested)
    spared = [r for r in tested if r not in residues]
    rule = _residue_text(residues, block_size)
    if len(tested) == block_size and len(spared) < len(residues):
        rule = f"not {_residue_text(spared, block_size)}"
    return Law(
        text=f"fails if and only if {rule}{_spill_text(residues, tested, block_size)}",
        residues=residues,
        modulus=block_size,
        tested=tested,
    )


def _residue_text(residues: Sequence[int], block_size: int) -> str:
    if len(residues) == 1:
        return f"N mod {block_size} = {residues[0]}"
    return f"N mod {block_size} is one of {{{', '.join(map(str, residues))}}}"


def _spill_text(residues: Sequence[int], tested: Sequence[int], block_size: int) -> str:
    """Return a clause that says whether a lookahead of L slots needs an extra block exactly at these residues."""
    fits = [
        lookahead
        for lookahead in range(1, min(_MOST_LOOKAHEAD, block_size - 1) + 1)
        if {r for r in tested if spills(r or block_size, block_size, lookahead)} == set(residues)
    ]
    untested = f"; {len(tested)} of {block_size} residues were tested"
    if not fits:
        return untested
    which = f"{fits[0]}" if len(fits) == 1 else f"{fits[0]} to {fits[-1]}"
    return f", which is where a lookahead of {which} slots takes one more block than the prompt fills{untested}"


def _threshold_on_residues(
    bad: Sequence[int], good: Sequence[int], residues: tuple[int, ...], block_size: int, tested: tuple[int, ...]
) -> Law:
    """Return the law when residues explain failures only above some length, or not at all.

    A rule with a residue and a bound of its own for each failing length says no more than their list.
    """
    last_good = max(n for n in good if n % block_size in residues)
    if all(n > last_good for n in bad) and len(bad) > len(residues):
        text = f"fails if and only if {_residue_text(residues, block_size)} and N is more than {last_good}"
        return Law(text=text, residues=residues, modulus=block_size, tested=tested)
    return Law(
        text=f"no rule on the length explains it: {len(bad)} of {len(bad) + len(good)} tested lengths fail "
        f"({', '.join(map(str, bad[:8]))}{' …' if len(bad) > 8 else ''})",
        tested=tested,
        exact=False,
    )
