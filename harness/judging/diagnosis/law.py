"""Infer the law of lengths: the rule that says which prompt lengths fail."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from typing import NamedTuple

from harness.judging.findings import Law
from harness.prompts.lengths import spills

_MOST_LOOKAHEAD = 8
IFF = "fails if and only if "
"""Begins a law that leaves no other explanation among those that are tried."""


class RuleOfLengths(NamedTuple):
    """A law of lengths, and of how many rules of its kind for as many lengths it was chosen."""

    law: Law
    rules: int = 1


def rule_of_lengths(failed: Mapping[int, bool], block_size: int) -> RuleOfLengths | None:
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
        return RuleOfLengths(Law(text=text, tested=tested, exact=False))
    if not good:
        which = f"{len(bad)} from {bad[0]} to {bad[-1]}" if len(bad) > 1 else f"{bad[0]} alone"
        return RuleOfLengths(Law(text=f"every tested length fails ({which})", tested=tested))
    if bad[0] > good[-1]:
        text = f"{IFF}the prompt has more than {good[-1]} tokens"
        return RuleOfLengths(Law(text=text, tested=tested), 2)
    if bad[-1] < good[0]:
        text = f"{IFF}the prompt has fewer than {good[0]} tokens"
        return RuleOfLengths(Law(text=text, tested=tested), 2)
    residues = tuple(sorted({n % block_size for n in bad}))
    exceptions = [n for n in good if n % block_size in residues]
    if exceptions:
        return _threshold_on_residues(bad, good, residues, block_size, tested)
    spared = [r for r in tested if r not in residues]
    rule = _residue_text(residues, block_size)
    if len(tested) == block_size and len(spared) < len(residues):
        rule = f"not {_residue_text(spared, block_size)}"
    lookaheads = _lookaheads(residues, tested, block_size)
    law = Law(
        text=f"{IFF}{rule}{_spill_text(lookaheads, tested, block_size)}",
        residues=residues,
        modulus=block_size,
        tested=tested,
    )
    return RuleOfLengths(law, _MOST_LOOKAHEAD if lookaheads else comb(len(tested), len(residues)))


def _residue_text(residues: Sequence[int], block_size: int) -> str:
    if len(residues) == 1:
        return f"N mod {block_size} = {residues[0]}"
    return f"N mod {block_size} is one of {{{', '.join(map(str, residues))}}}"


def _lookaheads(residues: Sequence[int], tested: Sequence[int], block_size: int) -> list[int]:
    """Return the lookaheads of which so many slots need an extra block exactly at these residues."""
    return [
        lookahead
        for lookahead in range(1, min(_MOST_LOOKAHEAD, block_size - 1) + 1)
        if {r for r in tested if spills(r or block_size, block_size, lookahead)} == set(residues)
    ]


def _spill_text(lookaheads: Sequence[int], tested: Sequence[int], block_size: int) -> str:
    """Return a clause that says of which lookahead these residues are, if of any, and how many were tested."""
    untested = f"; {len(tested)} of {block_size} residues were tested"
    if not lookaheads:
        return untested
    which = f"{lookaheads[0]}" if len(lookaheads) == 1 else f"{lookaheads[0]} to {lookaheads[-1]}"
    return f", which is where a lookahead of {which} slots takes one more block than the prompt fills{untested}"


def _threshold_on_residues(
    bad: Sequence[int], good: Sequence[int], residues: tuple[int, ...], block_size: int, tested: tuple[int, ...]
) -> RuleOfLengths:
    """Return the law when residues explain failures only above some length, or not at all.

    A rule with a residue and a bound of its own for each failing length says no more than their list.
    """
    last_good = max(n for n in good if n % block_size in residues)
    if all(n > last_good for n in bad) and len(bad) > len(residues):
        text = f"{IFF}{_residue_text(residues, block_size)} and N is more than {last_good}"
        law = Law(text=text, residues=residues, modulus=block_size, tested=tested)
        return RuleOfLengths(law, (len(bad) + len(good)) * comb(len(tested), len(residues)))
    return RuleOfLengths(
        Law(
            text=f"no rule on the length explains it: {len(bad)} of {len(bad) + len(good)} tested lengths fail "
            f"({', '.join(map(str, bad[:8]))}{' …' if len(bad) > 8 else ''})",
            tested=tested,
            exact=False,
        )
    )
