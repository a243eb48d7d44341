"""Own decoding of answers: with real tokenizers, against vLLM's way of decoding one token after the other."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from tokenizers.decoders import DecodeStream

from harness.util.paths import REPOSITORY
from harness.workload.own_text import decoder_of, own_text
from tests.support.builders import leg

PROBE = REPOSITORY / "models" / "probe" / "tokenizer"


@pytest.fixture(scope="module")
def bytes_folder(tmp_path_factory):
    """A tokenizer of single bytes, of which most make no character alone, with an end token."""
    alphabet = sorted(_bytes_to_unicode().items())
    vocabulary = {"<end>": 0, **{character: number + 1 for number, (_, character) in enumerate(alphabet)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    folder = tmp_path_factory.mktemp("bytes")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>", "additional_special_tokens": []}')
    return folder


def _bytes_to_unicode():
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in plain]
    return {b: chr(b) for b in plain} | {b: chr(256 + n) for n, b in enumerate(others)}


def streamed(folder, prompt, output):
    """The text as vLLM's detokenizer makes it."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<end>"] if "bytes" in str(folder) else ["<|eot|>"])
    stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
    return "".join(stream.step(tokenizer, i) or "" for i in output)


def as_ids(text):
    order = {character: number + 1 for number, (_, character) in enumerate(sorted(_bytes_to_unicode().items()))}
    return tuple(order[_bytes_to_unicode()[b]] for b in text.encode())


@given(st.text(min_size=1, max_size=12), st.text(max_size=24))
@settings(max_examples=200, deadline=None)
def test_own_text_is_what_a_stream_gives(bytes_folder, prompt, answer):
    decode = decoder_of(bytes_folder)
    answered = leg("single", as_ids(prompt), (*as_ids(answer), 0))
    assert own_text(decode, answered) == streamed(bytes_folder, answered.echoed_ids, answered.output_ids) == answer


def test_the_token_that_ended_an_answer_has_no_text_and_those_before_a_string_have(bytes_folder):
    decode = decoder_of(bytes_folder)
    ids = as_ids("abc")
    assert own_text(decode, leg("single", as_ids("x"), ids, finish_reason="stop", stop_reason=ids[-1])) == "ab"
    assert own_text(decode, leg("single", as_ids("x"), ids, finish_reason="stop", stop_reason="bc")) == "abc"
    assert own_text(decode, leg("single", as_ids("x"), ids, finish_reason="length")) == "abc"


def test_without_tokens_there_is_no_text(bytes_folder):
    decode = decoder_of(bytes_folder)
    assert own_text(decode, leg("single", (1,), (2,), output_ids=None)) is None
    assert own_text(decode, leg("single", (1,), (2,), echoed_ids=None)) is None


def test_the_probe_tokenizer_has_no_text_of_its_marks():
    decode = decoder_of(PROBE)
    tokenizer = Tokenizer.from_file(str(PROBE / "tokenizer.json"))
    mark = tokenizer.token_to_id("<|eot|>")
    assert decode([mark, 40, mark]) == decode([40]) != ""


def test_a_tokenizer_that_cannot_be_loaded_decodes_nothing(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    assert decoder_of(tmp_path) is None
