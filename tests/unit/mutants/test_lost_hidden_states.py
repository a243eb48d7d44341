"""The faults that give a drafter no hidden state: which token's is lost, and in which step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from harness.mutants import hooks
from harness.mutants.catalogue import MUTANTS


class AlwaysOn:
    """Stands for a switch that is on, and counts how often a fault took effect."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> bool:
        return True

    def fired(self) -> None:
        self.count += 1


def _step(new: Any = (), cached: Any = (), resumed: Any = (), scheduled: Any = None) -> Any:
    """A step of the scheduler; ``cached`` are names with the tokens that they have computed."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(req_id=id_, prompt_token_ids=[0] * prompt, num_computed_tokens=computed)
            for id_, prompt, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[id_ for id_, _ in cached],
            num_computed_tokens=[computed for _, computed in cached],
            resumed_req_ids=set(resumed),
        ),
        num_scheduled_tokens=scheduled,
    )


def _lost(mutant: str, *steps: Any, tokens: int = 0) -> list[list[int]]:
    """Return the rows without a hidden state in each step, of a runner whose requests have so many tokens."""
    assert mutant in MUTANTS
    mine = {p.symbol: p.change for p in hooks.PATCHES if p.mutant == mutant and p.runner == "V1"}
    active, out = AlwaysOn(), []
    for step in steps:
        ids = list(step.num_scheduled_tokens)
        starts = [0, *torch.tensor([step.num_scheduled_tokens[i] for i in ids]).cumsum(0).tolist()]
        runner = SimpleNamespace(
            requests={id_: SimpleNamespace(num_tokens=tokens) for id_ in ids},
            input_batch=SimpleNamespace(req_ids=ids),
            query_start_loc=SimpleNamespace(np=starts),
        )
        mine["GPUModelRunner._update_states"](lambda *_: None, active, runner, step)
        hidden, seen = torch.ones(starts[-1], 2), []

        def proposes(*given: Any, seen: list[Any] = seen) -> None:
            seen += [given[4], *given[6]]

        mine["GPUModelRunner.propose_draft_token_ids"](
            proposes, active, runner, step, None, None, hidden, None, [hidden.clone()], None, None, None
        )
        rows = [(~one.bool().any(1)).nonzero().flatten().tolist() for one in seen]
        # What the target gives in several layers is lost alike, and the target's own is left as it is.
        assert rows[0] == rows[1] and bool(hidden.all())
        out.append(rows[0])
    assert active.count == sum(bool(rows) for rows in out)
    return out


@pytest.mark.parametrize(("mutant", "expected"), [("N56", [[0, 1, 2, 3], []]), ("N57", [[13], []]), ("N58", [[], []])])
def test_the_last_token_of_a_prompt_is_lost_after_what_the_fault_names(mutant: str, expected: list[list[int]]):
    # D pads its first step with drafts; b has a block of its prompt in the cache, and c nothing.
    first = _step(new=[("a", 40, 39), ("b", 42, 32), ("c", 5, 0)], scheduled={"a": 4, "b": 10, "c": 5})
    then = _step(cached=[("a", 40), ("b", 42), ("c", 5)], scheduled={"a": 4, "b": 4, "c": 4})
    assert _lost(mutant, first, then) == expected


def test_a_resumed_request_is_damaged_where_its_last_chunk_drafts():
    first = _step(cached=[("a", 0)], resumed=["a"], scheduled={"a": 192})
    second = _step(cached=[("a", 192)], scheduled={"a": 38})
    third = _step(cached=[("a", 230)], scheduled={"a": 4})
    assert _lost("N58", first, second, third, tokens=230) == [[], [37], []]
