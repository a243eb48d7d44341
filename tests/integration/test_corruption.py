"""A thousand and more damaged files: a sentence, or a verdict that is not green, or the evidence as it was.

Never a traceback, never a PASS on other evidence than what was recorded, and never long.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import NamedTuple

import pytest

from benchmarks.memory import forget_peak, peak_mib
from harness.errors import HarnessError
from harness.history.folder import History, load_history
from harness.history.layout import LINES, SCORES
from harness.history.records import COLD
from harness.history.verdict import Verdict
from harness.judging.findings import Judgement
from harness.judging.references import References
from harness.profiles.known_defects import load_known
from harness.profiles.load import load_profile
from harness.prompts.model import load_prompts
from harness.reports.judge_run import assess, write_reports
from harness.runner.run import prepared_recorder
from harness.util import clock
from harness.util.paths import REPOSITORY
from harness.workload.prepare import prepare
from tests.support.builders import changed_profile, garbled
from tests.support.corrupt import Damage, Form, damages
from tests.support.engines import ENVIRONMENT
from tests.support.fake_answers import perform, score
from tests.support.reseal import reseal
from tests.support.run_files import answers, scores

pytestmark = pytest.mark.computes

LIMIT_S = 20.0
"""For one file, on a busy machine."""
REPORTED = 10
"""Of so many odd runs that can be read, one is reported too: a report takes a second on a busy machine."""
MOST_MIB = 400
"""That the process may grow by over a file's damages."""
SAME_EVIDENCE = "PASS on the same evidence"


