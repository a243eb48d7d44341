"""Text of prompts, engines and file names, made safe to show."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

# Control characters of terminals, characters that change the direction of the surrounding text (also by ending the
# paragraph and with it every isolation: UAX #9, X8), and lone surrogates, which stand for undecodable bytes of file
# names and cannot be encoded as UTF-8.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """Return the text with terminal and bidirectional control characters replaced by U+FFFD; tabs and newlines stay."""
    return _OBEYED.sub("\ufffd", text)


def counted(number: int, noun: str) -> str:
    """Return a number with a noun, in the plural unless it is one: ``1 cell``, ``1,204 cells``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def percent_range(low: float, high: float) -> str:
    """Return an interval of a rate as people write it, ``2.8 to 60 %``, ``63 to 100 %``."""
    return f"{_percent(low)} to {_percent(high)} %"


def _percent(rate: float) -> str:
    # Two digits would round 99.6 to 100, and write that with an exponent.
    return f"{100 * rate:.2g}" if rate < 0.995 else f"{100 * rate:.4g}"


def lasting(seconds: float) -> str:
    """Return a time as people say it: ``40 seconds``, ``4 minutes``, ``13.4 hours``."""
    if seconds < 90:
        return counted(round(seconds), "second")
    minutes = seconds / 60
    return counted(round(minutes), "minute") if minutes < 90 else f"{minutes / 60:.1f} hours"


def moment(text: str) -> str:
    """Return a time of ISO 8601 as people read it, in UTC: ``2026-11-28 02:42 UTC``. Other texts, times without a zone
    among them, are returned as they are."""
    try:
        found = datetime.fromisoformat(text)
        return text if found.tzinfo is None else f"{found.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError):
        return text


def listed(names: Sequence[str], last: str) -> str:
    """Return names as people list them, with ``last`` before the last one: ``a``, ``a and b``, ``a, b and c``."""
    return f" {last} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def shortened(text: str, most: int = 2000) -> str:
    """Return at most the first ``most`` characters of a text, with a note on how many more there are."""
    return text if len(text) <= most else f"{text[:most]} … {len(text) - most} more characters"


def cut(text: str, most: int) -> str:
    """Return at most ``most`` characters of a line, cut between words, so that no address is cut in two."""
    if len(text) <= most:
        return text
    whole = text[: most - 1].rpartition(" ")[0].rstrip()
    # A single word that is longer than the line can only be cut within.
    return f"{whole or text[: most - 2]} …"


def without_log(text: str) -> str:
    """Return a message as one line, without the last lines of a log that it may end with."""
    return " ".join(text.partition("; last lines of ")[0].split())


def abridged(text: str, most: int) -> str:
    """Return at most ``most`` characters of a line, as ``cut`` does, but with what stands behind its last semicolon
    where that leaves room for the rest: sentences end with what to do."""
    head, _, end = text.rpartition("; ")
    room = most - len(end) - 2
    if len(text) <= most or not head or room < most / 3:
        return cut(text, most)
    return f"{cut(head, room)}; {end}"
