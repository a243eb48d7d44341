"""Natural prompts: real questions at exact lengths, in every stratum of several block sizes. Data sets come from files
and from a fake hub."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from harness.errors import DataError, EnvironmentFault
from harness.judging.power import per_stratum, sensitivity
from harness.profiles.hub import Hub
from harness.profiles.load import load_profile
from harness.profiles.model import PromptRecipe
from harness.prompts.chat import DATE, Chat, pad
from harness.prompts.datasets import Texts, fetch_texts, first_turn, read_texts
from harness.prompts.echo import INSTRUCTION
from harness.prompts.lengths import Stratum, classify, target_lengths
from harness.prompts.model import Layout, PromptSet, TextSource, filling, load_prompts, planned_prompts, write_prompts
from harness.prompts.padded import build_from_recipe, build_natural_prompts, coverage
from harness.prompts.probe_task import WEIGHTS
from harness.util.paths import REPOSITORY
from harness.workload.prepare import prepare
from tests.support.builders import changed_profile, extending
from tests.support.fake_hub import FakeRepository, fake_hub
from tests.support.program import inside
from tests.support.program import run as forked

TOPICS = [
    "rivers",
    "bridges",
    "whales",
    "computers",
    "glaciers",
    "novels",
    "islands",
    "recipes",
    "engines",
    "orchestras",
]
ASKS = (
    "Explain in simple words how {} work.",
    "Write a short story about {} for a child who has never seen any, and end it with a question.",
    "What is the difference between {} of today and those of a hundred years ago? Name three things and say for each "
    "why it changed, who wanted it to change, and what was lost.",
    "You are a careful teacher. Plan a lesson of one hour about {}: give the aim, the steps with their minutes, two "
    "exercises with answers, and the mistakes that pupils often make. Then write a letter to the parents which says "
    "what the class learned, what they may ask at home, and which museum they could visit together at the weekend.",
)
QUESTIONS = [ask.format(topic) for ask in ASKS for topic in TOPICS]
TEMPLATE = (
    "{{ bos_token }}<|system|>\nToday is {{ date_string }} ({{ strftime_now('%Y') }}).<|end|>\n"
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content | trim }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def make_tokenizer(out: Path, template: str = TEMPLATE) -> Path:
    """A byte-level BPE tokenizer like those of real models, with a date in its template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1500,
        special_tokens=["<s>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    words = " a river stone garden window table morning paper music water house summer letter picture"
    tokenizer.train_from_iterator([*QUESTIONS, "Please answer carefully.", "Thank you.", *([words] * 5)], trainer)
    # Here, because every worker of pytest imports every file, and this takes seconds.
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", chat_template=template)
    fast.save_pretrained(str(out))
    return out


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("bpe"))


@pytest.fixture(scope="module")
def texts() -> Texts:
    return Texts(tuple(enumerate(QUESTIONS)), TextSource(dataset="questions.jsonl", column="prompt", revision="0" * 64))


@pytest.fixture(scope="module")
def chat(folder) -> Chat:
    return Chat(folder)


