"""Soaks: growth on hand-made series, the sampler on processes of this machine, how rounds are judged."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from harness.errors import UsageError
from harness.history.verdict import Verdict
from harness.judging.figures import AcceptanceFigures, RatesFigures
from harness.judging.findings import CellVerdict, CheckResult
from harness.lab.soak.growth import LIMITS, PARTS, judge_growth, split
from harness.lab.soak.model import COUNTED, HARNESS, ResourceSample, Round, Soak, TreeUsage
from harness.lab.soak.rounds import RoundJudge
from harness.lab.soak.run import prepare_soak
from harness.lab.soak.sampler import Record, Sampler, Watcher
from harness.supervision import procfs
from harness.supervision.procfs import Segment
from tests.support.builders import change_final, history, observation
from tests.support.fake_soak import FLAT, FakeWatcher

HOUR = np.arange(0, 3600, 5.0)


def growths(tree: str = HARNESS, times: np.ndarray = HOUR, **changed: np.ndarray) -> dict[str, Verdict]:
    series = {f: np.full(len(times), getattr(FLAT, f), dtype=float) for f in TreeUsage.model_fields} | changed
    return {g.quantity: g.verdict for g in judge_growth({tree: series}, times)}


# --- growth ----------------------------------------------------------------------------------------------------------


def test_flat_series_pass_in_every_figure():
    assert set(growths().values()) == {Verdict.PASS}
    assert len(growths()) == len(LIMITS)
    assert "RSS" not in growths("decode"), "what processes share counts several times in an engine's RSS"


@pytest.mark.parametrize(
    ("field", "quantity", "per_hour"),
    [
        ("rss_mib", "RSS", 40),
        ("pss_mib", "PSS", 40),
        ("descriptors", "descriptors", 10),
        ("threads", "threads", 6),
        ("processes", "processes", 3),
        ("shm_files", "shared memory files", 3),
        ("shm_mib", "shared memory", 4),
    ],
)
def test_a_leak_is_found_and_named(field: str, quantity: str, per_hour: float):
    noise = np.random.default_rng(1).normal(0, 0.3, len(HOUR)) if field.endswith("mib") else 0
    grown = getattr(FLAT, field) + np.floor(HOUR / 3600 * per_hour * 4) / 4 + noise
    found = growths(**{field: grown})
    assert found.pop(quantity) is Verdict.REGRESSION and set(found.values()) == {Verdict.PASS}


def test_growth_within_the_warm_up_alone_is_none():
    assert growths(rss_mib=200 + 100 * np.minimum(HOUR / 700, 1.0))["RSS"] is Verdict.PASS


def test_growth_near_the_limit_cannot_be_told():
    noise = np.random.default_rng(2).normal(0, 4, len(HOUR))
    assert growths(rss_mib=200 + 20 * HOUR / 3600 + noise)["RSS"] is Verdict.UNKNOWN


def test_a_short_soak_says_nothing_about_growth():
    short = np.arange(0, 180, 5.0)
    found = judge_growth({HARNESS: {f: np.full(len(short), 1.0) for f in TreeUsage.model_fields}}, short)
    assert {g.verdict for g in found} == {Verdict.UNKNOWN}
    assert all("a soak of 25" in g.why for g in found)


def test_a_hole_in_the_samples_says_nothing_about_growth():
    assert growths(times=np.concatenate([HOUR[HOUR < 1800], HOUR[HOUR > 2400]]))["RSS"] is Verdict.UNKNOWN


def test_the_slope_and_its_bounds():
    assert len(split(HOUR)) == PARTS
    grown = dict.fromkeys(TreeUsage.model_fields, 100 + 30 * HOUR / 3600)
    found = next(g for g in judge_growth({HARNESS: grown}, HOUR) if g.quantity == "RSS")
    assert found.per_hour == pytest.approx(30, abs=0.2) and found.low <= found.per_hour <= found.high


def test_memory_without_any_change_has_no_slope():
    flat = {f: np.full(len(HOUR), 7.0) for f in TreeUsage.model_fields}
    found = next(g for g in judge_growth({HARNESS: flat}, HOUR) if g.quantity == "RSS")
    assert (found.per_hour, found.low, found.high) == (0, 0, 0)


def sawtooth(rng: np.random.Generator) -> np.ndarray:
    """Memory as it is: garbage that is collected every 40 s, neighbours alike, and a slow random walk."""
    saw = 3 * ((HOUR + rng.uniform(0, 40)) % 40) / 40
    walk = np.cumsum(rng.normal(0, 0.05, len(HOUR)))
    noise = np.zeros(len(HOUR))
    for i, e in enumerate(rng.normal(0, 0.5, len(HOUR))):
        noise[i] = (0.9 * noise[i - 1] if i else 0) + e
    return 200 + saw + walk + noise


def test_noise_alone_is_never_a_leak_and_a_leak_is_always_one():
    rng = np.random.default_rng(3)
    flat = [growths(rss_mib=sawtooth(rng))["RSS"] for _ in range(200)]
    assert Verdict.REGRESSION not in flat and flat.count(Verdict.PASS) >= 198
    leaking = [growths(rss_mib=sawtooth(rng) + 40 * HOUR / 3600)["RSS"] for _ in range(100)]
    assert Verdict.PASS not in leaking and leaking.count(Verdict.REGRESSION) >= 98


# --- samples ---------------------------------------------------------------------------------------------------------

HOLDER = """
import sys, threading, time, subprocess, mmap
from multiprocessing import shared_memory
kept = [open('/dev/null') for _ in range(7)]
for _ in range(3):
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
block = shared_memory.SharedMemory(create=True, size=2 << 20)
block.buf[:] = b'x' * (2 << 20)
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])
print(block.name, flush=True)
sys.stdin.readline()
child.kill(); child.wait(); block.close(); block.unlink()
"""


@pytest.fixture
def holder():
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None and process.stdout.readline().strip()
    yield process
    process.communicate("\n")


def test_a_tree_is_measured_whole(holder: subprocess.Popen[str]):
    tree = Watcher({"decode": holder.pid}).sample()["decode"]
    # multiprocessing has a tracker of its own beside the child.
    assert tree.processes == len(procfs.family(holder.pid, procfs.processes())) >= 2
    assert tree.threads >= tree.processes + 3 and tree.descriptors >= 7 + 3
    assert tree.shm_files == 1 and tree.shm_mib == pytest.approx(2, abs=0.1)
    assert 0 < tree.pss_mib <= tree.rss_mib


def test_shared_memory_that_its_owner_forgot_still_counts(tmp_path: Path, holder: subprocess.Popen[str]):
    watcher = Watcher({"decode": holder.pid})
    assert watcher.sample()["decode"].shm_files == 1
    forgotten = procfs.SHM / f"{next(iter(watcher._had['decode'])).name}-forgotten"
    forgotten.write_bytes(b"x")
    try:
        watcher._had["decode"].add(Segment(forgotten.name, forgotten.stat().st_ino))
        assert watcher.sample()["decode"].shm_files == 2
    finally:
        forgotten.unlink()
    assert watcher.sample()["decode"].shm_files == 1


def sampled(tmp_path: Path, watcher: FakeWatcher, seconds: float, interval_s: float = 0.02) -> Sampler:
    record = Record(tmp_path)
    with Sampler(watcher, record, time.monotonic(), interval_s) as sampler:
        time.sleep(seconds)
    record.close()
    return sampler


def test_a_sampler_that_keeps_up_has_no_trouble(tmp_path: Path):
    assert sampled(tmp_path, FakeWatcher(), 1.0, 0.1).trouble is None
    assert len((tmp_path / "soak.jsonl").read_text().splitlines()) >= 8


def test_a_sampler_that_dies_is_trouble(tmp_path: Path):
    sampler = sampled(tmp_path, FakeWatcher(dies_after=2), 0.3)
    assert sampler.trouble is not None and "no more descriptors" in sampler.trouble


def test_a_sampler_that_falls_behind_is_trouble(tmp_path: Path):
    sampler = sampled(tmp_path, FakeWatcher(took_s=0.3), 0.7)
    assert sampler.trouble is not None and "fell behind" in sampler.trouble


def test_an_engine_without_processes_is_trouble(tmp_path: Path):
    gone = FLAT.model_copy(update={"processes": 0})
    sampler = sampled(tmp_path, FakeWatcher(trees={HARNESS: FLAT, "single": gone}), 0.2)
    assert sampler.trouble is not None and "single" in sampler.trouble


# --- the record ------------------------------------------------------------------------------------------------------


def a_round(number: int, verdict: Verdict = Verdict.PASS) -> Round:
    return Round(
        number=number, at_s=60.0 * number, seconds=50, answered=10, broken=0, tokens=900, drafts=600, accepted=300,
        moved_bytes=1 << 20, preemptions=0, verdict=verdict,
    )  # fmt: skip


def recorded(folder: Path, *rounds: Round, minutes: int = 60) -> Record:
    record = Record(folder)
    for at in range(0, 60 * minutes, 5):
        record.append(ResourceSample(at_s=at, took_s=0.1, trees={HARNESS: FLAT, "decode": FLAT}))
    for item in rounds:
        record.append(item)
    record.close()
    return record


def result(record: Record, **changes: object) -> Soak:
    base = dict(
        run_id="r", started="2026-01-01T00:00:00+00:00", profile="cpu", cell="pd-eagle3", versions={}, minutes=60,
        concurrency=4, rounds=record.verdicts.total(), verdicts=dict(record.verdicts), seconds=record.seconds,
        samples=len(record.times_s), growths=tuple(judge_growth(record.trees, record.times_s)),
        **{name: record.sums[name] for name in COUNTED},
    )  # fmt: skip
    return Soak.model_validate(base | changes)


def test_a_quiet_record_passes(tmp_path: Path):
    found = result(recorded(tmp_path, a_round(1), a_round(2)))
    assert found.verdict is Verdict.PASS
    assert (found.rounds, found.answered, found.samples) == (2, 20, 720)
    assert found.acceptance == 0.5


def test_one_bad_round_a_doubt_or_nothing_at_all_do_not(tmp_path: Path):
    record = recorded(tmp_path, a_round(1), a_round(2, Verdict.REGRESSION))
    assert result(record).verdict is Verdict.REGRESSION
    assert result(record, verdicts={"PASS": 2}, doubts=("interrupted",)).verdict is Verdict.UNKNOWN
    assert result(record, verdicts={"PASS": 2}, answered=0).verdict is Verdict.UNKNOWN
    assert result(record, verdicts={"PASS": 2}, growths=()).verdict is Verdict.UNKNOWN
    assert result(record, verdicts={}).rounds == 2


# --- rounds ----------------------------------------------------------------------------------------------------------


def judged(folder: Path, judge: RoundJudge, **changes: object) -> Verdict:
    o = observation("single-none", concurrent=4, shared_counters={"single": {"finished_requests": 1.0}})
    return judge.judge(history([o], folder=folder).run, [change_final(o, **changes) if changes else o])


def test_a_round_without_baseline_is_unknown_and_other_tokens_later_are_wrong(tmp_path: Path):
    judge = RoundJudge(tmp_path, {}, None)
    assert judged(tmp_path, judge) is Verdict.UNKNOWN
    output = observation("single-none").legs[-1].output_ids
    assert output is not None
    assert judged(tmp_path, judge, output_ids=(*output[:-2], 7, output[-1])) is Verdict.REGRESSION
    (changed,) = [f for f in judge.findings if f.check == "soak-repeats"]
    assert changed.evidence.position == len(output) - 2


def test_findings_are_kept_up_to_a_limit_and_counted_beyond(tmp_path: Path):
    judge = RoundJudge(tmp_path, {}, None)
    for _ in range(80):
        judged(tmp_path, judge)
    assert len(judge.findings) == 50 and judge.found >= 80


def rates(accepted: float) -> RatesFigures:
    return RatesFigures(
        requests=42,
        steps=1,
        accepted_at=(),
        rates=(),
        acceptance_length_pooled=1 + accepted,
        acceptance_length_per_prompt=None,
    )


def pooled(ours: float, reference: float) -> CellVerdict:
    figures = AcceptanceFigures(ours=rates(ours), reference=rates(reference), against="the baseline")
    result = CheckResult(
        check="acceptance-baseline", cell="pd-eagle3", verdict=Verdict.PASS, judged=42, figures=figures
    )
    return CellVerdict(cell="pd-eagle3", verdict=Verdict.PASS, results=(result,))


def rounds_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: list[float]) -> tuple[list[Verdict], RoundJudge]:
    """A soak's judge after rounds with these accepted drafts per step, of 2.446 recorded ones."""
    judge = RoundJudge(tmp_path, {}, None)
    told = iter(ours)
    monkeypatch.setattr("harness.lab.soak.rounds.apply_known", lambda judged, *_: judged)
    monkeypatch.setattr("harness.lab.soak.rounds.judge_cell", lambda _: pooled(next(told), 2.446))
    return [judged(tmp_path, judge) for _ in ours], judge


