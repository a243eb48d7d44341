"""Prometheus counters of an engine, summed over engine labels.

Each text is parsed once and summed whole, so that the numerator and denominator of a ratio cannot come from different
engines.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlencode

from prometheus_client.parser import text_string_to_metric_families

# Sample names (vLLM 0.32.0) → our names. Histograms contribute their _sum and _count.
_SAMPLES = {
    "vllm:spec_decode_num_drafts_total": "drafts",
    "vllm:spec_decode_num_draft_tokens_total": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted_tokens",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:external_prefix_cache_queries_total": "external_queries",
    "vllm:external_prefix_cache_hits_total": "external_hits",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:request_success_total": "finished_requests",
    "vllm:request_queue_time_seconds_sum": "queue_seconds",
    "vllm:request_inference_time_seconds_sum": "inference_seconds",
    "vllm:iteration_tokens_total_count": "engine_steps",
    "vllm:nixl_xfer_time_seconds_count": "nixl_transfers",
    "vllm:nixl_bytes_transferred_sum": "nixl_bytes",
    "vllm:nixl_num_descriptors_sum": "nixl_descriptors",
    "vllm:nixl_num_failed_transfers_total": "nixl_failed_transfers",
    "vllm:nixl_num_failed_notifications_total": "nixl_failed_notifications",
    "vllm:nixl_num_kv_expired_reqs_total": "nixl_expired",
}
LATE_COUNTERS = ("nixl_expired", "nixl_failed_transfers", "nixl_failed_notifications")
"""Counters that grow when the engine notices an event, possibly long after the request that caused it: P counts an
expired lease while it serves a later request."""
_OF_A_TRANSFER = (
    "nixl_transfers",
    "nixl_bytes",
    "nixl_descriptors",
    "nixl_failed_transfers",
    "nixl_failed_notifications",
)
_BY_SOURCE = "vllm:prompt_tokens_by_source_total"
_STEP_TOKENS = "vllm:iteration_tokens_total_bucket"
_BY_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos_total"


_READ = (*_SAMPLES, _BY_SOURCE, _STEP_TOKENS, _BY_POSITION)
ALL = "/metrics"
READ_ONLY = f"{ALL}/?{urlencode([('name[]', name) for name in _READ])}"
"""Path of the counters that are read, a tenth of what an engine publishes: the server of ``prometheus_client``, which
vLLM mounts below ``/metrics/``, leaves out the others."""


_NOT_READ = ("#", "vllm:", "http_", "process_", "python_")
"""Beginnings of lines that are never read, but for those in ``_READ``. A line that is neither is not skipped, so that a
text in another format is refused."""


@functools.lru_cache(maxsize=4096)
def _name_of(series: str) -> str | None:
    """Return our name for a series (``name{label="value"}``), None for one that is not read. Raises ValueError when it
    is not in Prometheus format.

    Each request needs a scrape of each engine, whose series stay the same: parsing their labels anew each time would
    be a tenth of the harness's own time.
    """
    (family,) = text_string_to_metric_families(f"{series} 0\n")
    (sample,) = family.samples
    if sample.timestamp is not None:
        raise ValueError(f"expected a series and a value, found three parts: {series[:80]}")
    if sample.name == _BY_SOURCE:
        return f"prompt_tokens_{sample.labels.get('source', 'unknown')}"
    if sample.name == _STEP_TOKENS:
        bound = sample.labels.get("le", "+Inf")
        return None if bound.endswith("Inf") else f"engine_steps_le_{float(bound):.0f}"
    if sample.name == _BY_POSITION:
        return f"accepted_at_{sample.labels.get('position', '?')}"
    return _SAMPLES.get(sample.name)


def parse_counters(text: str) -> dict[str, float]:
    """Return totals by our names, summed over engine labels. Absent metrics are absent keys, never zero. Raises
    ValueError when the text is not in Prometheus format, or a total is not finite."""
    totals: dict[str, float] = defaultdict(float)
    for line in text.splitlines():
        if line and (line.startswith(_READ) or not line.startswith(_NOT_READ)):
            series, _, value = line.rpartition(" ")
            if (name := _name_of(series)) is not None:
                totals[name] += float(value)
    for name, total in totals.items():
        if not math.isfinite(total):
            raise ValueError(f"{name} is {total}")
    return dict(totals)


def delta(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the counters that changed and their growth; a counter that is new in ``after`` started at zero."""
    return {name: value - before.get(name, 0.0) for name, value in after.items() if value != before.get(name, 0.0)}


def credited(written: dict[str, float], read: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return the growth of P's counters and of D's, with what NIXL moved among D's, whoever counted it.

    The engine that moves KV counts it: D where it reads, P where it writes (``engine.kv_transfer: push``).
    """
    moved = {name: written[name] + read.get(name, 0.0) for name in _OF_A_TRANSFER if name in written}
    return {name: value for name, value in written.items() if name not in moved}, {**read, **moved}


class KvPool(NamedTuple):
    """The KV pool as an engine reports it; None where it does not."""

    blocks: int | None = None
    block_size: int | None = None
    """Tokens of a block of attention KV."""


def parse_kv_pool(text: str) -> KvPool:
    """Return the size of the KV pool and of its blocks."""
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:cache_config_info":
                told = [sample.labels.get(f, "") for f in ("num_gpu_blocks", "effective_attention_block_size")]
                return KvPool(*(int(value) or None if value.isdigit() else None for value in told))
    return KvPool()