def check_exact(prompts: PromptSet, folder: Path) -> None:
    """Each prompt's count is its length, and its ids are those of its text."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    for prompt in prompts.prompts:
        assert len(prompt.ids) == prompt.tokens
        assert tuple(tokenizer(prompt.text, add_special_tokens=False)["input_ids"]) == prompt.ids


LAYOUT = Layout(block_size=64, lookahead=4, max_blocks=3, held_out=True, more_sizes=(16, 32))


@pytest.fixture(scope="module")
def built(folder, texts):
    return build_natural_prompts(folder, texts, LAYOUT, 4)


def test_one_set_covers_the_strata_of_all_block_sizes(built, folder, tmp_path):
    check_exact(built.prompts, folder)
    rows = {(c.key.block_size, c.key.stratum): c for c in coverage(built.prompts)}
    assert len(rows) == 15
    for (size, stratum), row in rows.items():
        # With the template no question is shorter than 43 tokens, so that none lies within such a block.
        if size < 43 and stratum is Stratum.SUB_BLOCK:
            assert (row.cold, row.held_out, row.blocks) == (0, 0, ())
        else:
            assert row.cold >= 4 and row.held_out >= 4, row
    assert len(rows[64, Stratum.ALIGNED].blocks) > 1
    assert built.prompts.header.block_sizes == (64, 16, 32)
    write_prompts(built.prompts, tmp_path / "n.jsonl")
    assert load_prompts(tmp_path / "n.jsonl") == built.prompts


def test_recipe_adds_bare_texts_and_words_to_repeat(folder, texts):
    recipe = PromptRecipe(
        dataset="a/b", revision="0" * 40, block_sizes=(16, 32), lookaheads=(3,), per_stratum=2, plain=4, echo=1
    )
    prompts = build_from_recipe(folder, texts, recipe).prompts
    without = build_from_recipe(folder, texts, recipe.model_copy(update={"plain": 0, "echo": 0})).prompts
    known = {p.id for p in without.prompts}
    assert known < {p.id for p in prompts.prompts} and len({p.id for p in prompts.prompts}) == len(prompts.prompts)
    for use in ("cold", "held-out"):
        more = [p for p in prompts.prompts if p.use == use and p.id not in known]
        echo = [p for p in more if INSTRUCTION in p.text]
        bare = [p for p in more if p not in echo]
        # A text of its own is its own unit; one that is padded elsewhere, too, is not.
        assert len(bare) == 4 and all(p.source and p.origin.endswith("padded by 0 tokens") for p in bare)
        assert echo and not any(p.source for p in echo)
        for size in (16, 32):
            assert {p.stratum_for(size, 3) for p in echo} >= {Stratum.ALIGNED, Stratum.LOOKAHEAD, Stratum.FIRST}
    planned = planned_prompts(recipe.model_copy(update={"texts": 40}))
    assert len(planned.cold) == len(planned.held_out)
    assert sum(p.source is None for p in planned.cold) == len(filling(Layout.of_recipe(recipe), 1, 60))
    assert {p.source for p in prompts.cold} & {p.source for p in prompts.held_out} == {None}


def test_texts_may_be_asked_as_they_are(folder, texts):
    recipe = PromptRecipe(
        dataset="a/b", revision="0" * 40, block_sizes=(16,), lookaheads=(3,), padded=False, texts=5, seed=42
    )
    prompts = build_from_recipe(folder, texts, recipe).prompts
    check_exact(prompts, folder)
    assert len(prompts.cold) == 5 and not prompts.held_out
    assert all(p.origin.endswith("padded by 0 tokens") for p in prompts.cold)
    assert len({p.origin for p in prompts.cold}) == 5
    other = build_from_recipe(folder, texts, recipe.model_copy(update={"seed": 43})).prompts
    assert [p.origin for p in other.cold] != [p.origin for p in prompts.cold]
    with pytest.raises(DataError, match="expected 5000 texts"):
        build_from_recipe(folder, texts, recipe.model_copy(update={"texts": 5000}))
    with pytest.raises(DataError, match="its chat template does not know enable_thinking"):
        build_from_recipe(folder, texts, recipe.model_copy(update={"template": {"enable_thinking": False}}))


@pytest.mark.parametrize("changes", [{"padded": False}, {"padded": False, "texts": 5, "per_stratum": 2}, {"texts": 5}])
def test_recipe_says_how_many(changes):
    with pytest.raises(ValidationError, match=r"per_stratum|texts"):
        PromptRecipe(dataset="a/b", revision="0" * 40, block_sizes=(16,), lookaheads=(3,), **changes)


def test_no_text_is_in_both_halves_and_padding_is_at_most_a_block(built):
    rows: dict[str, set[str]] = {"cold": set(), "held-out": set()}
    for prompt in built.prompts.prompts:
        rows[prompt.use].add(prompt.origin.partition(", padded")[0])
        assert int(prompt.origin.rsplit("by ", 1)[1].split()[0]) < 64
    assert rows["cold"] and rows["cold"].isdisjoint(rows["held-out"])
    spoken = {u: {next(q for q in QUESTIONS if q in p.text) for p in built.prompts.prompts if p.use == u} for u in rows}
    assert spoken["cold"].isdisjoint(spoken["held-out"])
    assert len({p.ids for p in built.prompts.prompts}) == len(built.prompts.prompts)


def test_the_same_texts_give_the_same_set_and_another_seed_another(built, folder, texts):
    assert build_natural_prompts(folder, texts, LAYOUT, 4).prompts == built.prompts
    assert build_natural_prompts(folder, texts, LAYOUT._replace(seed=8), 4).prompts != built.prompts


def test_every_text_is_used_once_before_one_is_used_twice(folder, texts):
    few = build_natural_prompts(folder, texts, Layout(block_size=32, max_blocks=6), 2)
    used = [p.origin.partition(", padded")[0] for p in few.prompts.prompts]
    assert len(used) == len(set(used))
    assert few.dropped == {"not needed": len(QUESTIONS) - len(used)}
    many = build_natural_prompts(folder, texts._replace(rows=texts.rows[:3]), Layout(block_size=32), 4)
    assert len({p.origin.partition(", padded")[0] for p in many.prompts.prompts}) == 3
    assert len({p.tokens for p in many.prompts.prompts}) >= 5


def test_unsuitable_texts_are_left_out_with_their_count(folder, texts):
    odd = Texts((*texts.rows, (90, "Say <|end|> twice."), (91, "long " * 2000)), texts.source)
    dropped = build_natural_prompts(folder, odd, Layout(block_size=32), 1).dropped
    assert dropped["longer than 191 tokens"] == 1
    assert dropped["with characters that have no token, or a marker of the template"] == 1
    with pytest.raises(DataError, match=r"expected texts that fit into .* tokens with the chat template"):
        build_natural_prompts(folder, odd._replace(rows=odd.rows[-2:]), Layout(block_size=32), 1)
    refused = tuple((n, "Say <|end|> twice.") for n in range(3))
    words = "found none among 4: 3 with characters that have no token, .*; 1 longer than 191 tokens; give texts in the"
    with pytest.raises(DataError, match=words):
        build_natural_prompts(folder, odd._replace(rows=(*refused, odd.rows[-1])), Layout(block_size=32), 1)


def test_texts_that_cannot_be_padded_take_another_length_or_are_dropped(folder, texts, monkeypatch):
    """A text whose padding fails at one length goes to another stratum; one that fails at all is counted."""
    real, hopeless = pad, QUESTIONS[0]

    def sometimes(chat, text, tokens, seed=0):
        return None if text == hopeless or tokens % 32 == 0 else real(chat, text, tokens, seed)

    monkeypatch.setattr("harness.prompts.padded.pad", sometimes)
    found = build_natural_prompts(folder, texts._replace(rows=texts.rows[:6]), Layout(block_size=32), 3)
    assert found.dropped["cannot be padded to a wanted length"] == 1
    counts = {c.key.stratum: c.cold for c in coverage(found.prompts)}
    assert counts[Stratum.ALIGNED] == 0 and counts[Stratum.LOOKAHEAD] >= 3 and counts[Stratum.FIRST] >= 3
    assert not any(hopeless in p.text for p in found.prompts.prompts)


@settings(max_examples=60, deadline=None)
@given(
    text=st.one_of(
        st.sampled_from(QUESTIONS), st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=60)
    ),
    more=st.integers(0, 70),
    seed=st.integers(0, 3),
)
def test_padding_is_exact_or_refused(chat, folder, text, more, seed):
    from transformers import AutoTokenizer

    text = text.strip() or "Why?"
    if not chat.accepts(text):
        return
    bare = chat.render(text)
    wanted = len(bare.ids) + more
    found = pad(chat, text, wanted, seed)
    assert found == pad(chat, text, wanted, seed)
    if more == 0:
        assert found == bare
    if text in QUESTIONS:
        assert found is not None
    if found is not None:
        assert len(found.ids) == wanted
        again = AutoTokenizer.from_pretrained(str(folder)) if more == 7 else chat._tokenizer
        assert tuple(again(found.text, add_special_tokens=False)["input_ids"]) == found.ids
        assert text in found.text
    assert pad(chat, text, len(bare.ids) - 1, seed) is None


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([16, 32, 64]), min_size=1, max_size=3, unique=True),
    lookahead=st.integers(0, 7),
    count=st.integers(1, 3),
    held=st.booleans(),
    chosen=st.sets(st.sampled_from(range(len(QUESTIONS))), min_size=4, max_size=12),
)
def test_every_built_prompt_has_its_length_and_stratum(folder, texts, sizes, lookahead, count, held, chosen):
    layout = Layout(block_size=sizes[0], lookahead=lookahead, max_blocks=4, held_out=held, more_sizes=tuple(sizes[1:]))
    some = texts._replace(rows=tuple(texts.rows[n] for n in sorted(chosen)))
    try:
        prompts = build_natural_prompts(folder, some, layout, count).prompts
    except DataError as error:
        # All the texts that were drawn may be too long for the smallest layout.
        assert "expected texts that fit" in str(error)
        return
    check_exact(prompts, folder)
    for prompt in prompts.prompts:
        assert prompt.stratum is classify(prompt.tokens, sizes[0], lookahead)
        assert prompt.id.split("-")[1] == f"{prompt.tokens:03d}"
    assert bool(prompts.held_out) == held


# --- templates ------------------------------------------------------------------------------------------------------


def test_date_in_a_template_is_fixed_and_recorded(folder, texts):
    some = texts._replace(rows=texts.rows[:4])
    ours = build_natural_prompts(folder, some, Layout(), 1).prompts
    assert ours.header.date == DATE.isoformat()
    assert all("Today is 26 Jul 2024 (2024)." in p.text for p in ours.prompts)
    other = build_natural_prompts(folder, some, Layout(), 1, date(2025, 12, 1)).prompts
    assert other.header.date == "2025-12-01" and "Today is 01 Dec 2025 (2025)." in other.prompts[0].text


def test_template_without_a_date_records_none(tmp_path, texts):
    plain = make_tokenizer(tmp_path, TEMPLATE.replace("{{ date_string }} ({{ strftime_now('%Y') }})", "a day"))
    prompts = build_natural_prompts(plain, texts._replace(rows=texts.rows[:4]), Layout(), 1).prompts
    assert prompts.header.date is None
    write_prompts(prompts, tmp_path / "n.jsonl")
    assert "date" not in json.loads((tmp_path / "n.jsonl").read_text().splitlines()[0])


def test_closed_vocabulary_of_the_probes_is_refused_in_words(texts):
    with pytest.raises(DataError, match="expected texts that fit"):
        build_natural_prompts(WEIGHTS / "tokenizer", texts, Layout(), 1)


# --- texts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (" a ", "a"),
        (["first", "second"], "first"),
        ([{"role": "system", "content": "s"}, {"role": "user", "content": " u "}], "u"),
        ([{"from": "human", "value": "h"}], "h"),
        ([{"role": "assistant", "content": "x"}], None),
        ([{"role": "user", "content": ["parts"]}], None),
        ("", None),
        ([], None),
        (3, None),
        (None, None),
    ],
)
def test_first_turn(value, text):
    assert first_turn(value) == text


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


def write_questions(folder: Path) -> Path:
    return write_jsonl(folder / "questions.jsonl", [{"prompt": q} for q in QUESTIONS])


def test_files_give_distinct_first_turns_with_their_rows(tmp_path):
    rows = [{"prompt": ["a", "b"]}, {"prompt": []}, {"prompt": ["a"]}, {"prompt": ["c"]}]
    lines = read_texts(write_jsonl(tmp_path / "p.jsonl", rows), "prompt")
    assert lines.rows == ((0, "a"), (3, "c"))
    assert lines.source.dataset == "p.jsonl" and len(lines.source.revision or "") == 64
    parquet.write_table(pa.table({"prompt": [r["prompt"] for r in rows]}), tmp_path / "p.parquet")
    assert read_texts(tmp_path / "p.parquet", "prompt").rows == lines.rows


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("p.csv", b"a,b", "expected the ending .jsonl, .parquet, or .txt"),
        ("p.jsonl", b"{", "line 1: expected a JSON object"),
        ("p.jsonl", b'{"text": "a"}\n', "expected a column 'prompt', found text"),
        ("p.jsonl", b'{"prompt": 3}\n', "expected texts or lists of turns in column 'prompt', found none"),
        ("p.jsonl", b"", "expected a column 'prompt', found none"),
        ("p.parquet", b"PAR1 nonsense", "expected a Parquet file"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, content, sentence):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=sentence):
        read_texts(tmp_path / name, "prompt")
    with pytest.raises(DataError, match="there is no such file of texts; correct the path"):
        read_texts(tmp_path / "nowhere.jsonl", "prompt")


def test_missing_package_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(EnvironmentFault, match="install the extra `natural`, or do without the hub"):
        fetch_texts("fake/bench", None, "train", "prompt", "main", Hub("http://127.0.0.1:1", tmp_path))


# --- command line ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory) -> Iterator[tuple[str, str]]:
    """A data set like MT-Bench's prompts on a fake hub: its address and commit."""
    rows = [{"prompt_id": n, "prompt": [q, "And then?"]} for n, q in enumerate(QUESTIONS)]
    data = "".join(json.dumps(r) + "\n" for r in rows).encode()
    commit = "d" * 40
    with fake_hub({"fake/bench": FakeRepository({commit: {"train.jsonl": data}}, {"main": commit}, "datasets")}) as hub:
        yield hub.url, commit


