"""Times and rates as people read them, and what is no time as it is; sentences that are too long."""

from __future__ import annotations

import pytest

from harness.util.text import abridged, moment, percent_range


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


ADVICE = "record it with `harness baseline record`"


@pytest.mark.parametrize(
    ("text", "most", "shown"),
    [
        (f"no baseline of any kind; {ADVICE}", 100, f"no baseline of any kind; {ADVICE}"),
        (f"no baseline of any kind that fits; {ADVICE}", 70, f"no baseline of any kind …; {ADVICE}"),
        # Advice that would leave nothing of what is wrong is cut, as a text without any is.
        (f"no baseline; {ADVICE}", 45, "no baseline; record it with `harness …"),
        ("a text without any advice", 16, "a text without …"),
    ],
)
def test_an_abridged_sentence_keeps_what_to_do(text, most, shown):
    assert abridged(text, most) == shown and len(shown) <= most
