"""The mutants of the client and of the router (M9, N6, N73), which change how requests are sent, not the engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from harness.engines.client import Client
from harness.engines.request import Ask, Exchange
from harness.history.records import Leg
from harness.profiles.cells import Role
from harness.profiles.model import Profile

_KNOWN_TO_OPENAI = {"frequency_penalty", "logprobs", "presence_penalty", "seed", "stop", "top_p"}
"""Names of parameters that a router hands on with N73."""


class MutatedExchange(Exchange):
    """Sends requests correctly, except where ``is_on`` returns True for a mutant's id."""

    def __init__(
        self,
        clients: Mapping[Role, Client],
        profile: Profile,
        routers: Mapping[bool, Client],
        is_on: Callable[[str], bool],
    ) -> None:
        super().__init__(clients, profile, routers)
        self._is_on = is_on

    def _router(self, hand_off: bool) -> Client:
        """Return the client of the router to use. With N6, that router does not know P and sends everything to D."""
        return super()._router(hand_off and not self._is_on("N6"))

    def _ask_router(self, ask: Ask) -> Leg:
        """Send a request to the router. With N73, it lacks the parameters that OpenAI's API does not have."""
        if self._is_on("N73"):
            ask = ask._replace(fields={k: v for k, v in ask.fields.items() if k in _KNOWN_TO_OPENAI})
        return super()._ask_router(ask)

    def _ask_decode(self, ask: Ask, prefill: Leg, salt: str) -> Leg:
        """Send the decode request. With M9, it lacks P's parameters, as if a router had lost them, so that P keeps its
        blocks."""
        if not self._is_on("M9"):
            return super()._ask_decode(ask, prefill, salt)
        return self._clients["decode"].complete(
            ask.payload,
            self._sampling(ask),
            prefill.request_id,
            salt,
            count=False,
        )

    def _awaited(self) -> dict[str, int]:
        return {} if self._is_on("M9") else super()._awaited()
