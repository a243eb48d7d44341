"""The typed figures that findings and check results carry besides their message: one model per kind.

Each model has its own set of required fields, so that a recorded object is read back as the model that wrote it.
"""

from __future__ import annotations

from typing import Any

from harness.util.strict import Strict

StepRows = tuple[tuple[str, int, float], ...]
"""Per step since the hand-off: the step index, the number of requests that reach it, and their mean accepted drafts."""


class NoEvidence(Strict):
    """No figures besides the message."""


NO_EVIDENCE = NoEvidence()


# --- check results ----------------------------------------------------------------------------------------------------


class RatesFigures(Strict):
    """Acceptance pooled over requests."""

    requests: int
    steps: int
    accepted_at: tuple[int, ...]
    rates: tuple[float, ...]
    acceptance_length_pooled: float | None
    acceptance_length_per_prompt: float | None


class DraftFigures(RatesFigures):
    """Acceptance of one cell, without a comparison."""

    padded_first_steps: int
    by_step: StepRows


class AcceptanceFigures(Strict):
    """Acceptance of a cell and of its reference, compared request by request (bitwise tier)."""

    ours: RatesFigures
    reference: RatesFigures
    against: str


class TransferFigures(Strict):
    """Totals moved by all hand-offs of a cell."""

    bytes: int
    descriptors: int
    external_tokens: int


class PositionRates(Strict):
    """Rates by draft position, or by another pooled column of a test; None where undefined."""

    rates: tuple[float | None, ...]


class ConditionalRates(Strict):
    """P(draft p accepted | draft p - 1 accepted), for the reference and for the cell."""

    reference: tuple[float | None, ...]
    found: tuple[float | None, ...]


class ColumnFigures(Strict):
    """One column of a registered test. Rates are fractions; effect and interval are in percentage points."""

    column: str
    reference: float | None
    found: float | None
    effect_points: float | None
    interval_points: tuple[float | None, float | None]
    prompts: int
    p_adjusted: float


class HypothesisFigures(Strict):
    """The result of a registered test (normal tier)."""

    reference: PositionRates
    conditional: ConditionalRates
    p: float | None
    p_adjusted: float | None
    alpha: float
    prompts: int
    texts: int | None = None
    """Texts that the prompts were made of, which are the units; None in records of earlier versions."""
    detectable_points: float | None
    """Smallest change over all prompts that the test can detect, in percentage points."""
    detectable_prompts: int | None = None
    """Fewest prompts, of different texts, whose damage it can detect with everything else equal."""
    detectable_stratum_points: float | None
    """The same for the least sensitive stratum."""
    columns: tuple[ColumnFigures, ...]


CheckFigures = DraftFigures | AcceptanceFigures | TransferFigures | HypothesisFigures | NoEvidence


# --- findings ---------------------------------------------------------------------------------------------------------


class IncompleteCell(Strict):
    """The reason why a cell is incomplete."""

    reason: str


class FailedRequest(Strict):
    """What came of an engine in place of an answer."""

    role: str
    status: int | None
    exit_code: int | None
    """Of an engine that ended, negative for a signal."""
    words: str
    answered_by: str = ""
    """The cell of this run that answered the same request."""


class EchoDifference(Strict):
    """Prompt ids as sent and as an engine saw them, from the start to shortly after the first difference."""

    role: str
    position: int
    sent: tuple[int, ...]
    seen: tuple[int, ...]


class OfEngine(Strict):
    """The engine whose response contradicts itself."""

    role: str


class StopToken(OfEngine):
    """A response that continued after its stop token."""

    token: int


class TextDifference(Strict):
    """Outputs of a prompt sent as text and as ids, from the first difference on."""

    position: int
    as_text: tuple[int, ...]
    as_ids: tuple[int, ...]


class TokenDifference(Strict):
    """Output tokens around the first difference from the reference; both windows begin at ``window_start``."""

    position: int
    reference_gap_nats: float | None
    window_start: int
    found: tuple[int, ...]
    expected: tuple[int, ...]
    differing_tokens: int
    output_tokens: int


class LogprobDifference(Strict):
    """Log-probs, or distances of the two best tokens, that moved while the tokens are right."""

    logprob_position: int | None
    """First output token that moved; None if only the smallest distance over the output is known."""
    found_nats: float
    expected_nats: float
    bound_nats: float
    moved_tokens: int
    compared_tokens: int
    most: tuple[tuple[int, float], ...]
    """The output tokens that moved most, with the absolute difference in nats."""


class RepeatDifference(Strict):
    """Output tokens of a repeated request from its first difference on."""

    position: int
    found: tuple[int, ...]
    expected: tuple[int, ...]


class TotalsDifference(Strict):
    """Acceptance totals of a request: the number of steps, then how many accepted the draft at each position."""

    found_totals: tuple[int, ...]
    expected_totals: tuple[int, ...]


class StepsDifference(Strict):
    """Accepted drafts per verify step from the first difference on; means and rates cover the whole request."""

    step: int
    positions: tuple[int, ...]
    common_steps: int
    found: tuple[int, ...]
    expected: tuple[int, ...]
    found_mean: float
    expected_mean: float
    found_rates: tuple[float, ...]
    expected_rates: tuple[float, ...]
    padded_first_step: bool
    last_alone: bool = False
    """Whether only the last of several steps differs, of an answer after a hand-off that ended with an end token."""
    raw: tuple[int, ...]
    """The counts as the engine reported them, including a padded first step."""


