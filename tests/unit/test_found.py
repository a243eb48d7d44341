"""``found/`` has each defect of vLLM that no public thread names, and what it says of vLLM's code is so."""

from __future__ import annotations

import importlib.util
import py_compile
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.profiles.known_defects import load_known
from harness.util.paths import REPOSITORY

FOUND = REPOSITORY / "found"
FOLDERS = sorted(folder for folder in FOUND.iterdir() if folder.is_dir() and not folder.name.startswith("__"))
SECTIONS = ["What happens", "What is expected", "How to see it", "Versions", "Cause", "Reported", "How it was found"]
EXPORTED = "of the environment that has vLLM"
"""What is in the programs that ``harness repro --export`` wrote."""
ROW = re.compile(r"^\| \[([\w-]+)\]\(\1/README\.md\) \|.*\|([^|]*)\|$", re.MULTILINE)
"""A row of the table: the folder first, the entries of known-defects.yaml last."""
QUOTE = re.compile(r"^`(vllm/\S+\.py):(\d+)`:\n\n```python\n(.*?)\n```", re.MULTILINE | re.DOTALL)
PLACE = re.compile(r"\b(\w+\.py):(\d+)")


def table() -> dict[str, list[str]]:
    """Return the known defects of each folder in the table."""
    return {name: re.findall(r"`([\w-]+)`", ids) for name, ids in ROW.findall((FOUND / "README.md").read_text())}


def misquoted(text: str, packages: Path) -> Iterator[str]:
    """Yield the places at which a text quotes other lines than an installed vLLM has there."""
    for path, line, quoted in QUOTE.findall(text):
        first, count = int(line) - 1, quoted.count("\n") + 1
        file = packages / path
        lines = file.read_text(encoding="utf-8").splitlines()[first : first + count] if file.is_file() else []
        if textwrap.dedent("\n".join(lines)) != quoted:
            yield f"{path}:{line}"


def test_every_defect_that_no_thread_names_has_a_folder():
    listed = load_known(REPOSITORY / "known-defects.yaml")
    assert listed is not None
    defects = [entry.defect for entry in listed.entries]
    written = {id_ for ids in table().values() for id_ in ids}
    assert written == {d.id for d in defects if not d.reported}
    assert any(d.reported for d in defects)


def test_the_table_has_every_folder():
    assert list(table()) == sorted(table()) and set(table()) == {folder.name for folder in FOLDERS}
    assert not [f for f in FOUND.rglob("*") if f.suffix in {".safetensors", ".zip"}]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
class TestFolder:
    def test_text_has_what_a_maintainer_needs(self, folder: Path):
        text = (folder / "README.md").read_text()
        headings = re.findall(r"^## (.+)", text, re.MULTILINE)
        assert text.startswith("# ") and [h for h in headings if h != "What would mend it"] == SECTIONS
        assert f"python found/{folder.name}/show.py" in text and "0.32.0" in text and "[output](output.txt)" in text
        quoted = {(path.rpartition("/")[2], line) for path, line, _ in QUOTE.findall(text)}
        assert quoted
        # A place that is not quoted is one of another version.
        for place in set(PLACE.findall(text)) - quoted:
            assert re.search(rf"0\.33\.0 does \(`{':'.join(place)}` there\)", text), place

    def test_output_is_that_of_a_defect_that_shows(self, folder: Path):
        lines = (folder / "output.txt").read_text().splitlines()
        assert lines[0] == f"$ python found/{folder.name}/show.py"
        assert lines[-2:] == ["THE DEFECT SHOWS", "exit code 1"]

    def test_script_is_short_and_has_plain_commands(self, folder: Path):
        text = (folder / "show.py").read_text()
        assert "vllm serve " in text and "models/probe/" in text
        assert len(text.splitlines()) <= (250 if EXPORTED in text else 150)

    def test_nothing_names_a_machine(self, folder: Path, tmp_path: Path):
        for file in (f for f in folder.iterdir() if f.suffix in {".md", ".py", ".txt"}):
            assert not re.search(r"(?<![\w.])/(work|tmp|root|home|usr|opt)/", file.read_text()), file.name
        py_compile.compile(str(folder / "show.py"), cfile=str(tmp_path / "x.pyc"), doraise=True)

    def test_links_lead_somewhere(self, folder: Path):
        for link in re.findall(r"\]\((?!https:)([^)#]+)", (folder / "README.md").read_text()):
            assert (folder / link).exists(), link

    def test_quoted_lines_are_those_of_the_installed_vllm(self, folder: Path):
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            pytest.skip("vLLM is not installed")
        packages = Path(spec.origin).parent.parent
        assert list(misquoted((folder / "README.md").read_text(), packages)) == []


def test_a_wrong_quote_is_seen(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/a.py").write_text("def f():\n    x = 1\n    y = 2\n")
    quote = "`vllm/a.py:{}`:\n\n```python\n{}\n```\n"
    assert list(misquoted(quote.format(2, "x = 1\ny = 2"), tmp_path)) == []
    for wrong in (quote.format(1, "x = 1"), quote.format(2, "x = 2"), quote.format(9, "x = 1")):
        assert list(misquoted(wrong, tmp_path)) == [f"vllm/a.py:{wrong[11]}"]
    assert list(misquoted(quote.format(2, "x = 1").replace("a.py", "b.py"), tmp_path)) == ["vllm/b.py:2"]
