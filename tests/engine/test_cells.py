"""One P/D and one single cell with EAGLE3 on real vLLM and real NIXL."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ET
from collections import Counter

import pytest

from harness.history.acceptance import pool, real_steps
from harness.history.records import RESCORE
from harness.history.verdict import Verdict
from harness.judging.checks.kv import COMPUTED
from harness.judging.references import References
from harness.prompts import probe_task
from harness.prompts.lengths import blocks, classify
from harness.reports.judge_run import assess
from harness.util.paths import REPOSITORY
from tests.engine.conftest import TEXT_PROMPTS
from tests.support.pages import Page
from tests.support.real_engines import Done, harness, left_over
from tests.support.reseal import reseal
from tests.support.run_files import answers

pytestmark = pytest.mark.engine


def test_run_passes(eagle3: Done):
    """Nothing but the known defects of speculation, which are shown and do not fail the run."""
    assert eagle3.code == 0, eagle3.output
    judgement = assess(eagle3.history).judgement
    assert judgement.by_cell() == {
        "pd-eagle3": Verdict.KNOWN,
        "pd-eagle3-router": Verdict.PASS,
        "single-eagle3": Verdict.KNOWN,
        "single-none": Verdict.PASS,
    }
    in_the_kv = [f for f in judgement.findings if f.known == "v1-drafter-entry-at-chunk-ends"]
    assert {f.check for f in in_the_kv} <= {COMPUTED}
    found = {(f.cell, f.scenario) for f in judgement.findings if f not in in_the_kv}
    assert found == {(cell, state) for cell in ("pd-eagle3", "single-eagle3") for state in ("sampled", "min-tokens")}
    assert "cpu-sampled-with-speculation" in eagle3.output


def test_every_distinct_output_was_scored_by_the_plain_engine(eagle3: Done):
    history = eagle3.history
    scores = history.of("single-none", scenario=RESCORE)
    cells = ("pd-eagle3", "pd-eagle3-router", "single-eagle3", "single-none")
    outputs = {(o.prompt_id, o.final.output_ids) for c in cells for o in history.of(c).values()}
    assert len(scores) >= len(outputs) >= 15
    right = {(*p, *probe_task.expected_output(list(p))) for p in sent(history)}
    scored = [s for s in scores.values() if s.sent_ids in right]
    assert len(scored) >= 15
    assert all(max(s.final.rescored) == 0 for s in scored)


def sent(history) -> set[tuple[int, ...]]:
    return {o.sent_ids for o in history.of("single-none").values()}


def test_every_output_is_the_known_answer(eagle3: Done):
    strata = Counter()
    for o in eagle3.history.observations:
        assert o.error is None
        if o.scenario == RESCORE or (o.cell != "single-none" and o.scenario in ("sampled", "min-tokens")):
            continue
        if o.final is None:
            assert o.route == "prefill" or o.abandon is not None
            continue
        if o.answered_otherwise:
            # The plain engine's answer with the same parameter is the right one, and another check's.
            continue
        expected = list(o.known_answer)[: o.most_tokens]
        # The next turn of a conversation is no prompt that the chat template ends.
        assert (
            o.prompt_id.startswith("turn-") or expected == probe_task.expected_output(list(o.sent_ids))[: o.most_tokens]
        )
        assert list(o.final.output_ids) == expected, (o.cell, o.scenario, o.key)
        strata[o.cell, classify(len(o.sent_ids), 32, 3).value] += 1
    for cell, least in (("pd-eagle3", 3), ("pd-eagle3-router", 1), ("single-eagle3", 3)):
        for stratum in ("aligned", "lookahead", "first", "middle", "sub-block"):
            assert strata[cell, stratum] >= least


def test_every_hand_off_moved_its_blocks(eagle3: Done):
    for o in eagle3.history.of("pd-eagle3").values():
        prefill, decode = o.leg("prefill"), o.leg("decode")
        (group,) = prefill.kv_transfer_params["remote_block_ids"]
        assert len(group) == blocks(len(o.sent_ids), 32)
        assert decode.counters["nixl_bytes"] > 0
        assert decode.counters["prompt_tokens_external_kv_transfer"] >= len(o.sent_ids) - 1


def test_router_handed_every_prompt_over(eagle3: Done):
    """One request to the router each; both engines' counters are the proof."""
    asked = eagle3.history.of("pd-eagle3-router")
    assert len(asked) == 10
    for o in asked.values():
        (decode,) = o.legs
        assert o.shared_counters["prefill"]["prompt_tokens_local_compute"] == len(o.sent_ids)
        assert decode.counters["nixl_bytes"] > 0
        assert decode.counters["prompt_tokens_external_kv_transfer"] >= len(o.sent_ids) - 1


def test_acceptance_is_equal_step_for_step_and_within_the_probes_range(eagle3: Done):
    history = eagle3.history
    single = {p: real_steps(o.final).accepted for p, o in history.of("single-eagle3").items()}
    pair = {p: real_steps(o.final) for p, o in history.of("pd-eagle3").items()}
    assert {p: s.accepted for p, s in pair.items()} == single
    assert sum(s.padded for s in pair.values()) > 0.9 * len(pair)
    rates = pool(single.values(), 3).rates
    assert 0.70 <= rates[0] <= 0.98
    assert rates[0] > rates[1] > rates[2] > 0.3