class MeanDifference(Strict):
    """Mean accepted drafts per step over the rounds of a soak, and in its reference."""

    found: float
    expected: float
    rounds: int


class WrongWhenRescored(Strict):
    """Output tokens that the plain engine would not have produced; the first is at ``position``."""

    position: int
    gap_nats: float
    wrong_tokens: int
    scored_tokens: int
    rank: int | None = None
    """Place of the first one among all tokens by what the plain engine thinks; None where the record does not tell."""
    best_token: int | None = None
    """Which token it prefers there."""


class TraceMoved(Strict):
    """Log-probs of an answer that moved further than rounding moves them, over the window where they did most."""

    position: int
    """First output token of the window."""
    tokens: int
    mean_nats: float
    limit_nats: float
    usual_nats: float
    """By how much rounding moves a token of this text."""
    not_best: int | None = None
    """Tokens of the window that are not the plain engine's best; None where the record does not tell."""


class DraftsBeside(Strict):
    """Steps of a request that accepted their first draft, beside those of another answer to the same prompt."""

    accepted: int
    steps: int
    expected_accepted: int
    expected_steps: int
    p: float


class KVPlace(Strict):
    """16 tokens of one layer whose KV is another one."""

    layer: str
    kind: str
    """``keys``, ``values`` or ``latent``."""
    heads: tuple[int, ...]
    first_token: int
    zeros: bool
    found_at: int | None
    """First of the 16 tokens whose KV stands there instead; None where it is no other tokens' of this prompt."""


class KVState(Strict):
    """A recurrent state of one layer that is another one."""

    layer: str
    kind: str
    """``convolution`` or ``state``."""
    heads: tuple[int, ...]
    after: int
    """The tokens of the prompt that it is of."""
    zeros: bool


class KVOfLayers(Strict):
    """Layers, one after the other, in which the same blocks of a prompt differ, or their recurrent states."""

    layers: tuple[str, ...]
    keys: tuple[int, ...]
    """The blocks whose keys differ."""
    values: tuple[int, ...]
    latent: tuple[int, ...] = ()
    """Those whose latent does, of multi-head latent attention."""
    states: tuple[int, ...] = ()
    """The numbers of tokens after which their recurrent states differ."""
    zeros: bool
    """Whether zeros stand in all of them."""


class KVDifference(Strict):
    """KV of a prompt that is not what another engine had, or computed, of it."""

    role: str
    places: tuple[KVPlace, ...]
    differing: int
    """Number of such places; not all are listed."""
    tokens: tuple[int, ...]
    """The tokens whose KV differs; empty where only cells of 16 could be compared."""
    prompt_tokens: int
    """Length of the prompt."""
    by_layer: tuple[KVOfLayers, ...]
    """All layers in which something differs."""
    states: tuple[KVState, ...] = ()
    """Recurrent states that differ; not all are listed."""


class DraftDifference(Strict):
    """Drafts that were made of something else than those of the single engine, by the first of them."""

    role: str
    behind_token: int
    """Position of the token that they follow."""
    draft: int
    """Its number in its step, from 1."""
    found: int
    expected: int
    """The tokens that were drafted, which may be the same one."""
    differing_drafts: int
    compared_drafts: int


class CacheHit(Strict):
    """Blocks that an engine took from its prefix cache."""

    hit_blocks: int


class Counted(Strict):
    """Growth of an engine's counters over the request."""

    counters: dict[str, float]


class RouterCounted(Counted):
    """Growth of the counters of D and P over a request answered by a router."""

    prefill_counters: dict[str, float]


class HandOffParameters(Strict):
    """The parameters that P published for a hand-off."""

    kv_transfer_params: dict[str, Any]


class PublishedBlocks(HandOffParameters):
    """Number of blocks that P published in a KV-cache group, and the number that the prompt fills."""

    group: int
    expected_blocks: int
    published_blocks: int


class TokenTestEvidence(HypothesisFigures):
    """A failed registered test of output tokens or of their log-probs."""

    changed: tuple[str, ...]
    """Columns that carry the change, as ``stratum@position``; empty when the test had too little power."""


class StepsBeside(Strict):
    """Acceptance by step, of a cell and of its reference."""

    found: StepRows
    reference: StepRows


class AcceptanceTestEvidence(TokenTestEvidence):
    """A failed registered test of acceptance."""

    by_step: StepsBeside


FindingEvidence = (
    IncompleteCell
    | FailedRequest
    | EchoDifference
    | OfEngine
    | StopToken
    | TextDifference
    | TokenDifference
    | LogprobDifference
    | RepeatDifference
    | TotalsDifference
    | StepsDifference
    | MeanDifference
    | WrongWhenRescored
    | TraceMoved
    | DraftsBeside
    | KVDifference
    | DraftDifference
    | CacheHit
    | Counted
    | RouterCounted
    | HandOffParameters
    | PublishedBlocks
    | TokenTestEvidence
    | AcceptanceTestEvidence
    | NoEvidence
)
