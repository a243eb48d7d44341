"""A cache bounded by the size in bytes of the sources of its values."""

from __future__ import annotations

import threading
from typing import Generic, TypeVar

from cachetools import LRUCache

K = TypeVar("K")
V = TypeVar("V")


class ByteCache(Generic[K, V]):
    """A thread-safe LRU cache of ``limit`` bytes that holds at least ``always`` values, however large they are."""

    def __init__(self, limit: int, always: int = 1) -> None:
        # cachetools refuses a value larger than the cache, so each counts for at most its share.
        share = max(limit // always, 1)
        self._kept: LRUCache[K, tuple[V, int]] = LRUCache(share * always, lambda kept: max(1, min(kept[1], share)))
        self._lock = threading.Lock()

    def get(self, key: K) -> V | None:
        with self._lock:
            found = self._kept.get(key)
            return None if found is None else found[0]

    def put(self, key: K, value: V, size: int) -> None:
        with self._lock:
            self._kept[key] = value, size