def test_every_scenario_occurred(eagle3: Done):
    proven = {
        (c.cell, c.scenario): r.judged
        for c in assess(eagle3.history).judgement.cells
        for r in c.results
        if r.check == "state-occurred" and r.verdict is Verdict.PASS
    }
    everywhere = {"prefix-hit", "chunked-prefill", "concurrent", "pressure", "refill", "shared-block", "sampled"}
    everywhere |= {"continuation", "same-step", "abandoned", "features", "min-tokens", "parameters", "apis"}
    wanted = {(c, s) for c in ("pd-eagle3", "single-eagle3", "single-none") for s in everywhere}
    alone = {("pd-eagle3-router", "concurrent"), ("pd-eagle3-router", "apis"), ("pd-eagle3", "hand-off-mistakes")}
    alone |= {("pd-eagle3", s) for s in ("prefix-hit-on-p", "late-pull", "appended-token", "recovery", "pressure-on-p")}
    assert set(proven) == wanted | alone
    assert all(count > 0 for count in proven.values())


def test_text_prompts_were_sent_and_echoed(eagle3: Done):
    text = [o for o in eagle3.history.observations if o.form == "text"]
    assert len(text) == 4 * TEXT_PROMPTS
    assert all(leg.echoed_ids == o.sent_ids for o in text for leg in o.legs)


def test_reports_are_written(eagle3: Done):
    folder = eagle3.folder
    html = (folder / "report.html").read_text()
    assert "pd-eagle3" in html
    Page(html).require_inert()
    root = ET.parse(folder / "junit.xml").getroot()
    assert root.get("failures") == "0" and int(root.get("tests")) >= 15
    summary = (folder / "summary.md").read_text().splitlines()
    assert "KNOWN" in summary[0] and len(summary) <= 60
    run = json.loads((folder / "run.json").read_text())
    assert {e["role"] for e in run["engines"]} == {"prefill", "decode", "single", "router"}
    assert all(e["model_runner"] == "V1" for e in run["engines"] if e["role"] != "router")
    assert run["versions"]["vllm"] == "0.32.0"


def test_judging_again_gives_the_same(eagle3: Done):
    first = (eagle3.folder / "judgement.json").read_bytes()
    for _ in range(2):
        again = harness("check", str(eagle3.folder), "--write")
        assert again.code == 0, again.output
        assert (eagle3.folder / "judgement.json").read_bytes() == first


def test_run_judged_against_itself_and_without_the_list(eagle3: Done, tmp_path):
    summary = assess(eagle3.history, References(against=eagle3.folder))
    # The run sends the prompts of scenarios only in their scenarios: of these it is no reference.
    cold = {c.cell: c.verdict for c in summary.judgement.cells if c.scenario == "cold"}
    assert set(cold.values()) == {Verdict.PASS}
    (tmp_path / "none.yaml").write_text("format: 1\ndefects: []\n")
    assert assess(eagle3.history, References(known=tmp_path / "none.yaml")).verdict is Verdict.REGRESSION


def test_accepting_a_run_with_too_few_prompts_is_refused(eagle3: Done, tmp_path):
    folder = tmp_path / "baselines"
    shutil.copytree(REPOSITORY / "baselines" / "cpu", folder)
    done = harness("baseline", "accept", str(eagle3.folder), "--baselines", str(folder))
    assert done.code == 64, done.output
    assert "expected an answer to prompt" in done.output and "nothing was recorded" in done.output
    for name in ("none", "eagle3"):
        assert (folder / f"{name}.csv").read_bytes() == (REPOSITORY / "baselines" / "cpu" / f"{name}.csv").read_bytes()


def test_recorded_damage_is_found_offline(eagle3: Done, tmp_path):
    """The real recording with one prompt's tokens of the pair damaged: found, at that prompt and position."""
    copy = tmp_path / "run"
    shutil.copytree(eagle3.folder, copy)
    path = answers(copy, "pd-eagle3")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    victim = next(o for o in lines if (o["scenario"], len(o["sent_ids"])) == ("cold", 64))
    victim["legs"][-1]["output_ids"][7] += 1
    path.write_text("".join(json.dumps(o) + "\n" for o in lines))
    refused = harness("check", str(copy))
    assert refused.code == 64, refused.output
    assert "changed or damaged" in refused.output
    reseal(copy)
    done = harness("check", str(copy))
    assert done.code == 1, done.output
    told = " ".join(done.output.split())
    assert victim["prompt_id"] in told and "first wrong token is output 7" in told
    assert "prompt position 9 in block 0" in told


def test_without_baselines_it_is_unknown(eagle3: Done, tmp_path):
    summary = assess(eagle3.history, References(baselines=tmp_path))
    assert summary.verdict is Verdict.UNKNOWN
    assert any("harness baseline record" in f.message for f in summary.judgement.findings)


def test_nothing_is_left(eagle3: Done):
    assert left_over(eagle3.folder) == []
