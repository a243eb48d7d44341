"""Times and rates as people read them, and what is no time as it is."""

from __future__ import annotations

import pytest

from harness.util.text import moment, percent_range


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


@pytest.mark.parametrize(
    ("low", "high", "shown"),
    [
        (0.6306, 1, "63 to 100 %"),
        (0.9963, 0.99979, "99.63 to 99.98 %"),
        (0, 0.0202, "0 to 2 %"),
        (0.02814, 0.60009, "2.8 to 60 %"),
    ],
)
def test_interval_of_a_rate_has_no_exponent(low, high, shown):
    assert percent_range(low, high) == shown
