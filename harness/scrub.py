"""Overwriting the KV blocks that earlier requests left behind.

Freed blocks keep their contents. An engine that reads a block which nobody wrote for it then finds what was there, and
after the same prompt, or one that begins alike, that is the right KV: with M1, a prompt of 30 tokens that had just
given wrong tokens gave the right ones seven times in a row when it was sent again on the same engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from harness.engine.command import Role
from harness.engine.exchange import Ask
from harness.engine.topology import EngineGroupSession
from harness.errors import HandoffError
from harness.history import Leg
from harness.prompts import Prompt
from harness.strata import blocks

MOST_BLOCKS = 256
"""Larger pools are left alone: vLLM hands out the block that was freed first, so in these it takes thousands of tokens
until blocks come round."""


_JOINED = 16
"""Prompts that are joined into fills."""


class Scrubber:
    """Fills the pools of a group's engines with other KV than any prompt of the set has."""

    def __init__(self, session: EngineGroupSession, prompts: Sequence[Prompt]) -> None:
        self._session = session
        self._size = session.profile.engine.block_size
        # Read backwards, so that no token stands where it does in a prompt that is judged; as long as a prompt may be,
        # because each request costs more than its tokens.
        tokens = [i for p in sorted(prompts, key=lambda p: -p.tokens)[:_JOINED] for i in reversed(p.ids)]
        most = session.profile.engine.max_model_len - 2
        self._fill = [tokens[i : i + most] for i in range(0, len(tokens), most)]
        self._pools: dict[Role, int] = {}
        self.requests = 0

    def scrub(self) -> None:
        """Raises HandoffError when an engine does not answer, EngineDiedError when it is gone."""
        with ThreadPoolExecutor(len(self._session.roles)) as pool:
            for asked in list(pool.map(self._scrub, self._session.roles)):
                self.requests += asked

    def _scrub(self, role: Role) -> int:
        if role not in self._pools:
            self._pools[role] = self._session.client(role).kv_blocks() or 0
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
