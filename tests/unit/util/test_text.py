"""Times as people read them, and what is no time as it is."""

from __future__ import annotations

import pytest

from harness.util.text import moment


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("2026-11-28T02:42:59+00:00", "2026-11-28 02:42 UTC"),
        ("2026-11-28T02:42:59.123456Z", "2026-11-28 02:42 UTC"),
        ("2026-11-28T01:12:00+02:00", "2026-11-27 23:12 UTC"),
        ("2026-11-28T02:42:59", "2026-11-28T02:42:59"),
        ("0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00+14:00"),
        ("2026 </script>", "2026 </script>"),
        ("", ""),
    ],
)
def test_times_are_in_utc_and_other_texts_stay(text, shown):
    assert moment(text) == shown
