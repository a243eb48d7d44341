"""What servers that run already tell of themselves, side by side, and where they cannot be one pair."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from harness.engines.attached import Server
from harness.engines.server_info import PREFIX_CACHING
from harness.history.engine_interfaces import SERVER_INFO
from harness.profiles.cells import Role

_PATHS = {
    "model": "model_config.model",
    "tokenizer": "model_config.tokenizer",
    "device": "device_config.device",
    "method": "speculative_config.method",
    "drafter": "speculative_config.model",
    "dtype": "model_config.dtype",
    "kv_cache_dtype": "cache_config.cache_dtype",
    "block_size": "cache_config.block_size",
    "kv_blocks": "cache_config.num_gpu_blocks",
    "prefix caching": PREFIX_CACHING,
    "max_model_len": "model_config.max_model_len",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "tensor_parallel": "parallel_config.tensor_parallel_size",
    "enforce_eager": "model_config.enforce_eager",
    "hf_overrides": "model_config.hf_overrides",
    "per-request acceptance": "observability_config.per_request_spec_decode_metrics",
    "kv_connector": "kv_transfer_config.kv_connector",
    "kv_role": "kv_transfer_config.kv_role",
    "kv_buffer_device": "kv_transfer_config.kv_buffer_device",
    "kv_load_failure_policy": "kv_transfer_config.kv_load_failure_policy",
    "kv_connector_extra_config": "kv_transfer_config.kv_connector_extra_config",
}
_EQUAL = (
    *("model", "device", "method", "drafter", "dtype", "kv_cache_dtype", "block_size", "enforce_eager"),
    *("hf_overrides", "kv_connector", "kv_buffer_device"),
)
"""What P and D must have in common: a profile has one value for both."""
_EQUAL_TO_D = ("model", "device", "dtype", "kv_cache_dtype", "block_size", "enforce_eager", "hf_overrides")
"""What an engine alone must have in common with D, which it is compared with."""
_NOT_SHOWN = ("kv_connector_extra_config",)
_ROLES = {("kv_both", "kv_both"): "both", ("kv_producer", "kv_consumer"): "split"}
_OF_SPECULATION = ("method", "drafter")
_NO_DRAFTER = {"ngram": "ngram", "suffix": "suffix"}
"""What vLLM names as the model of a method without one."""
NO_METHOD = "none"


@dataclass(frozen=True)
class Told:
    """What one server tells. A missing value is None: it is not told, or there is nothing of it."""

    server: Server
    values: Mapping[str, Any]
    drafts: int | None
    """k; 0 without speculation, None if it is not told."""

    def __getitem__(self, name: str) -> Any:
        return self.values.get(name)

    @property
    def lease_s(self) -> Any:
        return self.server.info.lease_s

    @property
    def tells_connector(self) -> bool:
        return self.server.surfaces[SERVER_INFO]

    @property
    def side_channel(self) -> str | None:
        """The address of NIXL's side channel, if there is a connector."""
        variables = self.server.info.variables
        host, port = (variables.get(f"VLLM_NIXL_SIDE_CHANNEL_{part}") for part in ("HOST", "PORT"))
        return f"{host}:{port}" if self["kv_connector"] and host and port else None


def told_by(server: Server) -> Told:
    """Return what a server tells, by the names of profiles where they have one for it."""
    info = server.info
    values = {name: info.say(path) for name, path in _PATHS.items()}
    if values["dtype"] is not None:
        values["dtype"] = str(values["dtype"]).removeprefix("torch.")
    if values["drafter"] in (values["model"], _NO_DRAFTER.get(values["method"])):
        values["drafter"] = None
    drafts = info.say("speculative_config.num_speculative_tokens") or 0
    return Told(server, values, drafts if "speculative_config" in info.config else None)


def table(told: Mapping[Role, Told]) -> list[tuple[str, ...]]:
    """Return rows for people: each setting that any server tells, and its value on each."""
    rows = [
        ("address", *(t.server.url for t in told.values())),
        ("served as", *(t.server.model for t in told.values())),
        ("vLLM", *(t.server.version or "?" for t in told.values())),
        ("drafts per step", *("?" if t.drafts is None else str(t.drafts) for t in told.values())),
        ("P's lease, s", *(_shown(t.lease_s) for t in told.values())),
        ("side channel", *(_shown(t.side_channel) for t in told.values())),
        *((name, *(_shown(t[name]) for t in told.values())) for name in _PATHS if name not in _NOT_SHOWN),
    ]
    return [row for row in rows if any(value not in ("?", "", "–") for value in row[1:])]


def _shown(value: Any) -> str:
    return "–" if value in (None, {}, "") else str(value)


def contradictions(told: Mapping[Role, Told]) -> Iterator[str]:
    """Yield every reason for which these servers cannot be judged together."""
    p, d, single = (told.get(role) for role in _ROLE_NAMES)
    versions = {t.server.version for t in told.values()}
    if len(versions) > 1:
        yield f"expected one vLLM, found {', '.join(_versions(told))}"
    if p is not None and d is not None:
        yield from _unlike(p, d, _EQUAL)
        if (p.drafts == 0) != (d.drafts == 0) and None not in (p.drafts, d.drafts):
            yield f"{_of(p)} drafts {p.drafts} tokens a step, {_of(d)} {d.drafts}: both must speculate, or neither"
        for server in (p, d):
            if server.tells_connector and server["kv_connector"] is None:
                yield f"{_of(server)} has no KV connector; start it with --kv-transfer-config"
        roles = (p["kv_role"], d["kv_role"])
        if None not in roles and roles not in _ROLES:
            yield (
                f"{_of(p)} is {roles[0]} and {_of(d)} {roles[1]}; start both as kv_both, or P as kv_producer and D as "
                "kv_consumer"
            )
    if single is not None and d is not None:
        yield from _unlike(single, d, _EQUAL_TO_D)
        if single.drafts and d.drafts:
            yield (
                f"{_of(single)} speculates, as D does, which answers the single cells of its method itself; give the "
                "plain engine as --single"
            )


_ROLE_NAMES: tuple[Role, ...] = ("prefill", "decode", "single")


def kv_roles(p: Told, d: Told) -> str | None:
    return _ROLES.get((p["kv_role"], d["kv_role"]))


def _versions(told: Mapping[Role, Told]) -> list[str]:
    return [f"{t.server.version or 'one that does not tell'} ({_of(t)})" for t in told.values()]


def _unlike(one: Told, other: Told, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        mine, theirs = one[name], other[name]
        without = name in _OF_SPECULATION and not (one.drafts and other.drafts)
        if mine is not None and theirs is not None and mine != theirs and not without:
            yield f"{name}: {_of(one)} has {mine}, {_of(other)} {theirs}"


def _of(told: Told) -> str:
    return f"--{told.server.option} {told.server.url}"
