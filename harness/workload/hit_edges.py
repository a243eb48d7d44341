"""Lengths of prefix hits at which an engine changes what it does, and those that no prompt of a run has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from harness.history.records import LegRole, unverified_tokens
from harness.history.token_ids import common_prefix
from harness.observed.prefix_cache import OF_P_ALONE
from harness.profiles.cells import Cell
from harness.profiles.engine_args import caches_prefixes
from harness.profiles.kv_layout import modules_in, recurrent, target_config, windows_in
from harness.profiles.model import Profile
from harness.scenarios.base import Send
from harness.workload.cells import CellWork
from harness.workload.edges import around, left_to_d

_ROUTES = {"prefill": ("cell", "prefill", "read-back"), "decode": ("cell", "local"), "single": ("cell", "local")}
"""Where the requests go that an engine computes."""


class HitEdge(NamedTuple):
    """Lengths of prefix hits at which something changes."""

    role: LegRole
    of: Literal["beginning", "prompt", "hit"]
    """Of what ``numbers`` are the length: the cached beginning of a prompt of which more follows, a prompt that is
    cached as a whole, both modulo the block size, or what is taken of either."""
    numbers: frozenset[int]
    block_size: int
    words: str
    """What happens there."""

    @property
    def at(self) -> str:
        numbers = f"{{{', '.join(map(str, sorted(self.numbers)))}}}"
        if self.of == "hit":
            return f"no prefix hit has N tokens with N in {numbers}, where {self.words}"
        what = "a whole prompt of N tokens" if self.of == "prompt" else "the first N tokens of a prompt"
        return f"no prefix hit on {what} has N mod {self.block_size} in {numbers}, where {self.words}"


class _Hit(NamedTuple):
    """What an engine is to find of a prompt."""

    length: int
    """That of the prompt, or of its beginning that the engine's cache may have."""
    whole: bool
    """Whether it has computed all of the prompt before."""
    tokens: int
    """What it takes from its cache."""


class _Known(NamedTuple):
    """What an engine has computed for a request."""

    tokens: Sequence[int]
    again: int
    """How many of them it would find if the prompt were asked again, but for those that it computes again."""


class _CachingEngine(NamedTuple):
    """An engine of a cell, by what its prefix cache depends on."""

    role: LegRole
    block_size: int
    left: int
    """Tokens at the end of a prompt that it leaves to D."""
    unverified: int
    """Tokens at the end of what it has computed that its cache leaves out."""
    dropped: int
    """Tokens of a hit that it computes again."""
    one_state: bool
    """Whether it keeps, of a recurrent state, that alone which a prompt would need that is asked again."""


def hit_edges_of(profile: Profile, cell: Cell) -> Iterator[HitEdge]:
    """Yield the edges of the prefix hits of a cell's engines: where the cached beginning of a prompt is a whole number
    of blocks, a token less or one more; where a hit of a whole prompt leaves a token, a block or a token less, and D
    nothing to fetch; and the last hit at which a window begins in the first block, and the next one."""
    target = target_config(profile)
    left = left_to_d(profile, cell)
    for engine in _engines(profile, cell):
        size = engine.block_size
        beginning = "they are whole blocks, one token less or one more"
        yield HitEdge(engine.role, "beginning", around(0, size), size, beginning)
        leaves = "it leaves one token, a whole block or one token less than that to compute"
        fetched = around(left, size) if engine.role == "decode" and left else frozenset[int]()
        words = f"{leaves}, or D has nothing to fetch" if fetched else leaves
        yield HitEdge(engine.role, "prompt", around(0, size) | fetched, size, words)
        for window in windows_in(target, cell.method, profile.engine.extra_args):
            if window is not None:
                last = (window - 2 + size) // size * size
                words = f"a window of {window} begins in the first block for the last time, and in the second one"
                yield HitEdge(engine.role, "hit", frozenset({last, last + size}), size, words)


