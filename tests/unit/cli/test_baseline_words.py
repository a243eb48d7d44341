"""What ``harness baseline record`` says of cells that a limit cut off, and that it writes the others."""

import os
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.baselines.build import NewBaselines, Recorded
from harness.cli.baseline import _print_made
from harness.commands import baseline
from harness.engines.flags import NO_FLAGS
from harness.errors import UsageError
from harness.util.signals import ignored, interrupt
from tests.support.builders import history, observation, with_profile, written_run


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
        f"single-none: A/A noise was not measured, because the repetition is incomplete: {why}; "
        "3 of 86 prompts answered",
        "next: harness baseline record -p cpu -c single-eagle3 -c single-none --baselines b",
    ]
    _print_made(NewBaselines(made.recorded, {}, {}), "cpu", [])
    assert "next:" not in capsys.readouterr().out


def test_accepting_a_run_whose_profile_is_elsewhere_asks_for_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = written_run(tmp_path / "run", with_profile(history([observation("single-none")]), source="mine.yaml"))
    with pytest.raises(UsageError, match=r"was recorded with profile mine\.yaml, which is not here; .* --profile"):
        baseline.accept(run, None, None, tmp_path)


def made_by_signals(tmp_path, monkeypatch, *made):
    """What is recorded by a command that a signal cuts off, and another while it writes; ``made`` at each writing."""
    left = list(made)

    def write(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        return left.pop(0)

    def recorded(*_, options, **__):
        # As the runner does, whose handling of signals the tests of it show.
        with ignored():
            options.before_ending((cut_off, cut_off))
        return cut_off, cut_off

    cut_off = SimpleNamespace(run=SimpleNamespace(interrupted=True))
    (tmp_path / "run" / "repetition-01").mkdir(parents=True)
    monkeypatch.setattr(baseline, "_require_no_loss", lambda *_: None)
    monkeypatch.setattr(baseline, "new_baselines", write)
    monkeypatch.setattr("harness.runner.run.new_folder", lambda *_: tmp_path / "run")
    monkeypatch.setattr("harness.runner.repetitions.record_repetitions", recorded)
    prepared, server = SimpleNamespace(profile=None, sets={}), SimpleNamespace(environment=lambda _: None)
    old = signal.signal(signal.SIGTERM, interrupt)
    try:
        found = baseline.record(prepared, tmp_path, None, None, 2, tmp_path / "b", NO_FLAGS, server)
    finally:
        signal.signal(signal.SIGTERM, old)
    assert left == []
    return found


def test_complete_cells_are_written_before_the_engines_end_whatever_signal_follows(tmp_path, monkeypatch):
    none, eagle3 = (Recorded(m, Path(f"b/{m}.json"), 86, (f"new: {m}",)) for m in ("none", "eagle3"))
    early = NewBaselines((none,), {"single-eagle3": "the run left it pending"}, {})
    # EAGLE3 became complete while the engines were being ended.
    late = NewBaselines((none._replace(change=()), eagle3), {}, {})
    assert made_by_signals(tmp_path, monkeypatch, early, late) == NewBaselines((none, eagle3), {}, {})
