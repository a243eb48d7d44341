"""Notes of engines that several runs share."""

from __future__ import annotations

from pathlib import Path

from harness.history.layout import WITNESS
from harness.runner.kv_notes import notes_brought, notes_of_servers


def _append(folder: Path, text: str, name: str = "pd-none.decode.1.jsonl") -> None:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        stream.write(text)


def test_each_run_gets_the_layers_and_what_was_noted_meanwhile(tmp_path: Path) -> None:
    engines, first, second = tmp_path / "engines", tmp_path / "first", tmp_path / "second"
    with notes_brought(engines, first, "pd-none"):
        _append(engines, "layers\na\n")
    _append(engines, "healed\n")
    for text in ("b\n", "c\n"):
        with notes_brought(engines, second, "pd-none"):
            _append(engines, text)
            _append(engines, "layers\nother\n", f"pd-none.prefill.{text[0]}.jsonl")
    assert (first / WITNESS / "pd-none.decode.1.jsonl").read_text() == "layers\na\n"
    assert (second / WITNESS / "pd-none.decode.1.jsonl").read_text() == "layers\nb\nc\n"
    assert (second / WITNESS / "pd-none.prefill.c.jsonl").read_text() == "layers\nother\n"


def test_engines_of_another_group_are_not_of_this_run(tmp_path: Path) -> None:
    engines, run = tmp_path / "engines", tmp_path / "run"
    with notes_brought(engines, run, "pd-none"):
        _append(engines, "layers\na\n")
        _append(engines, "layers\nb\n", "pd-eagle3.decode.2.jsonl")
    assert [path.name for path in (run / WITNESS).iterdir()] == ["pd-none.decode.1.jsonl"]


def test_notes_of_a_failure_are_kept(tmp_path: Path) -> None:
    engines, run = tmp_path / "engines", tmp_path / "run"
    try:
        with notes_brought(engines, run, "pd-none"):
            _append(engines, "layers\na\n")
            raise KeyError
    except KeyError:
        pass
    assert (run / WITNESS / "pd-none.decode.1.jsonl").read_text() == "layers\na\n"


def test_engines_in_the_runs_own_folder_need_no_copy(tmp_path: Path) -> None:
    with notes_brought(tmp_path / WITNESS, tmp_path, "pd-none"):
        _append(tmp_path / WITNESS, "layers\na\n")
    assert (tmp_path / WITNESS / "pd-none.decode.1.jsonl").read_text() == "layers\na\n"
    with notes_brought(tmp_path / "none", tmp_path / "other", "pd-none"):
        pass
    assert not (tmp_path / "other").exists()


def test_notes_of_servers_become_those_of_a_group(tmp_path: Path) -> None:
    folder, run = tmp_path / "noted", tmp_path / "run"
    folder.mkdir()
    (folder / "decode.7.jsonl").write_text("layers\nbefore\n")
    (folder / "engine.7.jsonl").write_text("of nobody that was named\n")
    with notes_of_servers(folder, run, "pd-eagle3"), (folder / "decode.7.jsonl").open("a") as stream:
        stream.write("a\n")
    assert {path.name: path.read_text() for path in (run / WITNESS).iterdir()} == {
        "pd-eagle3.decode.7.jsonl": "layers\na\n"
    }


def test_events_are_brought_from_the_first_on(tmp_path):
    """What an engine told of its prefix cache before a trial says what it holds."""
    engines, first, second = (tmp_path / name for name in ("engines", "first", "second"))
    engines.mkdir()
    told = engines / "pd-none.decode-events.1.jsonl"
    told.write_text("header\nbefore\n")
    for run in (first, second, first):
        with notes_brought(engines, run, "pd-none"), told.open("a") as stream:
            stream.write(f"in {run.name}\n")
    found = [(run / WITNESS / told.name).read_text().split("\n")[:-1] for run in (first, second)]
    assert found == [
        ["header", "before", "in first", "in second", "in first"],
        ["header", "before", "in first", "in second"],
    ]