def test_data_set_of_a_hub_by_revision(bench, folder, tmp_path):
    url, commit = bench
    out = tmp_path / "natural.jsonl"
    start = ["prompts", "build", "natural", "--tokenizer", str(folder), "--out", str(out)]
    env = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    env |= {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "home")}
    code, output = forked(*start, "--dataset", "fake/bench", "--per-stratum", "2", "--held-out", env=env)
    assert code == 0, output
    prompts = load_prompts(out)
    source = {"dataset": "fake/bench", "split": "train", "column": "prompt", "revision": commit}
    assert prompts.header.source == TextSource(**source)
    check_exact(prompts, folder)
    assert "prompts per stratum" in output and "lookahead" in output
    for arguments, wanted, sentence in (
        (["--dataset", "fake/bench", "--revision", "v7"], 64, "expected a commit, tag or branch 'v7'"),
        (["--dataset", "fake/nothing"], 64, "expected a repository"),
        (["--dataset", "fake/bench", "--column", "turns"], 64, "expected a column 'turns', found"),
        (["--dataset", "fake/bench", "--split", "test"], 64, "expected split 'test'"),
    ):
        code, output = forked(*start, "--overwrite", *arguments, env=env)
        assert (code, sentence in output) == (wanted, True), output


def test_several_block_sizes_from_a_file_with_the_table(folder, tmp_path):
    source = write_questions(tmp_path)
    out = tmp_path / "natural.jsonl"
    sizes = ["--block-size", "64", "--block-size", "16", "--max-blocks", "3"]
    start = ["prompts", "build", "natural", "--tokenizer", str(folder), "--out", str(out)]
    code, output = inside(*start, *sizes, "--file", str(source), "--per-stratum", "2", "--date", "2025-01-31")
    assert code == 0, output
    assert "block size 16, sub-block" not in output, "the template alone is longer"
    assert load_prompts(out).header.date == "2025-01-31"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["poems"], "No such command 'poems'"),
        (["--kind", "natural"], "No such option: --kind"),
        (["natural", "--tokenizer", "/nowhere"], "Missing option '--out'"),
        (["natural", "--out", "x"], "name the tokenizer: --tokenizer DIR, or --for-profile PROFILE"),
        (["natural", "--tokenizer", "/nowhere", "--out", "x"], "there is no tokenizer_config.json in it"),
        (
            ["natural", "--file", "x", "--dataset", "a/b", "TOKENIZER"],
            "--file and --dataset exclude each other; leave one out",
        ),
        (["natural", "--date", "today", "TOKENIZER"], "is not a date; write it as YYYY-MM-DD"),
        (["natural", "--turns", "last", "TOKENIZER"], "'last' is not one of 'first'"),
        (["natural", "--effect", "1", "TOKENIZER"], "--effect needs --for-profile NAME"),
        (
            ["natural", "--effect", "1", "--per-stratum", "2", "TOKENIZER"],
            "--per-stratum and --effect exclude each other",
        ),
        (
            ["copy", "--block-size", "8", "--block-size", "32", "--lookahead", "8"],
            "has to be smaller than a block (--block-size 8)",
        ),
        (["copy", "--for-profile", "nowhere"], "expected a shipped profile"),
        (["copy", "--file", "x"], "No such option: --file"),
        (["recipe"], "Missing option '--profile'"),
        (["recipe", "--profile", "nowhere"], "expected a shipped profile"),
        (["recipe", "--profile", "cpu"], "the profile has no recipe for prompts (workload.recipe)"),
    ],
)
def test_wrong_usage_of_build(arguments, sentence, folder, tmp_path):
    if "TOKENIZER" in arguments:
        more = ["--tokenizer", str(folder), "--out", str(tmp_path / "n.jsonl")]
        arguments = [a for a in arguments if a != "TOKENIZER"] + more
    code, output = inside("prompts", "build", *arguments)
    assert (code, sentence in output) == (64, True), output
    assert not (tmp_path / "n.jsonl").exists()


