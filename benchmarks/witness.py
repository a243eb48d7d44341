"""Measure what the plugin of the KV witness costs an engine, on caches of a stand-in:

python -m benchmarks.witness [--layers N] [--heads N] [--size N] [--prompt N] [--answer N] [--device D] [--plugin FILE]

Times are CPU time of the engine's thread and of the one that writes, in ms a request, so that other work on the machine
moves them little. Without options the caches are those of the profile ``cpu`` with EAGLE3; ``--plugin`` measures
another version of the plugin.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from harness.engines.witness import kv_harness_witness

_BLOCK_SIZE = 32
_DRAFTS = 3
_HIDDEN = 128


class StandInBackEnd:
    """Writes keys by element and values by token, as vLLM does on CPUs."""

    def do_kv_cache_update(self, _layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        tokens, size = cache.shape[2], cache.shape[3] // 2
        block, at = slots // tokens, slots % tokens
        pages = cache.view(*cache.shape[:2], 2, -1)
        pages[:, :, 0].view(*cache.shape[:2], size, tokens)[block, :, :, at] = key
        pages[:, :, 1].view(*cache.shape[:2], tokens, size)[block, :, at] = value


class StandInDraftHead:
    """Drafts the same in each step."""

    def __init__(self, device: str) -> None:
        self._draft_attn_layer_names = {"draft"}
        self._hidden = torch.randn((1, _HIDDEN), device=device)
        self._drafts = torch.zeros((1, _DRAFTS), dtype=torch.int64, device=device)

    def propose(self, target_positions: Any, token_indices_to_sample: Any, common_attn_metadata: Any) -> Any:
        for _ in range(_DRAFTS):
            self._sample_draft_tokens(self._hidden, None)
        return self._drafts

    def _sample_draft_tokens(self, hidden_states: Any, _metadata: Any) -> Any:
        return hidden_states


def engine(args: argparse.Namespace) -> Any:
    """Return a model runner of version 1 with target and drafter."""
    blocks = -(-(args.prompt + args.answer) // _BLOCK_SIZE)
    names = [*(f"model.layers.{n}" for n in range(args.layers - 1)), "draft"]
    layers = {
        name: SimpleNamespace(
            kv_cache=torch.randn((blocks + 1, args.heads, _BLOCK_SIZE, 2 * args.size), device=args.device),
            impl=StandInBackEnd(),
            num_kv_heads=args.heads,
            head_size=args.size,
            dtype=torch.float32,
            kv_cache_dtype="auto",
        )
        for name in names
    }
    group = SimpleNamespace(layer_names=names, kv_cache_spec=SimpleNamespace(block_size=_BLOCK_SIZE))
    return SimpleNamespace(
        kv_caches=[True],
        requests={},
        drafter=StandInDraftHead(args.device),
        input_batch=SimpleNamespace(req_ids=[]),
        compilation_config=SimpleNamespace(static_forward_context=layers),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[group]),
        blocks=list(range(blocks, 0, -1)),
    )


class Played:
    """Plays requests to the plugin as an engine does, and adds up what each moment takes."""

    def __init__(self, plugin: Any, args: argparse.Namespace) -> None:
        self.rows: list[Callable[[], dict[str, Any]]] = []
        self._plugin, self._args, self._runner = plugin, args, engine(args)
        plugin._rank = lambda: (0, 1)
        plugin._writer = SimpleNamespace(put=self.rows.append)
        self._positions = torch.arange(args.prompt + args.answer, device=args.device)
        self._last = torch.zeros(1, dtype=torch.int64, device=args.device)
        self._metadata = SimpleNamespace(query_start_loc=torch.tensor([0, 1], device=args.device))
        self.bytes = 0

    def request(self, number: int, receives: bool) -> dict[str, float]:
        """Play a request of P, or of D, which receives its prompt; return seconds by moment."""
        name, prompt = f"cmpl-{number}-0-0a1b2c3d", list(range(self._args.prompt))
        answer = list(range(self._args.answer)) if receives else [7]
        plugin, runner = self._plugin, self._runner
        runner.requests[name] = SimpleNamespace(prompt_token_ids=prompt, output_token_ids=answer)
        runner.input_batch.req_ids = [name]
        if receives:
            plugin._received[name] = [runner.blocks]
        new = SimpleNamespace(
            req_id=name,
            prompt_token_ids=prompt,
            block_ids=[runner.blocks],
            num_computed_tokens=len(prompt) - 1 if receives else 0,
        )
        took = {"begins": _timed(plugin._begun, runner, _step([new], []))}
        # Each step verifies the drafts of the one before.
        steps = len(answer) // (_DRAFTS + 1) if receives else 0
        took["steps"] = sum(self._drafted(name) for _ in range(steps))
        took["ends"] = _timed(plugin._ended, runner, _step([], [], finished=[name]))
        took["writes"] = _timed(self._write)
        return took

    def _drafted(self, name: str) -> float:
        took = _timed(self._plugin._ended, self._runner, _step([], [name]))
        took += _timed(self._plugin._begun, self._runner, _step([], [name]))
        return took + _timed(self._runner.drafter.propose, self._positions, self._last, self._metadata)

    def _write(self) -> None:
        for row in self.rows:
            self.bytes += len(json.dumps(row(), separators=(",", ":")).encode())
        self.rows.clear()


def _step(new: Sequence[Any], cached: Sequence[str], finished: Sequence[str] = ()) -> Any:
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=cached,
            num_computed_tokens=[0 for _ in cached],
            new_block_ids=[None for _ in cached],
            resumed_req_ids=set(),
        ),
        finished_req_ids=set(finished),
        preempted_req_ids=set(),
    )


def _timed(work: Callable[..., Any], *args: Any) -> float:
    started = time.thread_time()
    work(*args)
    return time.thread_time() - started


def _loaded(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("measured_witness", path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"{path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"layers": 4, "heads": 4, "size": 32, "prompt": 110, "answer": 120, "requests": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--plugin", type=Path, default=Path(kv_harness_witness.__file__))
    args = parser.parse_args()
    # As in an engine of one core.
    torch.set_num_threads(1)
    played = Played(_loaded(args.plugin), args)
    table = Table(
        title=f"CPU time a request, ms (median of {args.requests}, prompt {args.prompt}, answer {args.answer})"
    )
    moments = ("begins", "steps", "ends", "writes")
    for column in ("engine", *moments, "all", "bytes"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for engine_name, receives in (("prefill", False), ("decode", True)):
        for number in range(20):
            played.request(number, receives)
        played.bytes = 0
        took = [played.request(number, receives) for number in range(args.requests)]
        each = [statistics.median(1e3 * t[moment] for t in took) for moment in moments]
        figures = [f"{ms:.2f}" for ms in (*each, sum(each))]
        table.add_row(engine_name, *figures, str(played.bytes // args.requests))
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
