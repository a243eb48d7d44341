"""What a cache holds is bounded by bytes, and the values that were asked for last are never lost to their size."""

from __future__ import annotations

from harness.util.byte_cache import ByteCache


def test_the_value_that_was_asked_for_longest_ago_goes_first():
    cache: ByteCache[str, int] = ByteCache(10)
    for key in "ab":
        cache.put(key, 1, 5)
    assert cache.get("a") == 1
    cache.put("c", 1, 5)
    assert [cache.get(key) for key in "abc"] == [1, None, 1]


def test_values_that_are_too_large_are_held_as_many_as_always_are():
    cache: ByteCache[int, int] = ByteCache(10, always=2)
    for key in range(4):
        cache.put(key, key, 1000)
    assert [cache.get(key) for key in range(4)] == [None, None, 2, 3]
    cache.put(3, 9, 1)
    assert cache.get(3) == 9