@pytest.mark.parametrize("kind", [["copy"], ["echo", "--per-length", "2"], ["natural", "--per-stratum", "1"]])
def test_a_set_that_is_there_is_replaced_when_that_is_asked_for_and_no_folder_is_made(kind, folder, tmp_path):
    texts = ["--file", str(write_questions(tmp_path))] if kind[0] == "natural" else []
    tokenizer = ["--tokenizer", str(folder)] if kind[0] != "copy" else []
    build = ["prompts", "build", *kind, *texts, *tokenizer, "--block-size", "64", "--max-blocks", "1"]
    there, nowhere = tmp_path / "n.jsonl", tmp_path / "nowhere" / "n.jsonl"
    code, output = inside(*build, "--out", str(nowhere))
    assert code == 64 and f"there is no folder {nowhere.parent}; make it" in output
    assert not nowhere.parent.exists()
    assert inside(*build, "--out", str(there))[0] == 0
    made = there.read_bytes()
    code, output = inside(*build, "--seed", "3", "--out", str(there))
    assert code == 64 and "this prompt set exists" in output and "replace it with --overwrite" in output
    assert there.read_bytes() == made
    assert inside(*build, "--seed", "3", "--overwrite", "--out", str(there))[0] == 0
    assert there.read_bytes() != made


