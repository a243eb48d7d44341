"""Echo prompts for any tokenizer with a chat template: exact lengths in every stratum."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from harness.errors import DataError
from harness.judging.diagnosis.sources import is_copy, sources
from harness.prompts import probe_task
from harness.prompts.echo import INSTRUCTION, build_echo_prompts
from harness.prompts.lengths import Stratum
from harness.prompts.model import Layout, load_prompts, write_prompts

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A byte-level BPE tokenizer like those of real models, trained on the spot."""
    words = [w for w in probe_task.vocabulary() if w.isalpha()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2400,
        special_tokens=["<s>", "<|user|>", "<|assistant|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([f"{INSTRUCTION} a {' '.join(words)}"] * 3, trainer)
    # Here, because every worker of pytest imports every file, and this takes seconds.
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", chat_template=TEMPLATE)
    out = tmp_path_factory.mktemp("bpe")
    fast.save_pretrained(str(out))
    return out


def test_every_stratum_is_hit_exactly_and_words_have_one_source(folder, tmp_path):
    prompts = build_echo_prompts(folder, Layout())
    strata = {p.stratum for p in prompts.prompts}
    assert strata >= {Stratum.ALIGNED, Stratum.LOOKAHEAD, Stratum.FIRST, Stratum.MIDDLE}
    for prompt in prompts.prompts:
        assert len(prompt.ids) == prompt.tokens and prompt.expected is None
    longest = max(prompts.prompts, key=lambda p: p.tokens)
    listed = longest.text.partition(INSTRUCTION)[2].split()
    words = [w for w in listed if w in set(listed[:-2])][: longest.tokens - 40]
    assert len(words) > 40 and len(set(words)) == len(words)
    # A word said twice would leave open which position an output token was read from.
    answer = longest.ids[-60:-6]
    assert len(set(answer)) == len(answer)
    assert is_copy(sources(longest.ids, answer))
    write_prompts(prompts, tmp_path / "echo.jsonl")
    assert load_prompts(tmp_path / "echo.jsonl") == prompts
    assert build_echo_prompts(folder, Layout()) == prompts


def test_tokenizer_without_a_template_or_without_words_is_refused(folder, tmp_path):
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast.from_pretrained(str(folder))
    fast.chat_template = None
    fast.save_pretrained(str(tmp_path / "plain"))
    with pytest.raises(DataError, match="chat template"):
        build_echo_prompts(tmp_path / "plain", Layout())
    with pytest.raises(DataError, match="single-token words"):
        build_echo_prompts(folder, Layout(block_size=256))
