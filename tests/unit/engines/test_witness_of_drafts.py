"""The plugin's notes of what drafts were sampled from, on drafters of stand-in engines of both model runners."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.engines.witness import kv_harness_witness as plugin
from harness.errors import DataError
from harness.history.layout import WITNESS
from harness.history.witness import KVWitness, NotedDrafts
from harness.observed.draft_notes import compare_drafts
from tests.support.kv_caches import AtOnce, StandInRunner, as_in_an_engine, kv_of

_PROMPT = 40
_STARTS = torch.tensor([0, 4, 8])
"""Two requests have four tokens each in a step, of which one and none are rejected."""
_REJECTED = torch.tensor([1, 0])
_POSITIONS = torch.tensor([39, 40, 41, 42, 60, 61, 62, 63])


@pytest.fixture(autouse=True)
def _as_in_an_engine() -> Iterator[None]:
    with as_in_an_engine():
        yield


class StandInDrafting:
    """Drafts the largest of a hidden state's numbers, which a step has by request and draft: in one call for each draft
    or in one for all."""

    def __init__(self, at_once: bool) -> None:
        self.at_once = at_once
        self.hidden = torch.zeros(0)

    def _drafts(self, sample: Any) -> Any:
        rows, drafts, size = self.hidden.shape
        if self.at_once:
            return sample(self.hidden.reshape(-1, size), None).view(rows, drafts)
        return torch.stack([sample(self.hidden[:, at], None) for at in range(drafts)], 1)


class StandInDrafter(StandInDrafting):
    """Has the names of model runner V1."""

    def propose(self, *, target_positions: Any, token_indices_to_sample: Any, common_attn_metadata: Any) -> Any:
        return self._drafts(lambda *given: self._sample_draft_tokens(*given)[0])

    def _sample_draft_tokens(self, hidden_states: Any, sampling_metadata: Any) -> Any:
        return hidden_states.argmax(-1), None


class StandInSpeculator(StandInDrafting):
    """Has the names of model runner V2."""

    def propose(self, input_batch: Any, num_rejected: Any, dummy_run: bool = False) -> Any:
        return self._drafts(self.sample_draft)

    def sample_draft(self, hidden_states: Any, step: Any) -> Any:
        return hidden_states.argmax(-1)


def _runner(version: str, at_once: bool) -> Any:
    runner: Any = StandInRunner(kv_of(1), 32)
    if version == "V1":
        runner.drafter = StandInDrafter(at_once)
        runner.input_batch = SimpleNamespace(req_ids=["cmpl-a-0-0a1b2c3d", "cmpl-b-0-0a1b2c3d"])
    else:
        del runner.drafter
        runner.speculator, runner.device = StandInSpeculator(at_once), torch.device("cpu")
    return runner


def _step(runner: Any, hidden: torch.Tensor, **more: Any) -> Any:
    """Let the drafter of a runner draft for both requests; return the drafts."""
    ids = ["cmpl-a-0-0a1b2c3d", "cmpl-b-0-0a1b2c3d"]
    if hasattr(runner, "speculator"):
        runner.speculator.hidden = hidden
        batch = SimpleNamespace(req_ids=ids, num_reqs=2, query_start_loc=_STARTS, positions=_POSITIONS)
        return runner.speculator.propose(batch, _REJECTED, **more)
    runner.drafter.hidden = hidden
    return runner.drafter.propose(
        target_positions=_POSITIONS,
        token_indices_to_sample=_STARTS[1:] - 1 - _REJECTED,
        common_attn_metadata=SimpleNamespace(query_start_loc=_STARTS),
    )


def _hidden(seed: int) -> torch.Tensor:
    return torch.randn((2, 3, 24), generator=torch.Generator().manual_seed(seed))


def _noted(folder: Path, runner: Any, *steps: torch.Tensor, role: str = "decode") -> dict[str, tuple[NotedDrafts, ...]]:
    """Return what was noted of each of two requests, by name, of which every step drafts for both."""
    witness = plugin.Witness(runner, AtOnce(folder, role))
    names = [f"cmpl-{name}-0-0a1b2c3d" for name in "ab"]
    for name in names:
        witness.requests[name] = plugin.WatchedRequest(range(_PROMPT), _PROMPT, 1)
        witness.take(name, runner.of_groups, 0)
    for hidden in steps:
        _step(runner, hidden)
    for name in names:
        witness.end(name, range(_PROMPT))
    read = KVWitness(folder)
    assert read.errors == {} and read.drafting == {"pd-eagle3"}
    return {name: read.noted(name, role, "drafts")[0].drafts for name in "ab"}


@pytest.mark.parametrize("version", ["V1", "V2"])
@pytest.mark.parametrize("at_once", [False, True])
def test_each_draft_is_noted_by_request_and_position(tmp_path: Path, version: str, at_once: bool) -> None:
    first, second = _hidden(1), _hidden(2)
    noted = _noted(tmp_path, _runner(version, at_once), first, second)
    assert [s.position for s in noted["a"]] == [41, 41] and [s.position for s in noted["b"]] == [63, 63]
    assert [s.tokens for s in noted["b"]] == [tuple(h[1].argmax(-1).tolist()) for h in (first, second)]
    again = _noted(tmp_path / "again", _runner("V1", at_once=False), first, second)
    for name in "ab":
        found = compare_drafts(noted[name][:1], again[name][:1], _PROMPT - 1, 99, 1e-6)
        assert (found.drafts, found.others) == (3, ())


@pytest.mark.parametrize("together", ["32 steps", "as many as fit"])
@pytest.mark.parametrize("at_once", [False, True])
def test_steps_that_are_sketched_together_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool, together: str
) -> None:
    if together == "as many as fit":
        # Those of seven steps.
        monkeypatch.setattr(plugin, "_HIDDEN", 2 * 3 * 24 * 7)
    steps = [_hidden(n) for n in range(2 * plugin._STEPS + 3)]
    noted = _noted(tmp_path, _runner("V1", at_once), *steps)
    for row, name in enumerate("ab"):
        assert [s.tokens for s in noted[name]] == [tuple(h[row].argmax(-1).tolist()) for h in steps]
        assert {s.position for s in noted[name]} == {(41, 63)[row]}
        for n in (0, 6, 7, plugin._STEPS, len(steps) - 1):
            alone = _noted(tmp_path / f"{n}{name}", _runner("V1", at_once), steps[n])[name][0]
            assert noted[name][n].sketches == pytest.approx(alone.sketches, rel=1e-4, abs=1e-4)


def test_hidden_states_that_are_not_of_the_drafts_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = _runner("V1", at_once=False)
    monkeypatch.setattr(plugin, "_writer", AtOnce(tmp_path, "decode"))
    witness = plugin.Witness(runner, plugin._writer)  # type: ignore[arg-type]
    witness.requests["cmpl-a-0-0a1b2c3d"] = plugin.WatchedRequest(range(_PROMPT), _PROMPT, 1)
    monkeypatch.setattr(plugin, "_STEPS", 1)
    runner.drafter._drafts = lambda sample: (sample(torch.zeros(3, 24), None), torch.zeros((2, 3)).to(torch.int64))[1]
    assert _step(runner, _hidden(1)).shape == (2, 3)
    assert "expected hidden states of the drafts of 2 requests, found [3]" in KVWitness(tmp_path).errors["pd-eagle3"][0]


def test_a_changed_hidden_state_is_named_by_position_and_draft(tmp_path: Path) -> None:
    hidden = _hidden(3)
    other = hidden.clone()
    other[1, 1] = other[1, 1].roll(1)
    ours = _noted(tmp_path, _runner("V1", at_once=False), other)["b"]
    theirs = _noted(tmp_path, _runner("V2", at_once=True), hidden, role="prefill")["b"]
    # The drafts behind one that differs follow another token.
    (found,) = compare_drafts(ours, theirs, _PROMPT - 1, 99, 2e-3).others
    assert (found.position, found.draft) == (63, 2) and found.distance > 0.1
    assert (found.ours, found.theirs) == (int(other[1, 1].argmax()), int(hidden[1, 1].argmax()))


def test_only_tokens_of_both_answers_are_compared(tmp_path: Path) -> None:
    ours = _noted(tmp_path, _runner("V1", at_once=False), _hidden(4))["b"]
    theirs = _noted(tmp_path, _runner("V1", at_once=False), _hidden(5), role="prefill")["b"]
    assert compare_drafts(ours, theirs, _PROMPT - 1, 65, 2e-3).others
    # The token behind the last one that is verified is another one, or that one is of a chunk of the prompt.
    assert compare_drafts(ours, theirs, _PROMPT - 1, 64, 2e-3).drafts == 0
    assert compare_drafts(ours, theirs, 64, 65, 2e-3).drafts == 0


def test_a_preempted_request_has_its_drafts_from_before_and_after(tmp_path: Path) -> None:
    runner = _runner("V1", at_once=False)
    witness = plugin.Witness(runner, AtOnce(tmp_path, "decode"))
    name = "cmpl-a-0-0a1b2c3d"
    for noted in (False, True):
        witness.requests[name] = plugin.WatchedRequest(range(_PROMPT), _PROMPT, 1)
        witness.take(name, runner.of_groups, 0)
        _step(runner, _hidden(6))
        witness.end(name, range(_PROMPT), noted=noted)
    assert [len(n.drafts) for n in KVWitness(tmp_path).noted("a", "decode", "drafts")] == [1, 1]


def test_drafts_behind_a_chunk_of_a_prompt_or_a_resumed_answer_are_not_noted(tmp_path: Path) -> None:
    runner = _runner("V1", at_once=False)
    witness = plugin.Witness(runner, AtOnce(tmp_path, "decode"))
    # Its steps verify the tokens at positions 41 and 63.
    for name, resumed in (("a", 42), ("b", 65)):
        id_ = f"cmpl-{name}-0-0a1b2c3d"
        tokens = [*range(resumed)]
        witness.requests[id_] = plugin.WatchedRequest(tokens, 32, 1)
        witness.take(id_, runner.of_groups, 0)
        # What is said later is not computed in chunks.
        tokens += range(30)
    _step(runner, _hidden(6))
    for name in "ab":
        witness.end(f"cmpl-{name}-0-0a1b2c3d", range(_PROMPT))
    noted = {name: KVWitness(tmp_path).noted(name, "decode", "drafts")[0].drafts for name in "ab"}
    assert [step.position for step in noted["a"]] == [41] and noted["b"] == ()


def test_a_dummy_run_is_not_noted(tmp_path: Path) -> None:
    runner = _runner("V2", at_once=False)
    witness = plugin.Witness(runner, AtOnce(tmp_path, "decode"))
    witness.requests["cmpl-a-0-0a1b2c3d"] = request = plugin.WatchedRequest(range(_PROMPT), _PROMPT, 1)
    _step(runner, _hidden(7), dummy_run=True)
    assert request.drafts == []
    _step(runner, _hidden(7))
    assert len(request.drafts) == 1


def test_drafters_that_graphs_hide_or_that_have_no_model_are_not_watched() -> None:
    hidden: Any = _runner("V2", at_once=False)
    hidden.device = torch.device("cuda")
    hidden.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=False))
    assert not plugin._watch_drafter(hidden, None)  # type: ignore[arg-type]
    hidden.vllm_config.model_config.enforce_eager = True
    assert plugin._watch_drafter(hidden, None)  # type: ignore[arg-type]
    assert not plugin._watch_drafter(SimpleNamespace(drafter=SimpleNamespace(propose=print)), None)  # type: ignore[arg-type]


def test_a_step_that_cannot_be_noted_is_told_and_drafts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = _runner("V1", at_once=False)
    monkeypatch.setattr(plugin, "_writer", AtOnce(tmp_path, "decode"))
    plugin.Witness(runner, plugin._writer)  # type: ignore[arg-type]
    del runner.input_batch
    assert _step(runner, _hidden(8)).shape == (2, 3)
    assert "no attribute 'input_batch'" in KVWitness(tmp_path).errors["pd-eagle3"][0]


def test_damaged_notes_of_drafts_are_refused(tmp_path: Path) -> None:
    _noted(tmp_path, _runner("V1", at_once=False), _hidden(9))
    (path,) = (tmp_path / WITNESS).iterdir()
    whole = path.read_text()
    for was, damaged in (('"sketches": "', '"sketches": "AAAA'), ('"positions": [41]', '"positions": [41, 42]')):
        assert was in whole
        path.write_text(whole.replace(was, damaged))
        with pytest.raises(DataError):
            KVWitness(tmp_path).noted("a", "decode", "drafts")
