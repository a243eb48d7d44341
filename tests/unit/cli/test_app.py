"""What the program says when something fails below it, and what it leaves."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from harness.cli.app import main
from harness.cli.investigate import TriedOptions
from harness.cli.options import make_console
from harness.errors import NotARunError, UsageError
from harness.runner.run import removed_if_empty
from harness.util.paths import REPOSITORY
from tests.support.program import inside, keeping_signals


def said(error: Exception, capsys, code: int = 64) -> str:
    program = typer.Typer()

    @program.command()
    def fail() -> None:
        raise error

    with keeping_signals(), pytest.MonkeyPatch.context() as patched, pytest.raises(SystemExit) as end:
        patched.setattr("sys.argv", ["harness"])
        main(program)
    assert end.value.code == code
    return capsys.readouterr().err


def test_a_library_that_cannot_load_a_file_is_quoted(capsys):
    text = said(OSError("Can't load tokenizer\nfor 'models/mine'"), capsys)
    assert text == "harness: what the command needs cannot be read: Can't load tokenizer for 'models/mine'\n"
    text = said(OSError(errno.ENOSPC, "No space left on device", "/full/run.json"), capsys)
    assert "(No space left on device: /full/run.json); choose a writable folder" in text


@pytest.mark.parametrize(
    ("command", "code", "said"),
    [
        ("list cells | true", 128 + signal.SIGPIPE, ""),
        ("check /nowhere 2>&1 >&- | true", 128 + signal.SIGPIPE, ""),
        ("list cells > /dev/full", 2, "harness: the output cannot be written: No space left on device\n"),
        ("check /nowhere 2> /dev/full", 2, ""),
    ],
)
def test_output_that_cannot_be_written_is_no_regression(command: str, code: int, said: str):
    script = f"set -o pipefail; {sys.executable} -m harness {command}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode, done.stderr) == (code, said)


def test_a_terminal_without_our_characters_gets_their_numbers():
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-c", "import typer; from harness.cli.app import main; main(lambda: print('\u25c6'))"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert (done.returncode, done.stdout) == (0, "\\u25c6\n")


def test_an_error_that_nobody_expected_is_no_regression(capsys):
    assert "ValueError: odd" in said(ValueError("odd"), capsys, code=2)
    assert "Abort" in said(EOFError(), capsys, code=2)


def test_a_run_that_could_not_begin_leaves_no_folder(tmp_path: Path):
    code, words = inside(
        "run", "-c", "single-none", "-s", "cold", "--engine-python", "/nowhere/python", "--out", str(tmp_path)
    )
    assert code == 2 and "could not be run" in words
    assert list(tmp_path.iterdir()) == []


def test_what_was_recorded_stays(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    with removed_if_empty(folder):
        (folder / "run.json").touch()
    assert folder.is_dir()
    (folder / "run.json").unlink()
    with pytest.raises(UsageError), removed_if_empty(folder):
        raise UsageError("nothing to run")
    assert not folder.exists()


@pytest.fixture
def latest(tmp_path: Path, monkeypatch) -> Path:
    run = tmp_path / "latest"
    run.mkdir()
    (run / "run.json").touch()
    monkeypatch.setattr("harness.cli.investigate.LATEST", run)
    return run


def test_a_finding_alone_is_one_of_the_latest_run(latest: Path):
    assert TriedOptions("pd-eagle3/transfer", None, None, None, "cold").origin() == (latest, "pd-eagle3/transfer")
    assert TriedOptions(str(latest), "x", None, None, "cold").origin() == (latest, "x")
    assert TriedOptions(None, None, "pd-none", "aligned", "cold").origin() == (None, None)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (
            (None, None, None, None, "cold"),
            "name what to try, [RUN_DIR] FINDING or --cell and --prompt; found neither",
        ),
        (("RUN", None, None, None, "cold"), "found no finding of"),
        (("RUN", "x", "pd-none", None, "cold"), "exclude each other"),
        ((None, None, "pd-none", None, "cold"), "--cell needs --prompt ID or --scenario NAME"),
        ((None, None, "pd-none", "copy-096-19", "refill"), "leave out --prompt or --scenario"),
    ],
)
def test_neither_or_both_are_refused(latest: Path, given, words):
    with pytest.raises(UsageError) as caught:
        TriedOptions(*(str(latest) if value == "RUN" else value for value in given)).origin()
    assert words in str(caught.value)


def test_a_run_that_is_none_is_refused(tmp_path: Path):
    with pytest.raises(NotARunError):
        TriedOptions(str(tmp_path / "nowhere"), "x", None, None, "cold").origin()


@pytest.mark.parametrize("command", ["repro", "bisect"])
def test_repro_and_bisect_take_the_same(command):
    ends = ["--good", "0.30.0", "--bad", "0.32.0"] if command == "bisect" else []
    code, words = inside(command, *ends)
    assert code == 64 and "name what to try, [RUN_DIR] FINDING" in words


@pytest.mark.parametrize(
    ("given", "ignored"),
    [
        (["FINDING", "--profile", "cpu"], "--profile"),
        (["FINDING", "--prompt", "aligned", "-s", "cold"], "--prompt and --scenario"),
        (["FINDING", "--starts", "4"], "--starts"),
        (["--cell", "pd-none", "--prompt", "first", "--export", "x.py", "--out", "x"], "--out"),
    ],
)
def test_what_repro_would_ignore_is_refused(latest: Path, given, ignored):
    code, words = inside("repro", *given)
    assert code == 64 and f"so {ignored} would be ignored" in words
    if ignored == "--profile":
        assert inside("bisect", *given, "--good", "0.30.0", "--bad", "0.32.0") == (code, words)


def test_an_exported_case_replaces_nothing_and_makes_no_folder(tmp_path: Path):
    case = ["repro", "--cell", "pd-none", "--prompt", "first", "--export"]
    (tmp_path / "x.md").touch()
    (tmp_path / "y.py").touch()
    for file, words in (
        ("x.py", "x.md exists already; name another"),
        ("y.py", "exists already"),
        ("no/z.py", "there is no folder"),
    ):
        code, said = inside(*case, str(tmp_path / file), "--export-issue")
        assert code == 64 and words in " ".join(said.split())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.md", "y.py"]


@pytest.mark.parametrize(
    "command",
    [
        ("fuzz", "--minutes", "inf"),
        ("fuzz", "--minutes", "1441"),
        ("soak", "--minutes", "inf"),
        ("soak", "--minutes", "1e300"),
        ("soak", "--minutes", "nan"),
        ("ci", "matrix", "--minutes-per-step", "inf"),
        ("aa", "--repeat", "99999999999"),
    ],
)
def test_what_would_never_end_is_refused(command):
    code, words = inside(*command)
    assert code == 64 and "Invalid value for " in words and command[-2] in words


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (("report", "RUN", "--compare", "RUN", "--out", "{0}/x.html"), "this is the name of a file"),
        (("trend", "{0}", "--out", "{0}/x.HTML"), "this is the name of a file"),
        (("check", "RUN", "--out", "{0}/taken"), "this is the name of a file"),
        (("merge", "RUN", "--out", "{0}/x.html"), "this is the name of a file"),
        (("run", "-c", "single-none", "--out", "{0}/x.html"), "this is the name of a file"),
        (("report", "RUN", "--compare", "RUN", "--out", "{0}/none/x"), "there is no folder {0}/none; make it"),
        (("trend", "{0}", "--out", "{0}/none/x"), "there is no folder {0}/none; make it"),
        (("check", "RUN", "--out", "{0}/none/x"), "there is no folder {0}/none; make it"),
    ],
)
def test_out_is_a_folder_that_lies_in_one(tmp_path: Path, command: tuple[str, ...], words: str):
    (tmp_path / "taken").touch()
    run = str(REPOSITORY / "tests" / "golden" / "runs" / "M1")
    code, said = inside(*(run if part == "RUN" else part.format(tmp_path) for part in command))
    assert code == 64 and words.format(tmp_path) in said, said
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


def test_pages_of_several_runs_lie_in_the_folder(tmp_path: Path):
    runs = REPOSITORY / "tests" / "golden" / "runs"
    code, said = inside("report", str(runs / "M1"), "--compare", str(runs / "M1"), "--out", str(tmp_path / "new"))
    assert code == 0 and (tmp_path / "new" / "compare.html").is_file(), said


@pytest.mark.parametrize(("columns", "width"), [("60", 60), ("200", 200), ("", 160), ("wide", 160), ("3", 160)])
def test_piped_output_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch, columns: str, width: int):
    monkeypatch.setenv("COLUMNS", columns)
    assert make_console().width == width
