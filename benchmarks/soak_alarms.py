"""Measure how often the growth test of ``harness soak`` is wrong on synthetic memory, sampled every 5 s for an hour.

    python -m benchmarks.soak_alarms [SERIES]

Noise: garbage collected every 40 s (a sawtooth of 3 MiB), autocorrelated samples (AR(1), 0.9, standard deviation
1.1 MiB) and a random walk of 0.05 MiB per sample; then the same with linear growth per hour.
"""

from __future__ import annotations

import sys
from collections import Counter

import numpy as np
from scipy.signal import lfilter

from harness.history.verdict import Verdict
from harness.lab.soak.growth import judge_growth
from harness.lab.soak.model import HARNESS, TreeUsage

TIMES = np.arange(0, 3600, 5.0)
GROWTHS = (0, 5, 10, 15, 20, 25, 30, 40)


def memory(rng: np.random.Generator, per_hour: float) -> np.ndarray:
    """Return the RSS in MiB at each sample."""
    saw = 3 * ((TIMES + rng.uniform(0, 40)) % 40) / 40
    walk = np.cumsum(rng.normal(0, 0.05, len(TIMES)))
    noise = lfilter([1.0], [1.0, -0.9], rng.normal(0, 0.5, len(TIMES)))
    return np.asarray(200 + per_hour * TIMES / 3600 + saw + walk + noise)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    rng = np.random.default_rng(7)
    flat = {field: np.full(len(TIMES), 1.0) for field in TreeUsage.model_fields}
    print("| growth, MiB an hour | flat | cannot tell | leak |\n|---:|---:|---:|---:|")
    for per_hour in GROWTHS:
        found = Counter(
            next(g.verdict for g in judge_growth({HARNESS: {**flat, "rss_mib": memory(rng, per_hour)}}, TIMES))
            for _ in range(count)
        )
        shares = (100 * found[v] / count for v in (Verdict.PASS, Verdict.UNKNOWN, Verdict.REGRESSION))
        print(f"| {per_hour} | " + " | ".join(f"{share:.1f} %" for share in shares) + " |", flush=True)


if __name__ == "__main__":
    main()