def test_the_shipped_set_is_not_replaced_by_accident(monkeypatch, tmp_path):
    shipped = tmp_path / "prompts" / "probe.jsonl"
    shipped.parent.mkdir()
    shutil.copy(REPOSITORY / "prompts" / "probe.jsonl", shipped)
    before = shipped.read_bytes()
    monkeypatch.setattr("harness.util.paths.REPOSITORY", tmp_path)
    code, output = inside("prompts", "build", "copy", "--seed", "3")
    assert code == 64 and f"{shipped}: this prompt set exists, and baselines may belong to it" in output
    assert shipped.read_bytes() == before


def test_profile_gives_tokenizer_sizes_and_the_number_of_prompts(folder, tmp_path):
    """A first set makes the profile whole; from it the number for a wanted effect follows."""
    first = tmp_path / "first.jsonl"
    source = write_questions(tmp_path)

    def change(raw: dict) -> None:
        raw["tokenizer"] = str(folder)
        raw["workload"]["prompts"] = str(first)
        raw["engine"]["block_size"] = 16
        raw["scenarios"] = []
        raw["judging"] = {"tier": "normal"}

    path = changed_profile(tmp_path, change)
    start = ["prompts", "build", "natural", "--for-profile", path, "--file", str(source), "--held-out"]
    code, output = inside(*start, "--effect", "5", "--out", str(first))
    assert code == 64 and "build a first one with --per-stratum" in output
    code, output = inside(*start, "--per-stratum", "2", "--out", str(first))
    assert code == 0, output
    header = load_prompts(first).header
    assert (header.block_size, header.lookahead) == (16, max(m.lookahead for m in load_profile(path).methods))
    prepared = prepare(path, [])
    counts = [per_stratum(prepared, effect) for effect in (20.0, 5.0, 1.0)]
    assert counts == sorted(counts) and counts[0] < counts[2]
    found = sensitivity(prepared)
    assert counts[0] == max(found.needed(r, 20.0) or 0 for r in found.rows) > 2
    assert yaml.safe_load(Path(path).read_text())["judging"]["tier"] == "normal"


