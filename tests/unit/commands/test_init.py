"""``harness init``: what it writes can be planned without a model, and what does not fit together is one sentence."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.commands.init import InitOptions, new_profile
from harness.errors import DataError, EnvironmentFault, UsageError
from harness.judging.power import sensitivity
from harness.profiles.hub import Hub, Remote
from harness.profiles.load import read_profile
from harness.profiles.methods import KNOWN_METHODS, traits_of
from harness.util.paths import REPOSITORY
from harness.workload.prepare import prepare
from tests.support.program import inside

COMMIT = "0e9e39f249a16976918f6564b8830bc894c89659"
PROBE = REPOSITORY / "models" / "probe"
WANTED = InitOptions("Qwen/Qwen3-4B", "me/x", "eagle3", 5, "gpu", None)


class Answers(Hub):
    """A hub that knows one commit of everything, or cannot be reached."""

    def __init__(self, commit: str | None, folder: Path) -> None:
        super().__init__("http://127.0.0.1:9", folder)
        self._commit = commit

    def look(self, reference, role):
        if self._commit is None:
            raise EnvironmentFault("the hub is away")
        return Remote(self._commit, 1, 1, False)


def written(tmp_path, wanted: InitOptions = WANTED, commit: str | None = COMMIT) -> tuple[Path, tuple[str, ...]]:
    path = tmp_path / "mine.yaml"
    found = new_profile(wanted, path, Answers(commit, tmp_path))
    path.write_text(found.text)
    return path, found.notes


def test_models_are_pinned_to_what_the_hub_has_now(tmp_path):
    path, notes = written(tmp_path)
    profile = read_profile(str(path))
    assert notes == ()
    assert (profile.target.repo, profile.target.pinned) == ("Qwen/Qwen3-4B", COMMIT)
    assert profile.methods[1].drafter.pinned == COMMIT
    assert (profile.methods[1].draft_tokens, profile.workload.recipe.lookaheads) == (5, (5,))


def test_without_the_hub_names_stay_and_it_says_how_to_pin_them(tmp_path):
    path, notes = written(tmp_path, commit=None)
    profile = read_profile(str(path))
    assert (profile.target.revision, profile.target.pinned) == ("main", None)
    assert len(notes) == 2
    assert f"append @COMMIT to its name; `harness models --profile {path}` shows it" in notes[0]
    assert "the hub is away" in notes[0]
    assert f"`harness models --profile {path}` shows" in path.read_text()


def test_a_revision_that_was_named_is_kept(tmp_path):
    path, _ = written(tmp_path, WANTED._replace(target=f"Qwen/Qwen3-4B@{COMMIT}"), commit=None)
    assert read_profile(str(path)).target.pinned == COMMIT


@pytest.mark.parametrize("device", ["cpu", "gpu"])
@pytest.mark.parametrize("method", ["none", *KNOWN_METHODS])
def test_what_is_written_can_be_planned_and_could_pass(tmp_path, method, device):
    drafter = "me/x" if traits_of(method, {}).drafter == "needed" else None
    path, _ = written(tmp_path, InitOptions("Qwen/Qwen3-4B", drafter, method, None, device, None))
    prepared = prepare(str(path), [], planned=True)
    assert {c.method.kind for c in prepared.plan.cells} == {"none", method}
    assert {c.topology for c in prepared.plan.cells} == {"pd", "single"}
    assert sensitivity(prepared).blind() == {}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": "Qwen3-4B"}, "--target Qwen3-4B is no folder, and no name on the hub"),
        ({"target": "Qwen/Qwen3-4B@0e9e39f"}, "expected all 40 lower-case hex digits"),
        ({"drafter": None}, "--method eagle3 needs --drafter MODEL"),
        ({"method": "none"}, "--drafter needs --method NAME"),
        ({"method": "none", "drafter": None}, "-k needs --method NAME"),
        ({"method": "ngram"}, "--method ngram drafts without a model; leave --drafter me/x out"),
        ({"method": "eagel3"}, "--method eagel3: `init` knows no such method; did you mean eagle3 or eagle?"),
        ({"drafts": 0}, "-k 0: expected 1 to 16 drafts a step"),
        ({"drafts": 17}, "-k 17: expected 1 to 16 drafts a step"),
        ({"drafts": 16, "block_size": 16}, "--block-size 16: expected more than the 16 KV slots that eagle3 reserves"),
        (
            {"block_size": 20, "device": "cpu"},
            "--block-size: expected a multiple of 32, as vLLM's attention on cpu wants, found 20; give 32",
        ),
        ({"block_size": 24}, "a multiple of 16, as vLLM's attention on gpu wants, found 24; give 16 or 32"),
        ({"name": "My Model"}, "--name My Model: expected lower-case letters, digits and dashes, such as my-model"),
        ({"name": "cpu"}, "--name: expected one that no shipped profile has, found cpu; give another, such as my-cpu"),
        ({"target": "me/smollm2"}, "found smollm2; give another, such as my-smollm2"),
        ({"drafter": "Qwen/Qwen3-4B"}, "drafter of eagle3: expected a model that was trained to draft for the target"),
        ({"target": f"{PROBE}/eagle3"}, "which can only draft (LlamaForCausalLMEagle3 in its config.json)"),
        (
            {"target": f"{PROBE}/target", "drafter": f"{PROBE}/eagle3/../target", "tokenizer": f"{PROBE}/tokenizer"},
            "found the target itself",
        ),
    ],
)
def test_what_does_not_fit_together_is_a_sentence(tmp_path, changes, words):
    with pytest.raises(UsageError) as caught:
        written(tmp_path, WANTED._replace(**changes))
    assert words in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_tokenizer_is_refused_and_one_can_be_named(tmp_path):
    probe = str(PROBE / "target")
    wanted = InitOptions(probe, None, "ngram", None, "cpu", None)
    with pytest.raises(UsageError, match=r"the folder has no tokenizer .*; name one with --tokenizer MODEL"):
        written(tmp_path, wanted)
    path, _ = written(tmp_path, wanted._replace(tokenizer=str(REPOSITORY / "models" / "probe" / "tokenizer")))
    assert str(read_profile(str(path)).target) == probe


def test_command_prints_or_writes_and_never_overwrites(tmp_path):
    given = ["init", "--target", f"Qwen/Qwen3-4B@{COMMIT}", "--method", "ngram"]
    code, output = inside(*given)
    assert code == 0 and "kind: ngram" in output
    out = tmp_path / "mine.yaml"
    code, output = inside(*given, "--out", str(out))
    assert (code, out.is_file()) == (0, True)
    assert f"harness run -p {out} --prepare" in output
    before = out.read_text()
    code, output = inside(*given, "-k", "4", "--out", str(out))
    assert (code, out.read_text()) == (64, before)
    assert "this file exists already; name another one" in output
    code, output = inside(*given, "--device", "tpu")
    assert (code, "expected cpu or gpu" in output) == (64, True)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("q.jsonl", "{", "--questions {}, line 1: expected a JSON object"),
        ("q.jsonl", '{"text": "a"}', "--questions {}: expected a column 'prompt', found text; call the one with the"),
        ("q.csv", "a,b", "--questions {}: expected the ending .jsonl"),
        ("q.jsonl", '{"prompt": 3}', "found none; call the one with the texts prompt"),
    ],
)
def test_what_is_wrong_with_questions_names_the_option_that_gave_them(tmp_path, name, content, words):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError) as refused:
        written(tmp_path, WANTED._replace(questions=path))
    assert words.format(path) in str(refused.value) and "--column" not in str(refused.value)


def test_models_and_questions_beside_the_profile_are_named_from_there(tmp_path):
    """So that the folder can be moved."""
    probe = REPOSITORY / "models" / "probe"
    for name in ("target", "tokenizer"):
        (tmp_path / "models").mkdir(exist_ok=True)
        shutil.copytree(probe / name, tmp_path / "models" / name)
    (tmp_path / "q.txt").write_text("What is a kite?\n\nWho wrote Hamlet?\n")
    models = tmp_path / "models"
    wanted = InitOptions(str(models / "target"), None, "none", None, "cpu", None, None, str(models / "tokenizer"))
    path, _ = written(tmp_path, wanted._replace(questions=tmp_path / "q.txt"))
    text = path.read_text()
    assert "target: ./models/target" in text and "tokenizer: ./models/tokenizer" in text and "file: ./q.txt" in text
    assert "mt_bench" not in text
    profile = read_profile(str(path))
    assert profile.workload.recipe.file == tmp_path / "q.txt" and profile.workload.recipe.texts == 2
    assert profile.expected.single_request_s < 1, "a guess by the size of the weights"
    (tmp_path / "q.txt").write_text("Alone?\n")
    path.unlink()
    with pytest.raises(UsageError, match="1 of the two texts that are needed"):
        written(tmp_path, wanted._replace(questions=tmp_path / "q.txt"))
