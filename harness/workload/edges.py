"""Prompt lengths at which a cell's layers and its hand-off change what they do, and those that nothing hands over."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from harness.history.records import held_back
from harness.profiles.cells import Cell
from harness.profiles.kv_layout import modules_in, recurrent, target_config, windows_in
from harness.profiles.model import Profile
from harness.scenarios.base import Script
from harness.workload.cells import CellWork


class Edge(NamedTuple):
    """Lengths of a prompt, by what is left of it past its whole blocks."""

    residues: frozenset[int]
    more_than: int
    """Prompts of no more tokens do not count."""
    words: str
    """What happens there."""


def edges_of(profile: Profile, cell: Cell) -> Iterator[Edge]:
    """Yield the edges of a cell with a hand-off: where P publishes a block more than the prompt fills, where what it
    hands over is a whole number of blocks, a token less and a token more, and the same where a window begins.

    P drops a block of a window as if it had computed the last token (``freed_blocks``).
    """
    if cell.topology != "pd":
        return
    size, target, left = profile.engine.block_size, target_config(profile), left_to_d(profile, cell)
    handed = "what P hands over is a whole number of blocks, one token less or one more"
    yield Edge(around(left, size), max(left, 1), handed + (f" (it leaves {left} to D)" if left else ""))
    if lookahead := cell.method.lookahead:
        spilling = {0, *range(size - lookahead + 1, size)}
        yield Edge(frozenset(spilling), 1, f"{lookahead} slots for drafts take another block")
    for window in windows_in(target, cell.method, profile.engine.extra_args):
        if window is not None:
            words = f"a window of {window} begins with a block, one token before or one behind"
            yield Edge(around(window - 1, size), window, words)


def left_to_d(profile: Profile, cell: Cell) -> int:
    """Return how many tokens at the end of a prompt P leaves to D."""
    return held_back(recurrent(target_config(profile)), cell.method.draft_tokens, modules_in(profile, cell.method))


def around(tokens: int, block_size: int) -> frozenset[int]:
    """Return what so many tokens are past whole blocks, with a token less and one more."""
    return frozenset((tokens + past) % block_size for past in (-1, 0, 1))


def missed(profile: Profile, work: CellWork) -> list[Edge]:
    """Return the edges of a cell at which it hands over no prompt that nothing is cached of, with the residues that it
    lacks."""
    size = profile.engine.block_size
    lengths = {*(item.prompt.tokens for item in work.items), *_handed_over(work.scripts)}
    found = []
    for edge in edges_of(profile, work.cell):
        lacking = edge.residues - {n % size for n in lengths if n > edge.more_than}
        if lacking:
            found.append(edge._replace(residues=frozenset(lacking)))
    return found


def _handed_over(scripts: Iterable[Script]) -> Iterator[int]:
    """Yield the lengths of the prompts that are answered through the cell before anything else shares their cache."""
    for script in scripts:
        known: set[str] = set()
        for send in script.sends:
            if send.route == "cell" and send.abandon is None and not send.mistake and send.group not in known:
                yield send.prompt.tokens
            known.add(send.group)
