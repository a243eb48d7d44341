"""What ``harness baseline record`` says of cells that a limit cut off, and that it writes the others."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

from harness.baselines.build import NewBaselines, Recorded
from harness.cli.baseline import _print_made
from harness.commands import baseline
from harness.engines.flags import NO_FLAGS
from harness.util.signals import interrupt


def test_the_cells_that_are_missing_are_named_in_a_command(capsys):
    why = "ended by a TERM signal (a time limit or job control)"
    made = NewBaselines(
        (Recorded("none", Path("b/none.json"), 86, ("new: 86 prompts",)),),
        {"single-eagle3": f"{why}; 12 of 86 prompts answered"},
        {"single-none": f"{why}; 3 of 86 prompts answered"},
    )
    _print_made(made, "cpu", ["--baselines", "b"])
    assert capsys.readouterr().out.splitlines() == [
        "none: 86 prompts: b/none.json",
        "  new: 86 prompts",
        f"single-eagle3: no baseline was recorded: {why}; 12 of 86 prompts answered",
        f"single-none: no noise (A/A) was measured, its repetition is not complete: {why}; 3 of 86 prompts answered",
        "next: harness baseline record -p cpu -c single-eagle3 -c single-none --baselines b",
    ]
    _print_made(NewBaselines(made.recorded, {}, {}), "cpu", [])
    assert "next:" not in capsys.readouterr().out


def test_a_second_signal_does_not_keep_complete_cells_from_being_written(tmp_path, monkeypatch):
    written = []

    def write(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        written.append(True)
        return "made"

    cut_off = SimpleNamespace(run=SimpleNamespace(interrupted=True))
    (tmp_path / "run" / "repetition-01").mkdir(parents=True)
    monkeypatch.setattr(baseline, "_require_no_loss", lambda *_: None)
    monkeypatch.setattr(baseline, "new_baselines", write)
    monkeypatch.setattr("harness.runner.run.new_folder", lambda *_: tmp_path / "run")
    monkeypatch.setattr("harness.runner.repetitions.record_repetitions", lambda *_, **__: (cut_off, cut_off))
    prepared, server = SimpleNamespace(profile=None, sets={}), SimpleNamespace(environment=lambda _: None)
    old = signal.signal(signal.SIGTERM, interrupt)
    try:
        made = baseline.record(prepared, tmp_path, None, None, 2, tmp_path / "b", NO_FLAGS, server)
    finally:
        signal.signal(signal.SIGTERM, old)
    assert made == "made" and written == [True]
