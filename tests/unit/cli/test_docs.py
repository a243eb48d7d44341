"""Every command line of ``harness`` in the documentation is one that the program understands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from harness.errors import HarnessError
from harness.profiles.load import shipped_profile_names
from harness.util.paths import REPOSITORY
from tests.support.command_lines import ROOT, parsed

BELOW = [page for folder in ("docs", "found") for page in sorted((REPOSITORY / folder).rglob("*.md"))]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *BELOW]
PROGRAM = re.compile(r"((\w+=\S+ )*(uvx (--from \S+ )?|python -m )?harness|\./run_matrix\.sh)(?=$|\s)")
SHELL = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(?<!`)`([^`]+)`(?!`)")
STANDS_FOR = {"ID": "M1"}
"""Placeholders where the program takes only what there is."""


class Line(NamedTuple):
    """A command line in a page."""

    page: str
    number: int
    text: str
    named: bool = False
    """Whether it stands in a sentence, which may name a command without its arguments."""

    def __str__(self) -> str:
        return f"{self.page}:{self.number}"


def lines_of(page: str, text: str) -> Iterator[Line]:
    """Yield the command lines in shell blocks and in code within sentences, which may go on in the next line."""
    prose = text
    for block in SHELL.finditer(text):
        first = text.count("\n", 0, block.start(2)) + 1
        prose = prose.replace(block[0], "\n" * block[0].count("\n"), 1)
        # A line that goes on in the next one counts as one of two.
        lines = re.split(r"(?<!\\)\n", block[2])
        for n, line in enumerate(lines if block[1] == "bash" else ()):
            yield Line(page, first + n + "".join(lines[:n]).count("\\\n"), line.replace("\\\n", " "))
    for code in INLINE.finditer(prose):
        yield Line(page, prose.count("\n", 0, code.start()) + 1, " ".join(code[1].split()), named=True)


def commands_in(line: Line) -> Iterator[list[str]]:
    """Yield the arguments of each ``harness`` of a line, which may have pipes, redirections and a remark."""
    text = line.text.replace("<Tab>", "")
    if not PROGRAM.search(text):
        return
    lexer = shlex.shlex(text, posix=True, punctuation_chars="|;&><()")
    lexer.whitespace_split = True
    parts: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|;&><()"):
            parts.append([])
        else:
            parts[-1].append(STANDS_FOR.get(word, word))
    for words in parts:
        if found := PROGRAM.match(" ".join(words)):
            arguments = words[len(found[0].split()) :]
            yield ["run", *arguments] if words[0].endswith(".sh") else arguments


def require_known(name: str) -> None:
    """Refuse a profile that the documentation names and nobody has."""
    if not (name.isupper() or name in shipped_profile_names()):
        assert name.endswith((".yaml", ".yml")), f"no such profile: {name}"
        assert not name.startswith("examples/") or (REPOSITORY / name).is_file(), f"no such file: {name}"


def understand(line: Line, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let the program read the commands of a line; return how many there are."""
    monkeypatch.setattr("harness.cli.options.require_run", lambda folder: None)
    monkeypatch.setattr("harness.profiles.load.require_profile", lambda name: None)
    commands = list(commands_in(line))
    for words in commands:
        try:
            if words and words[0].startswith("--"):
                # What the program does at once, such as installing completion, is looked up only.
                known = {o for p in ROOT.params for o in p.opts} | {"--help"}
                assert words[0] in known, f"no such option: {words[0]}"
            elif not (line.named and is_name(words)) and words[-1] != "--help":
                require_known(parsed(words).params.get("profile") or "cpu")
        except (Exception, HarnessError) as error:
            message = getattr(error, "message", None) or str(error) or type(error).__name__
            pytest.fail(f"{line}: harness {shlex.join(words)}: {message}", pytrace=False)
    return len(commands)


def is_name(words: list[str]) -> bool:
    """Return whether words are the name of a command or of a group of commands."""
    group = ROOT
    for word in words:
        group = getattr(group, "commands", {}).get(word)
        if group is None:
            return False
    return True


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_a_page_has_only_command_lines_that_are_understood(page: Path, monkeypatch):
    for line in lines_of(str(page.relative_to(REPOSITORY)), page.read_text(encoding="utf-8")):
        understand(line, monkeypatch)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))
def test_links_to_pages_show_titles_and_no_file_names(page: Path):
    assert re.findall(r"\[`?[\w/.-]+\.md`?\]\(\S*", page.read_text(encoding="utf-8")) == []


def test_command_lines_are_found(monkeypatch):
    texts = {str(p): p.read_text(encoding="utf-8") for p in PAGES}
    found = sum(understand(line, monkeypatch) for name, text in texts.items() for line in lines_of(name, text))
    assert found > 200
    text = """Say `harness run
--quick`.

```bash
A=1 harness plan \\
  --full > x.yaml  # it's all
harness check | jq .
```
"""
    found = [(line.number, words) for line in lines_of("x.md", text) for words in commands_in(line)]
    assert found == [(5, ["plan", "--full"]), (7, ["check"]), (1, ["run", "--quick"])]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("`harness rum`", "x.md:1: harness rum: "),
        ("\n\n`harness run --frofile cpu`", "x.md:3: harness run --frofile cpu: No such option"),
        ("`harness run --resume`", "Option '--resume' requires an argument"),
        ("`harness run -p cpuu`", "no such profile: cpuu"),
        ("`harness run --mutant M999`", "M999"),
        ("```bash\nharness up\n```", "x.md:2: harness up: Missing parameter: cell"),
        ("```bash\n./run_matrix.sh --quik\n```", "No such option"),
        ("`harness --versoin`", "no such option: --versoin"),
    ],
)
def test_what_is_not_understood_is_said_with_its_place(text, words, monkeypatch):
    with pytest.raises(pytest.fail.Exception, match=re.escape(words)):
        for line in lines_of("x.md", text):
            understand(line, monkeypatch)
