"""What an addition costs, by mypy, ruff and pytest themselves: in a toy checkout, and walked in a copy of this one."""

from __future__ import annotations

import subprocess

import pytest

from harness.util.paths import REPOSITORY
from tools.recipes import __main__ as program
from tools.recipes.places import Renewed, Written
from tools.recipes.walk import Recipe, complaints_of_tools, copy_of, walk

TOY = {
    "pyproject.toml": '[tool.mypy]\nfiles = ["kinds.py"]\nstrict = true\n[tool.ruff.lint]\nselect = ["F"]\n',
    "kinds.py": "NAMES = ['a']\n",
    "page.md": "a\n",
    "sizes.txt": "1\n",
    "sizes.py": "import kinds\n\nprint(len(kinds.NAMES))\n",
    "test_kinds.py": """
from pathlib import Path
import kinds

def test_page():
    assert kinds.NAMES == Path("page.md").read_text().split(), "page.md: expected a line for each name"

def test_sizes():
    assert Path("sizes.txt").read_text() == f"{len(kinds.NAMES)}\\n", "renew it: python sizes.py > sizes.txt"
""",
}
RECIPE = Recipe(
    "toy",
    (
        Written("kinds.py", "the name", (), "NAMES += [B]\n"),
        Written("kinds.py", "its value", ('"B"',), "B = 'b'\n", before="NAMES +="),
        Written("page.md", "its line", (), "b\n"),
        Renewed("how many", "python sizes.py > sizes.txt", "sizes.txt"),
        Written("notes.md", "what nobody asks for", (), "b\n"),
    ),
    ("test_kinds.py",),
    most_files=3,
    most_renewed=1,
)


@pytest.fixture
def toy(tmp_path):
    made = tmp_path / "toy"
    made.mkdir()
    for name, text in TOY.items():
        (made / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=made, check=True)
    return copy_of(made, tmp_path / "copy")


def test_tools_name_the_places_of_a_toy(toy, tmp_path):
    found = walk(RECIPE, toy, complaints_of_tools(tmp_path / "mypy"))
    named = {(s.place.what, s.named_by.tool) for s in found.steps if s.named_by}
    assert named == {("its value", "mypy"), ("its line", "tests"), ("how many", "tests")}
    assert [s.place.what for s in found.unnamed] == ["what nobody asks for"]
    assert (found.edited, found.renewed) == (("kinds.py", "notes.md", "page.md"), ("sizes.txt",))
    assert (toy / "sizes.txt").read_text() == "2\n"


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", program.RECIPES)
def test_every_place_of_a_recipe_is_named_by_a_tool(name):
    (found,) = program.walked([program.RECIPES[name]])
    assert found.holds, program.told(found)
    row = program.table([found]).splitlines()[-1]
    assert row in (REPOSITORY / "CONTRIBUTING.md").read_text(), f"CONTRIBUTING.md: expected the row {row}"