def test_a_loss_that_no_round_shows_is_found_in_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    verdicts, judge = rounds_of(tmp_path, monkeypatch, [2.446 * 0.99] * 10)
    assert set(verdicts) == {Verdict.PASS}
    (found,) = judge.together("pd-eagle3")
    assert found.verdict is Verdict.REGRESSION and found.check == "soak-acceptance-all"
    assert found.evidence.rounds == 10


def test_honest_rounds_show_nothing_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    verdicts, judge = rounds_of(tmp_path, monkeypatch, [2.4389, 2.4450, 2.4459, 2.4459] * 10)
    assert set(verdicts) == {Verdict.PASS}
    assert judge.together("pd-eagle3") == []


def test_too_few_rounds_are_not_judged_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert rounds_of(tmp_path, monkeypatch, [2.446 * 0.99] * 9)[1].together("pd-eagle3") == []


def test_one_round_far_off_is_a_regression_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    verdicts, judge = rounds_of(tmp_path, monkeypatch, [2.446, 2.446 * 0.97])
    assert verdicts == [Verdict.PASS, Verdict.REGRESSION]
    assert [f.check for f in judge.findings] == ["soak-acceptance"]


# --- what is sent ----------------------------------------------------------------------------------------------------


def test_a_soak_refuses_more_than_one_cell():
    with pytest.raises(UsageError, match="expected one cell"):
        prepare_soak("cpu", "pd-*")


def test_a_soak_is_of_cold_prompts_as_ids():
    (work,) = prepare_soak("cpu", "pd-eagle3").works
    assert {i.form for i in work.items} == {"ids"} and not work.scripts