def recipe_profile(tmp_path: Path, folder: Path, **recipe: object) -> str:
    """A profile whose two models have prompts that a recipe makes; the second model is not here."""
    made = {
        "dataset": "fake/bench",
        "revision": "d" * 40,
        "block_sizes": [16, 32],
        "lookaheads": [4],
        "per_stratum": 2,
        "max_blocks": 6,
        **recipe,
    }
    axes = {
        "model": {
            "here": {
                "target": str(WEIGHTS / "target"),
                "tokenizer": str(folder),
                "workload": {"prompts": "here.jsonl"},
            },
            "gone": {
                "target": {"repo": "fake/gone", "revision": "e" * 40},
                "tokenizer": {"repo": "fake/gone", "revision": "e" * 40},
                "workload": {"prompts": "gone.jsonl"},
            },
        }
    }
    methods = [{"kind": "none"}]
    return extending(tmp_path, scenarios=[], methods=methods, axes=axes, workload={"recipe": made})


def test_recipes_of_a_profile_are_built_and_one_that_cannot_be_hides_no_other(tmp_path, folder):
    file = write_questions(tmp_path)
    source = recipe_profile(tmp_path, folder)
    before = prepare(source, [], planned=True)
    assert all(p.origin.startswith("planned, not built") for p in before.prompts.prompts)
    code, output = inside("prompts", "build", "recipe", "--profile", source, "--file", str(file))
    assert code == 2, output
    assert "gone.jsonl: not built: tokenizer: expected fake/gone@" in output
    built = load_prompts(tmp_path / "here.jsonl")
    check_exact(built, folder)
    assert built.held_out and built.header.block_sizes == (16, 32)
    after = prepare(source, [], planned=True)
    assert after.sets["here"] == built
    assert after.sets["gone"].header.origin == "planned, not built: fake/bench"


