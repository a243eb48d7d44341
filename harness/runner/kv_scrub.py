"""Overwrite the KV blocks that earlier requests left behind.

Freed blocks keep their contents. An engine that wrongly reads a block that was never written for the request finds the
old contents; after the same prompt, or one with the same prefix, these happen to be the right KV and hide the defect.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from harness.engines.request import Ask
from harness.engines.session import EngineGroupSession
from harness.errors import HandoffError
from harness.history.records import Leg
from harness.profiles.cells import Role
from harness.prompts.lengths import blocks
from harness.prompts.model import Prompt

MOST_BLOCKS = 256
"""Larger pools are not scrubbed: vLLM reuses the least recently freed block first, so a block is reused only after
thousands of tokens."""


_JOINED = 16
"""Number of prompts whose tokens make up the fill requests."""


class Scrubber:
    """Fills the KV pools of a group's engines with contents that match no prompt of the set."""

    def __init__(self, session: EngineGroupSession, prompts: Sequence[Prompt]) -> None:
        self._session = session
        self._size = session.profile.engine.block_size
        # Tokens are reversed so that no fill shares a prefix with a judged prompt. Fills are as long as the engine
        # allows because requests have a fixed overhead.
        tokens = [i for p in sorted(prompts, key=lambda p: -p.tokens)[:_JOINED] for i in reversed(p.ids)]
        most = session.profile.engine.max_model_len - 2
        self._fill = [tokens[i : i + most] for i in range(0, len(tokens), most)]
        self._pools: dict[Role, int] = {}
        self.requests = 0

    def scrub(self) -> None:
        """Overwrite the free KV blocks of all engines. Raises HandoffError when an engine does not answer,
        EngineDiedError when it died."""
        with ThreadPoolExecutor(len(self._session.roles)) as pool:
            for asked in list(pool.map(self._scrub, self._session.roles)):
                self.requests += asked

    def _scrub(self, role: Role) -> int:
        if role not in self._pools:
            self._pools[role] = self._session.client(role).kv_pool().blocks or 0
        left, asked = self._pools[role] - 1, 0
        if left >= MOST_BLOCKS:
            return 0
        while left > 0:
            ids = self._fill[asked % len(self._fill)]
            legs: list[Leg] = []
            alone: Role = "prefill" if role == "prefill" else "single"
            error = self._session.ask(Ask(False, ids, max_tokens=1, alone=alone, counted=False), legs)
            if error is not None:
                raise HandoffError(error)
            left -= blocks(len(ids), self._size)
            asked += 1
        return asked
