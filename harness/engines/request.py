"""One request to the engines of a group: alone, or as a hand-off from P to D.

There is no fallback: a hand-off that breaks is recorded as broken.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

from harness.engines.answers import Sampling
from harness.engines.client import REMOTE_DECODE, Client
from harness.engines.counters import credited
from harness.errors import AbandonedError, HandoffError, RefusedError
from harness.history.records import Form, Leg
from harness.profiles.cells import SECOND_P, Role
from harness.profiles.model import Profile
from harness.profiles.scenarios import Abandon, Api, is_chat
from harness.prompts.messages import Messages
from harness.prompts.model import Prompt
from harness.workload.features import for_prefill


class Ask(NamedTuple):
    """One request, with or without a hand-off."""

    hand_off: bool
    payload: list[int] | str | Messages
    salt: str | None = None
    """Requests with the same salt may share cached blocks; None gives the request a cache of its own."""
    max_tokens: int | None = None
    temperature: float = 0.0
    alone: Role = "single"
    """Which engine is asked when there is no hand-off."""
    counted: bool = True
    """Whether the engine's counters are read around the request, which must be the only one then."""
    between: Callable[[], None] | None = None
    """Called after P has answered and before D is asked."""
    routed: bool = False
    """Whether the request goes to the router, which performs any hand-off."""
    abandon: Abandon | None = None
    """When the client gives the request up; None to wait for the answer."""
    former: Mapping[str, Any] | None = None
    """For a request to D alone, parameters of an earlier hand-off, as from a P that was restarted since: another engine
    answers at its address, so D cannot fetch anything."""
    as_given: bool = False
    """Whether ``former`` is sent as it is, and not made to name another engine: P was restarted since, or is meant."""
    appended: bool = False
    """Whether the last token of the payload, which is of ids then, is P's answer: P is asked for the others alone."""
    fields: Mapping[str, Any] = MappingProxyType({})
    """More fields of the request's body (``harness.workload.features``)."""
    by_second_p: bool = False
    """Whether the second P hands the request off."""
    read_back: Mapping[str, Any] | None = None
    """Parameters of D's last answer, by which P may read its blocks; None: P reads nothing."""
    api: Api = "completion"
    """How the answer is asked for; of Messages at the chat endpoint."""
    p_tokens: int = 1
    """Output tokens that P is asked for in a hand-off."""
    turn: AbstractContextManager[object] = contextlib.nullcontext()
    """Held while P is asked, so that requests which share it are computed there one by one."""

    @property
    def prefilled(self) -> list[int] | str | Messages:
        """The prompt that P is asked."""
        return self.payload[:-1] if self.appended and isinstance(self.payload, list) else self.payload

    @property
    def api_of_p(self) -> Api:
        """How P's answer is asked for: whole, at the same endpoint."""
        return "chat" if is_chat(self.api) else "completion"

    @property
    def prefilling(self) -> Role:
        """The engine that prefills a hand-off."""
        return SECOND_P if self.by_second_p else "prefill"

    def given_up(self, leg: Role) -> Abandon | None:
        """Return when the request is given up at an engine with this role in the hand-off."""
        return self.abandon if self.abandon is not None and (not self.hand_off or self.abandon.leg == leg) else None


def payload(prompt: Prompt, form: Form) -> list[int] | str:
    """Return a prompt in the given form, as token ids or as text."""
    return list(prompt.ids) if form == "ids" else prompt.text


def new_id() -> str:
    """Return a unique request id or cache salt."""
    return uuid.uuid4().hex


_LEASE_SHARE = 0.5
"""Share of P's lease within which D must be asked, so that it has read the blocks before the lease ends."""