def test_a_set_that_is_there_is_kept_and_options_beside_a_recipe_are_refused(tmp_path, folder):
    """Baselines belong to the set that is there: a nightly job must not replace it."""
    file = write_questions(tmp_path)
    inside("prompts", "build", "recipe", "--profile", recipe_profile(tmp_path, folder), "--file", str(file))
    made = (tmp_path / "here.jsonl").read_bytes()
    more = recipe_profile(tmp_path, folder, per_stratum=3)
    code, output = inside("prompts", "build", "recipe", "--profile", more, "--file", str(file))
    assert code == 2 and "already exists with" in output
    assert (tmp_path / "here.jsonl").read_bytes() == made
    inside("prompts", "build", "recipe", "--profile", more, "--file", str(file), "--overwrite")
    assert (tmp_path / "here.jsonl").read_bytes() != made
    code, output = inside("prompts", "build", "recipe", "--profile", more, "--per-stratum", "9", "--seed", "3")
    assert code == 64 and "--per-stratum" in output


def test_plan_counts_with_what_a_recipe_will_make():
    recipe = PromptRecipe(dataset="a/b", revision="0" * 40, block_sizes=(16, 64), lookaheads=(3, 8), per_stratum=3)
    planned = planned_prompts(recipe)
    assert len(planned.cold) == len(planned.held_out) > 0
    for size in (16, 64):
        for lookahead in (3, 8):
            found = Counter(p.stratum_for(size, lookahead) for p in planned.cold)
            wanted = {classify(t.tokens, size, lookahead) for t in target_lengths(size, lookahead, 5, 24)}
            assert Stratum.LOOKAHEAD in wanted
            assert all(found[s] >= 3 for s in wanted)


