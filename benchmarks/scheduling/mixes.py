"""Synthetic matrices with realistic figures, for the benchmark and the tests of the scheduler."""

from __future__ import annotations

import random
from collections.abc import Sequence

from harness.scheduling.model import Device, EngineNeed, Job, PlacementRule
from harness.scheduling.packing import impossible

GIB = 80.0
DEVICES_PER_NODE = 8
START_S = (40, 180)
CELL_S = (60, 900)
CELLS_PER_JOB = (1, 2, 2, 3, 4)
CELLS_PER_MODEL = 30


def inventory(gpus: int) -> list[Device]:
    """Return GPUs of 80 GiB, eight per node."""
    return [
        Device(
            f"n{i // DEVICES_PER_NODE}g{i % DEVICES_PER_NODE}", f"n{i // DEVICES_PER_NODE}", GIB, i % DEVICES_PER_NODE
        )
        for i in range(gpus)
    ]


def mix(cells: int, devices: Sequence[Device], seed: int) -> list[Job]:
    """Return jobs with ``cells`` cells in total, each of which fits on these devices. Deterministic.

    Each model has various pairs and single engines, and finally the plain engine, which waits for all others.
    """
    generator = random.Random(f"{cells}/{len(devices)}/{seed}")
    models = max(1, round(cells / CELLS_PER_MODEL))
    jobs: list[Job] = []
    for model in range(models):
        share = cells // models + (model < cells % models)
        jobs += _of_model(f"m{model:02}", share, devices, generator)
    return jobs


def _of_model(name: str, cells: int, devices: Sequence[Device], generator: random.Random) -> list[Job]:
    fraction = generator.choice((0.2, 0.25, 0.3, 0.35, 0.4, 0.45))
    large = generator.random() < 0.4
    left = max(0, cells - 1)
    jobs: list[Job] = []
    while left:
        count = min(left, generator.choice(CELLS_PER_JOB))
        left -= count
        jobs.append(_possible(f"{name}-{len(jobs):03}", count, fraction, large, devices, generator))
    plain = EngineNeed("single", 1, (0.9 if large else fraction) * GIB)
    reads = tuple(j.id for j in jobs)
    return [*jobs, Job(f"{name}-plain", (plain,), *_seconds(1, generator), after=reads)]


def _possible(
    name: str, cells: int, fraction: float, large: bool, devices: Sequence[Device], generator: random.Random
) -> Job:
    while True:
        engines, placement, share = _sort(fraction, large, generator)
        job = Job(name, engines, *_seconds(cells, generator), placement, share=share)
        if not impossible([job], devices):
            return job
        large = large and generator.random() < 0.5


def _sort(fraction: float, large: bool, generator: random.Random) -> tuple[tuple[EngineNeed, ...], PlacementRule, bool]:
    """Return the engines of one job: a single one, a pair on one GPU, or a pair with one or more GPUs each."""
    small = fraction * GIB
    full = 0.9 * GIB
    kind = generator.choices(("single", "one GPU", "GPU each", "parallel", "nodes"), (15, 40, 25, 15, 5))[0]
    if kind == "single":
        return (
            (EngineNeed("single", generator.choice((1, 1, 2)) if large else 1, full if large else small),),
            "any",
            True,
        )
    if kind == "one GPU":
        # Prefill and decode engines differ in their KV pools.
        decode = min(0.45, fraction + generator.choice((0.0, 0.0, 0.05))) * GIB
        return (EngineNeed("prefill", 1, small), EngineNeed("decode", 1, decode)), "together", True
    if kind == "parallel":
        prefill, decode_size = generator.choice(((1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 1), (2, 2)))
        gib = full if large else small
        return (EngineNeed("prefill", prefill, gib), EngineNeed("decode", decode_size, gib)), "together", True
    pair = (EngineNeed("prefill", 1, full), EngineNeed("decode", 1, full))
    return pair, "spread" if kind == "nodes" else "together", generator.random() < 0.9


def _seconds(cells: int, generator: random.Random) -> tuple[float, float]:
    return float(generator.randint(*START_S)), float(sum(generator.randint(*CELL_S) for _ in range(cells)))