@contextmanager
def within(seconds: float) -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError(f"not done after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def record(folder: Path, wrong: bool = False) -> Path:
    """A small run of fake engines that passes, or has one wrong token."""
    prepared = prepare("cpu", ["single-none", "single-eagle3"], [COLD], prompts_per_stratum=1)
    recorder = prepared_recorder(prepared, ENVIRONMENT, folder)
    for work in sorted(prepared.works, key=lambda w: w.cell.id):
        perform(recorder, work, spoilt if wrong and work.cell.id == "single-eagle3" else lambda o: o)
    score(recorder)
    recorder.finish()
    return folder


def spoilt(o):
    return garbled(o, at=0) if o.sequence == 2 else o


class Base(NamedTuple):
    folder: Path
    history: History
    judgement: Judgement


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = record(tmp_path_factory.mktemp("base") / "run")
    history = load_history(folder)
    judgement = assess(history).judgement
    assert judgement.verdict is Verdict.PASS, judgement.findings[:2]
    return Base(folder, history, judgement)


class Target(NamedTuple):
    """A file that is damaged, and what reads it."""

    form: Form
    seed: int
    flips: int = 40


TARGETS = {
    "run.json": Target("json", 1),
    LINES: Target("lines", 2),
    SCORES: Target("lines", 4),
    "observations.parquet": Target("binary", 3, 20),
    "run.json of a killed run": Target("json", 5, 10),
    f"{LINES} of a killed run": Target("lines", 6, 12),
    "baseline header": Target("json", 7, 20),
    "baseline rows": Target("table", 8, 16),
    "prompt set": Target("lines", 9),
    "profile": Target("yaml", 10, 60),
    "known defects": Target("yaml", 11, 24),
}


def put(path: Path, damage: Damage) -> None:
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    if damage.data is None:
        path.mkdir()
    else:
        path.write_bytes(damage.data)


def path_of(run: Path, name: str) -> Path:
    return {LINES: answers(run, "single-eagle3"), SCORES: scores(run)}.get(name, run / name)


Judge = Callable[[], str]
"""Reads the damaged file as the command line does, and says what came of it: an outcome that is allowed."""


def run_all(name: str, path: Path, judge: Judge) -> Counter[str]:
    """Put each damage into the place of the file and judge it; prints and returns what came of them."""
    target = TARGETS[name]
    # An earlier test may have had a higher peak, above which nothing here would show.
    forget_peak()
    before = peak_mib()
    outcomes: Counter[str] = Counter()
    begun, slowest = time.process_time(), 0.0
    for damage in damages(path.read_bytes(), target.form, target.seed, target.flips):
        put(path, damage)
        started = time.process_time()
        try:
            with within(LIMIT_S):
                outcome = judge()
        except HarnessError as error:
            assert str(error), damage.kind
            assert len(str(error)) < 20_000, damage.kind
            outcome = "refused in a sentence"
        except Exception as error:
            shown = b"folder" if damage.data is None else damage.data[:2000]
            raise AssertionError(f"{name}, {damage.kind}: {type(error).__name__}: {error}\n{shown!r}") from error
        outcomes[outcome] += 1
        slowest = max(slowest, time.process_time() - started)
    grown = peak_mib() - before
    assert grown < MOST_MIB
    print(
        f"\n{name}: {outcomes.total()} damaged files in {time.process_time() - begun:.1f} s of the processor, slowest "
        f"{slowest:.2f} s, {grown:.0f} MiB more: {dict(outcomes)}"
    )
    return outcomes


def judged(folder: Path, base: Base, number: int = 1) -> str:
    """As ``harness check`` judges, and now and then reports; a PASS has to be of the evidence as it was."""
    history = load_history(folder)
    summary = assess(history)
    verdict = summary.verdict
    if number % REPORTED == 0:
        write_reports(summary, folder)
    if verdict is Verdict.PASS:
        assert history.observations == base.history.observations and history.run == base.history.run
        return SAME_EVIDENCE
    return str(verdict)


def copied(base: Base, tmp_path: Path) -> Path:
    return shutil.copytree(base.folder, tmp_path / base.folder.name)


@pytest.mark.parametrize("name", ["run.json", LINES, SCORES, "observations.parquet"])
def test_files_of_a_finished_run(base, tmp_path, name):
    folder = copied(base, tmp_path)
    path = path_of(folder, name)
    written = json.loads((base.folder / "run.json").read_bytes())

    def judge() -> str:
        outcome = judged(folder, base)
        if outcome == SAME_EVIDENCE and name == "run.json":
            # White space, line ends and another way to write a number (1e-999 for 0.0) are no change.
            assert json.loads(path.read_bytes()) == written
        return outcome

    outcomes = run_all(name, path, judge)
    assert set(outcomes) <= {"refused in a sentence", SAME_EVIDENCE}
    if name in (LINES, SCORES):
        assert SAME_EVIDENCE not in outcomes


@pytest.mark.parametrize("name", ["run.json", LINES])
def test_files_of_a_killed_run(base, tmp_path, name):
    folder = copied(base, tmp_path)
    (folder / "observations.parquet").unlink()
    reseal(folder, lambda r: r.update(finished=None))
    numbers = count()
    outcomes = run_all(f"{name} of a killed run", path_of(folder, name), lambda: judged(folder, base, next(numbers)))
    assert SAME_EVIDENCE not in outcomes


@pytest.mark.parametrize(("name", "suffix"), [("baseline header", ".json"), ("baseline rows", ".csv")])
def test_files_of_a_baseline(base, tmp_path, name, suffix):
    baselines = tmp_path / "baselines"
    baselines.mkdir()
    for method in ("none", "eagle3"):
        for end in (".json", ".csv"):
            shutil.copy(REPOSITORY / "baselines" / "cpu" / f"{method}{end}", baselines)

    def judge() -> str:
        judgement = assess(base.history, References(baselines=baselines)).judgement
        if judgement.verdict is Verdict.PASS:
            # Every figure and every finding: the header says more than what is judged by.
            assert judgement.cells == base.judgement.cells
            return SAME_EVIDENCE
        return str(judgement.verdict)

    assert set(run_all(name, baselines / f"eagle3{suffix}", judge)) <= {"UNKNOWN", SAME_EVIDENCE}


def test_prompt_set(tmp_path):
    path = tmp_path / "prompts.jsonl"
    whole = load_prompts(REPOSITORY / "prompts" / "probe.jsonl")
    shutil.copy(REPOSITORY / "prompts" / "probe.jsonl", path)

    def judge() -> str:
        found = load_prompts(path)
        assert found.prompts == whole.prompts and found.sha256 == whole.sha256
        return "the same prompts"

    run_all("prompt set", path, judge)


def test_profile(tmp_path):
    path = Path(changed_profile(tmp_path, lambda raw: None))
    whole = load_profile(str(path))

    def judge() -> str:
        # What a profile says is recorded with the run: another one is another run.
        return "the same profile" if load_profile(str(path)) == whole else "another valid profile"

    run_all("profile", path, judge)


def test_list_of_known_defects(tmp_path):
    history = load_history(record(tmp_path / "run", wrong=True))
    path = tmp_path / "known.yaml"
    path.write_text(KNOWN)
    assert assess(history, References(known=path)).judgement.verdict is Verdict.KNOWN

    def judge() -> str:
        load_known(path)
        verdict = assess(history, References(known=path)).judgement.verdict
        assert verdict in (Verdict.KNOWN, Verdict.REGRESSION)
        return str(verdict)

    run_all("known defects", path, judge)


KNOWN = f"""\
# What is known.
format: 1
defects:
  - id: wrong-token
    classes: [sampler, target-kv, drafter-kv, input]
    cells: [single-eagle3]
    scenarios: [cold]
    strata: ["*"]
    checks: ["*"]
    at_most: 9
    vllm: ">=0.32,<0.33"
    devices: [cpu]
    link: https://example.org/issues/1
    reason: a token that is wrong on purpose
    added: {clock.utc().date()}
    expires: {clock.utc().date() + timedelta(30)}
"""


def test_there_are_more_than_a_thousand(base, tmp_path):
    """Counted without judging them: the other tests judge every one."""
    places = {
        "baseline header": REPOSITORY / "baselines" / "cpu" / "eagle3.json",
        "baseline rows": REPOSITORY / "baselines" / "cpu" / "eagle3.csv",
        "prompt set": REPOSITORY / "prompts" / "probe.jsonl",
        "profile": Path(changed_profile(tmp_path, lambda raw: None)),
    }
    (tmp_path / "known.yaml").write_text(KNOWN)
    places["known defects"] = tmp_path / "known.yaml"
    kinds: Counter[str] = Counter()
    by_file: Counter[str] = Counter()
    for name, target in TARGETS.items():
        path = places.get(name) or path_of(base.folder, name.split(" of ")[0])
        for damage in damages(path.read_bytes(), target.form, target.seed, target.flips):
            kinds[damage.kind] += 1
            by_file[name] += 1
    print(f"\n{by_file.total()} damaged files: {dict(by_file)}\n{dict(kinds.most_common())}")
    assert by_file.total() >= 1000
    assert len(kinds) > 20