class Exchange:
    """Sends requests to the engines of a group by their roles."""

    def __init__(
        self, clients: Mapping[Role, Client], profile: Profile, routers: Mapping[bool, Client] = MappingProxyType({})
    ) -> None:
        """``routers`` maps whether a router hands off to its client. Both mappings may be filled later."""
        self._clients = clients
        self._routers = routers
        self._workload = profile.workload
        self._lease_s = profile.engine.kv_lease_s
        self._pushes = profile.engine.pushes
        self._by_nixl = profile.engine.by_nixl
        self.kept_by_p = 0
        """Number of hand-offs that P answered and D did not finish: P keeps their blocks until the lease ends."""

    def send(self, ask: Ask, legs: list[Leg]) -> None:
        """Send a request, appending each leg as soon as it is answered; return early if it is to be given up. Raises
        HandoffError when a leg fails."""
        with contextlib.suppress(AbandonedError):
            if ask.routed:
                legs.append(self._ask_router(ask))
            elif ask.hand_off:
                self._hand_off(ask, legs)
            else:
                legs.append(self._ask_alone(ask))

    def client(self, role: Role) -> Client:
        """Return the client of an engine; in a pair, ``single`` means the decode engine."""
        return self._clients[role if role in self._clients else "decode"]

    def _sampling(self, ask: Ask) -> Sampling:
        return Sampling(ask.max_tokens or self._workload.max_tokens, self._workload.logprobs, ask.temperature)

    def _ask_alone(self, ask: Ask) -> Leg:
        """Send a request without hand-off: to the single engine, to the pair's decode engine, or to P."""
        given = ask.former if ask.as_given or ask.former is None else {**ask.former, "remote_engine_id": new_id()}
        # A P that reads back takes the request for a hand-off, and keeps its blocks for D.
        self.kept_by_p += ask.read_back is not None
        return self.client(ask.alone).complete(
            ask.payload,
            self._sampling(ask),
            new_id(),
            ask.salt or new_id(),
            given if ask.read_back is None else ask.read_back,
            role=ask.alone,
            await_counters=("finished_requests",),
            count=ask.counted,
            abandon=ask.given_up(ask.alone),
            fields=for_prefill(ask.fields) if ask.alone == "prefill" else ask.fields,
            api=ask.api,
        )

    def _ask_router(self, ask: Ask) -> Leg:
        """Send one request to the router; return the answer with the growth of the answering engine's counters. P's
        part is visible only in P's counters."""
        client = self.client("single")
        before = client.last_snapshot
        try:
            leg = self._router(ask.hand_off).complete(
                ask.payload,
                self._sampling(ask),
                new_id(),
                ask.salt or new_id(),
                role="decode" if ask.hand_off else "single",
                count=False,
                abandon=ask.given_up("decode"),
                fields=ask.fields,
                api=ask.api,
            )
        except HandoffError:
            # P may have answered the router.
            self.kept_by_p += ask.hand_off
            raise
        if not ask.counted:
            return leg
        awaited = {"finished_requests": 1, **({"nixl_bytes": 1} if ask.hand_off else {})}
        return leg.model_copy(update={"counters": client.counters_after(before, awaited)})

    def _router(self, hand_off: bool) -> Client:
        """Return the client of the router that hands off, or of the one that asks one engine."""
        return self._routers[hand_off]

    def _hand_off(self, ask: Ask, legs: list[Leg]) -> None:
        """Prefill on P, then decode on D with P's unchanged parameters, appending each leg as soon as it is answered.

        P's counters are read after D has answered, together with D's, because between the legs P is busy with its lease
        and may not answer /metrics until the lease ends.

        Raises HandoffError when a leg fails, P returns no parameters, or D could not be asked in time.
        """
        request_id, salt = new_id(), ask.salt or new_id()
        p, d = self._clients[ask.prefilling], self._clients["decode"]
        before = {client: client.last_snapshot for client in (p, d)}
        # Before it is asked: it may end just before it breaks or is given up.
        self.kept_by_p += 1
        try:
            with ask.turn:
                prefill = p.complete(
                    ask.prefilled,
                    Sampling(ask.p_tokens, self._workload.logprobs, ask.temperature),
                    request_id,
                    salt,
                    ask.read_back or REMOTE_DECODE,
                    count=False,
                    abandon=ask.given_up("prefill"),
                    fields=for_prefill(ask.fields),
                    api=ask.api_of_p,
                )
        except RefusedError:
            self.kept_by_p -= 1
            raise
        answered = time.monotonic()
        legs.append(prefill)
        # With requests in between, P's counters do not belong to this request alone.
        wanted = {p: {"finished_requests": 1}} if ask.counted and ask.between is None else {}
        try:
            legs.append(self._decode(ask, prefill, answered, salt))
            if ask.counted:
                wanted[d] = {"finished_requests": 1}
                if (moves := p if self._pushes else d) in wanted:
                    wanted[moves] |= self._awaited()
        finally:
            # One after the other: handing them to threads takes longer, beside engines that spin.
            for index, client in enumerate((p, d)):
                if client in wanted:
                    counters = client.counters_after(before[client], wanted[client])
                    legs[index] = legs[index].model_copy(update={"counters": counters})
            if self._pushes:
                _credit(legs)

    def _awaited(self) -> dict[str, int]:
        """Return by how much the counters of the engine that moves KV have to grow before they include a hand-off."""
        return {"nixl_bytes": 1} if self._by_nixl else {}

    def _decode(self, ask: Ask, prefill: Leg, answered: float, salt: str) -> Leg:
        """Send D's part of a hand-off; ``answered`` is when P answered, in ``time.monotonic()``. Raises HandoffError
        when P returned no parameters or most of its lease is over."""
        if not prefill.kv_transfer_params:
            raise HandoffError(
                f"prefill engine: expected kv_transfer_params in the answer to request {prefill.request_id}, found "
                "none, so the decode request was not sent"
            )
        if ask.between is not None:
            ask.between()
        abandon = ask.given_up("decode")
        if abandon is not None and abandon.unasked:
            raise AbandonedError("D is not asked")
        waited = time.monotonic() - answered
        if waited > _LEASE_SHARE * self._lease_s:
            raise HandoffError(
                f"expected to ask D within {_LEASE_SHARE * self._lease_s:.0f} s of P's answer to request "
                f"{prefill.request_id}, found {waited:.1f} s gone of the {self._lease_s} s for which P keeps the "
                "blocks, so D was not asked; the machine is too busy, run the cell again"
            )
        return self._ask_decode(ask, prefill, salt)

    def _ask_decode(self, ask: Ask, prefill: Leg, salt: str) -> Leg:
        """Ask D with P's parameters; D takes over the blocks that P keeps."""
        try:
            leg = self._clients["decode"].complete(
                ask.payload,
                self._sampling(ask),
                prefill.request_id,
                salt,
                prefill.kv_transfer_params,
                count=False,
                abandon=ask.given_up("decode"),
                fields=ask.fields,
                api=ask.api,
            )
        except AbandonedError:
            # An engine that aborts a request tells P that it does not need the blocks.
            self.kept_by_p -= 1
            raise
        self.kept_by_p -= 1
        return leg


def _credit(legs: list[Leg]) -> None:
    """Put what P wrote into D's blocks among D's counters."""
    if len(legs) == len(("prefill", "decode")):
        written, read = credited(legs[0].counters, legs[1].counters)
        legs[:] = [legs[0].model_copy(update={"counters": written}), legs[1].model_copy(update={"counters": read})]
