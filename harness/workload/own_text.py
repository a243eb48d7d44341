"""The text that tokens of an answer have, by a tokenizer of the harness's own rather than the engine's stream."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from harness.history.records import Leg
from harness.util.quiet_transformers import load_transformers

Decode = Callable[[Sequence[int]], str]


@cache
def decoder_of(folder: Path) -> Decode | None:
    """Return what decodes tokens without the special ones, as engines do for their answers; None if the tokenizer
    cannot be loaded."""
    try:
        return _decoder(folder)
    except Exception:
        # The libraries raise nothing narrower. Without it texts are not judged, which the judge says.
        return None


def _decoder(folder: Path) -> Decode:
    # Importing transformers takes seconds.
    if not (folder / "tokenizer.json").is_file():
        return _by_transformers(folder)
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(_special(folder / "tokenizer_config.json"))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=True))


def _special(settings: Path) -> list[str]:
    """Return the tokens that the settings of ``transformers`` make special, whatever ``tokenizer.json`` says."""
    told = json.loads(settings.read_text(encoding="utf-8")) if settings.is_file() else {}
    listed = told.get("added_tokens_decoder", {}).values()
    named = (value for name, value in told.items() if name.endswith("_token"))
    more = told.get("additional_special_tokens") or told.get("extra_special_tokens") or ()
    found = [*(t for t in listed if t.get("special")), *named, *(more.values() if isinstance(more, dict) else more)]
    contents = (t.get("content") if isinstance(t, dict) else t for t in found)
    return [content for content in contents if isinstance(content, str)]


def _by_transformers(folder: Path) -> Decode:
    tokenizer = load_transformers().AutoTokenizer.from_pretrained(str(folder))

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))

    return decode


def own_text(decode: Decode, leg: Leg) -> str | None:
    """Return the text of an answer behind its prompt, not yet cut at a stop string; None if the record lacks tokens.

    A token that ended the answer has no text. The prompt is decoded with it, because tokens of some vocabularies have
    another text at the start of one.
    """
    if leg.output_ids is None or leg.echoed_ids is None:
        return None
    by_token = leg.finish_reason == "stop" and not leg.ended_by_text
    told = leg.output_ids[:-1] if by_token else leg.output_ids
    before = decode(leg.echoed_ids)
    whole = decode((*leg.echoed_ids, *told))
    return whole.removeprefix(before) if whole.startswith(before) else None
