"""Packages of the extra ``run``: named once more in pyproject.toml, and in the sentence where one is missing."""

from __future__ import annotations

import re
import sys
import tomllib

import pytest

from harness.cli.app import main
from harness.errors import EnvironmentFault
from harness.profiles.hub import Hub
from harness.util import extras
from harness.util.paths import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]


def name(requirement: str) -> str:
    return re.split(r"[\[<>=~! ]", requirement)[0].replace("-", "_")


def test_packages_to_run_are_those_of_the_extra():
    assert sorted(map(name, PROJECT["optional-dependencies"]["run"])) == sorted([*extras.RUN, "py_spy"])
    assert extras.lacking_to_run() == []
    assert not set(map(name, PROJECT["dependencies"])) & set(extras.RUN)


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("httpx._client", "pip install 'kv-acceptance-harness[run]'"),
        # No package of an extra: it is not explained away, and is no regression either.
        ("harness.gone", "ModuleNotFoundError: No module named 'harness.gone'"),
    ],
)
def test_missing_package_of_an_extra_is_said_in_a_sentence(capsys: pytest.CaptureFixture[str], missing, words):
    def program() -> None:
        raise ModuleNotFoundError(f"No module named '{missing}'", name=missing)

    with pytest.raises(SystemExit) as end:
        main(program)
    assert end.value.code == 2 and words in capsys.readouterr().err


def test_hub_without_its_library_has_nothing_cached_and_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    hub = Hub()
    assert hub.cache == tmp_path / "hub" and not hub.has_token
    with pytest.raises(EnvironmentFault, match=r"huggingface_hub.*kv-acceptance-harness"):
        hub._api()
