"""The path of the gpu profile where there is no GPU: its cells, variants and jobs, packed onto two GPUs that are made
up, with real CPU engines in their slots."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from harness.commands.run import execute
from harness.engines.executor import LocalExecutor
from harness.engines.inventory import Inventory
from harness.history.folder import load_history
from harness.history.verdict import Verdict
from harness.judging.references import References
from harness.profiles.model import Profile
from harness.reports.judge_run import assess
from harness.runner.options import RunOptions
from harness.scheduling.model import Device
from harness.util.progress import Reporter
from harness.workload.prepare import prepare
from tests.support.real_engines import left_over

pytestmark = pytest.mark.engine

GPU_ON_CPU = {
    "extends": "gpu",
    "name": "gpu-on-cpu",
    "methods": [{"kind": "none"}],
    "scenarios": [],
    "exclude": [],
    "routes": ["client"],
    "engine": {"device": "cpu", "dtype": "float32", "kv_buffer_device": "cpu", "nixl_threads": 0},
    "axes": {
        "block": {
            "b32": {"engine": {"block_size": 32, "kv_blocks": 28}},
            "b16": {"engine": {"block_size": 16, "kv_blocks": 56}},
        }
    },
}


class MadeUpGpus(LocalExecutor):
    """Two GPUs that several engines may be on, each with room for one engine of this profile. Their numbers are those
    of cores."""

    def inventory(self, profile: Profile) -> Inventory:
        devices = tuple(Device(f"localhost/{n}", "localhost", 6.0, n) for n in range(2))
        self._inventory = Inventory(devices, {d.id: str(d.index) for d in devices}, shared=True)
        return self._inventory


@pytest.mark.exhaustive
def test_a_variant_runs_in_its_slots_and_one_that_vllm_refuses_costs_its_own_cells(tmp_path: Path):
    """vLLM's attention on CPUs takes blocks of 32 tokens and multiples of that."""
    path = tmp_path / "gpu-on-cpu.yaml"
    path.write_text(yaml.safe_dump(GPU_ON_CPU))
    prepared = prepare(str(path), [], prompts_per_stratum=1)
    with Reporter(prepared.expected_s) as reporter:
        done = execute(prepared, tmp_path / "runs", reporter, RunOptions(executor=MadeUpGpus()))
    # Nothing is recorded of these variants: without a baseline no cell can pass.
    assert done.summary.verdict is Verdict.UNKNOWN
    history = load_history(done.folder)
    assert assess(history, References(against=done.folder)).judgement.by_cell() == {
        "pd-none+b32": Verdict.PASS,
        "single-none+b32": Verdict.PASS,
        "pd-none+b16": Verdict.UNKNOWN,
        "single-none+b16": Verdict.UNKNOWN,
    }
    pair = [o.leg("decode") for o in history.of("pd-none+b32").values()]
    assert len(pair) >= 4 and all(leg.counters["nixl_bytes"] > 0 for leg in pair)
    for cell in ("pd-none+b16", "single-none+b16"):
        record = history.cell(cell)
        assert record is not None and record.state == "failed"
        assert "ValueError: No common block size for 16" in str(record.reason)
    sizes = {e.group: e.argv[e.argv.index("--block-size") + 1] for e in history.run.engines}
    assert sizes["pd-none+b32"] == "32"
    assert left_over(done.folder) == []
