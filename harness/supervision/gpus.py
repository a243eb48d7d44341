"""GPUs of this machine, claimed so that no two harnesses of a user put engines on the same one.

A harness claims the GPUs that it may use when it first looks for them, and has them until it ends: which of them its
engines get is decided for one group at a time, and an engine takes minutes to give back what it holds.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Iterable

from harness.supervision import procfs
from harness.supervision.cores import claim_file

_HELD: dict[str, int] = {}
"""Descriptors of the claims of this process, by UUID."""


def claim(uuids: Iterable[str]) -> list[str]:
    """Claim these GPUs until this process ends; return those that another harness has. Raises EngineStartError when
    there is no folder for claims."""
    taken = []
    for uuid in uuids:
        if uuid in _HELD:
            continue
        handle = claim_file(f"gpu-{uuid.replace('/', '_')}", uuid)
        if handle is None:
            taken.append(uuid)
            continue
        if not _HELD:
            atexit.register(_release, os.getpid())
        _HELD[uuid] = handle
    return taken


def _release(owner: int) -> None:
    """Release all claims, unless this is a child that was forked from their owner."""
    while _HELD and os.getpid() == owner:
        procfs.drop_claim(_HELD.popitem()[1])
