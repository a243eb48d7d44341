"""Help texts: panels, examples that are understood, nothing that a newcomer has to decode."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from harness.cli.app import app
from harness.cli.examples import EXAMPLES
from harness.cli.help import epilog
from harness.util.paths import REPOSITORY
from tests.support.command_lines import ROOT, parsed
from tests.support.program import inside


def commands(group=ROOT, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*before, name))
        else:
            yield (*before, name)


COMMANDS = list(commands())
GROUPS = sorted({c[:-1] for c in COMMANDS})


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")


def test_every_command_has_examples_and_no_other_has():
    assert {" ".join(c) for c in COMMANDS} == set(EXAMPLES)


@pytest.mark.parametrize(("name", "example"), [(n, e) for n, lines in EXAMPLES.items() for e in lines])
def test_an_example_is_understood(name, example, monkeypatch):
    # There is no reports/RUN and no my-profile.yaml.
    monkeypatch.setattr("harness.cli.options.require_run", lambda folder: None)
    monkeypatch.setattr("harness.profiles.load.require_profile", lambda name: None)
    assert example.startswith(name)
    words = shlex.split(example.partition("|")[0], comments=True)
    if ">" in words:
        words = words[: words.index(">")]
    assert parsed(words).command.name == name.split()[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("report --format xml", "'--format': 'xml' is not one of 'csv', 'openmetrics'."),
        ("ci engines 0.33.0 --device tpu", "'--device': 'tpu' is not one of 'cpu', 'gpu'."),
        ("aa --repeat many", "expected a valid integer"),
        ("aa --repeat 1", "expected a value greater than or equal to 2"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_refused_in_plain_words(words, said):
    code, shown = inside(*words.split())
    assert code == 64
    assert said in " ".join(shown.replace("│", "").split())
    assert not any(leaked in shown for leaked in ("Value error", "Input should", "unable to parse"))


def test_choices_are_shown():
    assert "cpu|gpu" in inside("ci", "engines", "--help")[1]


def documented(page: str) -> list[str]:
    """The commands of a page: lines of its shell blocks, and what stands between backquotes."""
    text = (REPOSITORY / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"(?:^|`|\| )harness ([a-z][^`\n#]*)", text, re.MULTILINE)


def test_every_row_that_was_not_run_names_a_command_or_says_why_not():
    page = (REPOSITORY / "docs" / "evidence" / "not-run.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(rows) > 10
    assert all(re.search(r"`(harness |docker |ci/gpu/\w)|any run|none:", row.split("|")[3]) for row in rows[1:])
    assert len(documented("evidence/not-run.md")) > 10


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_do_not_wrap_on_a_terminal_of_80_columns(name):
    # A space on each side is the margin of the help.
    assert max(map(len, epilog(name).replace("\\[", "[").splitlines())) <= 78


def test_what_is_no_command_is_not_understood():
    with pytest.raises(Exception, match="No such option"):
        parsed(["run", "--frofile", "cpu"])


@pytest.mark.parametrize("command", [*COMMANDS, *GROUPS])
def test_help_fits_and_names_no_python_type(command):
    code, _ = inside(*command, "--help")
    assert code == 0
    text = CliRunner().invoke(app, [*command, "--help"]).output
    assert max(map(len, text.splitlines())) <= 80
    for word in ("<bool>", "<str>", "<list", "<path>", "<int", "<float", "mutant", "Mutant"):
        assert word not in text.replace("--mutant", ""), word
    if command in COMMANDS:
        assert "Examples" in text


def test_panels_come_in_the_order_of_work():
    text = CliRunner().invoke(app, ["--help"]).output
    panels = ["Run ─", "Judge ─", "Investigate ─", "Trust ─", "Data ─", "Operate ─"]
    assert [text.index(p) for p in panels] == sorted(text.index(p) for p in panels)
    assert next(iter(ROOT.commands)) == "run"


def test_a_paragraph_is_not_broken_where_its_source_is():
    for command in COMMANDS:
        found = ROOT
        for name in command:
            found = found.commands[name]
        assert all("\n" not in part for part in found.help.split("\n\n")), command
    assert "whether KV moved" in " ".join(CliRunner().invoke(app, ["up", "--help"]).output.split())


@pytest.mark.parametrize(("option", "letter"), [("--profile", "-p"), ("--cell", "-c"), ("--scenario", "-s"),
                                                ("--mutant", "-m"), ("--repeat", "-n")])  # fmt: skip
def test_an_option_has_one_short_form_everywhere(option, letter):
    for command in COMMANDS:
        found = ROOT
        for name in command:
            found = found.commands[name]
        for parameter in found.params:
            if option in parameter.opts:
                assert (parameter.opts[0], parameter.opts[-1]) == (option, letter), command
            else:
                assert letter not in parameter.opts, command


@pytest.mark.parametrize(
    ("asked", "instead"),
    [
        (("help",), ("--help",)),
        (("help", "run"), ("run", "--help")),
        (("help", "list", "faults"), ("list", "faults", "--help")),
        (("list", "mutants"), ("list", "faults")),
    ],
)
def test_what_people_try_first_is_understood(asked, instead):
    assert inside(*asked) == inside(*instead) and inside(*asked)[0] == 0


def test_faults_may_be_named_alone_or_by_either_option():
    words = "there is no such fault; did you mean M9"
    for given in (("selftest", "M99"), ("selftest", "--fault", "M99"), ("run", "--mutant", "M99")):
        code, said = inside(*given)
        assert code == 64 and words in said


def test_what_stands_for_a_vllm_is_the_same_in_message_and_help():
    code, said = inside("ci", "engines", "banana")
    assert code == 64
    shown = " ".join(inside("ci", "engines", "--help")[1].replace("│", " ").split())
    for kind in ("version", "wheel", "commit", "interpreter"):
        assert kind in said and kind in shown