# --- without a hub --------------------------------------------------------------------------------------------------


def test_plain_files_have_a_text_a_line_and_conversations_may_be_used_whole(tmp_path):
    (tmp_path / "q.txt").write_text("What?\n\n  Why?  \nWhat?\n", encoding="utf-8")
    assert read_texts(tmp_path / "q.txt", "prompt").rows == ((0, "What?"), (2, "Why?"))
    talk = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because."},
        {"role": "user", "content": "Really?"},
        {"role": "assistant", "content": "Yes."},
    ]
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": talk}, {"prompt": ["a", "b"]}, {"prompt": talk[1:2]}])
    whole = dict(read_texts(path, "prompt", "all").rows)
    assert [turn.role for turn in whole[0]] == ["system", "user", "assistant", "user"]
    assert (whole[1], whole[2]) == ("a", "Why?")
    assert read_texts(path, "prompt").rows == ((0, "Why?"), (1, "a"))


def test_a_recipe_names_a_data_set_or_a_file(tmp_path):
    base = {"block_sizes": (16,), "lookaheads": (3,), "per_stratum": 2}
    for wrong in (
        {},
        {"dataset": "a/b", "revision": "0" * 40, "file": "q"},
        {"dataset": "a/b"},
        {"file": "q", "revision": "0" * 40},
    ):
        with pytest.raises(ValidationError, match="expected"):
            PromptRecipe.model_validate({**base, **wrong})
    assert PromptRecipe.model_validate({**base, "file": "a/q.txt"}).source == "q.txt"


def test_without_a_hub_the_shipped_questions_take_the_place_of_a_data_set(tmp_path, folder):
    source = recipe_profile(tmp_path, folder)
    code, output = forked("prompts", "build", "recipe", "--profile", source, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    assert code == 2, "the second model is not here"
    assert "the data set fake/bench is not available" in output and "workload.recipe.file in the profile" in output
    header = load_prompts(tmp_path / "here.jsonl").header
    assert header.source.dataset == "questions.jsonl of this project, in place of fake/bench"


def test_padding_beyond_a_block_reaches_the_largest_number_of_blocks(folder, texts):
    few = texts._replace(rows=texts.rows[:8])
    near = build_natural_prompts(folder, few, Layout(block_size=16, max_blocks=9), 6).prompts
    far = build_natural_prompts(folder, few, Layout(block_size=16, max_blocks=9, padding=120), 6).prompts
    check_exact(far, folder)
    assert max(p.tokens for p in near.cold) < 8 * 16 <= max(p.tokens for p in far.cold)