def missed_hits(profile: Profile, work: CellWork) -> list[HitEdge]:
    """Return the edges of a cell that none of its prefix hits has, with the numbers that they lack. An engine that
    nothing is to hit has none: that state was not asked for. Routers see none of them."""
    if work.cell.routed:
        return []
    hits = {engine.role: [*_hits(profile, work, engine)] for engine in _engines(profile, work.cell)}
    found = []
    for edge in hit_edges_of(profile, work.cell):
        mine = hits[edge.role]
        lacking = edge.numbers - {_number(edge, hit) for hit in mine}
        if mine and lacking:
            found.append(edge._replace(numbers=frozenset(lacking)))
    return found


def _number(edge: HitEdge, hit: _Hit) -> int | None:
    """Return what an edge counts of a hit; None of one that it is not about."""
    if edge.of == "hit":
        return hit.tokens
    return hit.length % edge.block_size if hit.whole == (edge.of == "prompt") else None


def _engines(profile: Profile, cell: Cell) -> list[_CachingEngine]:
    """Return the engines of a cell that have a prefix cache."""
    method = cell.method
    roles: tuple[LegRole, ...] = ("prefill", "decode") if cell.topology == "pd" else ("single",)
    unverified = unverified_tokens(method.draft_tokens, modules_in(profile, method))
    found = []
    for role in roles:
        settings = profile.engine.of(role)
        if caches_prefixes(settings.extra_args):
            dropped = settings.block_size if method.traits.drops_block else 0
            left = left_to_d(profile, cell) if role == "prefill" else 0
            kept = settings.prefix_cache_retention == settings.block_size
            one_state = recurrent(target_config(profile)) and not kept
            found.append(_CachingEngine(role, settings.block_size, left, unverified, dropped, one_state))
    return found


def _hits(profile: Profile, work: CellWork, engine: _CachingEngine) -> Iterator[_Hit]:
    """Yield what an engine is to find of the prompts of a cell's scenarios, by what it has computed in earlier stages
    of the same script."""
    evicting = {s.id for s in profile.scenarios if s.evicts or s.kind == "given-back"}
    for script in work.scripts:
        if script.scenario in evicting:
            continue
        known: dict[tuple[str, str, bool], list[_Known]] = defaultdict(list)
        for stage in script.stages:
            mine = [s for s in stage.sends if s.route in _ROUTES[engine.role] and not s.mistake and s.abandon is None]
            for send in mine:
                if hit := _hit(engine, send, known[_cache(send)]):
                    yield hit
            for send in mine:
                tokens = _computed(profile, engine, send)
                again = (len(_prompt(engine, send)) - 1) // engine.block_size * engine.block_size
                known[_cache(send)].append(_Known(tokens, again))


def _cache(send: Send) -> tuple[str, str, bool]:
    return send.group, send.adapter, send.unsalted


def _hit(engine: _CachingEngine, send: Send, known: Sequence[_Known]) -> _Hit | None:
    asked, size = _prompt(engine, send), engine.block_size
    limit = (len(asked) - 1) // size * size
    common = [common_prefix(one.tokens, asked) for one in known]
    kept, tokens = 0, 0
    for shared, one in zip(common, known, strict=True):
        of_one = min(shared, len(one.tokens) - engine.unverified)
        found = min(of_one // size * size, limit)
        if engine.one_state:
            found = one.again if one.again <= found else 0
        kept, tokens = max(kept, of_one), max(tokens, found - engine.dropped)
    whole = len(asked) in common
    return _Hit(len(asked) if whole else kept, whole, tokens) if tokens > 0 else None


def _prompt(engine: _CachingEngine, send: Send) -> Sequence[int]:
    """Return what an engine is asked for of a prompt: P all but what it leaves to D, where it hands it over."""
    return send.prompt.ids[: len(send.prompt.ids) - (engine.left if send.route == "cell" else 0)]


def _computed(profile: Profile, engine: _CachingEngine, send: Send) -> Sequence[int]:
    """Return the tokens that an engine computes for a request: of an answer those that are known before."""
    ids = _prompt(engine, send)
    answers = engine.role != "prefill" or send.route in OF_P_ALONE
    if answers and send.feature is None and not send.adapter and not send.appended:
        # The last token of an answer has no KV.
        ids = (*ids, *(send.prompt.expected or ())[: (send.max_tokens or profile.workload.max_tokens) - 1])
    return ids
