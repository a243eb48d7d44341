"""Text of prompts, engines and file names, made fit for where it is shown."""

from __future__ import annotations

import re

# What a terminal obeys, what turns the direction of the text around it (also by ending the paragraph, and with it
# every isolation: UAX #9, X8), and halves of surrogate pairs, which stand for bytes of file names and which UTF-8 has
# no place for.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def harmless(text: str) -> str:
    """The text with what a terminal or the bidirectional algorithm would obey replaced by U+FFFD; tabs and line ends
    stay."""
    return _OBEYED.sub("\ufffd", text)


def shortened(text: str, most: int = 2000) -> str:
    """The beginning of a long text, with how much of it is left out."""
    return text if len(text) <= most else f"{text[:most]} … {len(text) - most} more characters"
