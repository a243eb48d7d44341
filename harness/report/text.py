"""Text of prompts, engines and file names, made fit for where it is shown."""

from __future__ import annotations

import re

# A file name that is not UTF-8 becomes half of a surrogate pair, which no encoding can write.
_SURROGATES = re.compile("[\ud800-\udfff]")
# Control characters, which a terminal obeys, and marks that turn the direction of the text around them.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def encodable(text: str) -> str:
    """The text with what UTF-8 has no place for replaced by U+FFFD."""
    return _SURROGATES.sub("\ufffd", text)


def harmless(text: str) -> str:
    """The text without anything that a terminal would obey; tabs and line ends stay."""
    return _OBEYED.sub("\ufffd", text)


def shortened(text: str, most: int = 2000) -> str:
    """The beginning of a long text, with how much of it is left out."""
    return text if len(text) <= most else f"{text[:most]} … {len(text) - most} more characters"
